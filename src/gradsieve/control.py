"""Threshold laws: pure functions of numbers that every rank shares, so that thresholds agree.

[Note: thresholds as integers]
Positive float32 numbers sort like their bit patterns, and equal steps in bits are nearly equal steps in the
logarithm. The search therefore runs on integers: exact, the same on every machine, and it covers every scale
a gradient can have in the same few rounds.

[Note: fixed shapes]
Every ladder has the same number of rungs, a step that follows another counts once, and the sizes of messages are known
two steps before: so a device can run the same rules without asking the host.
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
HUGE = float(np.finfo(np.float32).max)
TOLERANCE_PERCENT = 3
"""A count this near the goal passes as it is."""
NUM_RUNGS = 64
COLD_ROUNDS = 4
"""Rounds of counting where no threshold is known from a step before; where one is, a single round settles it."""

# Around the last threshold: steps of 0.2 to 0.4 % for 4 to 8 % each way, where nearly every step of a training run
# finds its threshold; then coarser, down by 12 to 25 % (lower would let a tenth of the vector pass the first sieve) and
# up to any scale, so that after a leap the goal is shared out among few entries more than there were before it.
_DOWN = [-64, -52, -42, -34, -27]
_NEAR = range(-20, 21)
_UP = [27, 34, 42, 52, 64, 80, 100, 128, 192, 256, 512, 1024, 2048, 4096, 8192, 16384, 24576, 49152]
STEP_BITS = 15
"""The rungs lie whole steps of so many bits from the threshold."""
STEPS_BELOW = -_DOWN[0]
OFFSETS: Bits = np.array([*_DOWN, *_NEAR, *_UP], dtype=np.int64) << STEP_BITS

LEVELS: Bits = (OFFSETS >> STEP_BITS) + STEPS_BELOW
"""Of the rungs: steps above the lowest one."""
FINE_LEVELS, COARSE_LEVELS, TOP_LEVEL = 256, 64, (1 << 16) - 1
"""Levels, steps above the lowest rung: each by itself up to the first of these, then as many at a time as the second
says, up to the last, which stands for all beyond."""


def rung_table() -> npt.NDArray[np.int32]:
    """The highest rung that each level reaches, by fine and then by coarse levels."""
    levels = np.concatenate([np.arange(FINE_LEVELS), np.arange(FINE_LEVELS, TOP_LEVEL + 1, COARSE_LEVELS)])
    highest: npt.NDArray[np.int32] = (np.searchsorted(LEVELS, levels, side="right") - 1).astype(np.int32)
    return highest


def to_bits(threshold: float) -> int:
    return int(np.float32(threshold).view(np.int32))


def from_bits(bits: Bits) -> npt.NDArray[np.float32]:
    return bits.astype(np.int32).view(np.float32)


def warm_ladder(last_bits: int) -> Bits:
    """Rungs around the last step's threshold. Where they meet an end of the scale some are alike."""
    return np.clip(last_bits + OFFSETS, TINY_BITS, HUGE_BITS)


def ladder_between(low: int, high: int) -> Bits:
    """Rungs from `low` to `high`, both included."""
    return low + (high - low) * np.arange(NUM_RUNGS, dtype=np.int64) // (NUM_RUNGS - 1)


def cold_ladder() -> Bits:
    """Rungs over all scales."""
    return ladder_between(TINY_BITS, HUGE_BITS)


def everything() -> Bits:
    """Rungs that everything reaches."""
    return np.zeros(NUM_RUNGS, dtype=np.int64)


def lowest_rung(last: float) -> float:
    """The lowest threshold that a step counts at after one whose threshold was `last`."""
    return float(from_bits(warm_ladder(to_bits(last)))[0])


class Verdict(NamedTuple):
    """The rung of a ladder that entries have to reach."""

    rung: int
    thinned: bool = False
    """More entries than the goal reach it: the ranks share out the goal among them (`shares`)."""


def settle(totals: Sequence[int], goal: int, limit: int) -> Verdict:
    """Choose from the numbers of entries at or above each rung: nearest to `goal`, never above `limit`."""
    near = _near(totals, goal, limit)
    if near is not None:
        return Verdict(near)
    lower = _lower(totals, goal)
    # where all that reaches the lowest rung is less than the goal, take all of it
    return Verdict(lower, thinned=True) if lower >= 0 else Verdict(0)


def next_ladder(ladder: Bits, totals: Sequence[int], goal: int, limit: int) -> Bits | None:
    """The ladder of a further round, finer; None where this round will do."""
    lower = _lower(totals, goal)
    if lower < 0 or _near(totals, goal, limit) is not None:
        return None
    upper = lower + 1
    return ladder_between(int(ladder[lower]), int(ladder[upper]) if upper < NUM_RUNGS else HUGE_BITS)


def _lower(totals: Sequence[int], goal: int) -> int:
    """The highest rung that `goal` entries reach; -1 if there is none."""
    return sum(total >= goal for total in totals) - 1


def _near(totals: Sequence[int], goal: int, limit: int) -> int | None:
    """The rung next to the goal, if it is within the tolerance."""
    lower = _lower(totals, goal)
    rungs = [rung for rung in (lower, lower + 1) if 0 <= rung < NUM_RUNGS and totals[rung] <= limit]
    if not rungs:
        return None
    nearest = min(rungs, key=lambda rung: abs(totals[rung] - goal))
    return nearest if 100 * abs(totals[nearest] - goal) <= TOLERANCE_PERCENT * goal else None


def most_entries(goal: int, ceiling: float) -> int:
    """What a ceiling, in times of a goal, comes to."""
    return goal * int(ceiling * 1000) // 1000


def shares(counts: Sequence[int], goal: int) -> tuple[int, ...]:
    """Share `goal` out among ranks in proportion to their counts.

    Rounded cumulatively, so that the shares add up to the goal exactly.
    """
    total = sum(counts)
    borders = [goal * seen // total for seen in accumulate(counts, initial=0)]
    return tuple(stop - start for start, stop in pairwise(borders))


def next_threshold(applied: float, proposed: int, goal: int) -> float:
    """Where the next step looks around, after one in which `proposed` entries reached the `applied` threshold.

    Half of it where that was less than half of the goal: the rungs below a threshold do not reach far.
    """
    if 2 * proposed >= goal:
        return applied
    return float(from_bits(np.array([max(TINY_BITS, to_bits(applied) - _HALF)]))[0])


_HALF = 1 << 23
"""A factor of two in bits."""


OVERLAP_UNIT = 1 << 16
OVERLAP_STEPS = 3
"""One step's overlap moves what is remembered by a part of so many."""
OVERLAP_REACH = 4
"""What is remembered lies at most one part of so many above that of the last step, or as far below."""


def next_overlap(before: int, distinct_before: int, travelled: int, distinct: int) -> tuple[int, int]:
    """How far proposals overlap, as a fraction over `OVERLAP_UNIT`, after a step of which so many `travelled`.

    It jumps up and down from step to step, so that the last one by itself foretells the next one badly; but where it
    really changes that is followed at once. Another denominator says that nothing is known yet.
    """
    latest = OVERLAP_UNIT * travelled // distinct
    if distinct_before != OVERLAP_UNIT:
        return latest, OVERLAP_UNIT
    smooth = ((OVERLAP_STEPS - 1) * before + latest) // OVERLAP_STEPS
    low, high = (latest * OVERLAP_REACH // (OVERLAP_REACH + 1), latest * (OVERLAP_REACH + 1) // OVERLAP_REACH)
    return max(OVERLAP_UNIT, low, min(smooth, high)), OVERLAP_UNIT


LAG = 2
"""A device works ahead of the host: a step's numbers reach the host, without a wait, only two steps later."""
RECENT = 4
"""Steps whose largest proposal is remembered; there is no bound before so many were made."""

ROOM_GROWTH = 2
"""A proposal may have so many times as many entries as there is room for; those of later steps have room by it."""


def room(recent: Sequence[int], even: int) -> int | None:
    """How many entries of one rank may travel; None where there is no bound yet.

    `recent` holds the largest proposal of any rank in each of the last steps, newest last. Of those that the host can
    know the last two decide, with room to grow; `even` is what each has if all propose alike.
    """
    if len(recent) < RECENT:
        return None
    most = max(even, *recent[-LAG - 1 : 1 - LAG])
    return most + most // 16 + 4 * math.isqrt(most) + 16


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


# Ok-Topk: steps from one measurement of thresholds to the next, and from one balancing of borders to the next.
MEASURE_PERIOD = 32
BALANCE_PERIOD = 64


# SIDCo: the ratio each stage but the last keeps, how often the number of stages is looked at, and the band of
# actual over target in which it stays.
STAGE_RATIO = 0.25
STAGE_PERIOD = 5
STAGE_LOW, STAGE_HIGH = 0.8, 1.2


def most_stages(density: float) -> int:
    return 1 + int(math.log(density) / math.log(STAGE_RATIO))


def next_stages(stages: int, ratio: float, density: float) -> int:
    """SIDCo's number of stages from the actual over the asked number of entries.

    Accumulated gradients have lighter tails than an exponential, so that a fit to all of them asks too much of the
    largest: too few entries call for one more stage, too many for one less.
    """
    if ratio < STAGE_LOW:
        return min(stages + 1, most_stages(density))
    if ratio > STAGE_HIGH:
        return max(stages - 1, 1)
    return stages
