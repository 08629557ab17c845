"""Indices on their way: what is written is read again, bit for bit, and what is damaged is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve import wire
from gradsieve.wire import HEADER_BYTES, Shape, WireError, decode, encode

TAG, COUNT, CHECKSUM, START = range(3), range(4, 8), range(8, 12), range(12, 20)
"""Where the fields of a header lie; the flags are its fourth byte."""
FLAGS = 3


class Stretch(NamedTuple):
    """Indices, the stretch that they lie in, and the number that was agreed on."""

    indices: list[int]
    start: int
    extent: int
    most: int

    @property
    def shape(self) -> Shape:
        return Shape.of(self.most, self.extent)

    @property
    def tensor(self) -> Tensor:
        return torch.tensor(self.indices, dtype=torch.int64)

    def encoded(self) -> Tensor:
        return encode(self.tensor, self.start, self.shape)


def message_of(upper: int, lower: int, count: int, start: int, shape: Shape) -> bytes:
    """A message with these parts, each one large number, and a checksum that suits them."""
    body = upper.to_bytes(4 * shape.upper_words, "little") + lower.to_bytes(4 * shape.lower_words, "little")
    words = struct.unpack(f"<{len(body) // 4}I", body)
    tag, low, high = 0x67 | 1 << 8 | shape.low_bits << 16, start % 2**32, start // 2**32 % 2**32
    checksum = sum((word ^ word >> 16) * (2 * k + 1) for k, word in enumerate(words))
    checksum += tag * 0x27D4EB2F + count * 0x9E3779B1 + low * 0x85EBCA6B + high * 0xC2B2AE35
    return struct.pack("<5I", tag, count, checksum % 2**32, low, high) + body


def bytes_of(stretch: Stretch) -> bytes:
    """The whole message, as the format says it."""
    shape, upper, lower = stretch.shape, 0, 0
    for i, index in enumerate(stretch.indices):
        high, low = divmod(index - stretch.start, 2**shape.low_bits)
        upper |= 1 << high + i
        lower |= low << i * shape.low_bits
    return message_of(upper, lower, len(stretch.indices), stretch.start, shape)


def tensor_of(message: bytes) -> Tensor:
    return torch.tensor(list(message), dtype=torch.uint8)


@st.composite
def stretches(draw: st.DrawFn) -> Stretch:
    """Dense, sparse or clustered indices, near and far ones, none and all, in messages that have room for more."""
    start = draw(st.one_of(st.integers(0, 1000), st.integers(2**31 - 5, 2**33), st.just(2**62)))
    more = draw(st.sampled_from([0, 0, 1, 5, 300]))
    kind = draw(st.sampled_from(["full", "gaps", "clusters", "far"]))
    if kind == "full":
        extent = draw(st.integers(0, 400))
        return Stretch(list(range(start, start + extent)), start, extent, extent + more)
    near = st.sampled_from([1, 1, 2, 3, 31, 32, 33, 256])
    far = {"gaps": st.integers(1, 3000), "clusters": st.integers(60_000, 300_000), "far": st.integers(1, 2**34)}[kind]
    indices, place = [], start - 1
    for gap in draw(st.lists(near | far, max_size=60)):
        place += gap
        indices.append(place)
    behind = draw(st.integers(0, 70_000))
    return Stretch(indices, start, place + 1 - start + behind, len(indices) + more)


def damaged(message: Tensor, place: int, by: int) -> Tensor:
    changed = message.clone()
    changed[place] ^= by
    return changed


class TestRoundTrip:
    @given(stretch=stretches())
    def test_what_is_written_is_read_again(self, stretch: Stretch) -> None:
        message = stretch.encoded()
        assert message.dtype == torch.uint8
        assert len(message) == stretch.shape.num_bytes
        decoded = decode(message, stretch.shape, start=stretch.start, stop=stretch.start + stretch.extent)
        assert decoded.indices.dtype == torch.int64
        assert decoded.indices.tolist() == stretch.indices
        assert decoded.flags == 0

    @given(stretch=stretches())
    def test_the_bytes_are_those_of_the_format(self, stretch: Stretch) -> None:
        assert bytes(stretch.encoded().tolist()) == bytes_of(stretch)

    @given(stretch=stretches())
    def test_what_other_devices_do_is_the_same(self, stretch: Stretch) -> None:
        shape, offsets = stretch.shape, stretch.tensor - stretch.start
        words = wire._words_by_torch(offsets, shape)
        assert torch.equal(words.to(torch.int32).view(torch.uint8), stretch.encoded()[HEADER_BYTES:])
        assert torch.equal(wire._offsets_by_torch(words, len(offsets), shape), offsets)
        assert wire._checksum_by_torch(words) == wire._checksum(wire._words(offsets.numpy(), shape))

    @given(low_bits=st.integers(0, 31), count=st.integers(1, 70), data=st.data())
    def test_every_number_of_low_bits(self, low_bits: int, count: int, data: st.DataObject) -> None:
        extent = count << low_bits
        offsets = st.integers(0, extent - 1)
        indices = sorted(data.draw(st.sets(offsets, min_size=count, max_size=count)))
        stretch = Stretch(indices, 0, extent, count)
        assert stretch.shape.low_bits == low_bits
        assert bytes(stretch.encoded().tolist()) == bytes_of(stretch)
        assert decode(stretch.encoded(), stretch.shape).indices.tolist() == indices

    def test_narrow_indices_are_taken_too(self) -> None:
        wide, shape = torch.tensor([7, 300, 2**31 - 1]), Shape.of(3, 2**31)
        assert torch.equal(encode(wide.int(), 5, shape), encode(wide, 5, shape))

    @pytest.mark.parametrize("density", [0.9, 0.3, 0.01, 0.001])
    def test_many_random_indices(self, density: float) -> None:
        indices = torch.nonzero(torch.rand(1_000_000) < density).squeeze(1)
        shape = Shape.of(len(indices), 1_000_000)
        assert torch.equal(decode(encode(indices, 0, shape), shape).indices, indices)

    def test_a_row_of_gathered_messages_is_read_where_it_lies(self) -> None:
        shape = Shape.of(2, 100)
        rows = torch.stack([encode(torch.tensor([place, 90]), 0, shape) for place in range(3)])
        shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), rows.flatten()])[1:].view(3, -1)
        for messages in (rows, shifted, rows.T.contiguous().T):
            assert [decode(row, shape).indices.tolist() for row in messages] == [[0, 90], [1, 90], [2, 90]]

    def test_reading_leaves_the_message_as_it_was(self) -> None:
        stretch = Stretch([3, 4, 900], 1, 1000, 5)
        message = stretch.encoded()
        before = message.clone()
        decode(message, stretch.shape)
        decode(message, stretch.shape)
        assert torch.equal(message, before)

    def test_writing_leaves_the_indices_as_they_were(self) -> None:
        indices = torch.tensor([3, 4, 900])
        encode(indices, 1, Shape.of(3, 1000))
        assert indices.tolist() == [3, 4, 900]

    @pytest.mark.parametrize("flags", [1, 5, 127])
    def test_flags_are_returned(self, flags: int) -> None:
        stretch = Stretch([3], 0, 9, 1)
        decoded = decode(damaged(stretch.encoded(), FLAGS, flags), stretch.shape)
        assert (decoded.indices.tolist(), decoded.flags) == ([3], flags)


def test_a_small_message_byte_by_byte() -> None:
    """Six indices of at most seven in 500 positions from 2**32 + 100 on, of which six bits are the low ones.

    They lie 0, 1, 63, 64, 300 and 499 behind the start. Divided by 64 that is 0, 0, 0, 1, 4 and 7, so the bits 0, 1, 2,
    4, 8 and 12 are set. The low bits are 0, 1, 63, 0, 44 and 51; the last reach into a second word.
    """
    start = 2**32 + 100
    shape = Shape.of(7, 500)
    assert shape == Shape(7, 500, low_bits=6, upper_words=1, lower_words=2)
    message = encode(start + torch.tensor([0, 1, 63, 64, 300, 499]), start, shape)
    header, upper, lower = "67010600 06000000 2ccfd3ea 64000000 01000000", "17110000", "40f003ec 0c000000"
    assert bytes(message.tolist()) == bytes.fromhex(f"{header} {upper} {lower}")


class TestShape:
    @pytest.mark.parametrize(
        ("most", "extent", "low_bits", "upper_words", "lower_words"),
        [
            (0, 0, 0, 1, 0),
            (0, 100, 6, 1, 0),
            (31, 0, 0, 1, 0),
            (32, 0, 0, 2, 0),
            (10, 10, 0, 1, 0),
            (10, 19, 0, 1, 0),
            (10, 20, 1, 1, 1),
            (100, 12_800, 7, 7, 22),
            (1, 2**40, 31, 17, 1),
        ],
    )
    def test_numbers(self, most: int, extent: int, low_bits: int, upper_words: int, lower_words: int) -> None:
        shape = Shape.of(most, extent)
        assert shape == Shape(most, extent, low_bits, upper_words, lower_words)
        assert shape.num_bytes == 20 + 4 * (upper_words + lower_words)

    @given(most=st.integers(1, 10**6), spread=st.integers(0, 2**30))
    def test_an_index_takes_at_most_three_bits_beside_the_low_ones(self, most: int, spread: int) -> None:
        shape = Shape.of(most, most * spread)
        assert 8 * (shape.num_bytes - HEADER_BYTES) <= (shape.low_bits + 3) * most + 1 + 2 * 31
        assert 2**shape.low_bits <= max(spread, 1) < 2 ** (shape.low_bits + 1)

    @pytest.mark.parametrize(("density", "most"), [(0.5, 0.51), (0.1, 0.71), (0.01, 1.15), (0.001, 1.6)])
    def test_bytes_an_index(self, density: float, most: float) -> None:
        extent = 1_000_000
        indices = torch.nonzero(torch.rand(extent) < density).squeeze(1)
        shape = Shape.of(len(indices), extent)
        assert torch.equal(decode(encode(indices, 0, shape), shape).indices, indices)
        assert shape.num_bytes - HEADER_BYTES <= most * len(indices)

    @pytest.mark.parametrize(("most", "extent"), [(-1, 5), (2**31, 2**40), (1, -1)])
    def test_what_no_message_has_is_refused(self, most: int, extent: int) -> None:
        with pytest.raises(ValueError, match=f"up to {most} indices in a stretch of {extent} positions: give a number"):
            Shape.of(most, extent)


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ([10, 11, 12, 13], "4 indices came for a message of at most 3"),
        ([10, 30, 20], "3 indices came that do not ascend: sort them"),
        ([10, 20, 20], "3 indices came that do not ascend: sort them"),
        ([9, 20], "indices from 9 to 20 came for a message of those in 10:60"),
        ([20, 60], "indices from 20 to 60 came for a message of those in 10:60"),
    ],
)
def test_indices_that_do_not_suit_the_message_are_not_written(indices: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        encode(torch.tensor(indices), 10, Shape.of(3, 50))


class TestRefusal:
    @given(stretch=stretches(), by=st.integers(1, 255), data=st.data())
    def test_no_changed_byte_gives_other_indices(self, stretch: Stretch, by: int, data: st.DataObject) -> None:
        message = stretch.encoded()
        place = data.draw(st.integers(0, len(message) - 1).filter(lambda place: place != FLAGS))
        with pytest.raises(WireError):
            decode(damaged(message, place, by), stretch.shape)

    @pytest.mark.parametrize(
        "stretch",
        [
            Stretch([5, 6, 300], 0, 400, 3),
            Stretch([2**40 + 5, 2**41], 2**40, 2**40 + 400, 5),
            Stretch([], 7, 100, 4),
            Stretch(list(range(40)), 0, 40, 40),
            Stretch(list(range(0, 4000, 97)), 0, 4000, 50),
        ],
    )
    def test_no_flipped_bit_gives_other_indices(self, stretch: Stretch) -> None:
        message, shape = stretch.encoded(), stretch.shape
        for place in range(len(message)):
            for bit in range(8):
                changed = damaged(message, place, 1 << bit)
                if place == FLAGS and bit < 7:
                    assert decode(changed, shape).indices.tolist() == stretch.indices
                else:
                    with pytest.raises(WireError):
                        decode(changed, shape)

    @given(noise=st.binary(max_size=200))
    def test_random_bytes_are_refused(self, noise: bytes) -> None:
        shapes = [Shape.of(3, 400), Shape.of(len(noise), 0), Shape(9, 100, 0, max(len(noise) // 4 - 5, 0), 0)]
        for shape in shapes:
            with pytest.raises(WireError):
                decode(tensor_of(noise), shape)

    @given(checksum=st.integers(0, 2**32 - 1), start=st.integers(0, 2**40), count=st.integers(1, 20), data=st.data())
    def test_random_bytes_behind_a_good_tag_are_refused(
        self, checksum: int, start: int, count: int, data: st.DataObject
    ) -> None:
        shape = Shape.of(20, 4000)
        size = shape.num_bytes - HEADER_BYTES
        body = data.draw(st.binary(min_size=size, max_size=size))
        header = struct.pack("<3Iq", 0x0000_0167 | shape.low_bits << 16, count, checksum, start)
        with pytest.raises(WireError):
            decode(tensor_of(header + body), shape)

    @given(stretch=stretches(), data=st.data())
    def test_a_truncated_message_is_refused(self, stretch: Stretch, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, stretch.shape.num_bytes - 1))
        with pytest.raises(WireError, match=f"a message of {length} bytes came in place of {stretch.shape.num_bytes}"):
            decode(stretch.encoded()[:length], stretch.shape)

    @pytest.mark.parametrize(
        ("spoil", "words"),
        [
            (lambda message: message[:20], "20 bytes came in place of 28.* up to 4 indices in 400 .*same version"),
            (lambda message: torch.cat([message, message]), "56 bytes came in place of 28"),
            (lambda message: damaged(message, 0, 1), "no indices of gradsieve .it begins with 66010600.*process group"),
            (lambda message: damaged(message, FLAGS, 128), "no indices of gradsieve .it begins with 67010680"),
            (lambda message: damaged(message, TAG[1], 3), "another version of gradsieve .format 2, here 1.*install"),
            (lambda message: damaged(message, TAG[2], 1), "has 7 low bits an index in place of 6.*same model"),
            (lambda message: damaged(message, COUNT[0], 64), "tells of 67 indices, and at most 4 were agreed on"),
            (lambda message: damaged(message, COUNT[3], 128), "tells of 21474836.. indices, and at most 4"),
            (lambda message: damaged(message, COUNT[0], 1), "2 indices was damaged on its way .its checksum"),
            (lambda message: damaged(message, CHECKSUM[1], 1), "3 indices was damaged on its way .its checksum"),
            (lambda message: damaged(message, START[4], 1), "3 indices was damaged on its way .its checksum"),
            (lambda message: damaged(message, HEADER_BYTES, 1), "3 indices was damaged on its way .*the run again"),
        ],
    )
    def test_a_refusal_says_what_is_wrong_and_what_to_do(self, spoil: Callable[[Tensor], Tensor], words: str) -> None:
        stretch = Stretch([5, 6, 300], 0, 400, 4)
        with pytest.raises(WireError, match=words):
            decode(spoil(stretch.encoded()), stretch.shape)

    @pytest.mark.parametrize(("upper", "found"), [(0b0011, 2), (0b1111, 4), (0, 0)])
    def test_as_many_marks_as_indices(self, upper: int, found: int) -> None:
        shape = Shape.of(4, 400)
        with pytest.raises(WireError, match=f"tells of 3 indices and holds {found}, so it was damaged"):
            decode(tensor_of(message_of(upper, 0, 3, 0, shape)), shape)

    @pytest.mark.parametrize("low", [(7, 7), (7, 6)])
    def test_indices_that_do_not_ascend_are_refused(self, low: tuple[int, int]) -> None:
        shape = Shape.of(2, 200)
        lower = low[0] | low[1] << shape.low_bits
        with pytest.raises(WireError, match="the 2 indices of a message do not ascend"):
            decode(tensor_of(message_of(0b11, lower, 2, 0, shape)), shape)

    @pytest.mark.parametrize(("start", "stop"), [(101, None), (None, 361), (102, 400), (0, 101)])
    def test_indices_outside_the_stretch_are_refused(self, start: int | None, stop: int | None) -> None:
        stretch = Stretch([100, 361], 90, 400, 2)
        message, shape = stretch.encoded(), stretch.shape
        assert decode(message, shape, start=100, stop=362).indices.tolist() == [100, 361]
        with pytest.raises(WireError, match=r"indices from 100 to 361, outside .*same model and method"):
            decode(message, shape, start=start, stop=stop)

    @pytest.mark.parametrize("start", [-3, -(2**40), 2**63 - 2])
    def test_indices_that_no_vector_has_are_refused(self, start: int) -> None:
        shape = Shape.of(2, 10)
        message = tensor_of(message_of(0b1001, 0b0100, 2, start, shape))
        last = start + (2 * 4 | 1)
        with pytest.raises(WireError, match=f"indices from {start} to {last}, outside"):
            decode(message, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("density", [0, 1e-5, 0.001, 0.1, 1])
def test_cuda_writes_and_reads_the_same_bytes(density: float) -> None:
    indices = torch.nonzero(torch.rand(200_000) < density).squeeze(1) + 2**33
    shape = Shape.of(len(indices) + 3, 200_000)
    message, on_cuda = (encode(each, 2**33, shape) for each in (indices, indices.cuda()))
    assert on_cuda.is_cuda
    assert torch.equal(on_cuda.cpu(), message)
    assert decode(on_cuda, shape).indices.is_cuda
    assert torch.equal(decode(on_cuda, shape).indices.cpu(), indices)
    with pytest.raises(WireError):
        decode(damaged(on_cuda, COUNT[0], 1), shape)
