from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from gradsieve.report import figures
from gradsieve.report.colours import looks
from gradsieve.report.drawing import style
from gradsieve.report.frontier import between, dense_bytes, equal_bytes_table, far_behind, frontier_table, methods
from gradsieve.report.grouping import Group, Section, Spread, sections
from gradsieve.report.texts import ABSENT
from synthetic_runs import Plan, make_runs

DENSITIES = (0.001, 0.01, 0.1)


@pytest.fixture(scope="module")
def section(tmp_path_factory: pytest.TempPathFactory) -> Section:
    plans = [
        *(Plan("dense", 1.0, 16, seed) for seed in (0, 1)),
        *(Plan(label, density, 16, seed) for label in ("topk", "micro") for density in DENSITIES for seed in (0, 1)),
        Plan("union", 0.01, 16),
    ]
    (only,) = sections(make_runs(tmp_path_factory.mktemp("runs"), plans))
    return only


def test_methods_have_their_densities_by_bytes(section: Section) -> None:
    found = {groups[0].label: [group.density for group in groups] for groups in methods(section)}
    assert found == {"dense": [1.0], "topk": [*DENSITIES], "micro": [*DENSITIES], "union": [0.01]}


def test_the_figure_has_a_line_a_method_and_dense_as_a_level(section: Section) -> None:
    with style():
        (axes,) = figures.measure_by_bytes(section, looks(group.series for group in section.groups)).axes
    lines = {str(line.get_label()): np.asarray(line.get_xydata()) for line in axes.lines}
    for label in ("topk", "micro"):
        sizes, finals = lines[label].T
        groups = next(groups for groups in methods(section) if groups[0].label == label)
        assert sizes.tolist() == [group.link_bytes for group in groups]
        assert finals.tolist() == pytest.approx([100 * group.final.mean for group in groups])
    dense = section.dense(16)
    assert dense is not None
    assert lines["_level"][:, 1].tolist() == pytest.approx([100 * dense.final.mean] * 2)
    assert axes.get_xscale() == "log"


@pytest.mark.parametrize(
    ("finals", "far"),
    [
        ([0.9, 0.89, 0.88, 0.87], []),
        ([0.9, 0.89, 0.88, 0.1], [3]),
        ([0.9, 0.89, math.nan, 0.88], [2]),
        ([0.9, 0.9, 0.9, 0.1], []),
        ([math.nan, math.inf], []),
        ([], []),
    ],
)
def test_who_ends_far_behind_is_told(section: Section, finals: list[float], far: list[int]) -> None:
    groups = [SimpleNamespace(final=Spread(final, 0.0, final, final, 1)) for final in finals]
    assert far_behind(section, cast("list[Group]", groups)) == [groups[place] for place in far]


def test_who_ends_far_behind_leaves_the_room_to_the_others(section: Section, monkeypatch: pytest.MonkeyPatch) -> None:
    worst = min(section.main, key=lambda group: group.final.mean)
    monkeypatch.setattr(figures, "far_behind", lambda *_: [worst])
    with style():
        (axes,) = figures.measure_by_bytes(section, looks(group.series for group in section.groups)).axes
    low, high = axes.get_ylim()
    finals = [100 * group.final.mean for group in section.main if group is not worst]
    assert 100 * worst.final.mean < low < min(finals) < max(finals) < high
    assert [text.get_text() for text in axes.texts] == [f"outside: {worst.label}"]


def test_the_table_tells_the_actual_density(section: Section) -> None:
    table = frontier_table(section)
    assert len(table.rows) == 8
    rows = {(row[0].value, row[1].value): row for row in table.rows}
    topk = next(group for group in section.groups if group.series == ("topk", 0.01))
    assert rows["topk", 0.01][2].value == topk.density_actual
    assert topk.density_actual > 0.1
    assert rows["dense", 1.0][4].text == "100 %"
    assert rows["union", 0.01][6].text == ABSENT


def test_methods_meet_at_equal_bytes(section: Section) -> None:
    table = equal_bytes_table(section)
    assert [row[0].text for row in table.rows] == ["topk", "micro"]
    keys = [column.key for column in table.columns]
    micro, place = table.rows[1], keys.index("at_0.03")
    groups = next(groups for groups in methods(section) if groups[0].label == "micro")
    assert groups[0].final.mean < float(micro[place].value or 0) < groups[-1].final.mean
    assert "±" in micro[place].text


def test_between_neighbours_the_line_is_straight_over_the_logarithm(section: Section) -> None:
    groups = next(groups for groups in methods(section) if groups[0].label == "micro")
    middle = math.sqrt(groups[0].link_bytes * groups[1].link_bytes)
    assert between(groups, middle).mean == pytest.approx((groups[0].final.mean + groups[1].final.mean) / 2)
    assert between(groups, groups[1].link_bytes).mean == pytest.approx(groups[1].final.mean)
    assert math.isnan(between(groups, 2 * groups[-1].link_bytes).mean)


def test_one_group_needs_no_table(tmp_path: Path) -> None:
    (section,) = sections(make_runs(tmp_path, [Plan(epochs=2)]))
    assert frontier_table(section).rows == equal_bytes_table(section).rows == ()
    assert dense_bytes(section) > 0
