"""Proposals into messages, and the messages of all ranks into a support, on the device.

The plain twin is `wire`, which says what a message looks like. A message is refused without the host: a foreign one
counts as empty, nothing is read or written out of bounds, and the checksum that was found stands in the record beside
the one that came, for the host to compare once the step's numbers reach it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsieve import wire
from gradsieve.kernels.tiling import HEAD, Decision, Sight

INDICES = 1024
"""Indices that a program writes."""
WORDS = 128
"""Words that a program reads, bit by bit."""
_HEAD = tl.constexpr(HEAD)
_FIELDS = tl.constexpr(wire.HEADER_BYTES // 4)
_TAG_FACTOR = tl.constexpr(wire.TAG_FACTOR)
_COUNT_FACTOR = tl.constexpr(wire.COUNT_FACTOR)
_LOW_FACTOR = tl.constexpr(wire.START_LOW_FACTOR)
_HIGH_FACTOR = tl.constexpr(wire.START_HIGH_FACTOR)
_AT_ONCE = tl.constexpr(1024)


@triton.jit
def sum_before(values, until):
    """The sum of the first `until` of some numbers."""
    total = tl.zeros([_AT_ONCE], dtype=tl.int64)
    for first in range(0, until, _AT_ONCE):
        place = first + tl.arange(0, _AT_ONCE)
        total += tl.load(values + place, mask=place < until, other=0).to(tl.int64)
    return tl.sum(total)


@triton.jit
def _header_sum(tag, count, start):
    """What the header adds to the checksum."""
    low = start & 0xFFFFFFFF
    return tag * _TAG_FACTOR + count * _COUNT_FACTOR + low * _LOW_FACTOR + (start >> 32) * _HIGH_FACTOR


@triton.jit
def _put(words, bit, value, mask):
    """Set a few bits from bit number `bit` on; they may reach into the next word."""
    spread = value << (bit & 31)
    tl.atomic_or(words + (bit >> 5), spread.to(tl.int32), mask=mask, sem="relaxed")
    further = spread >> 32
    tl.atomic_or(words + (bit >> 5) + 1, further.to(tl.int32), mask=mask & (further != 0), sem="relaxed")


@triton.jit(do_not_specialize=["capacity", "num_words", "upper_words", "first_rank", "low_bits", "tag"])
def _pack(
    picked, capacity, looks, record, message, num_words, upper_words, low_bits, tag, first_rank, world,
    INDICES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    message += row * (num_words + _FIELDS)
    length = tl.minimum(tl.load(record + _HEAD + 2 * world + first_rank + row), capacity)
    start = tl.load(looks + row * 4)
    number = (tl.program_id(0) * INDICES + tl.arange(0, INDICES)).to(tl.int64)
    inside = number < length
    place = tl.load(picked + row * capacity + number, mask=inside, other=0).to(tl.int64) - start
    _put(message + _FIELDS, (place >> low_bits) + number, tl.full([INDICES], 1, dtype=tl.int64), inside)
    rest = place & ((tl.full([INDICES], 1, dtype=tl.int64) << low_bits) - 1)
    _put(message + _FIELDS + upper_words, number * low_bits, rest, inside & (low_bits > 0))
    if tl.program_id(0) == 0:
        tl.store(message, tag)
        tl.store(message + 1, length.to(tl.int32))
        tl.store(message + 3, start.to(tl.int32))
        tl.store(message + 4, (start >> 32).to(tl.int32))


@triton.jit(do_not_specialize=["num_words", "upper_words", "num_chunks"])
def _tally(
    messages, num_words, upper_words, chunk_sums, chunk_entries, num_chunks, WORDS: tl.constexpr, SEAL: tl.constexpr
):  # fmt: skip
    """Add up the words for the checksum: into the message, or by chunk beside the set bits of its upper part."""
    chunk = tl.program_id(0)
    index = tl.program_id(1).to(tl.int64)
    message = messages + index * (num_words + _FIELDS)
    place = chunk * WORDS + tl.arange(0, WORDS)
    word = tl.load(message + _FIELDS + place, mask=place < num_words, other=0)
    wide = word.to(tl.int64) & 0xFFFFFFFF
    weighed = tl.sum((wide ^ (wide >> 16)) * (2 * place.to(tl.int64) + 1))
    if chunk == 0:
        low = tl.load(message + 3).to(tl.int64) & 0xFFFFFFFF
        start = low | (tl.load(message + 4).to(tl.int64) << 32)
        weighed += _header_sum(tl.load(message).to(tl.int64) & 0xFFFFFF, tl.load(message + 1).to(tl.int64), start)
    if SEAL:
        tl.atomic_add(message + 2, weighed.to(tl.int32), sem="relaxed")
    else:
        tl.store(chunk_sums + index * num_chunks + chunk, weighed.to(tl.int32))
        bits = (word[:, None] >> tl.arange(0, 32)[None, :]) & 1
        tl.store(chunk_entries + index * num_chunks + chunk, tl.sum(tl.where((place < upper_words)[:, None], bits, 0)))


def pack(picked: Tensor, sight: Sight, decision: Decision, shape: wire.Shape, first_rank: int) -> Tensor:
    """Each row's proposal as a message, `[rows, shape.num_bytes]`."""
    rows, capacity = picked.shape
    num_words = shape.upper_words + shape.lower_words
    message = torch.zeros((rows, shape.num_bytes // 4), dtype=torch.int32, device=picked.device)
    _pack[(-(-capacity // INDICES), rows)](
        picked,
        capacity,
        sight.looks,
        decision.record,
        message,
        num_words,
        shape.upper_words,
        shape.low_bits,
        shape.tag,
        first_rank,
        decision.world,
        INDICES=INDICES,
        num_warps=4,
    )
    num_chunks = -(-num_words // WORDS)
    _tally[(num_chunks, rows)](
        message, num_words, shape.upper_words, message, message, num_chunks, WORDS=WORDS, SEAL=True, num_warps=4
    )  # fmt: skip
    return message.view(torch.uint8)


@triton.jit(
    do_not_specialize=["num_words", "upper_words", "num_chunks", "low_bits", "tag", "shift", "numel", "capacity"]
)
def _unpack(
    messages, num_words, upper_words, low_bits, tag, chunk_sums, chunk_entries, num_chunks, record, ranks, world,
    shift, numel, support, capacity, marks,
    WORDS: tl.constexpr, WORLD: tl.constexpr, DISJOINT: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    index = tl.program_id(1).to(tl.int64)
    message = messages + index * (num_words + _FIELDS)
    rank = tl.load(ranks + index)
    sent = tl.load(record + _HEAD + 2 * world + rank)
    sound = ((tl.load(message) & 0xFFFFFF) == tag) & (tl.load(message + 1).to(tl.int64) == sent)
    count = tl.where(sound, sent, 0)
    if chunk == 0:
        found = sum_before(chunk_sums + index * num_chunks, num_chunks).to(tl.int32)
        tl.store(record + _HEAD + 3 * world + rank, found)
        tl.store(record + _HEAD + 4 * world + rank, tl.where(sound, tl.load(message + 2), ~found))
    start = (tl.load(message + 3).to(tl.int64) & 0xFFFFFFFF) | (tl.load(message + 4).to(tl.int64) << 32)
    place = chunk * WORDS + tl.arange(0, WORDS)
    word = tl.load(message + _FIELDS + place, mask=place < upper_words, other=0)
    bit = tl.arange(0, 32)
    ones = (word[:, None] >> bit[None, :]) & 1
    by_word = tl.sum(ones, axis=1).to(tl.int64)
    before = sum_before(chunk_entries + index * num_chunks, chunk) + tl.cumsum(by_word) - by_word
    number = before[:, None] + tl.cumsum(ones, axis=1).to(tl.int64) - 1
    there = (ones == 1) & (number < count)
    high = place.to(tl.int64)[:, None] * 32 + bit[None, :] - number
    # the low bits stand in one word, or in two
    at = number * low_bits
    lower = message + _FIELDS + upper_words
    first = tl.load(lower + (at >> 5), mask=there & (low_bits > 0), other=0).to(tl.int64) & 0xFFFFFFFF
    straddles = (at & 31) + low_bits > 32
    second = tl.load(lower + (at >> 5) + 1, mask=there & straddles, other=0).to(tl.int64) & 0xFFFFFFFF
    low = ((first | (second << 32)) >> (at & 31)) & ((tl.full([1, 1], 1, dtype=tl.int64) << low_bits) - 1)
    position = start + ((high << low_bits) | low)
    good = there & (position >= 0) & (position < numel)
    if DISJOINT:
        others = tl.arange(0, WORLD)
        earlier = ((shift + others) % world) < ((shift + rank) % world)
        lengths = tl.load(record + _HEAD + 2 * world + others, mask=earlier & (others < world), other=0)
        spot = tl.sum(lengths) + number
        tl.store(support + spot, position.to(support.dtype.element_ty), mask=good & (spot < capacity))
    else:
        mark = (tl.full([1, 1], 1, dtype=tl.int64) << (position & 31)).to(tl.int32)
        tl.atomic_or(marks + (position >> 5), mark, mask=good, sem="relaxed")


def unpack(
    messages: Tensor,
    ranks: Tensor,
    decision: Decision,
    shape: wire.Shape,
    support: Tensor,
    marks: Tensor | None,
    *,
    shift: int,
    numel: int,
) -> None:
    """The indices of all messages, `[messages, bytes]`: side by side into `support` or, given `marks`, as marks there.

    `ranks` says whose message each is. Side by side means in the order of partitions, at this step `shift` on. Notes
    the checksums in the record.
    """
    words = messages.view(torch.int32)
    num_words = shape.upper_words + shape.lower_words
    num_chunks = -(-num_words // WORDS)
    chunk_sums, chunk_entries = torch.empty((2, len(messages), num_chunks), dtype=torch.int32, device=messages.device)
    _tally[(num_chunks, len(messages))](
        words, num_words, shape.upper_words, chunk_sums, chunk_entries, num_chunks, WORDS=WORDS, SEAL=False, num_warps=4
    )  # fmt: skip
    _unpack[(-(-shape.upper_words // WORDS), len(messages))](
        words,
        num_words,
        shape.upper_words,
        shape.low_bits,
        shape.tag,
        chunk_sums,
        chunk_entries,
        num_chunks,
        decision.record,
        ranks,
        decision.world,
        shift,
        numel,
        support,
        len(support),
        support if marks is None else marks,
        WORDS=WORDS,
        WORLD=triton.next_power_of_2(decision.world),
        DISJOINT=marks is None,
        num_warps=4,
    )
