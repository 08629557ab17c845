"""Lines over the seeds: mean, least and most, thinned to what a figure can show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gradsieve.runs import Run

Array = npt.NDArray[np.float64]

MOST_POINTS = 400


class Curve(NamedTuple):
    """A line and the band around it; NaN where there is nothing."""

    x: Array
    mean: Array
    low: Array
    high: Array

    @property
    def empty(self) -> bool:
        return not bool((np.isfinite(self.x) & np.isfinite(self.mean)).any())

    def times(self, factor: float) -> Curve:
        return Curve(self.x, factor * self.mean, factor * self.low, factor * self.high)


def curve(
    runs: Sequence[Run],
    name: str,
    *,
    by: str = "step",
    of: Literal["steps", "evaluations"] = "steps",
    most: int = MOST_POINTS,
) -> Curve:
    """A column over another. Runs meet at equal steps; where there are too many steps, each point is a bin's mean."""
    steps = [run.series("step", of=of) for run in runs]
    edges = _edges(np.unique(np.concatenate([*steps, np.empty(0)])), most)
    bins = [np.searchsorted(edges, own, side="right") - 1 for own in steps]
    x = _table(bins, [run.series(by, of=of) for run in runs], len(edges))
    y = _table(bins, [run.series(name, of=of) for run in runs], len(edges))
    return Curve(_over_runs(x), _over_runs(y), np.fmin.reduce(y, axis=0), np.fmax.reduce(y, axis=0))


def _edges(steps: Array, most: int) -> Array:
    """The first step of each bin."""
    steps = steps[np.isfinite(steps)]
    if len(steps) <= most:
        return steps
    chosen: Array = steps[np.arange(most) * len(steps) // most]
    return chosen


def _table(bins: Sequence[npt.NDArray[np.intp]], columns: Sequence[Array], width: int) -> Array:
    """`[runs, width]`: the mean of each run in each bin. One row at least, for a mean over none is an error."""
    rows = [_binned(own, column, width) for own, column in zip(bins, columns, strict=True)]
    return np.stack(rows) if rows else np.full((1, width), np.nan)


def _over_runs(table: Array) -> Array:
    """The mean of each column, NaN left out."""
    counts = np.isfinite(table).sum(axis=0)
    return _quotient(np.nansum(table, axis=0), counts)


def _binned(bins: npt.NDArray[np.intp], values: Array, width: int) -> Array:
    finite = np.isfinite(values)
    sums = np.bincount(bins[finite], values[finite], minlength=width)
    counts = np.bincount(bins[finite], minlength=width)
    return _quotient(sums, counts)


def _quotient(sums: npt.NDArray[Any], counts: npt.NDArray[Any]) -> Array:
    """NaN where nothing was counted."""
    quotient: Array = np.full(len(sums), np.nan)
    np.divide(sums, counts, out=quotient, where=counts > 0)
    return quotient


def smoothed(values: Array, window: int) -> Array:
    """The centred moving mean; NaN values are left out of it."""
    if not len(values):
        return values
    finite = np.isfinite(values)
    kernel = np.ones(min(window, len(values)))
    sums = np.convolve(np.where(finite, values, 0.0), kernel, mode="same")
    counts = np.rint(np.convolve(finite.astype(np.float64), kernel, mode="same"))
    return _quotient(sums, counts)
