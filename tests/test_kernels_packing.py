"""`kernels.packing` against `wire`: the same bytes, and the same indices out of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve import kernels, wire
from gradsieve.kernels.tiling import HEAD, Decision, Record, Sight
from kernel_place import DEVICE, MARKS, pack, unpack

pytestmark = MARKS

FILLER = -7


class Proposals(NamedTuple):
    """What ranks propose, each in a stretch of its own."""

    indices: list[list[int]]
    starts: list[int]
    most: int
    extent: int

    @property
    def world(self) -> int:
        return len(self.indices)

    @property
    def shape(self) -> wire.Shape:
        return wire.Shape.of(self.most, self.extent)

    def decision(self) -> Decision:
        """A record that says how many travel of each rank."""
        decision = Decision.empty(1, self.world, 1, DEVICE)
        lengths = torch.tensor([len(own) for own in self.indices], device=DEVICE)
        decision.record[HEAD + 2 * self.world :][: self.world] = lengths
        return decision

    def encoded(self) -> Tensor:
        """The messages by the plain twin, as the device of the test has them."""
        messages = [
            wire.encode(torch.tensor(own, dtype=torch.int64), start, self.shape)
            for own, start in zip(self.indices, self.starts, strict=True)
        ]
        return torch.stack(messages).to(DEVICE)

    def packed(self, ranks: Sequence[int] | None = None) -> Tensor:
        """The messages of some ranks that follow one another, by the kernel."""
        ranks = range(self.world) if ranks is None else ranks
        picked = torch.full((len(ranks), max(1, self.most)), FILLER, dtype=torch.int64)
        for row, rank in enumerate(ranks):
            picked[row, : len(self.indices[rank])] = torch.tensor(self.indices[rank], dtype=torch.int64)
        looks = torch.tensor([[self.starts[rank], 0, 0, 0] for rank in ranks], device=DEVICE)
        nothing = torch.empty(0, device=DEVICE)
        sight = Sight(looks, nothing, nothing, nothing, nothing, nothing, nothing)
        return pack(picked.to(DEVICE), sight, self.decision(), self.shape, ranks[0])

    def unpacked(self, messages: Tensor, shift: int = 0, numel: int = 1 << 60) -> tuple[Tensor, Tensor]:
        """Side by side, with room for one more behind, and the checks."""
        total = sum(map(len, self.indices))
        support = torch.full((total + 1,), FILLER, dtype=torch.int64, device=DEVICE)
        ranks = torch.arange(self.world, device=DEVICE)
        decision = self.decision()
        unpack(messages, ranks, decision, self.shape, support, None, shift=shift, numel=numel)
        return support, checks_of(decision)


def checks_of(decision: Decision) -> Tensor:
    """By rank: the checksum that was found, and the one that came."""
    record = Record.of(decision.record.tolist(), decision.world)
    return torch.tensor([record.found, record.stated]).T


def proposals_of(
    counts: Sequence[int], extent: int, *, most: int | None = None, starts: Sequence[int] | None = None, seed: int = 0
) -> Proposals:
    """Random ones."""
    generator = torch.Generator().manual_seed(seed)
    starts = [0] * len(counts) if starts is None else starts
    indices = []
    for count, start in zip(counts, starts, strict=True):
        offsets = kernels.merged(torch.randint(0, extent, (4 * count,), generator=generator))
        chosen = offsets[torch.randperm(len(offsets), generator=generator)[:count]].sort().values
        assert len(chosen) == count
        indices.append((chosen + start).tolist())
    return Proposals(indices, list(starts), max(counts) if most is None else most, extent)


@st.composite
def some_proposals(draw: st.DrawFn) -> Proposals:
    extent = draw(st.one_of(st.integers(1, 300), st.integers(1, 2**40)))
    offsets = st.one_of(st.integers(0, min(extent - 1, 40)), st.integers(0, extent - 1))
    starts = st.sampled_from([0, 7, 2**31 - 20, 2**31 + 5, 2**32 - 1, 2**45])
    pieces = draw(st.lists(st.tuples(starts, st.sets(offsets, max_size=40)), min_size=1, max_size=3))
    indices = [sorted(start + offset for offset in own) for start, own in pieces]
    most = max(map(len, indices)) + draw(st.sampled_from([0, 1, 30]))
    return Proposals(indices, [start for start, _ in pieces], max(1, most), extent)


@given(some_proposals())
@example(Proposals([[]], [0], 1, 1))
@example(Proposals([[0]], [0], 1, 1))
@example(Proposals([[2**31 - 1, 2**31, 2**32 - 1, 2**32]], [2**31 - 1], 4, 2**33))
def test_messages_are_those_of_the_plain_twin(proposals: Proposals) -> None:
    packed = proposals.packed()
    assert (packed.dtype, packed.shape) == (torch.uint8, (proposals.world, proposals.shape.num_bytes))
    assert torch.equal(packed, proposals.encoded())


MANY = proposals_of([3000, 0, 2999], 40_000, most=3100, starts=[0, 5, 2**33])
DENSE = proposals_of([2000], 2500, most=2500)
FAR_APART = proposals_of([1500], 2**45)


@pytest.mark.parametrize("proposals", [MANY, DENSE, FAR_APART], ids=["many", "dense", "far apart"])
def test_messages_of_many_indices_are_those_of_the_plain_twin(proposals: Proposals) -> None:
    packed = proposals.packed()
    assert torch.equal(packed, proposals.encoded())
    support, checks = proposals.unpacked(packed)
    assert support.tolist() == [*(index for own in proposals.indices for index in own), FILLER]
    assert torch.equal(*checks.unbind(1))


def test_a_rank_that_is_alone_in_its_process_finds_its_own_length() -> None:
    proposals = proposals_of([5, 70, 33], 4000)
    for rank in range(3):
        assert torch.equal(proposals.packed([rank])[0], proposals.encoded()[rank])


@given(some_proposals(), st.integers(0, 7))
def test_indices_come_out_side_by_side_in_the_order_of_partitions(proposals: Proposals, shift: int) -> None:
    support, checks = proposals.unpacked(proposals.encoded(), shift=shift % proposals.world)
    order = [(partition - shift) % proposals.world for partition in range(proposals.world)]
    assert support.tolist() == [*(index for rank in order for index in proposals.indices[rank]), FILLER]
    assert torch.equal(*checks.unbind(1))


def marked_by(proposals: Proposals, messages: Tensor, ranks: Sequence[int], numel: int) -> tuple[list[int], Tensor]:
    """The indices that messages of some ranks mark, and the checks."""
    marks = torch.zeros(-(-numel // 32), dtype=torch.int32, device=DEVICE)
    support = torch.full((1,), FILLER, dtype=torch.int32, device=DEVICE)
    whose = torch.tensor(ranks, device=DEVICE)
    decision = proposals.decision()
    unpack(messages, whose, decision, proposals.shape, support, marks, shift=0, numel=numel)
    assert support.tolist() == [FILLER]
    bits = marks.cpu().unsqueeze(1) >> torch.arange(32) & 1
    return bits.flatten().nonzero().flatten().tolist(), checks_of(decision)


@pytest.mark.parametrize("ranks", [[0, 1, 2], [2, 0], [1]], ids=str)
def test_indices_come_out_as_marks_each_once(ranks: list[int]) -> None:
    numel = 3001
    proposals = proposals_of([700, 1, 1200], numel)
    messages = proposals.encoded()[ranks]
    marked, checks = marked_by(proposals, messages, ranks, numel)
    assert marked == sorted({index for rank in ranks for index in proposals.indices[rank]})
    assert torch.equal(*checks.unbind(1))


FLAGS = range(24, 32)
"""The bits of a message that are reserved, and that no checksum covers."""


@given(st.data())
def test_a_flipped_bit_is_noticed(data: st.DataObject) -> None:
    proposals = proposals_of([40, 3], 9000, most=44, starts=[0, 9000])
    messages = proposals.encoded()
    bit = data.draw(st.integers(0, 8 * messages.shape[1] - 1).filter(lambda bit: bit not in FLAGS))
    messages[0, bit // 8] ^= 1 << bit % 8
    support, checks = proposals.unpacked(messages, numel=18_000)
    (found, wanted), other = checks.tolist()
    assert found != wanted
    # the message beside it is read as ever, and nothing is written elsewhere
    assert other[0] == other[1]
    assert support[40:].tolist() == [*proposals.indices[1], FILLER]


def foreign(proposals: Proposals, kind: str) -> Tensor:
    """Messages of which the first is none of ours."""
    messages = proposals.encoded()
    if kind == "zeros":
        messages[0] = 0
    elif kind == "ones":
        messages[0] = 255
    elif kind == "another version":
        messages[0, 1] += 1
    elif kind == "another number of low bits":
        messages[0, 2] += 1
    else:
        messages[0] = torch.randint(0, 256, messages[0].shape, dtype=torch.uint8)
    return messages


@pytest.mark.parametrize("kind", ["zeros", "ones", "another version", "another number of low bits", "noise"])
def test_a_foreign_message_is_noticed_and_counts_as_empty(kind: str) -> None:
    proposals = proposals_of([40, 30], 9000, starts=[0, 9000])
    support, checks = proposals.unpacked(foreign(proposals, kind), numel=18_000)
    (found, wanted), other = checks.tolist()
    assert found != wanted
    assert other[0] == other[1]
    assert support.tolist() == [FILLER] * 40 + [*proposals.indices[1], FILLER]


def test_a_message_of_another_number_of_indices_is_noticed() -> None:
    proposals, longer = (proposals_of([count, 30], 9000, most=44) for count in (40, 41))
    support, checks = proposals.unpacked(longer.encoded())
    assert (checks[:, 0] == checks[:, 1]).tolist() == [False, True]
    assert support[:40].tolist() == [FILLER] * 40


def test_indices_outside_the_vector_are_not_written() -> None:
    proposals = proposals_of([40], 9000)
    inside = [index for index in proposals.indices[0] if index < 5000]
    assert 0 < len(inside) < 40
    support, _ = proposals.unpacked(proposals.encoded(), numel=5000)
    assert support.tolist() == [*inside, *[FILLER] * (41 - len(inside))]
    marked, _ = marked_by(proposals, proposals.encoded(), [0], 5000)
    assert marked == inside


def test_no_more_is_written_than_there_is_room_for() -> None:
    proposals = proposals_of([40, 30], 9000, starts=[0, 9000])
    memory = torch.full((100,), FILLER, dtype=torch.int64, device=DEVICE)
    unpack(
        proposals.encoded(),
        torch.arange(2, device=DEVICE),
        proposals.decision(),
        proposals.shape,
        memory[:50],
        None,
        shift=0,
        numel=18_000,
    )
    assert memory[:50].tolist() == [*proposals.indices[0], *proposals.indices[1][:10]]
    assert (memory[50:] == FILLER).all()
