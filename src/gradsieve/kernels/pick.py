"""The indices that a rank proposes, in ascending order, out of what it collected.

The plain twin is `reference.at_least` followed by `reference.thinned`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gradsieve.control import NUM_RUNGS
from gradsieve.kernels.ladder import (
    ELEMENTS,
    WIDE,
    chunk_of,
    collected_levels,
    collected_of,
    further_levels,
    scores_of,
)
from gradsieve.kernels.tiling import HEAD, Decision, Found, Sight, Tiles

_RUNGS = tl.constexpr(NUM_RUNGS)
PICK_WARPS = 2
_ELEMENTS = tl.constexpr(ELEMENTS)
_HEAD = tl.constexpr(HEAD)


@triton.jit
def thinned(number, count, quota):
    """Where entry `number` of `count` goes among `quota` evenly spread ones; -1 if it is left out.

    Entry `j` of the thinned list is entry `j * count // quota` of the whole one.
    """
    place = (number * quota + count - 1) // tl.maximum(count, 1)
    # the whole number in [number * quota / count, (number + 1) * quota / count), if there is one
    kept = place * count < (number + 1) * quota
    return tl.where(count <= quota, number, tl.where(kept, place, -1))


@triton.jit
def _placed(number, reaching, quota, length):
    """Where an entry goes in the proposal, first thinned to the quota, then to the length that may travel."""
    placed = number
    # nearly always all go, and divisions take long
    if reaching > quota:
        placed = thinned(placed, reaching, quota)
    if quota > length:
        placed = tl.where(placed >= 0, thinned(tl.maximum(placed, 0), quota, length), -1)
    return tl.where(placed < length, placed, -1)


@triton.jit
def _put(picked, base, flats, offset, hit, reaching, quota, length):
    """Write entries of a few tiles into the proposal, from number `base` of each on; returns how many each had."""
    hits = hit.to(tl.int32)
    place = _placed(base[:, None] + tl.cumsum(hits, axis=1) - 1, reaching, quota, length)
    position = flats.to(picked.dtype.element_ty)[:, None] + offset
    tl.store(picked + place, position, mask=hit & (place >= 0))
    return tl.sum(hits, axis=1)


@triton.jit(do_not_specialize=["num_chunks", "capacity", "first_rank"])
def _pick(
    acc, acc_row, starts, slots, looks, rungs, last, weights, margins, tile_counts, tile_places,
    num_tiles, chunk_counts, num_chunks, record, rung_of, picked, capacity, first_rank, world,
    ALL: tl.constexpr, BY_IMPORTANCE: tl.constexpr, NARROW: tl.constexpr, TILES: tl.constexpr, ENTRIES: tl.constexpr,
    WIDE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    low, high = chunk_of(looks, row, num_chunks, TILES)
    acc += row * acc_row
    picked += row * capacity
    rung = tl.load(rung_of)
    threshold = tl.load(rungs + rung)
    rank = first_rank + row
    reaching = tl.load(record + _HEAD + rank)
    quota = tl.load(record + _HEAD + world + rank)
    length = tl.minimum(tl.load(record + _HEAD + 2 * world + rank), capacity)
    chunk = tl.arange(0, CHUNKS)
    before = tl.load(chunk_counts + (row * _RUNGS + rung) * num_chunks + chunk, mask=chunk < tl.program_id(0), other=0)
    number = tl.sum(before).to(tl.int64)
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
                hit = inside & (score >= threshold)
                hits = hit.to(tl.int64)
                place = _placed(number + tl.cumsum(hits) - 1, reaching, quota, length)
                tl.store(picked + place, position.to(picked.dtype.element_ty), mask=hit & (place >= 0))
                number += tl.sum(hits)
    else:
        for tile in range(low, high, TILES):
            tiles = tile + tl.arange(0, TILES)
            there = tiles < high
            numbers, places = collected_of(tiles, there, row, tile_counts, tile_places, num_tiles)
            flats = tl.load(starts + tiles, mask=there, other=0)
            is_long = tl.max(numbers) > ENTRIES
            # nearly always these are all; if not: [Note: long tiles] in `ladder`
            offset, reached = collected_levels(
                0, numbers, places, tiles, starts, slots, acc, weights, margins, last,
                ENTRIES, NARROW, BY_IMPORTANCE,
            )  # fmt: skip
            passing = tl.sum((reached >= threshold).to(tl.int32), axis=1)
            if is_long:
                for long in range(tile, tl.minimum(tile + TILES, high)):
                    for first in range(ENTRIES, tl.load(tile_counts + row * num_tiles + long), WIDE):
                        levels = further_levels(
                            long, first, row, tile_counts, tile_places, num_tiles, starts, slots, acc, weights, margins,
                            last, WIDE, NARROW, BY_IMPORTANCE,
                        )[1]  # fmt: skip
                        passing += tl.where(tiles == long, tl.sum((levels >= threshold).to(tl.int32)), 0)
            base = number + (tl.cumsum(passing) - passing)
            base += _put(picked, base, flats, offset, reached >= threshold, reaching, quota, length)
            if is_long:
                for long in range(tile, tl.minimum(tile + TILES, high)):
                    own = long + tl.arange(0, 1)
                    behind = tl.sum(tl.where(tiles == long, base, 0)) + own * 0
                    for first in range(ENTRIES, tl.load(tile_counts + row * num_tiles + long), WIDE):
                        offsets, levels = further_levels(
                            long, first, row, tile_counts, tile_places, num_tiles, starts, slots, acc, weights, margins,
                            last, WIDE, NARROW, BY_IMPORTANCE,
                        )  # fmt: skip
                        flat = tl.load(starts + own)
                        behind += _put(picked, behind, flat, offsets, levels >= threshold, reaching, quota, length)
            number += tl.sum(passing)


def pick(
    acc: Tensor,
    tiling: Tiles,
    sight: Sight,
    found: Found,
    decision: Decision,
    picked: Tensor,
    *,
    rungs: Tensor | None,
    rung: Tensor,
    first_rank: int,
) -> None:
    """Write each row's proposal into `picked`, `[rows, capacity]`; its length is in the record.

    Comes after `count` at the same `rungs`, of which number `rung` is the threshold.
    """
    tiles, entries = sight.group
    _pick[(decision.num_chunks, len(acc))](
        acc,
        acc.stride(0),
        tiling.starts,
        tiling.slots,
        sight.looks,
        sight.levels if rungs is None else rungs,
        decision.record[8:],
        sight.weights,
        sight.margins,
        found.tile_counts,
        found.tile_places,
        found.tile_counts.shape[1],
        decision.chunk_counts,
        decision.num_chunks,
        decision.record,
        rung,
        picked,
        picked.shape[1],
        first_rank,
        decision.world,
        ALL=rungs is not None,
        BY_IMPORTANCE=sight.by_importance,
        NARROW=found.narrow,
        TILES=tiles,
        ENTRIES=entries,
        WIDE=WIDE,
        CHUNKS=triton.next_power_of_2(decision.num_chunks),
        num_warps=PICK_WARPS,
    )
