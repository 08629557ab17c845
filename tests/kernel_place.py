"""Where Triton's kernels are tested: on CUDA where there is one, else on the CPU, by Triton's interpreter.

Take the kernels from here: where Triton is not installed, the module that does is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")

from triton.runtime import interpreter

from gradsieve import control
from gradsieve.fused import Tiling, uploaded
from gradsieve.kernels.ladder import count, decide, group_shape
from gradsieve.kernels.merge import merge
from gradsieve.kernels.packing import pack, unpack
from gradsieve.kernels.pick import pick
from gradsieve.kernels.scatter import gather, write_back
from gradsieve.kernels.sieve import clear, sieve
from gradsieve.kernels.tiling import HEAD, Decision, Found, Run, Sent, Sight
from gradsieve.score import Importance, Magnitude, Score
from gradsieve.types import View
from gradsieve.weights import Weights
from ranks import Moment

__all__ = [
    "DEVICE",
    "MARKS",
    "SIZES",
    "Place",
    "assert_same_bits",
    "awkward",
    "clear",
    "count",
    "decide",
    "gather",
    "group_shape",
    "level_of",
    "merge",
    "pack",
    "pick",
    "sieve",
    "uneven",
    "unpack",
    "write_back",
]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
MARKS = [pytest.mark.gpu]
"""Of every module of tests that runs kernels: `pytestmark = MARKS`."""

SIZES = [4097, 0, 33, 4500, 1]
"""Of parameters: more than a tile, none, part of a tile, and one entry."""
LEVELS = uploaded(control.LEVELS, DEVICE)
TABLE = uploaded(control.rung_table(), DEVICE)


def _rounded(values: Any, source: Any, target: Any, rounding: Any) -> Any:  # noqa: ARG001 - the interpreter's signature
    """From float32 to bfloat16 and back as devices do it; the interpreter cuts off where they round."""
    if source.primitive_bitwidth == 32:
        return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).float().numpy()


def _once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let the interpreter take the place of Triton's language once for each function, not at every call of it."""
    patched: set[Any] = set()

    def patch_unless_done(function: Any) -> Any:
        if function not in patched:
            patch(function)
            patched.add(function)
        return SimpleNamespace(restore=lambda: None)

    return patch_unless_done


if INTERPRETED:
    interpreter._convert_float = _rounded
    # it would take three times as long otherwise; no sum of so few entries is near an overflow
    interpreter._patch_lang = _once(interpreter._patch_lang)
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    # numpy tells of every overflow, as a device does not, and of how the interpreter reads a number
    MARKS = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("RuntimeWarning", "DeprecationWarning")]


class Place:
    """A vector of some parameters, cut into tiles, with a row for each of some ranks: what kernels work on."""

    def __init__(
        self,
        sizes: Sequence[int] = SIZES,
        rows: int = 1,
        *,
        world: int | None = None,
        dtype: torch.dtype = torch.float32,
        num_chunks: int = 3,
    ) -> None:
        self.bounds = (0, *accumulate(sizes))
        self.numel = self.bounds[-1]
        self.rows = rows
        self.world = rows if world is None else world
        self.tiling = Tiling(self.bounds, DEVICE)
        self.acc = torch.zeros((rows, self.numel), dtype=dtype, device=DEVICE)
        self.found = Found.empty(rows, self.tiling.tiles.num, DEVICE)
        self.decision = Decision.empty(rows, self.world, num_chunks, DEVICE)
        self.weights: Tensor | None = None
        self.look([(0, self.numel)] * rows)

    @property
    def whole(self) -> Run:
        (run,) = self.tiling.whole
        return run

    def look(
        self,
        stretches: Sequence[tuple[int, int]],
        last: float = 1.0,
        *,
        weights: Tensor | None = None,
        group: tuple[int, int] = (4, 64),
        many: bool = False,
    ) -> None:
        """Let each row look at a stretch, around a threshold; by importance if there are weights."""
        self.stretches = stretches
        self.lowest = control.lowest_rung(last)
        self.last = control.to_bits(last)
        self.decision.learned[0] = self.last
        self.decision.record[8] = self.last
        rows = [(start, stop, *self.tiling.touched(start, stop)) for start, stop in stretches]
        ladder = uploaded(control.warm_ladder(self.last).astype(np.int32), DEVICE)
        nothing = torch.empty(0, device=DEVICE)
        looks = torch.tensor(rows, dtype=torch.int64, device=DEVICE)
        last_bits = self.decision.learned
        self.sight = Sight(looks, ladder, last_bits, TABLE, LEVELS, nothing, nothing, group=group, many=many)
        self.weights = weights
        if weights is not None:
            self.sight.by_importance = True
            self.sight.weights = weights
            self.sight.margins = Weights(lambda: weights, self.bounds).scales * Importance().eps

    @property
    def score(self) -> Score:
        return Magnitude() if self.weights is None else Importance()

    def view(self, row: int) -> View:
        """What the plain twins look at."""
        view = Moment(1, self.numel, 1, bounds=self.bounds).view(0, self.acc[row])
        weights = self.weights
        return view if weights is None else replace(view, weights=Weights(lambda: weights, self.bounds))

    def scores(self, row: int) -> Tensor:
        """Of the entries that a row looks at."""
        return self.score(self.view(row), *self.stretches[row])

    def feed(self, gradient: Tensor, *, collect: bool = True, sent: Sent | None = None, check: bool = False) -> None:
        """Take in a gradient of all rows, which is used up."""
        self.found.narrow = gradient.element_size() < 4
        # what was collected stands in it
        self.fed = gradient
        tiles, looked = self.tiling.tiles, (self.sight, self.found)
        sieve(gradient, self.acc, tiles, self.whole, *looked, sent, collect=collect, check=check)

    def count(self, rungs: Tensor | None = None) -> None:
        count(self.acc, self.tiling.tiles, self.sight, self.found, self.decision, rungs=rungs)

    def sent(self, support: Tensor, rest: Tensor | None = None) -> Sent:
        """That a step sent these entries."""
        borders = torch.searchsorted(support, self.tiling.tiles.starts.to(support.dtype))
        return Sent(support, borders, rest)

    def note(self, reaching: Sequence[int], quotas: Sequence[int], lengths: Sequence[int]) -> None:
        """Put into the record what the ranks reach, are to propose, and may send."""
        by_rank = torch.tensor([*reaching, *quotas, *lengths], device=DEVICE)
        self.decision.record[HEAD:][: len(by_rank)] = by_rank
        self.decision.record[5:8] = sum(lengths)


def level_of(scores: Tensor, last: int) -> Tensor:
    """See [Note: levels] in `kernels.sieve`."""
    bits = scores.view(torch.int32).long()
    levels = (bits - last >> control.STEP_BITS) + control.STEPS_BELOW
    return torch.where(bits >= control.HUGE_BITS, control.TOP_LEVEL, levels)


def awkward(*shape: int, seed: int = 0) -> Tensor:
    """Noise of many scales around 1, with zeros, ties, denormal numbers, the largest ones, and what is no number."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(shape, generator=generator) * torch.exp(torch.randn(shape, generator=generator))
    limits = torch.finfo(torch.float32)
    special = [0.0, 1.0, -1.0, 1e-42, limits.tiny, limits.max, -torch.inf, torch.inf, torch.nan]
    choice = torch.randint(0, 20 * len(special), shape, generator=generator)
    for number, value in enumerate(special):
        noise[choice == number] = value
    return noise.to(DEVICE)


def uneven(place: Place) -> Tensor:
    """A gradient of which one tile collects thousands of entries, the next some hundreds, and others few or none."""
    gradient = awkward(place.rows, place.numel) / 32
    gradient[:, 4097 + 33 :] *= 64
    gradient[:, 4097 + 33 + 4096 :] /= 16
    return gradient


def assert_same_bits(one: Tensor, other: Tensor) -> None:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    if one.is_floating_point():
        # what is not a number has many patterns of bits
        assert torch.equal(one.isnan(), other.isnan())
        one, other = (vector.masked_fill(vector.isnan(), 0).view(torch.uint8) for vector in (one, other))
    assert torch.equal(one, other)
