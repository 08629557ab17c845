"""The page of a lab: step time and time to accuracy by bandwidth, bytes, break-even."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradsieve.report import texts
from gradsieve.report.colours import COMPUTE, EXCHANGE, SELECT, TEXT, Look, looks
from gradsieve.report.drawing import inline_svg, labels, new_figure, style, write_files
from gradsieve.report.figures import Key, Looks, NothingToDrawError
from gradsieve.report.labs import Lab, LabRow, break_even_table, findings, rate_text, read_labs, rows_table
from gradsieve.report.page import Plate, Sheet, part_links, rendered, write_data, write_table

TITLE = "gradient exchange by bandwidth"
HEIGHT, ROW_HEIGHT, PANEL_HEIGHT = 280, 21, 60
"""Of a figure; of a bar, and of a panel beside its bars."""
PARTS = (("compute", COMPUTE), ("select", SELECT), ("exchange", EXCHANGE))
WORDS = {"compute": "computing", "select": "selection", "exchange": "exchange"}
KEYS = tuple(Key(WORDS[part], colour) for part, colour in PARTS)
BEYOND = 10.0
"""How far right of the fastest rate `no limit` is drawn: so many times."""


@dataclass(frozen=True)
class LabPart:
    """A section of the page."""

    title: str
    facts: str
    findings: tuple[str, ...]
    legend: tuple[Look, ...]
    plates: tuple[Plate, ...]
    sheets: tuple[Sheet, ...]
    commands: tuple[str, ...]
    notes: tuple[str, ...]


def write_lab_page(paths: Sequence[Path], output: Path, title: str | None = None) -> Path:
    """Write `index.html` with figures and tables beside it, from files that `gradsieve lab` wrote."""
    found = read_labs(paths)
    for folder in ("figures", "tables"):
        (output / folder).mkdir(parents=True, exist_ok=True)
    all_looks = looks(row.series for lab in found for row in lab.rows)
    parts = [_part(lab, f"{place}-", all_looks, output) for place, lab in enumerate(found, start=1)]
    page = output / "index.html"
    links = part_links(part.title for part in parts)
    page.write_text(
        rendered("lab.html", title=title or TITLE, parts=parts, links=links, looks=all_looks), encoding="utf-8"
    )
    return page


def _part(lab: Lab, prefix: str, all_looks: Looks, output: Path) -> LabPart:
    used = {row.series for row in lab.rows}
    return LabPart(
        lab.title,
        _facts(lab),
        tuple(findings(lab)),
        tuple(look for series, look in all_looks.items() if series in used),
        tuple(_plate(exhibit, lab, prefix, all_looks, output / "figures") for exhibit in _exhibits(lab)),
        tuple(_sheets(lab, prefix, output / "tables")),
        tuple(dict.fromkeys(str(facts.get("command")) for facts in lab.provenances)),
        lab.errors,
    )


def _facts(lab: Lab) -> str:
    setting, facts = lab.settings[0], lab.provenances[0]
    trained = f"{setting['task']} · " if lab.kind == "lab-training" else ""
    return (
        f"{texts.count(setting['world'], 'host')} · {trained}{setting['parameters']:,} parameters · density "
        f"{setting['density']:g} · torch {facts.get('torch')} · {facts.get('cpu')}, {facts.get('cores')} cores · "
        f"commit {str(facts.get('package_commit'))[:10]}"
    )


@dataclass(frozen=True)
class LabExhibit:
    """A figure of a lab's page."""

    name: str
    title: str
    caption: str
    draw: Callable[[Lab, Looks], Figure]
    keys: tuple[Key, ...] = ()


def step_by_rate(lab: Lab, all_looks: Looks) -> Figure:
    if len(lab.rates) < 2:
        raise NothingToDrawError("needs measurements at several rates")
    figure = new_figure(HEIGHT)
    axes = figure.subplots()
    finite = [bits for rate in lab.rates if math.isfinite(bits := _bits(lab, rate))]
    for series in dict.fromkeys(row.series for rate in lab.rates for row in lab.at(rate)):
        rows = sorted((row for row in lab.rows if row.series == series), key=lambda row: row.bits)
        look = all_looks[series]
        x = [_place(row.bits, finite) for row in rows]
        line = {"color": look.colour.light, "linestyle": look.dash, "marker": look.marker}
        axes.plot(x, [1000 * row.seconds for row in rows], gid=look.gid, label=look.name, **line)  # type: ignore[arg-type]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([_place(_bits(lab, rate), finite) for rate in lab.rates], [rate_text(rate) for rate in lab.rates])
    axes.minorticks_off()
    axes.set_xlabel("bandwidth of a host's link")
    axes.set_title("milliseconds a step")
    return figure


def _bits(lab: Lab, rate: str) -> float:
    return next(row.bits for row in lab.rows if row.rate == rate)


def _place(bits: float, finite: Sequence[float]) -> float:
    return bits if math.isfinite(bits) else BEYOND * max(finite, default=1e9)


def split_by_rate(lab: Lab, all_looks: Looks) -> Figure:
    figure, panels = _panels(lab)
    for rate, axes in zip(lab.rates, panels, strict=True):
        rows = lab.at(rate)
        _name_bars(axes, rows, all_looks)
        left = np.zeros(len(rows))
        for part, colour in PARTS:
            width = np.nan_to_num(np.array([1000 * getattr(row, part) for row in rows]))
            bars = axes.barh(range(len(rows)), width, left=left, color=colour.light, height=0.62, label=WORDS[part])
            _mark(bars, rows, all_looks)
            left += width
        _note_bars(axes, rows, list(left), [texts.number(total) for total in left], all_looks)
        axes.set_xlim(0, 1.16 * max(left))
        axes.set_title(f"{rate_text(rate)}: milliseconds a step")
    return figure


def time_to_accuracy(lab: Lab, all_looks: Looks) -> Figure:
    return _bars_by_rate(lab, all_looks, "reached_seconds", "seconds", texts.number)


def bytes_by_rate(lab: Lab, all_looks: Looks) -> Figure:
    return _bars_by_rate(lab, all_looks, "counted_bytes", "bytes a step and host", texts.data)


def uplink_bytes(lab: Lab, all_looks: Looks) -> Figure:
    return _bars_by_rate(lab, all_looks, "uplink_bytes", "bytes a step between racks, both ways", texts.data)


def _bars_by_rate(lab: Lab, all_looks: Looks, name: str, words: str, text: Callable[[float], str]) -> Figure:
    """A panel for each rate with a bar for each method, the shortest first, on a logarithmic scale."""
    known = {rate: [row for row in lab.at(rate) if getattr(row, name) > 0] for rate in lab.rates}
    if not any(known.values()):
        raise NothingToDrawError(f"needs {words}, which were not measured")
    figure, panels = _panels(lab)
    for rate, axes in zip(lab.rates, panels, strict=True):
        rows = sorted(known[rate], key=lambda row: float(getattr(row, name)))
        values = [float(getattr(row, name)) for row in rows]
        _name_bars(axes, rows, all_looks)
        colours = [all_looks[row.series].colour.light for row in rows]
        _mark(axes.barh(range(len(rows)), values, color=colours, height=0.62, label=f"_{words}"), rows, all_looks)
        _note_bars(axes, rows, values, [text(value) for value in values], all_looks)
        axes.set_xscale("log")
        axes.minorticks_off()
        if values:
            axes.set_xlim(min(values) / 3, max(values) * 6)
        axes.set_xticks([])
        axes.set_title(f"{rate_text(rate)}: {words}")
    return figure


def _panels(lab: Lab) -> tuple[Figure, list[Axes]]:
    most = max(len(lab.at(rate)) for rate in lab.rates)
    figure = new_figure(len(lab.rates) * (PANEL_HEIGHT + ROW_HEIGHT * most))
    return figure, list(np.ravel(figure.subplots(len(lab.rates), squeeze=False)))


def _name_bars(axes: Axes, rows: Sequence[LabRow], all_looks: Looks) -> None:
    axes.set_yticks(range(len(rows)), [all_looks[row.series].name for row in rows], color=TEXT.light)
    for row, label in zip(rows, axes.get_yticklabels(), strict=True):
        label.set_gid(all_looks[row.series].gid)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def _mark(bars: object, rows: Sequence[LabRow], all_looks: Looks) -> None:
    for row, bar in zip(rows, bars, strict=True):  # type: ignore[call-overload]
        bar.set_gid(all_looks[row.series].gid)


def _note_bars(
    axes: Axes, rows: Sequence[LabRow], ends: Sequence[float], words: Sequence[str], all_looks: Looks
) -> None:
    for place, (row, end, text) in enumerate(zip(rows, ends, words, strict=True)):
        gid = all_looks[row.series].gid
        axes.annotate(text, (end, place), (4, 0), textcoords="offset points", va="center", fontsize=10, gid=gid)


def _exhibits(lab: Lab) -> list[LabExhibit]:
    by_rate = LabExhibit(
        "step-by-bandwidth",
        "Time of a step by bandwidth",
        "Median over steps, slowest host. Where a method's line crosses that of ddp is its break-even. Without a limit "
        "the machine's processors are what is measured.",
        step_by_rate,
    )
    split = LabExhibit(
        "split-by-bandwidth",
        "What a step consists of",
        "Computing is forward and backward measured alone, and the optimizer; selection as the method tells; exchange "
        "is what is left of the step, the whole work of hooks that tell nothing included.",
        split_by_rate,
        KEYS,
    )
    reached = LabExhibit(
        "time-to-accuracy",
        f"Time to {100 * (lab.accuracy or 0):g} % accuracy",
        "Seconds of training, without evaluations, until an evaluation first saw it; logarithmic. Methods that never "
        "saw it are left out.",
        time_to_accuracy,
    )
    counted = LabExhibit(
        "bytes-by-counter",
        "Bytes a step",
        "What a host's interface sent in a step, as the kernel counted, on a logarithmic scale.",
        bytes_by_rate,
    )
    between = LabExhibit(
        "bytes-between-racks",
        "Bytes between the racks",
        "What passed through the link between the racks in a step, both ways, on a logarithmic scale.",
        uplink_bytes,
    )
    trained = [split, reached] if lab.kind == "lab-training" else []
    return [by_rate, *trained, counted, *([between] if lab.racks > 1 else [])]


def _plate(exhibit: LabExhibit, lab: Lab, prefix: str, all_looks: Looks, folder: Path) -> Plate:
    name = prefix + exhibit.name
    try:
        with style():
            figure = exhibit.draw(lab, all_looks)
            svg = inline_svg(figure, name, f"{exhibit.title}. {exhibit.caption}")
            keys = tuple(key for key in exhibit.keys if key.words in labels(figure))
            write_data(figure, folder / f"{name}.csv")
            write_files(figure, folder / name)
    except NothingToDrawError as error:
        return Plate(name, exhibit.title, exhibit.caption, reason=f"No figure: it {error}.")
    return Plate(name, exhibit.title, exhibit.caption, Markup(svg), keys)


def _sheets(lab: Lab, prefix: str, folder: Path) -> list[Sheet]:
    even = "Between two rates the ratio to plain DDP is interpolated on logarithmic scales."
    sheets = [
        Sheet(rows_table(lab).filled(), "All rows", f"{prefix}rows"),
        *(
            [Sheet(break_even_table(lab), "Break-even with plain DDP", f"{prefix}break-even", even)]
            if lab.racks == 1
            else []
        ),
    ]
    for sheet in sheets:
        write_table(folder / sheet.file, sheet.table, sheet.table)
    return sheets
