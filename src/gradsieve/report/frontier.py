"""Tables of what a method reaches for the bytes it sends: as run, and at equal bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from gradsieve.report import texts
from gradsieve.report.grouping import Group, Measure, Section, Spread, ratio
from gradsieve.report.table import Cell, Column, Table

BUDGETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""Parts of dense's bytes at which methods are held against one another."""
BYTES_OF_A_VALUE = 4


FAR = 10
"""Times as far behind as half of the others are: a figure that shows such a group shows little of the others."""


def methods(section: Section) -> list[list[Group]]:
    """The judged groups that counted bytes, method by method, those that send least first."""
    counted = [group for group in section.main_judged if group.link_bytes > 0]
    by_method = groupby(counted, key=lambda group: group.label)
    return [sorted(groups, key=lambda group: group.link_bytes) for _, groups in by_method]


def far_behind(section: Section, groups: Sequence[Group]) -> list[Group]:
    """Those that end so far behind the best that a figure does without them."""
    finals = np.array([group.final.mean for group in groups])
    known = finals[np.isfinite(finals)]
    if not len(known):
        return []
    best = known.max() if section.measure.higher_is_better else known.min()
    behind = np.abs(finals - best)
    limit = FAR * float(np.median(behind[np.isfinite(behind)]))
    return [group for group, gap in zip(groups, behind, strict=True) if limit and not gap <= limit]


def dense_bytes(section: Section) -> float:
    """Through a worker's link in a step of dense, each way: a ring sends all but its own part, twice."""
    world = section.main_world
    return 2 * (world - 1) / world * BYTES_OF_A_VALUE * section.parameters


def frontier_table(section: Section) -> Table:
    """What was reached for which bytes; empty where there is but one group to show."""
    columns = (
        Column("method", "method"),
        Column("density", "density asked", numeric=True),
        Column("density_actual", "actual density", numeric=True),
        Column("link_bytes", "bytes through a link", numeric=True),
        Column("part", "of dense", numeric=True),
        Column("final", f"final {section.measure.words}", numeric=True),
        Column("deviation", "±", numeric=True),
        Column("seeds", "seeds", numeric=True),
    )
    groups = [group for of_method in methods(section) for group in of_method]
    shown = groups if len(groups) > 1 else []
    rows = tuple(_row(section, group) for group in shown)
    return Table("frontier", "Bytes and what they buy", columns, rows, tuple(group.series for group in shown))


def _row(section: Section, group: Group) -> tuple[Cell, ...]:
    part = ratio(group.link_bytes, dense_bytes(section))
    deviation = group.final.deviation if group.final.size > 1 else math.nan
    return (
        Cell(group.label, texts.printable(group.label)),
        Cell(group.density, f"{group.density:g}"),
        Cell(group.density_actual, texts.number(group.density_actual)),
        Cell(group.link_bytes, texts.data(group.link_bytes)),
        Cell(part, texts.percent(part)),
        Cell(group.final.mean, section.measure.text(group.final.mean)),
        Cell(deviation, section.measure.text(deviation)),
        Cell(group.final.size, str(group.final.size)),
    )


def equal_bytes_table(section: Section) -> Table:
    """Each method at the same bytes, between the densities it was run at; empty where no method has two."""
    whole = dense_bytes(section)
    lines = [groups for groups in methods(section) if len(groups) > 1]
    budgets = [part for part in BUDGETS if any(_covers(groups, part * whole) for groups in lines)]
    columns = (
        Column("method", "method"),
        *(Column(f"at_{part:g}", f"{texts.percent(part)} of dense", numeric=True) for part in budgets),
    )
    rows = tuple(
        (Cell(groups[0].label, texts.printable(groups[0].label)), *_at(groups, section.measure, budgets, whole))
        for groups in lines
    )
    series = tuple(groups[0].series for groups in lines)
    title = f"{section.measure.words.capitalize()} at equal bytes"
    return Table("equal-bytes", title, columns, rows if budgets else (), series if budgets else ())


def _covers(groups: Sequence[Group], size: float) -> bool:
    return groups[0].link_bytes <= size <= groups[-1].link_bytes


def _at(groups: Sequence[Group], measure: Measure, budgets: Sequence[float], whole: float) -> list[Cell]:
    found = [between(groups, part * whole) for part in budgets]
    return [Cell(value.mean, _text(value, measure)) for value in found]


def _text(value: Spread, measure: Measure) -> str:
    if value.size < 2 or not math.isfinite(value.mean):
        return measure.text(value.mean)
    return f"{measure.text(value.mean)} ± {measure.text(value.deviation)}"


def between(groups: Sequence[Group], size: float) -> Spread:
    """The final measure for so many bytes, straight between neighbours on a logarithmic scale; NaN outside of them."""
    if not _covers(groups, size):
        return Spread(math.nan, math.nan, math.nan, math.nan, 0)
    sizes = np.log([group.link_bytes for group in groups])
    parts = [np.interp(math.log(size), sizes, column) for column in zip(*(g.final[:4] for g in groups), strict=True)]
    mean, deviation, low, high = map(float, parts)
    return Spread(mean, deviation, low, high, min(group.final.size for group in groups))
