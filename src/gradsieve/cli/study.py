"""`gradsieve compare STUDY`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradsieve.checks import UsageError
from gradsieve.cli.display import Display
from gradsieve.cli.options import read_config
from gradsieve.cli.running import run_cells, told
from gradsieve.cli.summary import show_summary
from gradsieve.digests import Digest
from gradsieve.training.folder import RUNS, make_writable
from gradsieve.training.grid import Cell
from gradsieve.training.study import (
    Form,
    Results,
    Study,
    StudyCell,
    distinct,
    form_name,
    make_study,
    planned,
    study_cells,
)


@dataclass(frozen=True)
class Asked:
    """What the command line asks of a study."""

    path: Path
    form: Form
    given: Mapping[str, Any]
    only: Sequence[str]
    output: Path | None
    results: Path | None
    jobs: int


@dataclass(frozen=True)
class Standing:
    """A study in one form, its runs, and the digests of those that are done."""

    study: Study
    form: str
    results: Results
    cells: Sequence[StudyCell]
    done: Mapping[str, Digest]

    @property
    def open(self) -> list[StudyCell]:
        return [cell for cell in self.cells if cell.name not in self.done]


def run_study(asked: Asked) -> int:
    """Carry out the runs of a study that have no digest yet; returns the exit code."""
    standing = look(asked)
    _check_data(asked, standing)
    ready = planned(distinct(standing.open), asked.output or RUNS / standing.study.name / standing.form)
    make_writable(standing.results.folder)

    def keep(cell: Cell) -> None:
        standing.results.keep(ready[cell.folder][0], cell.folder)

    with Display() as display:
        _introduce(display, standing)
        code = run_cells(display, [cell for _, cell in ready.values()], asked.jobs, keep)
    standing = look(asked)
    standing.results.take_over(standing.cells)
    if standing.done:
        show_summary(display.console, list(standing.done.values()))
        display.line(f"a page of them: gradsieve report {standing.results.folder}")
    return told(display, code)


def list_study(asked: Asked) -> int:
    """Say what would be run, and what is done."""
    standing, display = look(asked), Display()
    _introduce(display, standing)
    for cell in standing.cells:
        display.line(f"{'done' if cell.name in standing.done else 'open'}  {cell.name}")
    return 0


def look(asked: Asked) -> Standing:
    study = make_study(asked.path.stem, read_config(asked.path), str(asked.path))
    form = form_name(asked.form, asked.given)
    results = Results(asked.results or asked.path.parent / "results", study, form)
    cells = study_cells(study, asked.form, asked.given, asked.only, str(asked.path))
    found = {cell.name: results.find(cell) for cell in cells}
    done = {name: digest for name, digest in found.items() if digest is not None}
    return Standing(study, form, results, cells, done)


def _introduce(display: Display, standing: Standing) -> None:
    display.line(f"{standing.study.title}: {standing.study.shows}")
    display.line(
        f"{len(standing.cells)} runs of the form {standing.form}, {len(standing.done)} of them done; "
        f"in {standing.results.folder}"
    )


def _check_data(asked: Asked, standing: Standing) -> None:
    """Grids with data of their own kind name them below --data."""
    below = {cell.grid for cell in standing.open if standing.study.grids[cell.grid].get("data") is not None}
    if below and asked.given.get("data") is None:
        grid = sorted(below)[0]
        raise UsageError(
            f"{asked.path}: the grid {grid} needs {standing.study.grids[grid]['data']} in the folder of --data: "
            "give --data DIR, or other grids by --only"
        )
