"""One pass over gradient and residual: clear what was sent, add the two up, and collect what may be sent.

The plain twin is `Residual.clear` and `Residual.add`, followed by `score.collect`.

[Note: tiles]
The flat vector is cut into tiles, at most `TILE` entries each and never across two parameters, numbered in the order of
the vector. A bucket of DDP is a run of tiles, or a few, and a table says where in the bucket each begins.

What a tile collects is written over the tile's own gradient: that has been taken in and is overwritten with the mean
later. So there is always room enough, collecting takes no memory and no second pass, and reading tile by tile gives
the entries in ascending order, the same in every run. An entry is four bytes, its place in the tile and its level;
where there are gradients of 16 bits it is its place alone, and the level is worked out again from the accumulated
vector.

[Note: levels]
The rungs of a warm ladder lie whole multiples of 2**15 bits above its base, 64 of them below the last threshold. Which
of them a score reaches follows from its level, the number of such multiples above the base, by a table
(`control.rung_table`); 16 bits hold a level.

[Note: few or many]
Hits become bits of words, and only words are numbered across the tile. Where hits are few they are then taken out of
the words one by one, and what belongs to each is read again; where they are many every entry works out its own number.

[Note: clearing late]
What was sent in a step is cleared from the residual in the next one, when its tile is read and written anyway: writes
to single entries all over the memory take several times as long. Until then `Fused.settle_residual` does it for whoever
looks at the residual.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from gradsieve.control import COARSE_LEVELS, FINE_LEVELS, HUGE_BITS, STEP_BITS, STEPS_BELOW, TOP_LEVEL
from gradsieve.kernels.tiling import Found, Run, Sent, Sight, Tiles

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_HUGE = tl.constexpr(HUGE_BITS)
_INFINITE = tl.constexpr(0x7F800000)
_LEVEL_BITS = tl.constexpr(STEP_BITS)
_BELOW = tl.constexpr(STEPS_BELOW << STEP_BITS)
_FINE, _COARSE, _TOP = tl.constexpr(FINE_LEVELS), tl.constexpr(COARSE_LEVELS), tl.constexpr(TOP_LEVEL)
BLOCK = 2048
"""Entries of a tile that are in registers at a time."""
BLOCK_OF_MANY = 1024
"""The same where many are collected: see [Note: few or many]."""
ENTRIES = 128
"""Sent entries that are cleared at a time."""
NUM_WARPS = 4


@triton.jit
def size_bits(acc, weights, margin, BY_IMPORTANCE: tl.constexpr):
    """The bits of an entry's score: they sort like the score, and what is not a number comes last."""
    if BY_IMPORTANCE:
        # what is not a number stays none, as in plain torch
        size = tl.maximum(tl.abs(weights) + margin, 1.1754943508222875e-38, propagate_nan=tl.PropagateNan.ALL)
        score = tl.div_rn(tl.abs(acc), size)
    else:
        score = acc
    return score.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def level_of(bits, last):
    """The level of a score above the base that lies below the last threshold; the highest for what is beyond all."""
    level = tl.minimum((bits - (last - _BELOW)) >> _LEVEL_BITS, _TOP)
    return tl.where(bits >= _HUGE, _TOP, level)


@triton.jit
def rung_of(level, table, there):
    """The highest rung that a level reaches."""
    entry = tl.where(level < _FINE, level, _FINE + (level - _FINE) // _COARSE)
    return tl.load(table + entry, mask=there, other=0)


@triton.jit
def num_ones(word):
    """How many bits of a 32-bit word are set."""
    if _INTERPRETED:
        pairs = word - ((word >> 1) & 0x55555555)
        fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
        eights = (fours + (fours >> 4)) & 0x0F0F0F0F
        ones = ((eights * 0x01010101) >> 24) & 0xFF
    else:
        ones = libdevice.popc(word)
    return ones


@triton.jit
def load_block(vector, begin, length, BLOCK: tl.constexpr):
    """So many entries from `begin` on; zeros behind the end."""
    place = begin + tl.arange(0, BLOCK)
    # a mask would forbid wide loads
    if begin + BLOCK <= length:
        values = tl.load(vector + place)
    else:
        values = tl.load(vector + place, mask=place < length, other=0.0)
    return values


@triton.jit
def clear_tile(acc, tile, sent, borders, rest, REST: tl.constexpr, ENTRIES: tl.constexpr):
    """Clear what was sent of a tile, but for the rest that did not travel."""
    first = tl.load(borders + tile)
    last = tl.load(borders + tile + 1)
    for number in range(first, last, ENTRIES):
        numbers = number + tl.arange(0, ENTRIES)
        inside = numbers < last
        index = tl.load(sent + numbers, mask=inside, other=0).to(tl.int64)
        left = tl.zeros([ENTRIES], dtype=acc.dtype.element_ty)
        if REST:
            left = tl.load(rest + numbers, mask=inside, other=0.0).to(acc.dtype.element_ty)
        tl.store(acc + index, left, mask=inside)


@triton.jit
def _put(fed, number, place, bits, base, there, NARROW: tl.constexpr):
    """Write collected entries over the gradient, each at its number."""
    if NARROW:
        tl.store(fed.to(tl.pointer_type(tl.int16), bitcast=True) + number, place.to(tl.int16), mask=there)
    else:
        entry = place | (level_of(bits, base) << 16)
        tl.store(fed.to(tl.pointer_type(tl.int32), bitcast=True) + number, entry, mask=there)


@triton.jit(do_not_specialize=["first_tile"])
def _sieve(
    gradient, gradient_row, acc, acc_row, starts, sources, first_tile, looks, ladder, last, weights, margins,
    slots, tile_counts, tile_places, faults, num_tiles, sent, borders, rest, rest_row,
    BLOCK: tl.constexpr, ENTRIES: tl.constexpr, ALIGNED: tl.constexpr, IN_PLACE: tl.constexpr,
    COLLECT: tl.constexpr, BY_IMPORTANCE: tl.constexpr, NARROW: tl.constexpr, CLEAR: tl.constexpr, REST: tl.constexpr,
    MANY: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    tile = first_tile + tl.program_id(0)
    flat = tl.load(starts + tile)
    length = (tl.load(starts + tile + 1) - flat).to(tl.int32)
    source = flat if IN_PLACE else tl.load(sources + tl.program_id(0))
    if ALIGNED:
        source = tl.multiple_of(source, 8)
        flat = tl.multiple_of(flat, 8)
    fed = gradient + row * gradient_row + source
    acc += row * acc_row
    if CLEAR:
        clear_tile(acc, tile, sent, borders, rest + row * rest_row, REST, ENTRIES)
        tl.debug_barrier()
    # the part of the tile that the row looks at
    low = 0
    high = 0
    floor = 0
    base = 0
    margin = 0.0
    if COLLECT:
        low = tl.maximum(tl.load(looks + row * 4) - flat, 0).to(tl.int32)
        high = tl.minimum(tl.load(looks + row * 4 + 1) - flat, length).to(tl.int32)
        floor = tl.load(ladder)
        base = tl.load(last).to(tl.int32)
        if BY_IMPORTANCE:
            margin = tl.load(margins + tl.load(slots + tile))
    number = 0
    word = tl.arange(0, BLOCK // 32)
    bit = tl.arange(0, 32)
    for begin in range(0, length, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        target = acc + flat + place
        taken = load_block(fed, begin, length, BLOCK)
        kept = load_block(acc + flat, begin, length, BLOCK)
        if CHECK:
            sizes = taken.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            if tl.max(sizes) >= _INFINITE:
                taken = tl.where(sizes < _INFINITE, taken, 0.0)
                tl.atomic_max(faults + row, tl.load(slots + tile) + 1)
        if gradient.dtype.element_ty == tl.float64:
            total = (kept.to(tl.float64) + taken).to(acc.dtype.element_ty)
        else:
            total = (kept.to(tl.float32) + taken.to(tl.float32)).to(acc.dtype.element_ty)
        # the cache is to keep the residual's lines until they are full, whatever streams by
        if begin + BLOCK <= length:
            tl.store(target, total, eviction_policy="evict_last")
        else:
            tl.store(target, total, mask=place < length)
        if COLLECT:
            if (begin < high) & (begin + BLOCK > low):
                weight = 0.0
                if BY_IMPORTANCE:
                    weight = load_block(weights + flat, begin, length, BLOCK).to(tl.float32)
                bits = size_bits(total.to(tl.float32), weight, margin, BY_IMPORTANCE)
                hit = (bits >= floor) & (place >= low) & (place < high)
                words = tl.sum(tl.reshape(hit.to(tl.int32) << (place & 31), [BLOCK // 32, 32]), axis=1)
                in_word = num_ones(words)
                into = number + tl.cumsum(in_word) - in_word
                # every thread has read its part of the gradient, and what it wrote can be read
                tl.debug_barrier()
                if MANY:
                    before = num_ones(words[:, None] & ((1 << bit) - 1)[None, :])
                    goal = tl.reshape(into[:, None] + before, [BLOCK])
                    _put(fed, goal, place, bits, base, hit, NARROW)
                else:
                    for _ in range(tl.max(in_word)):
                        lowest = words & -words
                        offset = begin + word * 32 + num_ones(lowest - 1)
                        there = words != 0
                        value = tl.load(acc + flat + offset, mask=there, other=0.0).to(tl.float32)
                        size = 0.0
                        if BY_IMPORTANCE:
                            size = tl.load(weights + flat + offset, mask=there, other=0.0).to(tl.float32)
                        score = size_bits(value, size, margin, BY_IMPORTANCE)
                        _put(fed, into, offset, score, base, there, NARROW)
                        into += 1
                        words ^= lowest
                number += tl.sum(in_word)
    if COLLECT:
        tl.store(tile_places + row * num_tiles + tile, fed.to(tl.int64))
        tl.store(tile_counts + row * num_tiles + tile, number)


def sieve(
    gradient: Tensor,
    acc: Tensor,
    tiling: Tiles,
    run: Run,
    sight: Sight,
    found: Found,
    sent: Sent | None,
    *,
    collect: bool,
    check: bool = False,
) -> None:
    """Add `gradient` (`[rows, any]`, or one row flat) into `acc` (`[rows, numel]`) over a run of tiles.

    Uses the gradient up where it collects. Before, clears what was `sent` of these tiles. With `check`, what is not
    finite is not added but noted in `found.faults`.
    """
    rest = None if sent is None else sent.rest
    _sieve[(run.num, len(acc))](
        gradient,
        gradient.stride(0) if gradient.dim() == 2 else 0,
        acc,
        acc.stride(0),
        tiling.starts,
        tiling.starts if run.sources is None else run.sources,
        run.first,
        sight.looks,
        sight.ladder,
        sight.last,
        sight.weights,
        sight.margins,
        tiling.slots,
        found.tile_counts,
        found.tile_places,
        found.faults,
        found.tile_counts.shape[1],
        sight.looks if sent is None else sent.support,
        sight.looks if sent is None else sent.borders,
        acc if rest is None else rest,
        0 if rest is None else rest.stride(0),
        BLOCK=BLOCK_OF_MANY if sight.many else BLOCK,
        ENTRIES=ENTRIES,
        ALIGNED=run.aligned,
        IN_PLACE=run.sources is None,
        COLLECT=collect,
        BY_IMPORTANCE=sight.by_importance,
        NARROW=found.narrow,
        CLEAR=sent is not None,
        REST=rest is not None,
        MANY=sight.many,
        CHECK=check,
        num_warps=NUM_WARPS,
    )


@triton.jit(do_not_specialize=["first_tile"])
def _clear(acc, acc_row, first_tile, sent, borders, rest, rest_row, REST: tl.constexpr, ENTRIES: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    clear_tile(acc + row * acc_row, first_tile + tl.program_id(0), sent, borders, rest + row * rest_row, REST, ENTRIES)


def clear(acc: Tensor, sent: Sent, first: int, num: int) -> None:
    """Clear what was sent of `num` tiles from number `first` on, at once."""
    rest = sent.rest
    _clear[(num, len(acc))](
        acc,
        acc.stride(0),
        first,
        sent.support,
        sent.borders,
        acc if rest is None else rest,
        0 if rest is None else rest.stride(0),
        REST=rest is not None,
        ENTRIES=ENTRIES,
        num_warps=1,
    )
