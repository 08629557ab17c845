"""Counting at the rungs of a ladder, and the choice of one, on the device.

The plain twins are `reference.count_at_least` and `control.settle` with what surrounds it in `search`.

[Note: long tiles]
Gradients differ in size from layer to layer, so that most tiles collect few entries, many none, and some thousands. The
first ones of several tiles are looked at side by side; what is left of a long tile by itself and in wide strides, or
the whole kernel would wait for the few programs that have one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gradsieve.control import HUGE_BITS, NUM_RUNGS, ROOM_GROWTH, TINY_BITS
from gradsieve.kernels.sieve import level_of, rung_of, size_bits
from gradsieve.kernels.tiling import HEAD, Decision, Found, Sight, Tiles

_RUNGS = tl.constexpr(NUM_RUNGS)
_TINY = tl.constexpr(TINY_BITS)
_HUGE = tl.constexpr(HUGE_BITS)
_GROWTH = tl.constexpr(ROOM_GROWTH)

ELEMENTS = 256
"""Where the vector itself is looked at: entries at a time."""
_ELEMENTS = tl.constexpr(ELEMENTS)
WIDE = 512
"""Collected entries of one tile at a time: see [Note: long tiles]."""
GROUP = 128
"""Where collected entries are looked at: so many at a time, of several tiles side by side."""


def group_shape(per_tile: float) -> tuple[int, int]:
    """How many tiles, by how many entries of each, make a group, if a tile is expected to have so many."""
    entries = min(128, max(16, triton.next_power_of_2(int(2.5 * per_tile) + 1)))
    return GROUP // entries, entries


_HEAD = tl.constexpr(HEAD)

RANKS = 32
"""Ranks whose counts `decide` looks at at a time."""
COUNT_WARPS = 2
DECIDE_WARPS = 1


@triton.jit
def chunk_of(looks, row, num_chunks, group):
    """The tiles that this program looks at: the row's tiles are dealt out in order, in whole groups."""
    first = tl.load(looks + row * 4 + 2)
    last = tl.load(looks + row * 4 + 3)
    groups = tl.cdiv(last - first, group)
    share = tl.cdiv(groups, num_chunks) * group
    low = tl.minimum(first + tl.program_id(0) * share, last)
    return low, tl.minimum(low + share, last)


@triton.jit
def scores_of(acc, weights, margins, slot, position, inside, BY_IMPORTANCE: tl.constexpr):
    """Bits of the scores of entries of one tile, out of the vector itself."""
    value = tl.load(acc + position, mask=inside, other=0.0).to(tl.float32)
    weight = 0.0
    margin = 0.0
    if BY_IMPORTANCE:
        weight = tl.load(weights + position, mask=inside, other=0.0).to(tl.float32)
        margin = tl.load(margins + slot)
    return size_bits(value, weight, margin, BY_IMPORTANCE)


@triton.jit
def collected_of(tiles, there, row, tile_counts, tile_places, num_tiles):
    """For a few tiles: how many entries were collected, and where they stand."""
    numbers = tl.load(tile_counts + row * num_tiles + tiles, mask=there, other=0)
    places = tl.load(tile_places + row * num_tiles + tiles, mask=there & (numbers > 0), other=0)
    return numbers, places


@triton.jit
def collected_levels(
    first, numbers, places, tiles, starts, slots, acc, weights, margins, last,
    ENTRIES: tl.constexpr, NARROW: tl.constexpr, BY_IMPORTANCE: tl.constexpr,
):  # fmt: skip
    """Places in their tiles, and levels, of the entries from number `first` on of a few tiles; level -1: none there."""
    entries = first + tl.arange(0, ENTRIES)
    inside = entries[None, :] < numbers[:, None]
    if NARROW:
        address = places[:, None].to(tl.pointer_type(tl.int16)) + entries[None, :]
        place = tl.load(address, mask=inside, other=0).to(tl.int32)
        position = tl.load(starts + tiles, mask=numbers > 0, other=0)[:, None] + place
        slot = tl.load(slots + tiles, mask=numbers > 0, other=0)[:, None]
        bits = scores_of(acc, weights, margins, slot, position, inside, BY_IMPORTANCE)
        level = level_of(bits, tl.load(last).to(tl.int32))
    else:
        address = places[:, None].to(tl.pointer_type(tl.int32)) + entries[None, :]
        packed = tl.load(address, mask=inside, other=0)
        place = packed & 0xFFFF
        level = (packed >> 16) & 0xFFFF
    return place, tl.where(inside, level, -1)


@triton.jit
def further_levels(
    tile, first, row, tile_counts, tile_places, num_tiles, starts, slots, acc, weights, margins, last,
    WIDE: tl.constexpr, NARROW: tl.constexpr, BY_IMPORTANCE: tl.constexpr,
):  # fmt: skip
    """The same of one tile by itself: see [Note: long tiles]."""
    tiles = tile + tl.arange(0, 1)
    numbers, places = collected_of(tiles, tiles == tile, row, tile_counts, tile_places, num_tiles)
    return collected_levels(
        first, numbers, places, tiles, starts, slots, acc, weights, margins, last, WIDE, NARROW, BY_IMPORTANCE
    )


@triton.jit
def _by_rung(scores, rungs):
    """How many of the scores have each rung as their highest; those below all, and negative ones, are left out."""
    # how many rungs each reaches, by halves
    reached = tl.zeros_like(scores)
    for halving in tl.static_range(6):
        middle = reached + (_RUNGS >> (halving + 1))
        reached = tl.where(scores >= tl.load(rungs + middle - 1), middle, reached)
    reached = tl.where(scores >= tl.load(rungs + reached), reached + 1, reached)
    return tl.histogram(tl.maximum(reached - 1, 0), _RUNGS, mask=(reached > 0) & (scores >= 0))


@triton.jit
def _by_level(level, table, NUM: tl.constexpr):
    """The same of levels; negative ones are left out."""
    level = tl.reshape(level, [NUM])
    return tl.histogram(rung_of(level, table, level >= 0), _RUNGS, mask=level >= 0)


@triton.jit(do_not_specialize=["num_chunks"])
def _count(
    acc, acc_row, starts, slots, looks, rungs, last, table, weights, margins, tile_counts, tile_places,
    num_tiles, chunk_counts, counts, num_chunks,
    ALL: tl.constexpr, BY_IMPORTANCE: tl.constexpr, NARROW: tl.constexpr, TILES: tl.constexpr, ENTRIES: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    low, high = chunk_of(looks, row, num_chunks, TILES)
    acc += row * acc_row
    reached = tl.zeros([_RUNGS], dtype=tl.int32)
    if ALL:
        start = tl.load(looks + row * 4)
        stop = tl.load(looks + row * 4 + 1)
        for tile in range(low, high):
            flat = tl.load(starts + tile)
            end = tl.minimum(tl.load(starts + tile + 1), stop)
            slot = tl.load(slots + tile)
            for begin in range(tl.maximum(flat, start), end, _ELEMENTS):
                position = begin + tl.arange(0, _ELEMENTS).to(tl.int64)
                inside = position < end
                score = scores_of(acc, weights, margins, slot, position, inside, BY_IMPORTANCE)
                score = tl.where(inside, score, -1)
                reached += _by_rung(score, rungs)
    else:
        for tile in range(low, high, TILES):
            tiles = tile + tl.arange(0, TILES)
            numbers, places = collected_of(tiles, tiles < high, row, tile_counts, tile_places, num_tiles)
            first_levels = collected_levels(
                0, numbers, places, tiles, starts, slots, acc, weights, margins, last,
                ENTRIES, NARROW, BY_IMPORTANCE,
            )[1]  # fmt: skip
            reached += _by_level(first_levels, table, TILES * ENTRIES)
            if tl.max(numbers) > ENTRIES:
                for long in range(tile, tl.minimum(tile + TILES, high)):
                    for first in range(ENTRIES, tl.load(tile_counts + row * num_tiles + long), WIDE):
                        levels = further_levels(
                            long, first, row, tile_counts, tile_places, num_tiles, starts, slots, acc, weights, margins,
                            last, WIDE, NARROW, BY_IMPORTANCE,
                        )[1]  # fmt: skip
                        reached += _by_level(levels, table, WIDE)
    # from how many have each as their highest to how many reach it
    reached = tl.sum(reached) - tl.cumsum(reached) + reached
    column = tl.arange(0, _RUNGS)
    tl.store(chunk_counts + (row * _RUNGS + column) * num_chunks + tl.program_id(0), reached)
    tl.atomic_add(counts + row * _RUNGS + column, reached.to(tl.int64), mask=reached > 0, sem="relaxed")


def count(acc: Tensor, tiling: Tiles, sight: Sight, found: Found, decision: Decision, *, rungs: Tensor | None) -> None:
    """Entries of each row at or above each rung, added to `decision.counts` and, by chunk, in `decision.chunk_counts`.

    Looks at all of each row's stretch, at the bits of `rungs`; without them at what was collected, at the rungs of the
    ladder that it was collected by.
    """
    tiles, entries = sight.group
    _count[(decision.num_chunks, len(acc))](
        acc,
        acc.stride(0),
        tiling.starts,
        tiling.slots,
        sight.looks,
        sight.looks if rungs is None else rungs,
        sight.last,
        sight.table,
        sight.weights,
        sight.margins,
        found.tile_counts,
        found.tile_places,
        found.tile_counts.shape[1],
        decision.chunk_counts,
        decision.counts,
        decision.num_chunks,
        ALL=rungs is not None,
        BY_IMPORTANCE=sight.by_importance,
        NARROW=found.narrow,
        TILES=tiles,
        ENTRIES=entries,
        WIDE=WIDE,
        num_warps=COUNT_WARPS,
    )


@triton.jit
def _at(values, places, place):
    return tl.sum(tl.where(places == place, values, 0))


@triton.jit(do_not_specialize=["target", "most", "ceiling", "room"])
def _decide(
    gathered, gathered_row, ladder, next_ladder, offsets, learned, following, record, applied, counts,
    target, most, ceiling, room, rows, world,
    RANKS: tl.constexpr, COLD: tl.constexpr, FIRST: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, _RUNGS)
    open_still = 1
    if COLD and not FIRST:
        open_still = 1 - tl.load(record + 4).to(tl.int32)
    if open_still == 1:
        travelled = tl.load(learned + 1)
        distinct = tl.load(learned + 2)
        goal = tl.minimum((target.to(tl.int64) * travelled + distinct // 2) // distinct, most)
        limit = goal * ceiling // 1000
        totals = tl.zeros([_RUNGS], dtype=tl.int64)
        within = tl.zeros([_RUNGS], dtype=tl.int64)
        for first in range(0, world, RANKS):
            rank = first + tl.arange(0, RANKS)
            of_rank = gathered + rank[:, None] * gathered_row + place[None, :]
            own = tl.load(of_rank, mask=(rank < world)[:, None], other=0).to(tl.int64)
            totals += tl.sum(own, axis=0)
            within += tl.sum(tl.minimum(own, room), axis=0)
        # other ranks' entries make up for those that there is no room for, if they are enough
        bounded = (room >= 0) & (_at(within, place, 0) >= goal)
        totals = tl.where(bounded, within, totals)
        rungs = tl.load(ladder + place).to(tl.int64)
        lower = tl.sum((totals >= goal).to(tl.int64)) - 1
        upper = lower + 1
        beyond = goal * 0 + 9223372036854775807
        at_lower = _at(totals, place, lower)
        at_upper = _at(totals, place, upper)
        miss_lower = tl.where((lower >= 0) & (at_lower <= limit), at_lower - goal, beyond)
        miss_upper = tl.where((upper < _RUNGS) & (at_upper <= limit), goal - at_upper, beyond)
        nearest = tl.where(miss_lower <= miss_upper, lower, upper)
        miss = tl.minimum(miss_lower, miss_upper)
        near = (miss < beyond) & (100 * tl.where(miss < beyond, miss, 0) <= 3 * goal)
        thin = (near == 0) & (lower >= 0)
        rung = tl.where(near, nearest, tl.maximum(lower, 0))
        settled = 1
        if COLD and not FINAL:
            settled = tl.where(near | (lower < 0), 1, 0)
        if settled == 1:
            threshold = _at(rungs, place, rung)
            total = tl.maximum(_at(totals, place, rung), 1)
            before = goal * 0
            proposed = goal * 0
            going = goal * 0
            for first in range(0, world, RANKS):
                rank = first + tl.arange(0, RANKS)
                present = rank < world
                reaching = tl.load(gathered + rank * gathered_row + rung, mask=present, other=0).to(tl.int64)
                travelling = tl.where(bounded, tl.minimum(reaching, room), reaching)
                upto = before + tl.cumsum(travelling)
                share = goal * upto // total - goal * (upto - travelling) // total
                most_of_rank = tl.where(room >= 0, room.to(tl.int64) * _GROWTH, reaching)
                quotas = tl.where(thin, share, tl.minimum(reaching, most_of_rank))
                lengths = tl.where(room >= 0, tl.minimum(quotas, room), quotas)
                tl.store(record + _HEAD + rank, reaching, mask=present)
                tl.store(record + _HEAD + world + rank, quotas, mask=present)
                tl.store(record + _HEAD + 2 * world + rank, lengths, mask=present)
                # no message has come yet
                tl.store(record + _HEAD + 3 * world + rank, reaching * 0, mask=present)
                tl.store(record + _HEAD + 4 * world + rank, reaching * 0, mask=present)
                before += tl.sum(travelling)
                proposed += tl.sum(quotas)
                going += tl.sum(lengths)
            next_bits = tl.where(2 * proposed >= goal, threshold, tl.maximum(_TINY, threshold - 8388608))
            tl.store(record + 8, tl.load(learned))
            tl.store(following, next_bits)
            tl.store(following + 1, travelled)
            tl.store(following + 2, distinct)
            tl.store(record, threshold)
            tl.store(record + 1, rung)
            tl.store(record + 2, goal)
            tl.store(record + 3, proposed)
            tl.store(record + 4, 1)
            tl.store(record + 5, going)
            tl.store(record + 6, going)
            tl.store(record + 7, going)
            around = tl.load(offsets + place).to(tl.int64) + next_bits
            tl.store(next_ladder + place, tl.minimum(tl.maximum(around, _TINY), _HUGE).to(tl.int32))
            tl.store(applied + place, (rungs * 0 + threshold).to(tl.int32))
        else:
            bottom = _at(rungs, place, lower)
            top = tl.where(upper < _RUNGS, _at(rungs, place, upper), _HUGE)
            tl.store(record + 4, 0)
            tl.store(ladder + place, (bottom + (top - bottom) * place // 63).to(tl.int32))
    # they may be what was gathered, and the next count adds to them
    tl.debug_barrier()
    for row in range(rows):
        tl.store(counts + row * _RUNGS + place, tl.zeros([_RUNGS], dtype=tl.int64))


def decide(
    gathered: Tensor,
    ladder: Tensor,
    next_ladder: Tensor,
    offsets: Tensor,
    decision: Decision,
    *,
    target: int,
    most: int,
    ceiling: int,
    room: int,
    cold: bool = False,
    first: bool = False,
    final: bool = True,
) -> None:
    """Choose a rung by the counts of all ranks, `[world, NUM_RUNGS]`, or, in a cold search, the next ladder.

    Writes `decision.record` and, for the step after, `decision.following` and `next_ladder`. `most` is the largest goal
    there can be, `ceiling` is in thousandths, `room` is negative where there is no bound.
    """
    world = len(gathered)
    _decide[(1,)](
        gathered,
        gathered.stride(0),
        ladder,
        next_ladder,
        offsets,
        decision.learned,
        decision.following,
        decision.record,
        decision.applied,
        decision.counts,
        target,
        most,
        ceiling,
        room,
        len(decision.counts),
        world,
        RANKS=min(RANKS, triton.next_power_of_2(world)),
        COLD=cold,
        FIRST=first,
        FINAL=final,
        num_warps=DECIDE_WARPS,
    )
