from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from gradsieve.report.curves import MOST_POINTS, curve, smoothed
from gradsieve.runs import Run


def run_of(values: Sequence[float | None], start: int = 1) -> Run:
    header = {"config": {"seed": 0}, "measure": {"name": "accuracy"}}
    steps = [{"step": start + place, "value": value, "time": 0.5 * place} for place, value in enumerate(values)]
    return Run(Path("run"), header, "finished", None, {}, steps, [])


def test_few_points_stay_as_they_are() -> None:
    line = curve([run_of([3.0, 1.0, 2.0])], "value")
    assert line.x.tolist() == [1, 2, 3]
    assert line.mean.tolist() == line.low.tolist() == line.high.tolist() == [3, 1, 2]


def test_mean_least_and_most_over_runs() -> None:
    line = curve([run_of([1.0, 2.0]), run_of([3.0, 6.0])], "value")
    assert (line.mean.tolist(), line.low.tolist(), line.high.tolist()) == ([2, 4], [1, 2], [3, 6])


def test_many_points_become_means_of_bins() -> None:
    values = np.arange(10_000, dtype=float)
    line = curve([run_of(values.tolist())], "value")
    assert len(line.x) == MOST_POINTS
    assert line.mean == pytest.approx(values.reshape(MOST_POINTS, -1).mean(axis=1))
    assert line.x == pytest.approx(line.mean + 1)


def test_runs_meet_at_equal_steps_and_shorter_ones_end() -> None:
    line = curve([run_of([1.0, 1.0, 1.0, 1.0]), run_of([3.0], start=2)], "value")
    assert line.mean.tolist() == [1, 2, 1, 1]


def test_a_column_by_another() -> None:
    assert curve([run_of([1.0, 2.0, 3.0])], "value", by="time").x.tolist() == [0, 0.5, 1.0]


def test_gaps_stay_gaps() -> None:
    line = curve([run_of([1.0, None, math.inf, 4.0])], "value")
    assert np.isnan(line.mean).tolist() == [False, True, True, False]
    assert not line.empty


@pytest.mark.parametrize("runs", [[], [run_of([])], [run_of([None, None])]])
def test_without_values_a_curve_is_empty(runs: list[Run]) -> None:
    assert curve(runs, "value").empty


def test_a_moving_mean_leaves_gaps_out() -> None:
    assert smoothed(np.array([1.0, math.nan, 3.0]), 3).tolist() == [1, 2, 3]
    assert smoothed(np.array([5.0, 5.0]), 9).tolist() == [5, 5]
    assert smoothed(np.empty(0), 3).size == 0
