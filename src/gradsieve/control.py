"""Threshold laws: pure functions of numbers that every rank shares, so that thresholds agree.

[Note: thresholds as integers]
Positive float32 numbers sort like their bit patterns, and equal steps in bits are nearly equal steps in the
logarithm. The search therefore runs on integers: exact, the same on every machine, and it covers every scale
a gradient can have in the same few rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.int64]


def initial_threshold(target: int) -> float:
    """Where MiCRO starts and where a hard threshold stays: `1 / (2 * sqrt(target))`."""
    return 1 / (2 * math.sqrt(target))


# MiCRO's law as its published code executes it. A fourth branch there (0.9987, below the target) can never
# run, which is why the steady state sits a few per cent under the target.
PAPER_FAST, PAPER_SLOW, PAPER_DOWN = 1.005, 1.00125, 0.995
PAPER_HIGH, PAPER_LOW = 1.1, 0.909


def stepped_threshold(threshold: float, support: int, target: int) -> float:
    """The next threshold by MiCRO's published law, from the support of the step before."""
    ratio = support / target
    if ratio > PAPER_HIGH:
        return threshold * PAPER_FAST
    if ratio > PAPER_LOW:
        return threshold * PAPER_SLOW
    return threshold * PAPER_DOWN


TINY_BITS = 0x0080_0000
TINY = float(np.finfo(np.float32).tiny)
"""The smallest normal float32. Entries below it count as zeros, and nobody asks for zeros unless for everything."""
HUGE_BITS = 0x7F7F_FFFF
"""The largest finite float32."""
TOLERANCE = 0.03
"""A count this near the goal, relatively, ends the search."""
AFFORDABLE = 8
"""Once at most so many times the goal reach a rung, they are collected, and later rounds look at them alone."""
TIED_BITS = 64
"""Thresholds less than a hundred-thousandth apart: what lies between them is tied."""
NUM_RUNGS = 64

# Around the last threshold: steps of 0.2 to 0.4 % for 3 to 6 % each way, where nearly every step of a training run
# finds its threshold; then coarser, down by 12 to 25 % (lower would let a tenth of the vector pass the first sieve) and
# up by 33 to 50 %.
_NEAR = np.arange(-15, 16, dtype=np.int64) << 15
_FAR_DOWN = -(np.array([64, 44, 30, 21], dtype=np.int64) << 15)
_FAR_UP = np.array([21, 30, 44, 64, 90, 128], dtype=np.int64) << 15
_OFFSETS: Bits = np.concatenate([_FAR_DOWN, _NEAR, _FAR_UP])


def to_bits(threshold: float) -> int:
    return int(np.float32(threshold).view(np.int32))


def from_bits(bits: Bits) -> npt.NDArray[np.float32]:
    return bits.astype(np.int32).view(np.float32)


def ladder_between(low: int, high: int) -> Bits:
    """Rungs from `low` to `high`, both included."""
    return np.unique(low + (high - low) * np.arange(NUM_RUNGS, dtype=np.int64) // (NUM_RUNGS - 1))


def first_ladder(last: float, floor: float = 0.0) -> Bits:
    """Rungs of a first round: around the last step's threshold or, if there is none (0), over all scales.

    None below `floor`, unless `last` is: what reaches it has been collected, and below it everything is looked at.
    """
    if not last:
        return ladder_between(TINY_BITS, HUGE_BITS)
    rungs = np.unique(np.clip(to_bits(last) + _OFFSETS, TINY_BITS, HUGE_BITS))
    return rungs[rungs >= to_bits(floor)] if floor <= last else rungs


def lowest_rung(last: float) -> float:
    """The lowest threshold that a first round counts at."""
    return float(from_bits(first_ladder(last))[0])


def everything() -> Bits:
    """The ladder whose only rung lets everything pass."""
    return np.zeros(1, dtype=np.int64)


class Verdict(NamedTuple):
    """What a round of counting says: a rung of the ladder that was counted or, if there is one, the next ladder."""

    rung: int
    tied: bool = False
    """More entries than the goal are tied at the rung: the ranks share out the goal among them."""
    ladder: Bits | None = None
    affordable: bool = False
    """Few enough entries reach the next ladder to collect them."""


def narrow(ladder: Bits, totals: Sequence[int], goal: int, limit: int) -> Verdict:
    """Judge the numbers of entries at or above each rung: nearest to `goal`, never above `limit`."""
    upper = sum(total >= goal for total in totals)
    lower = upper - 1
    rungs = [rung for rung in (lower, upper) if 0 <= rung < len(ladder) and totals[rung] <= limit]
    nearest = min(rungs, key=lambda rung: abs(totals[rung] - goal), default=None)
    if nearest is not None and abs(totals[nearest] - goal) <= TOLERANCE * goal:
        return Verdict(nearest)
    low = int(ladder[lower]) if lower >= 0 else TINY_BITS
    high = int(ladder[upper]) if upper < len(ladder) else HUGE_BITS
    if lower < 0 and int(ladder[0]) == TINY_BITS:
        return Verdict(0)  # fewer entries than the goal are not zero: take them all
    if high - low <= TIED_BITS and lower >= 0:
        return Verdict(lower, tied=True)
    affordable = lower >= 0 and totals[lower] <= AFFORDABLE * goal
    return Verdict(lower, ladder=ladder_between(low, high), affordable=affordable)


def tied_quotas(at_rung: Sequence[int], above_rung: Sequence[int], goal: int) -> tuple[int, ...]:
    """Share `goal` out among ranks: all that lies above the rung, then of what is tied in proportion.

    Rounded cumulatively, so the quotas add up to the goal exactly.
    """
    tied = [at - above for at, above in zip(at_rung, above_rung, strict=True)]
    room = goal - sum(above_rung)
    borders = [room * seen // max(sum(tied), 1) for seen in accumulate(tied, initial=0)]
    extra = [stop - start for start, stop in pairwise(borders)]
    return tuple(above + more for above, more in zip(above_rung, extra, strict=True))


def dithered_share(target: int, numel: int, start: int, stop: int, step: int) -> int:
    """The whole number of entries that `start:stop` is worth; over steps it averages to the exact share.

    Over a partition of the vector the shares add up to the target. The phase moves by the golden ratio, so that a
    tensor worth less than one entry still gets its turn.
    """
    phase = step * _GOLDEN % _ONE
    worth = [(target * border * _ONE + phase * numel) // (numel * _ONE) for border in (start, stop)]
    return worth[1] - worth[0]


_ONE = 1 << 32
_GOLDEN = 2654435769
"""The golden ratio's fraction, in parts of `_ONE`."""


# SIDCo: the ratio each stage but the last keeps, how often the number of stages is looked at, and the band of
# actual over target in which it stays.
STAGE_RATIO = 0.25
STAGE_PERIOD = 5
STAGE_LOW, STAGE_HIGH = 0.8, 1.2


def next_stages(stages: int, ratio: float, density: float) -> int:
    """SIDCo's number of stages from the actual over the asked number of entries.

    Accumulated gradients have lighter tails than an exponential, so that a fit to all of them asks too much of the
    largest: too few entries call for one more stage, too many for one less.
    """
    most = 1 + int(math.log(density) / math.log(STAGE_RATIO))
    if ratio < STAGE_LOW:
        return min(stages + 1, most)
    if ratio > STAGE_HIGH:
        return max(stages - 1, 1)
    return stages
