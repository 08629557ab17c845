"""Fills the tables of docs/reproduction.md from the digests in studies/results.

python studies/tables.py            hands runs on to the studies that ask for the same, and rewrites what stands between
                                    the marks of the page
python studies/tables.py --check    says whether the page is up to date
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from gradsieve.cli.options import read_config
from gradsieve.digests import read_runs
from gradsieve.report import texts
from gradsieve.report.claims import CLAIMS, FORMS, NOT_RUN, NOT_TESTABLE, Claim
from gradsieve.report.grouping import Section, ratio, sections
from gradsieve.report.judging import Found, over_runs
from gradsieve.report.summary import final_text, section_rows
from gradsieve.report.table import Cell, Column, Table
from gradsieve.training.study import Form, Results, StudyCell, make_study, study_cells

STUDIES = Path(__file__).parent
PAGE = STUDIES.parent / "docs" / "reproduction.md"
RESULTS = STUDIES / "results"
MOST_SEEDS = 10
PHASES_STUDY = "phases"
SMALL_STUDIES = ("digits", "cifar10-narrow")
"""Those that anyone can run whole: claims of the others are judged by them, too."""
SHOWN_PHASES = ("forward", "backward", "compute", "select", "exchange", "rest", "step")


def results(study: str, form: Form) -> list[Section]:
    folder = RESULTS / study / form
    return sections(read_runs([folder])) if any(folder.glob("*.json")) else []


def told_by(claim: Claim) -> tuple[Form, Found | None]:
    """What the runs say of a claim, in the better of its forms that has those it needs."""
    for form in claim.forms:
        found = None if claim.judge is None else claim.judge(results(claim.study, form))
        if found is not None:
            return form, found
    return claim.forms[-1], None


def kept(study: str, form: Form, seeds: Sequence[int] = (0,)) -> tuple[Results, list[StudyCell]]:
    """The digests of a study, and the runs that it asks for."""
    path = STUDIES / f"{study}.toml"
    made = make_study(study, read_config(path), str(path))
    return Results(RESULTS, made, form), study_cells(made, form, {"seed": list(seeds)})


def state(study: str, form: Form) -> tuple[int, int]:
    """How many of the study's runs with its first seed are done, and how many there are."""
    digests, cells = kept(study, form)
    return sum(digests.path(cell).exists() for cell in cells), len(cells)


def hand_on() -> None:
    """Give every study the runs that it shares with another."""
    for study in sorted(path.stem for path in STUDIES.glob("*.toml")):
        for form in FORMS:
            digests, cells = kept(study, form, range(MOST_SEEDS))
            digests.take_over(cells)


def command(study: str, form: str) -> str:
    return f"`gradsieve compare studies/{study}.toml --{form}`"


CLAIM_TITLES = ("claim", "source", "confirmed if", "command", "obtained", "verdict")


def claims_table() -> str:
    return _markdown(CLAIM_TITLES, [_claim_row(claim) for claim in CLAIMS])


def small_claims_table(study: str) -> str:
    """The same by the runs of a small study, in each form that has those that a claim needs."""
    found = {form: results(study, form) for form in FORMS}
    rows = []
    for claim in CLAIMS:
        if claim.judge is None or not claim.anywhere:
            continue
        told = {form: claim.judge(found[form]) for form in reversed(claim.forms)}
        moved = replace(claim, study=study)
        rows += [_judged_row(moved, form, outcome) for form, outcome in told.items() if outcome is not None]
    return _markdown(CLAIM_TITLES, rows)


def _claim_row(claim: Claim) -> list[str]:
    if claim.judge is None:
        return [claim.words, claim.source, claim.condition, texts.ABSENT, texts.ABSENT, NOT_TESTABLE]
    return _judged_row(claim, *told_by(claim))


def _judged_row(claim: Claim, form: Form, told: Found | None) -> list[str]:
    obtained = texts.ABSENT if told is None else told.obtained
    return [
        claim.words,
        claim.source,
        claim.condition,
        command(claim.study, form),
        obtained,
        _verdict(told, claim, form),
    ]


def _verdict(told: Found | None, claim: Claim, form: Form) -> str:
    if told is None:
        return NOT_RUN
    done, total = state(claim.study, form)
    so_far = "" if done == total else f" so far ({done} of {total} runs)"
    return told.verdict + so_far


def _markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    columns = tuple(Column(title, title) for title in titles)
    return Table("", "", columns, tuple(tuple(Cell(text, text) for text in row) for row in rows)).markdown()


def study_tables(study: str) -> str:
    """A table for each task, model and setting, of the runs there are."""
    parts = []
    for form in FORMS:
        found = results(study, form)
        if found:
            parts.append("{} form, {} of {} runs of the first seed:\n".format(form.capitalize(), *state(study, form)))
        table = _phases_table if study == PHASES_STUDY else _section_table
        parts += [f"{section.title}:\n\n{table(section)}" for section in found]
    return "\n".join(parts) or f"Not run yet: {command(study, 'short')}\n"


def _phases_table(section: Section) -> str:
    titles = ("method", "workers", *(f"{phase} (ms)" for phase in SHOWN_PHASES), "selection, of all but rest", "seeds")
    rows = [
        [
            *(group.label, str(group.world)),
            *(texts.milliseconds(getattr(group.phases, phase)) for phase in SHOWN_PHASES),
            texts.percent(ratio(group.phases.select, group.phases.step - group.phases.rest)),
            str(len(group.runs)),
        ]
        for group in section.groups
    ]
    return _markdown(titles, rows)


def _section_table(section: Section) -> str:
    titles = (
        *("method", "workers", "density asked", "actual", "median error", "bytes through a link"),
        *(f"final {section.measure.words}", "to dense", "seeds"),
    )
    groups = {(group.series, group.world): group for group in section.groups}
    rows = []
    for row in section_rows(section):
        group = groups[row.series, row.world]
        error = over_runs(group, lambda run: run.median_density_error)
        rows.append(
            [
                *(row.method, str(row.world), f"{row.density:g}", texts.number(row.density_actual)),
                *(texts.percent(error.mean), texts.data(group.link_bytes)),
                *(final_text(row), row.measure.difference(row.difference), str(row.seeds)),
            ]
        )
    return _markdown(titles, rows)


MARK = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n)(?P<old>.*?)(<!-- end of table -->)", re.DOTALL)


def filled(page: str) -> str:
    """The page with its tables made anew."""
    return MARK.sub(lambda mark: f"{mark[1]}\n{_table(mark['name'])}\n{mark[4]}", page)


OF_CLAIMS: Mapping[str, Callable[[], str]] = {
    "claims": claims_table,
    **{f"claims-on-{study}": partial(small_claims_table, study) for study in SMALL_STUDIES},
}


def _table(name: str) -> str:
    return OF_CLAIMS[name]() if name in OF_CLAIMS else study_tables(name)


def main() -> int:
    page, checks = PAGE.read_text(encoding="utf-8"), "--check" in sys.argv[1:]
    if not checks:
        hand_on()
    new = filled(page)
    if checks:
        print("up to date" if new == page else f"{PAGE} is not up to date: run python studies/tables.py")
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
