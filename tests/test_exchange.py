from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gradsieve
from gradsieve.collectives import TeamCollectives, lockstep, run
from gradsieve.exchange import Agreed, Disjoint, Exchange, SteeredUnion, Union, averaged, gathered, owed
from gradsieve.kernels import thinned
from gradsieve.region import Region, RotatingSlices, Whole, even_borders
from gradsieve.types import ALL, Proposal, View
from gradsieve.wire import HEADER_BYTES, Shape, WireError, encode
from ranks import Message, Moment, Recording, positions, recorders, reduce, same_outcome

VALUE_BYTES = 4
COUNT_BYTES = 8


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """Uninitialised memory holds the largest number there is, in place of what is usually zero."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3, dtype=torch.int32).tolist() == [torch.iinfo(torch.int32).max] * 3
    yield
    torch.use_deterministic_algorithms(False)


def _proposals(by_rank: Sequence[Sequence[int]], *, counted: bool = True) -> list[Proposal]:
    counts = tuple(len(indices) for indices in by_rank) if counted else None
    return [Proposal(torch.tensor(indices, dtype=torch.int64), counts, (0.5,)) for indices in by_rank]


def _gather(
    by_rank: Sequence[Sequence[int]],
    moment: Moment,
    *,
    region: Region | None = None,
    room: int | None = None,
    damage: Callable[[Tensor], None] | None = None,
) -> tuple[list[list[list[int]]], list[Recording]]:
    """The pieces that each rank receives; `damage` is done to the first message on its way."""
    collectives = [_Damaging(rank, moment.world, damage) for rank in range(moment.world)]
    region, counts = region or Whole(), tuple(len(indices) for indices in by_rank)
    steps = []
    for rank, indices in enumerate(by_rank):
        step = moment.of(rank)
        territory = region.known(region.start(step.setup), step)
        assert territory is not None
        proposal = Proposal(torch.tensor(indices, dtype=torch.int64), counts, room=room)
        steps.append(gathered(View(step, torch.empty(0), None, territory), proposal, counts, collectives[rank]))
    return [[positions(piece) for piece in pieces] for pieces in lockstep(steps)], list(collectives)


class _Damaging(Recording):
    def __init__(self, rank: int, world: int, damage: Callable[[Tensor], None] | None) -> None:
        super().__init__(rank, world)
        self._damage = damage

    async def _all_gather(self, tensor: Tensor) -> Tensor:
        gathered = await super()._all_gather(tensor)
        if self._damage is not None and self.rank == 0:
            self._damage(gathered[0])
        return gathered


def _index_bytes(most: int, extent: int) -> int:
    """The bytes of a message of indices, which no rank makes longer than another; none where there are none."""
    return Shape.of(most, extent).num_bytes if most else 0


def _average(values: Tensor, dense: Tensor) -> tuple[list[tuple[Tensor, Tensor]], list[Recording]]:
    collectives = recorders(len(values))
    return lockstep([averaged(v, d, own) for v, d, own in zip(values, dense, collectives, strict=True)]), collectives


# What several ranks propose: each its own set out of the same small vector, overlapping freely.
NUMEL = 60
overlapping = st.lists(
    st.lists(st.integers(0, NUMEL - 1), max_size=20, unique=True).map(sorted), min_size=1, max_size=5
)


class TestAveraged:
    def test_the_mean_of_values_and_dense_travels_in_one_message(self) -> None:
        values, dense = torch.randn(3, 5), torch.randn(3, 2)
        outcomes, collectives = _average(values, dense)
        for mean, dense_mean in outcomes:
            torch.testing.assert_close(mean, values.mean(0))
            torch.testing.assert_close(dense_mean, dense.mean(0))
        assert all(own.operations == ["all_reduce"] for own in collectives)
        assert all(own.wire_bytes == 7 * VALUE_BYTES for own in collectives)

    @pytest.mark.parametrize(
        ("dtype", "mean_dtype"),
        [
            (torch.bfloat16, torch.float32),
            (torch.float16, torch.float32),
            (torch.float32, torch.float32),
            (torch.float64, torch.float64),
        ],
    )
    def test_sums_are_made_in_at_least_float32(self, dtype: torch.dtype, mean_dtype: torch.dtype) -> None:
        # in half precision the sum of these would overflow or lose the small one
        values = torch.tensor([[60_000.0, 256.0], [60_000.0, 1.0]]).to(dtype)
        outcomes, _ = _average(values, torch.zeros(2, 0))
        for mean, _ in outcomes:
            assert mean.dtype == mean_dtype
            assert mean.tolist() == [float(values[0, 0]), 128.5]

    @pytest.mark.parametrize(("num_values", "num_dense"), [(0, 3), (3, 0)])
    def test_either_part_may_be_empty(self, num_values: int, num_dense: int) -> None:
        values, dense = torch.ones(2, num_values), torch.ones(2, num_dense)
        outcomes, collectives = _average(values, dense)
        assert all((len(mean), len(dense_mean)) == (num_values, num_dense) for mean, dense_mean in outcomes)
        assert all(own.wire_bytes == 3 * VALUE_BYTES for own in collectives)

    def test_nothing_to_average_is_no_message(self) -> None:
        outcomes, collectives = _average(torch.zeros(2, 0), torch.zeros(2, 0))
        assert all(len(mean) == len(dense_mean) == 0 for mean, dense_mean in outcomes)
        assert all(not own.messages and own.wire_bytes == 0 for own in collectives)

    def test_the_given_vectors_are_left_as_they_were(self) -> None:
        values, dense = torch.ones(2, 3), torch.ones(2, 2)
        _average(values, dense)
        assert values.eq(1).all()
        assert dense.eq(1).all()


class TestGathered:
    @given(by_rank=overlapping)
    def test_every_rank_receives_every_proposal_by_rank(self, by_rank: list[list[int]]) -> None:
        received, _ = _gather(by_rank, Moment(len(by_rank), NUMEL, target=5))
        assert received == [by_rank] * len(by_rank)

    @given(by_rank=overlapping)
    def test_where_all_propose_one_message_is_padded_to_the_largest_count(self, by_rank: list[list[int]]) -> None:
        _, collectives = _gather(by_rank, Moment(len(by_rank), NUMEL, target=5))
        most = max(len(indices) for indices in by_rank)
        assert all(own.operations == ["all_gather"] * bool(most) for own in collectives)
        assert all(own.wire_bytes == _index_bytes(most, NUMEL) for own in collectives)

    @pytest.mark.usefixtures("filled_memory")
    def test_padding_is_zero_and_not_what_lay_in_memory(self) -> None:
        _, collectives = _gather([[5, 7, 9, 11], [9], []], Moment(3, NUMEL, target=5))
        words = [own.messages[0].tensor[HEADER_BYTES:].view(torch.int32).tolist() for own in collectives]
        # of which three bits are the low ones
        assert words == [[0b11011, 5 | 7 << 3 | 1 << 6 | 3 << 9], [0b10, 1], [0, 0]]

    def test_where_few_propose_each_of_them_broadcasts_and_the_others_hand_over_nothing(self) -> None:
        moment = Moment(5, NUMEL, target=5, proposers=(1, 3))
        received, collectives = _gather([[], [4, 9], [], [2, 9, 11], []], moment)
        assert received == [[[4, 9], [2, 9, 11]]] * 5
        assert all([(m.operation, m.source) for m in own.messages] == [("broadcast", 1), ("broadcast", 3)]
                   for own in collectives)  # fmt: skip
        # as many bytes as the one with the most needs
        assert [own.wire_bytes for own in collectives] == [0, _index_bytes(3, NUMEL), 0, _index_bytes(3, NUMEL), 0]

    def test_where_no_proposer_has_anything_nothing_travels(self) -> None:
        received, collectives = _gather([[], [], []], Moment(3, NUMEL, target=5, proposers=(0, 1)))
        assert received == [[[], []]] * 3
        assert not any(own.messages for own in collectives)

    def test_what_a_rank_has_that_does_not_propose_makes_no_message_longer(self) -> None:
        moment = Moment(3, NUMEL, target=5, proposers=(1,))
        received, collectives = _gather([list(range(40)), [7], []], moment)
        assert received == [[[7]]] * 3
        assert [own.wire_bytes for own in collectives] == [0, _index_bytes(1, NUMEL), 0]

    @given(by_rank=overlapping, room=st.integers(1, 20))
    def test_no_more_than_the_room_travels(self, by_rank: list[list[int]], room: int) -> None:
        received, collectives = _gather(by_rank, Moment(len(by_rank), NUMEL, target=5), room=room)
        assert received == [[positions(thinned(torch.tensor(indices), room)) for indices in by_rank]] * len(by_rank)
        most = min(room, max(len(indices) for indices in by_rank))
        assert all(own.wire_bytes == _index_bytes(most, NUMEL) for own in collectives)

    @given(numel=st.integers(1, 5000), world=st.integers(1, 6), index=st.integers(0, 20), data=st.data())
    def test_exclusive_partitions_are_written_from_their_own_start(
        self, numel: int, world: int, index: int, data: st.DataObject
    ) -> None:
        chosen = data.draw(st.lists(st.integers(0, numel - 1), unique=True).map(sorted))
        borders = even_borders(numel, world)
        owned = [(index + rank) % world for rank in range(world)]
        by_rank = [[place for place in chosen if borders[p] <= place < borders[p + 1]] for p in owned]
        received, collectives = _gather(by_rank, Moment(world, numel, 5, index=index), region=RotatingSlices())
        assert received == [by_rank] * world
        most, widest = max(len(indices) for indices in by_rank), -(-numel // world)
        assert all(own.wire_bytes == _index_bytes(most, widest) for own in collectives)

    def test_a_message_damaged_on_its_way_is_refused(self) -> None:
        def damage(message: Tensor) -> None:
            message[HEADER_BYTES] += 1

        with pytest.raises(WireError, match="2 indices was damaged on its way"):
            _gather([[4, 9], [2]], Moment(2, NUMEL, target=5), damage=damage)

    def test_a_rank_with_a_longer_vector_is_refused(self) -> None:
        def replace(message: Tensor) -> None:
            message.copy_(encode(torch.tensor([32, NUMEL]), 30, Shape.of(2, NUMEL)))

        with pytest.raises(WireError, match=f"indices from 32 to {NUMEL}, outside 0:{NUMEL}"):
            _gather([[4, 9], [2]], Moment(2, NUMEL, target=5), damage=replace)

    def test_an_index_outside_the_territory_is_not_sent(self) -> None:
        with pytest.raises(ValueError, match=f"indices from 2 to {NUMEL} came for a message of those in 0:{NUMEL}"):
            _gather([[4, 9], [2, NUMEL]], Moment(2, NUMEL, target=5))

    def test_of_what_exceeds_the_room_so_much_travels_evenly_spread(self) -> None:
        by_rank = [list(range(10)), [4, 5], list(range(20, 27)), [1, 2, 3, 4]]
        received, _ = _gather(by_rank, Moment(4, NUMEL, target=5), room=4)
        assert received == [[[0, 2, 5, 7], [4, 5], [20, 21, 23, 25], [1, 2, 3, 4]]] * 4

    def test_a_broadcast_is_bounded_by_the_room_too(self) -> None:
        moment = Moment(3, NUMEL, target=5, proposers=(1,))
        received, collectives = _gather([[], list(range(9)), []], moment, room=3)
        assert received == [[[0, 3, 6]]] * 3
        assert [own.wire_bytes for own in collectives] == [0, _index_bytes(3, NUMEL), 0]

    @given(by_rank=overlapping, room=st.integers(1, 25))
    def test_with_room_a_team_gathers_what_ranks_in_lockstep_do(self, by_rank: list[list[int]], room: int) -> None:
        moment, counts = Moment(len(by_rank), NUMEL, target=5), tuple(len(indices) for indices in by_rank)
        received, _ = _gather(by_rank, moment, room=room)
        indices = torch.tensor([index for indices in by_rank for index in indices], dtype=torch.int64)
        step = moment.of(0)
        view = View(step, torch.empty(0), None, Whole().known(None, step))
        team = TeamCollectives(moment.world, torch.device("cpu"))
        pieces = run(gathered(view, Proposal(indices, counts, room=room), counts, team))
        assert [positions(piece) for piece in pieces] == received[0]
        assert [len(piece) for piece in pieces] == [min(count, room) for count in counts]

    def test_the_only_rank_proposes_as_one_of_many_would(self) -> None:
        received, collectives = _gather([[1, 2]], Moment(1, NUMEL, target=5))
        assert received == [[[1, 2]]]
        assert collectives[0].wire_bytes == _index_bytes(2, NUMEL)

    @pytest.mark.parametrize("numel", [1, 2**31 - 1, 2**31, 2**33])
    @pytest.mark.parametrize("proposers", [None, (0,)])
    def test_an_index_arrives_wherever_it_lies(self, numel: int, proposers: tuple[int, ...] | None) -> None:
        moment = Moment(2, numel, target=1, proposers=proposers)
        received, collectives = _gather([[numel - 1], []], moment)
        assert received[1][0] == [numel - 1]
        assert collectives[0].messages[0].tensor.dtype == torch.uint8
        assert collectives[0].wire_bytes == _index_bytes(1, numel)


def _check_law(exchange: Exchange, by_rank: Sequence[Sequence[int]], moment: Moment) -> list[int]:
    """What holds for every exchange of indices; returns the support."""
    acc, proposals = torch.randn(moment.world, moment.numel), _proposals(by_rank)
    before = acc.clone()
    outcomes, collectives = reduce(exchange, acc, proposals, moment)
    assert all(same_outcome(outcome, outcomes[0]) for outcome in outcomes)
    support = positions(outcomes[0].indices)
    assert all(low < high for low, high in pairwise(support))
    assert positions(outcomes[0].sent) == support
    assert outcomes[0].counts == proposals[0].counts
    assert outcomes[0].distinct == len({index for indices in by_rank for index in indices})
    assert outcomes[0].thresholds == (0.5,)
    torch.testing.assert_close(outcomes[0].mean, acc[:, support].mean(0))
    assert torch.equal(acc, before)
    most = max(len(indices) for indices in by_rank)
    handed = _index_bytes(most, moment.numel) + len(support) * VALUE_BYTES
    assert all(own.wire_bytes == handed for own in collectives)
    return support


class TestUnion:
    @given(by_rank=overlapping)
    def test_the_support_is_everything_that_anyone_proposed_once(self, by_rank: list[list[int]]) -> None:
        support = _check_law(Union(), by_rank, Moment(len(by_rank), NUMEL, target=5))
        assert support == sorted({index for indices in by_rank for index in indices})

    def test_few_proposers_decide_for_all_but_every_rank_gives_its_values(self) -> None:
        acc, moment = torch.randn(4, NUMEL), Moment(4, NUMEL, target=3, proposers=(2,))
        outcomes, collectives = reduce(Union(), acc, _proposals([[], [], [3, 30], []]), moment)
        for outcome in outcomes:
            assert positions(outcome.indices) == [3, 30]
            torch.testing.assert_close(outcome.mean, acc[:, [3, 30]].mean(0))
        assert all(own.operations == ["broadcast", "all_reduce"] for own in collectives)
        assert [own.wire_bytes for own in collectives] == [8, 8, 8 + _index_bytes(2, NUMEL), 8]


class TestSteeredUnion:
    @given(by_rank=overlapping, ceiling=st.floats(1, 4), target=st.integers(1, 10))
    def test_a_union_too_large_is_cut_to_the_target_and_what_is_left_out_is_not_sent(
        self, by_rank: list[list[int]], ceiling: float, target: int
    ) -> None:
        support = _check_law(SteeredUnion(ceiling), by_rank, Moment(len(by_rank), NUMEL, target))
        union = {index for indices in by_rank for index in indices}
        assert set(support) <= union
        assert len(support) <= ceiling * target
        assert len(support) == len(union) or len(support) == target < len(union)

    def test_what_is_left_out_is_spread_evenly_so_that_no_tensor_is_cut_off(self) -> None:
        by_rank = [list(range(1000)), list(range(500, 1500))]
        support = _check_law(SteeredUnion(2.0), by_rank, Moment(2, 1500, target=150))
        assert len(support) == 150
        quarters = [sum(start <= index < start + 375 for index in support) for start in range(0, 1500, 375)]
        assert all(abs(number - 37.5) <= 1 for number in quarters)

    @pytest.mark.parametrize(
        ("ceiling", "union", "support"),
        [
            (2.0, 105, 105),
            (2.0, 106, 100),
            (1.02, 102, 102),
            (1.02, 103, 100),
            (1.0, 100, 100),
            (1.0, 101, 100),
            (2.0, 40, 40),  # too small: the next step proposes more
        ],
    )
    def test_the_cut_begins_at_five_per_cent_or_the_ceiling(self, ceiling: float, union: int, support: int) -> None:
        by_rank = [list(range(0, union, 2)), list(range(1, union, 2))]
        moment = Moment(2, 1000, target=100)
        (outcome, _), collectives = reduce(SteeredUnion(ceiling), torch.zeros(2, 1000), _proposals(by_rank), moment)
        assert len(positions(outcome.indices)) == support
        assert outcome.distinct == union
        assert all(own.operations == ["all_gather", "all_reduce"] for own in collectives)

    def test_counts_are_what_was_proposed_and_distinct_is_what_travelled(self) -> None:
        proposals = [each._replace(room=4) for each in _proposals([list(range(8)), [0, 1]])]
        (outcome, _), _ = reduce(SteeredUnion(2.0), torch.zeros(2, NUMEL), proposals, Moment(2, NUMEL, target=20))
        assert positions(outcome.indices) == positions(outcome.sent) == [0, 1, 2, 4, 6]
        assert (outcome.counts, outcome.distinct) == ((8, 2), 5)


class TestDisjoint:
    @given(numel=st.integers(1, NUMEL), world=st.integers(1, 6), index=st.integers(0, 20), data=st.data())
    def test_slices_in_rotation_give_an_ascending_support_without_sorting(
        self, numel: int, world: int, index: int, data: st.DataObject
    ) -> None:
        chosen = data.draw(st.lists(st.integers(0, numel - 1), unique=True).map(sorted))
        borders = even_borders(numel, world)
        owned = [(index + rank) % world for rank in range(world)]
        by_rank = [[place for place in chosen if borders[p] <= place < borders[p + 1]] for p in owned]
        assert _check_law(Disjoint(), by_rank, Moment(world, numel, target=5, index=index)) == chosen

    @given(chosen=st.lists(st.integers(0, NUMEL - 1), unique=True), world=st.integers(1, 5), index=st.integers(0, 9))
    def test_proposals_that_interleave_are_sorted(self, chosen: list[int], world: int, index: int) -> None:
        by_rank = [sorted(chosen[rank::world]) for rank in range(world)]
        support = _check_law(Disjoint(in_rotation=False), by_rank, Moment(world, NUMEL, target=5, index=index))
        assert support == sorted(chosen)

    def test_what_finds_no_room_is_not_sent(self) -> None:
        proposals = [each._replace(room=2) for each in _proposals([[0, 1, 2, 3], [5], [6, 7, 8]])]
        (outcome, *_), _ = reduce(Disjoint(), torch.zeros(3, 9), proposals, Moment(3, 9, target=3))
        assert positions(outcome.indices) == positions(outcome.sent) == [0, 2, 5, 6, 7]
        assert (outcome.counts, outcome.distinct) == ((4, 1, 3), 5)

    @pytest.mark.usefixtures("filled_memory")
    def test_a_rank_without_proposals_adds_none_by_its_padding(self) -> None:
        acc = torch.ones(3, 9)
        outcomes, _ = reduce(Disjoint(), acc, _proposals([[1, 2], [], [7]]), Moment(3, 9, target=3))
        assert positions(outcomes[0].indices) == [1, 2, 7]


class TestAgreed:
    def test_no_index_travels(self) -> None:
        acc, agreed = torch.randn(3, NUMEL), [1, 5, 44]
        outcomes, collectives = reduce(Agreed(), acc, _proposals([agreed] * 3), Moment(3, NUMEL, target=3))
        for outcome in outcomes:
            assert positions(outcome.indices) == positions(outcome.sent) == agreed
            torch.testing.assert_close(outcome.mean, acc[:, agreed].mean(0))
        assert all(own.operations == ["all_reduce"] for own in collectives)
        assert all(own.wire_bytes == 3 * VALUE_BYTES for own in collectives)

    def test_everything_needs_no_indices_at_all_and_leaves_the_vector_alone(self) -> None:
        acc = torch.randn(2, NUMEL)
        before = acc.clone()
        outcomes, collectives = reduce(Agreed(), acc, [Proposal(ALL, (NUMEL, NUMEL))] * 2, Moment(2, NUMEL, NUMEL))
        assert outcomes[0].indices == outcomes[0].sent == ALL
        torch.testing.assert_close(outcomes[0].mean, acc.mean(0))
        assert torch.equal(acc, before)
        assert all(own.wire_bytes == NUMEL * VALUE_BYTES for own in collectives)


class TestReduce:
    @pytest.mark.parametrize("exchange", [Union(), Disjoint(in_rotation=False)], ids=repr)
    def test_counts_travel_only_where_they_are_not_known(self, exchange: Exchange) -> None:
        acc, by_rank, moment = torch.randn(2, NUMEL), [[1, 2, 3], [10]], Moment(2, NUMEL, target=2)
        unknown, asking = reduce(exchange, acc, _proposals(by_rank, counted=False), moment)
        known, knowing = reduce(exchange, acc, _proposals(by_rank), moment)
        assert all(same_outcome(one, other) for one, other in zip(unknown, known, strict=True))
        assert all(own.operations == ["all_gather", "all_gather", "all_reduce"] for own in asking)
        assert all(own.operations == ["all_gather", "all_reduce"] for own in knowing)
        assert all(a.wire_bytes == k.wire_bytes + COUNT_BYTES for a, k in zip(asking, knowing, strict=True))

    @pytest.mark.parametrize("exchange", [Union(), Disjoint(), Agreed()], ids=repr)
    def test_no_proposals_are_no_message_and_no_support(self, exchange: Exchange) -> None:
        outcomes, collectives = reduce(exchange, torch.randn(3, 9), _proposals([[], [], []]), Moment(3, 9, target=1))
        assert all(len(positions(outcome.indices)) == len(outcome.mean) == 0 for outcome in outcomes)
        assert all(not own.messages for own in collectives)

    @pytest.mark.parametrize("exchange", [Union(), Disjoint(), Agreed()], ids=repr)
    def test_what_goes_dense_rides_with_the_values(self, exchange: Exchange) -> None:
        acc, dense, proposals = torch.randn(1, 9), torch.randn(1, 4), _proposals([[2, 5]])
        alone, _ = reduce(exchange, acc, proposals, Moment(1, 9, target=2))
        (outcome,), (own,) = reduce(exchange, acc, proposals, Moment(1, 9, target=2), dense=dense)
        assert torch.equal(outcome.dense, dense[0])
        assert torch.equal(outcome.mean, alone[0].mean)
        assert own.operations.count("all_reduce") == 1
        assert own.messages[-1].num_bytes == (2 + 4) * VALUE_BYTES

    @given(by_rank=overlapping, num_dense=st.integers(0, 5), counted=st.booleans())
    def test_the_bytes_counted_are_the_bytes_handed_over(
        self, by_rank: list[list[int]], num_dense: int, counted: bool
    ) -> None:
        world = len(by_rank)
        acc, dense = torch.ones(world, NUMEL), torch.ones(world, num_dense)
        proposals = _proposals(by_rank, counted=counted)
        _, collectives = reduce(SteeredUnion(1.5), acc, proposals, Moment(world, NUMEL, target=4), dense=dense)
        assert all(own.wire_bytes == sum(map(_num_bytes, own.messages)) for own in collectives)

    def test_with_a_wire_of_fewer_bits_what_goes_dense_is_a_message_of_its_own(self) -> None:
        acc, dense, moment = torch.randn(2, 9), torch.randn(2, 4), Moment(2, 9, target=3)
        proposals, given = _proposals([[2, 5], [7]]), dense.clone()
        for beside, operations in ((dense, ["all_to_all", "all_gather", "all_reduce"]), (None, None)):
            outcomes, collectives = reduce(Union(), acc, proposals, moment, dense=beside, wire=torch.bfloat16)
            for outcome, row, own in zip(outcomes, acc, collectives, strict=True):
                assert own.operations[1:] == (operations or ["all_to_all", "all_gather"])
                assert [message.tensor.dtype for message in own.messages[1:3]] == [torch.bfloat16] * 2
                assert outcome.mean.dtype == outcome.dense.dtype == torch.float32
                assert outcome.rest is not None
                assert (outcome.rest.abs() <= 2**-7 * row[outcome.sent].abs() + 2**-7 * acc.abs().max()).all()
            rest = torch.stack([outcome.rest for outcome in outcomes if outcome.rest is not None])
            torch.testing.assert_close(2 * outcomes[0].mean + rest.sum(0), acc[:, outcomes[0].sent].sum(0))
            if beside is not None:
                assert torch.equal(outcomes[0].dense, dense.mean(0))
            assert torch.equal(dense, given)

    def test_with_float32_nothing_of_what_was_sent_is_left(self) -> None:
        outcomes, _ = reduce(Union(), torch.randn(2, 9), _proposals([[2], [7]]), Moment(2, 9, target=2))
        assert all(outcome.rest is None for outcome in outcomes)

    def test_a_bfloat16_vector_is_averaged_in_float32(self) -> None:
        acc = torch.tensor([[256.0, 0.0], [1.0, 0.0]], dtype=torch.bfloat16)
        outcomes, _ = reduce(Union(), acc, _proposals([[0], [0]]), Moment(2, 2, target=1))
        assert all(outcome.mean.dtype == torch.float32 for outcome in outcomes)
        assert all(outcome.mean.tolist() == [128.5] for outcome in outcomes)


class TestOvershoot:
    """See [Note: overshooting] in `exchange`."""

    @pytest.mark.parametrize("share", [0.25, 0.5])
    @pytest.mark.parametrize("name", ["union", "topk", "cltk", "micro", "exdyna", "iwp"])
    def test_parameters_lag_less_behind_steady_gradients(self, name: str, share: float) -> None:
        steady = torch.linspace(0.5, 2, 400).expand(120, 3, 400)
        lags = []
        for overshoot in (0.0, share):
            method = gradsieve.method(name, density=0.1, overshoot=overshoot)
            trace = gradsieve.simulate(method, steady, parameters=torch.ones(400))
            applied = trace.mean.cumsum(0)
            lags.append(float((steady[:, 0].cumsum(0) - applied)[60:].mean()))
            torch.testing.assert_close(applied[-1] * 3 + trace.residual.sum(0), steady.sum((0, 1)))
        none, some = lags
        # between sendings an entry goes from -share to 1 of what is sent without, over 1 + share
        assert some == pytest.approx(none * (1 - share) / (1 + share), rel=0.25)

    def test_a_sum_that_was_rounded_is_owed_as_it_was_applied(self) -> None:
        values, rest = torch.tensor([1.0, -3.0, 0.0]), torch.tensor([0.125, -0.5, 0.0])
        after = owed(values, rest, 0.5)
        applied = (values - rest) * 1.5
        assert torch.equal(applied + after, values)

    def test_of_what_is_not_finite_nothing_is_kept(self) -> None:
        assert not owed(torch.tensor([float("nan"), float("inf"), -float("inf")]), None, 0.5).any()

    @pytest.mark.parametrize("bad", [-0.1, 1.0, 2, float("nan"), "much", True])
    def test_bad_shares_are_refused(self, bad: object) -> None:
        with pytest.raises((ValueError, TypeError), match="overshoot must be"):
            gradsieve.union(overshoot=bad)  # type: ignore[arg-type]


def _num_bytes(message: Message) -> int:
    return message.num_bytes
