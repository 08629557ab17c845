"""The kernels in plain torch: the specification that any faster twin is held to.

Indices are int64 and ascending wherever a kernel returns them.
"""

from __future__ import annotations

import math
import threading
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradsieve.control import HUGE_BITS, STAGE_RATIO, STEP_BITS

FEW_SCORES = 1 << 13
"""Up to so many, sorting on the CPU is faster than comparing with each of 64 rungs: each call has its cost."""
SCRATCH = 1 << 20
"""Entries looked at at a time on the CPU: see `score.CHUNK`."""
FEW_COMPARISONS = 1 << 26
"""Up to so many, all are compared with all on CUDA, for a histogram makes the host wait."""


def at_least(scores: Tensor, threshold: float, count: int | None = None) -> Tensor:
    """Positions whose score reaches the threshold; `count`, if it is known, spares a wait on CUDA.

    What is not a number reaches every threshold: it travels at once, and shows as it would in plain DDP.
    """
    missed = scores < threshold
    if scores.device.type == "cpu":
        # numpy's scan of a mask is four times as fast as torch.nonzero
        return torch.from_numpy(np.flatnonzero(~missed.numpy()))
    reached = missed.logical_not_()
    found = reached.nonzero() if count is None else torch.nonzero_static(reached, size=count)
    return found.flatten()


def magnitudes_at_least(vector: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Positions whose magnitude reaches the threshold, and those magnitudes, at least in float32."""
    if vector.device.type != "cpu" or vector.dtype != torch.float32:
        scores = vector.float().abs() if vector.dtype != torch.float64 else vector.abs()
        positions = at_least(scores, threshold)
        return positions, scores[positions]
    # bits of magnitudes sort like magnitudes, and what is not a number comes last; in memory that is used again
    # and again, for fresh memory costs more than what is done in it
    bits, reached = _scratch(len(vector), threading.get_ident())
    np.bitwise_and(vector.numpy().view(np.int32), 0x7FFF_FFFF, out=bits)
    np.greater_equal(bits, np.float32(threshold).view(np.int32), out=reached)
    positions = torch.from_numpy(_true_places(reached))
    return positions, vector.index_select(0, positions).abs_()


def _true_places(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """`np.flatnonzero` where few are true: eight at a time, and one by one only where there is any."""
    whole = len(mask) // 8 * 8
    eights = mask[:whole].view(np.int64)
    # finding what is true is fast in masks alone
    filled = np.flatnonzero(eights != 0)
    within = np.flatnonzero(eights[filled].view(np.bool_))
    places = filled[within >> 3] * 8 + (within & 7)
    return np.concatenate([places, whole + np.flatnonzero(mask[whole:])])


def _scratch(size: int, thread: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    bits, reached = _scratch_of(max(SCRATCH, size), thread)
    return bits[:size], reached[:size]


@lru_cache(maxsize=16)
def _scratch_of(size: int, thread: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:  # noqa: ARG001 - each thread has its own
    return np.empty(size, dtype=np.int32), np.empty(size, dtype=np.bool_)


def count_at_least(scores: Tensor, rungs: Tensor) -> Tensor:
    """Number of scores that reach each of the ascending `rungs`, in the sense of `at_least`."""
    if scores.device.type == "cpu":
        # comparing with every rung is four times as fast as sorting many or as torch.bucketize, which searches for each
        values = scores.numpy()
        if len(values) <= FEW_SCORES:
            # what is not a number is sorted last
            return torch.from_numpy(len(values) - np.searchsorted(np.sort(values), rungs.numpy()))
        if values.dtype == np.float32 and _equally_spaced(rungs.numpy().view(np.int32)):
            return _count_by_level(values.view(np.int32), rungs.numpy().view(np.int32))
        return torch.tensor([len(values) - np.count_nonzero(values < rung) for rung in rungs.numpy()])
    if len(scores) * len(rungs) <= FEW_COMPARISONS:
        missed: Tensor = (scores.unsqueeze(1) < rungs).sum(0)
        return len(scores) - missed
    num_reached = torch.bucketize(scores, rungs, right=True, out_int32=True)
    by_number = torch.bincount(num_reached, minlength=len(rungs) + 1)
    return by_number.flip(0).cumsum(0).flip(0)[1:]


def _equally_spaced(rungs: npt.NDArray[np.int32]) -> bool:
    """Do all rungs, but those at the end of the scale, lie whole steps of their bits above the first?"""
    return not ((rungs[rungs < HUGE_BITS] - rungs[0]) & ((1 << STEP_BITS) - 1)).any()


def _count_by_level(scores: npt.NDArray[np.int32], rungs: npt.NDArray[np.int32]) -> Tensor:
    """The same, from bits: how many scores lie how many steps above the first rung."""
    within = rungs < HUGE_BITS
    steps = (rungs[within] - rungs[0]) >> STEP_BITS
    levels = np.clip((scores - rungs[0]) >> STEP_BITS, -1, steps[-1]) + 1
    reached = np.full(len(rungs), np.count_nonzero(scores >= HUGE_BITS))
    reached[within] = (len(scores) - np.bincount(levels, minlength=int(steps[-1]) + 2).cumsum())[steps]
    return torch.from_numpy(reached)


def count_by_rank(scores: Tensor, rungs: Tensor, ranks: Tensor, world: int) -> Tensor:
    """`count_at_least` for each rank, `[world, rungs]`, where `ranks` says whose each score is."""
    num_reached = torch.bucketize(scores, rungs, right=True)
    cells = torch.zeros(world * (len(rungs) + 1), dtype=torch.int64, device=scores.device)
    cells.scatter_add_(0, ranks * (len(rungs) + 1) + num_reached, torch.ones_like(ranks))
    by_number = cells.view(world, len(rungs) + 1)
    return by_number.flip(1).cumsum(1).flip(1)[:, 1:]


def largest(scores: Tensor, k: int) -> Tensor:
    """Positions of the `k` largest scores."""
    if k >= len(scores):
        return torch.arange(len(scores), device=scores.device)
    positions: Tensor = torch.topk(scores, k, sorted=False).indices.sort().values
    return positions


def kth_largest(scores: Tensor, k: int) -> float:
    """The size of the `k`-th largest score, of at least as many; what is not a number is larger than all."""
    return float(scores.kthvalue(len(scores) - k + 1).values)


def merged(indices: Tensor) -> Tensor:
    """The distinct ones of `indices`."""
    if indices.device.type == "cpu":
        # they come as a few ascending runs, which a merge sort makes use of
        ordered = np.sort(indices.numpy(), kind="stable")
        return torch.from_numpy(ordered[np.diff(ordered, prepend=-1) != 0])
    distinct: Tensor = torch.unique(indices)
    return distinct


def thinned(indices: Tensor, limit: int) -> Tensor:
    """At most `limit` of the indices, evenly spread over them so that no layer is cut off."""
    if len(indices) <= limit:
        return indices
    return indices[torch.arange(limit, device=indices.device) * len(indices) // limit]


def uniform(start: int, stop: int, key: int, device: torch.device) -> Tensor:
    """A random number in (0, 1) for each position, a function of position and key alone.

    A hash and not a generator, so that any part of the vector can be drawn, in any order, on any device.
    """
    mask = 0xFFFF_FFFF
    position = torch.arange(start, stop, device=device)
    x = ((position & mask) ^ ((position >> 32) * 0x9E3779B1 & mask) ^ (key & mask)) & mask
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & mask
    x = x ^ (x >> 16)
    # 23 bits and a half, so that the number is exact in float32 and never 0 or 1
    return ((x >> 9).float() + 0.5) / (1 << 23)


def exponential_threshold(scores: Tensor, target: int, stages: int) -> float:
    """SIDCo's threshold: an exponential fitted to the scores, each later stage to what exceeds the last."""
    low = 0.0
    for _ in range(stages - 1):
        threshold = _exponential_quantile(scores, low, STAGE_RATIO)
        exceeding = scores[scores >= threshold]
        if len(exceeding) <= target:
            break
        scores, low = exceeding, float(exceeding.min())
    return _exponential_quantile(scores, low, target / max(len(scores), 1))


def _exponential_quantile(scores: Tensor, low: float, ratio: float) -> float:
    if ratio >= 1:
        return low
    return low + (float(scores.mean()) - low) * -math.log(ratio)


def sampled_threshold(scores: Tensor, target: int, fraction: float, offset: int) -> float:
    """DGC's threshold: the one that keeps the asked share of an evenly spaced sample.

    The sample grows beyond `fraction` until about ten of its entries pass; fewer would only be noise.
    """
    if target >= len(scores):
        return 0.0
    stride = max(1, min(round(1 / fraction), target // 10))
    sample = scores[offset % stride :: stride]
    keep = min(len(sample), max(1, round(target * len(sample) / len(scores))))
    return float(torch.topk(sample, keep, sorted=False).values.min())
