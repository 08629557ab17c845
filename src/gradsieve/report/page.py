"""The page: sections of findings, figures and tables in one HTML file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from gradsieve.report import tables, texts
from gradsieve.report.claims import judged_claims
from gradsieve.report.colours import Look, looks, style_sheet
from gradsieve.report.drawing import figure_data, inline_svg, labels, style, write_files
from gradsieve.report.figures import EXHIBITS, MOST_PANELS, Exhibit, Key, Looks, NothingToDrawError
from gradsieve.report.findings import Finding, finding
from gradsieve.report.frontier import equal_bytes_table, frontier_table
from gradsieve.report.grouping import Section, sections
from gradsieve.report.summary import RESULT_KEYS, TIME_KEYS, section_rows, summary_table
from gradsieve.report.table import Cell, Column, Table
from gradsieve.runs import Run


@dataclass(frozen=True)
class Plate:
    """A figure as the page shows it, or the reason why there is none."""

    name: str
    title: str
    caption: str
    svg: Markup | None = None
    keys: tuple[Key, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Sheet:
    """A table as the page shows it, and the name of its files."""

    table: Table
    title: str
    file: str
    note: str = ""
    narrow: bool = False
    """Does it go beside another?"""


class Link(NamedTuple):
    """To a place on the page."""

    place: str
    words: str


@dataclass(frozen=True)
class Rerun:
    """How to make a run again."""

    title: str
    command: str
    options: str


@dataclass(frozen=True)
class Part:
    """A section as the page shows it."""

    section: Section
    name: str
    finding: Finding
    legend: tuple[Look, ...]
    plates: tuple[Plate, ...]
    sheets: tuple[Sheet, ...]
    reruns: tuple[Rerun, ...]
    notes: tuple[str, ...]


def write_page(runs: Sequence[Run], output: Path, title: str) -> Path:
    """Write the page and the files beside it."""
    for folder in ("figures", "tables"):
        (output / folder).mkdir(parents=True, exist_ok=True)
    found = sections(runs)
    all_looks = looks((run.method, run.density) for run in runs)
    names = [f"{place}-" if len(found) > 1 else "" for place in range(1, len(found) + 1)]
    parts = [_part(section, name, all_looks, output) for section, name in zip(found, names, strict=True)]
    claims = _claims_sheet(runs, output / "tables")
    page = output / "index.html"
    links = [
        *part_links(part.section.title for part in parts),
        *([Link("claims", "Claims")] if claims.table.rows else []),
    ]
    context = {"parts": parts, "links": links, "claims": claims, "looks": all_looks}
    page.write_text(rendered("page.html", title=title, **context), encoding="utf-8")
    return page


def part_links(titles: Iterable[str]) -> list[Link]:
    return [Link(f"part-{place}", title) for place, title in enumerate(titles, start=1)]


def _part(section: Section, name: str, all_looks: Looks, output: Path) -> Part:
    return Part(
        section,
        name,
        finding(section),
        tuple(look for series, look in all_looks.items() if series in {group.series for group in section.groups}),
        tuple(_plate(exhibit, section, name, all_looks, output / "figures") for exhibit in EXHIBITS),
        tuple(_sheets(section, name, output / "tables")),
        tuple(_reruns(section)),
        tuple(_notes(section)),
    )


def _plate(exhibit: Exhibit, section: Section, prefix: str, all_looks: Looks, folder: Path) -> Plate:
    name = prefix + exhibit.name
    title, caption = (_filled(text, section) for text in (exhibit.title, exhibit.caption))
    if exhibit.timed and any(group.virtual for group in section.main):
        caption += " Workers that share one process take turns: these are times of a simulation."
    at_a_time = max(group.at_a_time for group in section.main)
    if exhibit.timed and at_a_time > 1:
        caption += f" Up to {at_a_time} runs were made at a time, and waited for one another."
    try:
        with style():
            figure = exhibit.draw(section, all_looks)
            svg = inline_svg(figure, name, f"{title}. {caption}")
            keys = tuple(key for key in exhibit.keys if key.dashed or key.words in labels(figure))
            write_data(figure, folder / f"{name}.csv")
            write_files(figure, folder / name)
    except NothingToDrawError as error:
        return Plate(name, title, caption, reason=f"No figure: it {error}.")
    return Plate(name, title, caption, Markup(svg), keys)


def _filled(text: str, section: Section) -> str:
    measure = section.measure.words
    workers = texts.count(section.main_world, "worker")
    fields = {"{measure}": measure, "{Measure}": measure[:1].upper() + measure[1:], "{workers}": workers}
    for field, value in fields.items():
        text = text.replace(field, value)
    return text


def write_data(figure: Figure, path: Path) -> None:
    """The points of a figure as CSV."""
    columns = tuple(Column(name, name) for name in ("panel", "series", "x", "y"))
    rows = tuple(tuple(Cell(value, str(value)) for value in row) for row in figure_data(figure))
    path.write_text(Table("figure", "", columns, rows).csv(), encoding="utf-8")


def _sheets(section: Section, prefix: str, folder: Path) -> Iterator[Sheet]:
    """The tables, each written to its files."""
    summary = summary_table(section_rows(section))
    keys = tuple(dict.fromkeys((*RESULT_KEYS, *TIME_KEYS)))
    write_table(folder / f"{prefix}summary", summary, summary.only(*keys))
    points = "points" if section.measure.percent else section.measure.words
    yield Sheet(
        summary.only(*RESULT_KEYS),
        "Results",
        f"{prefix}summary",
        f"± is the standard deviation over seeds; “to dense” is in {points}, at the same number of workers.",
    )
    if any(math.isfinite(group.phases.step) for group in section.groups):
        note = "Milliseconds of the slowest worker, then projections from them to other links."
        yield Sheet(summary.only(*TIME_KEYS), "Times of a step", f"{prefix}summary", note)
    for table, note in (
        (frontier_table(section), "The points of the figure of bytes, with the density that there really was."),
        (equal_bytes_table(section), "Straight between the densities that were run, over the logarithm of the bytes."),
    ):
        if table.rows:
            write_table(folder / f"{prefix}{table.name}", table, table)
            yield Sheet(table.filled(), table.title, f"{prefix}{table.name}", note)
    for make in (tables.runs_table, tables.differences_table, tables.configuration_table, tables.environment_table):
        table = make(section)
        write_table(folder / f"{prefix}{table.name}", table, table)
        narrow = table.name in ("configuration", "environment")
        yield Sheet(table.filled(), table.title, f"{prefix}{table.name}", narrow=narrow)
    commands = tables.commands_table(section)
    write_table(folder / f"{prefix}commands", commands, commands)


def _claims_sheet(runs: Sequence[Run], folder: Path) -> Sheet:
    table = judged_claims(runs)
    write_table(folder / table.name, table, table)
    note = (
        "By the runs on this page; one setting that fails makes a claim not confirmed. Differences are in points, or "
        "per cent where the measure is no percentage; ± is the standard deviation over seeds, of all that went in."
    )
    return Sheet(table, table.title, table.name, note)


def write_table(stem: Path, full: Table, shown: Table) -> None:
    """All of a table as CSV, what the page shows of it as Markdown."""
    stem.with_suffix(".csv").write_text(full.csv(), encoding="utf-8")
    stem.with_suffix(".md").write_text(shown.markdown(), encoding="utf-8")


def _reruns(section: Section) -> Iterator[Rerun]:
    for run, name in zip(section.runs, tables.folder_names(section.runs), strict=True):
        yield Rerun(name, tables.command(run), json.dumps(dict(run.config), indent=1, default=str, ensure_ascii=False))


def _notes(section: Section) -> Iterator[str]:
    """What a reader must know to read the section right."""
    if len(section.worlds) > 1:
        workers = texts.count(section.main_world, "worker")
        yield f"Figures show {workers}, where most runs are, except for the one by workers; tables show all."
    mixed = section.mixed_options()
    if mixed:
        yield (
            f"Runs of one method differ in more than the seed ({texts.listed(mixed)}), so their spread is not over "
            "seeds alone."
        )
    unfinished = sum(run.status != "finished" for run in section.runs)
    if unfinished:
        yield (
            f"{texts.count(unfinished, 'run')} did not finish. Final figures are of runs that did, as far as a method "
            "has any; curves show all."
        )
    if len(section.main) > MOST_PANELS:
        yield f"Figures with a panel a method show the first {MOST_PANELS}."


def rendered(template: str, **context: Any) -> str:
    """One of the templates in this package, with what all of them need."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_resource), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    return environment.get_template(template).render(
        count=texts.count,
        bracket=Markup("<wbr>("),
        style=Markup(style_sheet() + _resource("page.css")),
        script=Markup(_resource("page.js")),
        **context,
    )


def _resource(name: str) -> str:
    return resources.files("gradsieve.report").joinpath(name).read_text(encoding="utf-8")
