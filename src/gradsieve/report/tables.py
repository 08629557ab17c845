"""The tables beside the summary: the runs, their options, how to make them again."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from gradsieve.report import texts
from gradsieve.report.grouping import Measure, Section
from gradsieve.report.table import Cell, Column, Table
from gradsieve.runs import Run

NOT_OPTIONS = frozenset({"started", "command"})
"""What the provenance says of one run alone."""


def runs_table(section: Section) -> Table:
    """Every run: what it was, how it ended, where it lies. Those that did not finish come first."""
    columns = (
        Column("method", "method"),
        Column("status", "status"),
        Column("density", "density", numeric=True),
        Column("workers", "workers", numeric=True),
        Column("seed", "seed", numeric=True),
        Column("steps", "steps", numeric=True),
        Column("final", f"last {section.measure.words}", numeric=True),
        Column("seconds", "training (s)", numeric=True),
        Column("error", "error", long=True),
        Column("started", "started"),
        Column("folder", "folder"),
    )
    runs = sorted(section.runs, key=lambda run: run.status == "finished")
    named = zip(runs, folder_names(runs), strict=True)
    rows = tuple(_run_row(run, section.measure, name) for run, name in named)
    return Table("runs", "Runs", columns, rows, tuple((run.method, run.density) for run in runs))


def _run_row(run: Run, measure: Measure, name: str) -> tuple[Cell, ...]:
    last = _last(run.series(f"eval/{measure.name}", of="evaluations").tolist())
    seconds = _last(run.series("time/elapsed").tolist())
    started = str(run.provenance.get("started") or "")
    return (
        Cell(run.method, run.method),
        Cell(run.status, run.status),
        Cell(run.density, f"{run.density:g}"),
        Cell(run.world, str(run.world)),
        Cell(run.seed, str(run.seed)),
        Cell(run.num_steps, str(run.num_steps)),
        Cell(last, measure.text(last)),
        Cell(seconds, texts.number(seconds)),
        Cell(run.error, texts.printable(run.error or "") or texts.ABSENT),
        Cell(started, started[:16].replace("T", " ") or texts.ABSENT),
        Cell(name, name),
    )


def _last(values: Sequence[float]) -> float:
    return values[-1] if values else math.nan


def folder_names(runs: Sequence[Run]) -> list[str]:
    """The folders as seen from the one that holds them all."""
    if len(runs) == 1:
        return [runs[0].folder.name]
    parent = os.path.commonpath([run.folder.resolve().parent for run in runs])
    return [str(run.folder.resolve().relative_to(parent)) for run in runs]


def configuration_table(section: Section) -> Table:
    """The options that all runs share."""
    shared, _ = _shared_and_differing([run.config for run in section.runs])
    return _options_table("configuration", "Options common to all runs", shared)


def differences_table(section: Section) -> Table:
    """The options that differ, with all their values."""
    _, several = _shared_and_differing([run.config for run in section.runs])
    return _options_table("differences", "Options that differ", several)


def environment_table(section: Section) -> Table:
    """Where the runs were made, with what."""
    facts = [{k: v for k, v in run.provenance.items() if k not in NOT_OPTIONS} for run in section.runs]
    shared, several = _shared_and_differing(facts)
    return _options_table("environment", "Software and machine", shared | several)


def _shared_and_differing(mappings: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], dict[str, str]]:
    names = list(dict.fromkeys(name for mapping in mappings for name in mapping))
    values = {name: dict.fromkeys(_value(mapping.get(name)) for mapping in mappings) for name in names}
    shared = {name: next(iter(found)) for name, found in values.items() if len(found) == 1}
    several = {name: texts.listed(list(found)) for name, found in values.items() if len(found) > 1}
    return shared, several


def _value(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _options_table(name: str, title: str, options: Mapping[str, str]) -> Table:
    rows = tuple((Cell(option, option), Cell(value, value)) for option, value in options.items())
    return Table(name, title, (Column("option", "option"), Column("value", "value", long=True)), rows)


def commands_table(section: Section) -> Table:
    """How each run is made again."""
    columns = (Column("folder", "folder"), Column("command", "command"), Column("config", "options"))
    rows = tuple(
        (Cell(name, name), Cell(command(run), command(run)), Cell(options(run), options(run)))
        for run, name in zip(section.runs, folder_names(section.runs), strict=True)
    )
    return Table("commands", "How to run it again", columns, rows)


def command(run: Run) -> str:
    return str(run.provenance.get("command") or "")


def options(run: Run) -> str:
    return json.dumps(dict(run.config), default=str, ensure_ascii=False)
