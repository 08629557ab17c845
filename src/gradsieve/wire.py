"""How ascending indices travel: each as its low bits, and the rest of all of them as marks (an Elias-Fano code).

A message depends in its size on two numbers only, which sender and receivers agree on beforehand (`Shape`): `most`, the
largest number of indices that any message may hold, and `extent`, the length of the stretch that they lie in. It is a
vector of bytes, little-endian, in words of 32 bits:

- a header of five: tag, count, checksum, and the start of the stretch, its low and its high half. The tag is 'g', the
  version of the format, the number of low bits and the flags, a byte each. Flags are 0; they are reserved, and below
  128.
- the upper part, `upper_words`: for index number i, which lies v positions behind the start, the bit number
  `(v >> low_bits) + i` is set.
- the lower part, `lower_words`: the `low_bits` lowest bits of v, from the bit number `i * low_bits` on.

Bit number b of a part is the bit `b % 32` of its word `b // 32`. All other bits are 0. The checksum is the sum of all
words w behind the header, as `w ^ (w >> 16)` times 1, 3, 5, ..., and of the fields of the header, each times a
constant, modulo 2**32; of the tag without the flags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

VERSION = 1
WORD_BYTES = 4
HEADER_WORDS = 5
HEADER_BYTES = HEADER_WORDS * WORD_BYTES

LETTER = 0x67
TAG_FACTOR = 0x27D4_EB2F
COUNT_FACTOR = 0x9E37_79B1
START_LOW_FACTOR = 0x85EB_CA6B
START_HIGH_FACTOR = 0xC2B2_AE35

_MASK = 0xFFFF_FFFF
_TAG_MASK = 0xFF_FFFF
_MOST_LOW_BITS = 31
_LARGEST_COUNT = torch.iinfo(torch.int32).max
_BEYOND = 1 << 63
_RETRY = "start the run again, and if it happens again, look for a faulty link or memory"
_SAME_RUN = "give all ranks the same model and method"
_SAME_VERSION = "install the same version of gradsieve on all ranks"


class WireError(RuntimeError):
    """A message of indices that cannot be read."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What sender and receivers of a message know without a word."""

    most: int
    extent: int
    low_bits: int
    upper_words: int
    lower_words: int

    @classmethod
    def of(cls, most: int, extent: int) -> Shape:
        """The shape of messages of up to `most` indices each, in a stretch of `extent` positions."""
        if not 0 <= most <= _LARGEST_COUNT or extent < 0:
            raise ValueError(
                f"there is no message of up to {most} indices in a stretch of {extent} positions: "
                f"give a number from 0 to {_LARGEST_COUNT} and a length"
            )
        low_bits = min(max(0, (extent // max(most, 1)).bit_length() - 1), _MOST_LOW_BITS)
        return cls(most, extent, low_bits, _num_words(most + (extent >> low_bits) + 1), _num_words(most * low_bits))

    @property
    def num_bytes(self) -> int:
        return HEADER_BYTES + WORD_BYTES * (self.upper_words + self.lower_words)

    @property
    def tag(self) -> int:
        """The first word of a message, without flags."""
        return LETTER | VERSION << 8 | self.low_bits << 16

    @property
    def low_mask(self) -> int:
        return (1 << self.low_bits) - 1


class Decoded(NamedTuple):
    indices: Tensor
    """Ascending, int64, on the message's device."""
    flags: int


def encode(indices: Tensor, start: int, shape: Shape) -> Tensor:
    """A message on the same device. The indices ascend, and lie in the stretch from `start` on."""
    _check_indices(indices, start, shape)
    offsets = indices.long() - start
    if offsets.device.type == "cpu":
        words = _words(offsets.numpy(), shape)
        body, checksum = torch.from_numpy(words.view(np.uint8)), _checksum(words)
    else:
        wide = _words_by_torch(offsets, shape)
        body, checksum = wide.to(torch.int32).view(torch.uint8), _checksum_by_torch(wide)
    low, high = start & _MASK, start >> 32 & _MASK
    checksum = (checksum + _header_sum(shape.tag, len(indices), low, high)) & _MASK
    header = np.array([shape.tag, len(indices), checksum, low, high], dtype="<u4")
    return torch.cat([torch.from_numpy(header.view(np.uint8)).to(body.device), body])


def decode(message: Tensor, shape: Shape, *, start: int | None = None, stop: int | None = None) -> Decoded:
    """The indices in a message; refuses one that is damaged, or has an index outside `start:stop`."""
    header = _read_header(message, shape)
    # copied, because a view in words must begin at a multiple of their size
    body = message[HEADER_BYTES:].clone()
    if body.device.type == "cpu":
        words = body.numpy().view("<u4")
        _check_sum(_checksum(words), header)
        offsets = torch.from_numpy(_offsets(words, header.num_indices, shape))
    else:
        wide = body.view(torch.int32).long() & _MASK
        _check_sum(_checksum_by_torch(wide), header)
        offsets = _offsets_by_torch(wide, header.num_indices, shape)
    if not _ascends(offsets):
        raise WireError(f"the {header.num_indices} indices of a message do not ascend, so it was damaged: {_RETRY}")
    if header.num_indices:
        _check_bounds(header.start + int(offsets[0]), header.start + int(offsets[-1]), start, stop)
    return Decoded(offsets.add_(header.start), header.flags)


class _Header(NamedTuple):
    flags: int
    num_indices: int
    start: int
    checksum: int
    """What the words behind the header are to add up to."""


def _read_header(message: Tensor, shape: Shape) -> _Header:
    """The header, once it is known to be ours and of the shape agreed on."""
    if len(message) != shape.num_bytes:
        raise WireError(
            f"a message of {len(message)} bytes came in place of {shape.num_bytes}, which is what up to {shape.most} "
            f"indices in {shape.extent} positions take: {_SAME_VERSION}, and {_SAME_RUN}"
        )
    header = message[:HEADER_BYTES].cpu().numpy().tobytes()
    tag, count, checksum, low, high = np.frombuffer(header, "<u4").tolist()
    (start,) = np.frombuffer(header, "<i8", 1, offset=3 * WORD_BYTES).tolist()
    letter, version, low_bits, flags = (tag >> shift & 0xFF for shift in (0, 8, 16, 24))
    if letter != LETTER or flags > 127:
        raise WireError(
            f"a message came that holds no indices of gradsieve (it begins with {header[:WORD_BYTES].hex()}): "
            "use the process group for nothing else while a step runs"
        )
    if version != VERSION:
        raise WireError(
            f"a message was written by another version of gradsieve (format {version}, here {VERSION}): {_SAME_VERSION}"
        )
    if low_bits != shape.low_bits:
        raise WireError(f"a message has {low_bits} low bits an index in place of {shape.low_bits}: {_SAME_RUN}")
    if count > shape.most:
        raise WireError(f"a message tells of {count} indices, and at most {shape.most} were agreed on: {_SAME_RUN}")
    return _Header(flags, count, start, (checksum - _header_sum(tag, count, low, high)) & _MASK)


def _num_words(num_bits: int) -> int:
    return -(-num_bits // 32)


def _header_sum(tag: int, count: int, start_low: int, start_high: int) -> int:
    """What the fields of a header add to the checksum."""
    starts = start_low * START_LOW_FACTOR + start_high * START_HIGH_FACTOR
    return (tag & _TAG_MASK) * TAG_FACTOR + count * COUNT_FACTOR + starts


def _ascends(values: Tensor) -> bool:
    return bool((values[1:] > values[:-1]).all())


def _check_indices(indices: Tensor, start: int, shape: Shape) -> None:
    count, stop = len(indices), start + shape.extent
    if count > shape.most:
        raise ValueError(f"{count} indices came for a message of at most {shape.most}: agree on a larger number")
    if not _ascends(indices):
        raise ValueError(f"{count} indices came that do not ascend: sort them, and give each once")
    if count and not start <= int(indices[0]) <= int(indices[-1]) < stop:
        raise ValueError(
            f"indices from {int(indices[0])} to {int(indices[-1])} came for a message of those in {start}:{stop}: "
            "give the stretch that they lie in"
        )


def _check_sum(checksum: int, header: _Header) -> None:
    if checksum != header.checksum:
        raise WireError(
            f"a message of {header.num_indices} indices was damaged on its way (its checksum differs): {_RETRY}"
        )


def _check_marks(found: int, count: int) -> None:
    if found != count:
        raise WireError(f"a message tells of {count} indices and holds {found}, so it was damaged: {_RETRY}")


def _check_bounds(first: int, last: int, start: int | None, stop: int | None) -> None:
    # of Python's integers, which do not overflow
    lowest, beyond = 0 if start is None else start, _BEYOND if stop is None else stop
    if not lowest <= first <= last < beyond:
        raise WireError(
            f"a message holds indices from {first} to {last}, outside {lowest}:{beyond}, where its sender looks: "
            f"{_SAME_RUN}"
        )


# What follows works in place where it can, because fresh memory takes longer than the arithmetic.


def _words(offsets: npt.NDArray[np.int64], shape: Shape) -> npt.NDArray[np.uint32]:
    """The upper part and the lower part."""
    words = np.zeros(shape.upper_words + shape.lower_words, "<u4")
    marks = np.zeros(32 * shape.upper_words, np.uint8)
    numbers = np.arange(len(offsets))
    upper = offsets >> shape.low_bits
    upper += numbers
    marks[upper] = 1
    words[: shape.upper_words] = np.packbits(marks, bitorder="little").view("<u4")
    if len(offsets) and shape.low_bits:
        numbers *= shape.low_bits
        values = np.bitwise_and(offsets, shape.low_mask, out=upper)
        _write_lower(values, numbers, shape.low_bits, words[shape.upper_words :])
    return words


def _write_lower(
    values: npt.NDArray[np.int64], places: npt.NDArray[np.int64], low_bits: int, lower: npt.NDArray[np.uint32]
) -> None:
    """Values of so many bits, each at its place right behind the one before; spoils both."""
    # the first value that begins in each word: in all of them one does, for no value is longer than a word
    firsts = -(-32 * np.arange(int(places[-1]) // 32 + 1) // low_bits)
    places &= 31
    values <<= places
    # the bits are disjoint, so a sum joins them; what reaches into the next word stands above
    sums = np.add.reduceat(values, firsts)
    lower[: len(sums)] = sums & _MASK
    carried = sums[: len(lower) - 1] >> 32
    lower[1 : len(carried) + 1] |= carried.astype(np.uint32)


def _offsets(words: npt.NDArray[np.uint32], count: int, shape: Shape) -> npt.NDArray[np.int64]:
    """How far behind the start each index lies."""
    marks = np.unpackbits(words[: shape.upper_words].view(np.uint8), bitorder="little")
    offsets: npt.NDArray[np.int64] = np.flatnonzero(marks.view(np.bool_))
    _check_marks(len(offsets), count)
    places = np.arange(count)
    offsets -= places
    offsets <<= shape.low_bits
    # each word with its successor above it, because a value may reach into that; behind the last there is none
    pairs = np.append(words[shape.upper_words :].astype(np.int64), 0)
    pairs[:-1] |= pairs[1:] << 32
    places *= shape.low_bits
    lower = pairs[places >> 5]
    places &= 31
    lower >>= places
    lower &= shape.low_mask
    offsets |= lower
    return offsets


def _checksum(words: npt.NDArray[np.uint32]) -> int:
    # in 32 bits, so that it wraps by itself
    factors = np.arange(len(words), dtype=np.uint32)
    factors *= 2
    factors += 1
    return int(np.dot(words ^ (words >> np.uint32(16)), factors))


def _words_by_torch(offsets: Tensor, shape: Shape) -> Tensor:
    """As `_words`, on any device, in int64."""
    numbers = torch.arange(len(offsets), device=offsets.device)
    upper = _joined(torch.ones_like(offsets), (offsets >> shape.low_bits) + numbers, shape.upper_words)
    lower = _joined(offsets & shape.low_mask, numbers * shape.low_bits, shape.lower_words)
    return torch.cat([upper, lower])


def _joined(values: Tensor, places: Tensor, num_words: int) -> Tensor:
    """Words in which each value stands from its place on. Their bits are disjoint, so that a sum joins them."""
    sums = torch.zeros(num_words + 1, dtype=torch.int64, device=values.device)
    sums.scatter_add_(0, places >> 5, values << (places & 31))
    # what reaches into the next word stands above
    sums[1:] += sums[:-1] >> 32
    return sums[:-1] & _MASK


def _offsets_by_torch(words: Tensor, count: int, shape: Shape) -> Tensor:
    """As `_offsets`, on any device, of words in int64."""
    bits = torch.arange(32, device=words.device)
    marks = words[: shape.upper_words].unsqueeze(1) >> bits & 1
    upper = marks.flatten().nonzero().squeeze(1)
    _check_marks(len(upper), count)
    numbers = torch.arange(count, device=words.device)
    pairs = torch.cat([words[shape.upper_words :], words.new_zeros(1)])
    pairs[:-1] |= pairs[1:] << 32
    places = numbers * shape.low_bits
    lower = pairs[places >> 5] >> (places & 31) & shape.low_mask
    return (upper - numbers) << shape.low_bits | lower


def _checksum_by_torch(words: Tensor) -> int:
    factors = torch.arange(len(words), device=words.device) * 2 + 1
    return int(((words ^ (words >> 16)) * factors).sum()) & _MASK
