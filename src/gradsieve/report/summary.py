"""What the seeds of each method come to: rows of numbers, and the table of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gradsieve.report import texts
from gradsieve.report.colours import Series
from gradsieve.report.grouping import Group, Measure, Phases, Section, Spread, ratio, sections
from gradsieve.report.table import Cell, Column, Table
from gradsieve.runs import Run

SLOW, FAST = 1.0, 10.0
"""Gbit/s for which steps are projected."""


@dataclass(frozen=True)
class SummaryRow:
    """What the seeds of a method come to at one density and world. NaN stands for what was not measured."""

    task: str
    model: str
    method: str
    density: float
    world: int
    seeds: int
    runs: int
    finished: int
    measure: Measure
    final: Spread
    best: float
    difference: float
    """Of the final measure to dense's, at the same world."""
    density_actual: float
    density_error: float
    """Relative to the density asked for."""
    wire_bytes: float
    wire_ratio: float
    """To dense, at the same world."""
    phases: Phases
    projected_slow: float
    """Seconds of a step at 1 Gbit/s."""
    speedup_slow: float
    """Over dense, at the same world."""
    projected_fast: float
    """Seconds of a step at 10 Gbit/s."""
    speedup_fast: float

    @property
    def series(self) -> Series:
        return self.method, self.density


def summary_rows(runs: Sequence[Run]) -> list[SummaryRow]:
    """A row for each method, density and world, task by task."""
    return [row for section in sections(runs) for row in section_rows(section)]


def section_rows(section: Section) -> list[SummaryRow]:
    """Rows of the world that most runs have come first."""
    groups = sorted(section.groups, key=lambda group: (group.world != section.main_world, group.world))
    return [_summary_row(section, group) for group in groups]


def _summary_row(section: Section, group: Group) -> SummaryRow:
    dense = section.dense(group.world)
    slow, fast = group.projected(SLOW), group.projected(FAST)
    return SummaryRow(
        task=section.task,
        model=section.model,
        method=group.label,
        density=group.density,
        world=group.world,
        seeds=len({run.seed for run in group.runs}),
        runs=len(group.runs),
        finished=sum(run.status == "finished" for run in group.runs),
        measure=section.measure,
        final=group.final,
        best=group.best,
        difference=group.final.mean - dense.final.mean if dense and dense is not group and group.ended else math.nan,
        density_actual=group.density_actual,
        density_error=group.density_error,
        wire_bytes=group.wire_bytes,
        wire_ratio=ratio(group.wire_bytes, dense.wire_bytes) if dense else math.nan,
        phases=group.phases,
        projected_slow=slow,
        speedup_slow=ratio(dense.projected(SLOW), slow) if dense else math.nan,
        projected_fast=fast,
        speedup_fast=ratio(dense.projected(FAST), fast) if dense else math.nan,
    )


def final_text(row: SummaryRow) -> str:
    """Mean and standard deviation, what it is so far, or `diverged` where an evaluation gave no number."""
    if row.final.size and not math.isfinite(row.final.mean):
        return "diverged"
    if not row.finished and row.final.size:
        return f"{row.measure.text(row.final.mean)} so far"
    if row.final.size < 2:
        return row.measure.text(row.final.mean)
    shown, unit = row.measure.shown, row.measure.unit
    if row.measure.percent:
        return f"{shown(row.final.mean):.2f} ± {shown(row.final.deviation):.2f}{unit}"
    return f"{texts.number(row.final.mean, 4)} ± {texts.number(row.final.deviation, 2)}"


def _seed_count(row: SummaryRow) -> str:
    return str(row.seeds) if row.runs == row.finished else f"{row.finished} of {row.runs}"


def _percent_off(error: float) -> str:
    places = 1 if abs(error) < 1 else 0
    return f"{texts.signed(100 * error, places)} %" if math.isfinite(error) else texts.ABSENT


Value: TypeAlias = Callable[[SummaryRow], str | float | int]
Show: TypeAlias = tuple[str, str, Value, Callable[[SummaryRow], str]]


def _phase(phase: str, title: str) -> Show:
    def seconds(row: SummaryRow) -> float:
        return float(getattr(row.phases, phase))

    return f"{phase}_seconds", title, seconds, lambda row: texts.milliseconds(seconds(row))


SUMMARY: tuple[Show, ...] = (
    ("task", "task", lambda row: row.task, lambda row: row.task),
    ("model", "model", lambda row: row.model, lambda row: row.model),
    ("method", "method", lambda row: row.method, lambda row: row.method),
    ("density", "density asked", lambda row: row.density, lambda row: f"{row.density:g}"),
    ("workers", "workers", lambda row: row.world, lambda row: str(row.world)),
    ("seeds", "seeds", lambda row: row.seeds, _seed_count),
    ("runs", "runs", lambda row: row.runs, lambda row: str(row.runs)),
    ("finished", "finished", lambda row: row.finished, lambda row: str(row.finished)),
    ("measure", "measure", lambda row: row.measure.name, lambda row: row.measure.words),
    ("final", "final {measure}", lambda row: row.final.mean, final_text),
    ("final_deviation", "±", lambda row: row.final.deviation, lambda row: row.measure.text(row.final.deviation)),
    ("best", "best", lambda row: row.best, lambda row: row.measure.text(row.best)),
    ("difference", "to dense", lambda row: row.difference, lambda row: row.measure.difference(row.difference)),
    ("density_actual", "actual density", lambda row: row.density_actual, lambda row: texts.number(row.density_actual)),
    ("density_error", "off by", lambda row: row.density_error, lambda row: _percent_off(row.density_error)),
    ("wire_bytes", "bytes a step", lambda row: row.wire_bytes, lambda row: texts.data(row.wire_bytes)),
    ("wire_ratio", "of dense", lambda row: row.wire_ratio, lambda row: texts.percent(row.wire_ratio)),
    _phase("forward", "forward (ms)"),
    _phase("backward", "backward (ms)"),
    _phase("compute", "forward + backward (ms)"),
    _phase("select", "selection (ms)"),
    _phase("exchange", "communication (ms)"),
    _phase("rest", "rest (ms)"),
    _phase("step", "step (ms)"),
    (
        "projected_1gbit_seconds",
        "at 1\N{NO-BREAK SPACE}Gbit/s (ms)",
        lambda row: row.projected_slow,
        lambda row: texts.milliseconds(row.projected_slow),
    ),
    (
        "speedup_1gbit",
        "speed-up at 1\N{NO-BREAK SPACE}Gbit/s",
        lambda row: row.speedup_slow,
        lambda row: texts.times(row.speedup_slow),
    ),
    (
        "projected_10gbit_seconds",
        "at 10\N{NO-BREAK SPACE}Gbit/s (ms)",
        lambda row: row.projected_fast,
        lambda row: texts.milliseconds(row.projected_fast),
    ),
    (
        "speedup_10gbit",
        "speed-up at 10\N{NO-BREAK SPACE}Gbit/s",
        lambda row: row.speedup_fast,
        lambda row: texts.times(row.speedup_fast),
    ),
)
"""Name in CSV, title, value and text of each column."""
WORDS = frozenset({"task", "model", "method", "measure"})
RESULT_KEYS = (
    *("method", "density", "workers", "final", "difference", "best", "wire_bytes", "wire_ratio"),
    *("density_actual", "density_error", "step_seconds", "speedup_1gbit", "seeds"),
)
TIME_KEYS = (
    *("method", "density", "workers"),
    *(f"{phase}_seconds" for phase in Phases._fields),
    *("projected_1gbit_seconds", "speedup_1gbit", "projected_10gbit_seconds", "speedup_10gbit"),
)


def summary_table(rows: Sequence[SummaryRow]) -> Table:
    """All columns; `only` picks from them, by the names that CSV has."""
    measures = list(dict.fromkeys(row.measure.words for row in rows))
    measure = measures[0] if len(measures) == 1 else "measure"
    return Table(
        "summary",
        "Summary",
        tuple(Column(key, title.format(measure=measure), key not in WORDS) for key, title, _, _ in SUMMARY),
        tuple(tuple(Cell(value(row), text(row)) for _, _, value, text in SUMMARY) for row in rows),
        tuple(row.series for row in rows),
    )
