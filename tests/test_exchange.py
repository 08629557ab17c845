from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.collectives import lockstep
from gradsieve.exchange import Agreed, Disjoint, Exchange, SteeredUnion, Union, averaged, gathered
from gradsieve.region import even_borders
from gradsieve.types import ALL, Proposal
from ranks import Message, Moment, Recording, positions, recorders, reduce, same_outcome

INDEX_BYTES = VALUE_BYTES = 4
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


def _gather(by_rank: Sequence[Sequence[int]], moment: Moment) -> tuple[list[list[list[int]]], list[Recording]]:
    """The pieces that each rank receives."""
    collectives, counts = recorders(moment.world), tuple(len(indices) for indices in by_rank)
    steps = [
        gathered(moment.of(rank), torch.tensor(indices, dtype=torch.int64), counts, collectives[rank])
        for rank, indices in enumerate(by_rank)
    ]
    return [[positions(piece) for piece in pieces] for pieces in lockstep(steps)], collectives


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
        assert all(own.wire_bytes == most * INDEX_BYTES for own in collectives)

    @pytest.mark.usefixtures("filled_memory")
    def test_padding_is_zero_and_not_what_lay_in_memory(self) -> None:
        _, collectives = _gather([[5, 6, 7, 8], [9], []], Moment(3, NUMEL, target=5))
        assert [own.messages[0].tensor.tolist() for own in collectives] == [[5, 6, 7, 8], [9, 0, 0, 0], [0, 0, 0, 0]]

    def test_where_few_propose_each_of_them_broadcasts_and_the_others_hand_over_nothing(self) -> None:
        moment = Moment(5, NUMEL, target=5, proposers=(1, 3))
        received, collectives = _gather([[], [4, 9], [], [2, 9, 11], []], moment)
        assert received == [[[4, 9], [2, 9, 11]]] * 5
        assert all([(m.operation, m.source) for m in own.messages] == [("broadcast", 1), ("broadcast", 3)]
                   for own in collectives)  # fmt: skip
        assert [own.wire_bytes for own in collectives] == [0, 2 * INDEX_BYTES, 0, 3 * INDEX_BYTES, 0]

    def test_a_proposer_with_nothing_broadcasts_nothing(self) -> None:
        received, collectives = _gather([[], [7], []], Moment(3, NUMEL, target=5, proposers=(0, 1)))
        assert received == [[[], [7]]] * 3
        assert all([m.source for m in own.messages] == [1] for own in collectives)

    def test_the_only_rank_proposes_as_one_of_many_would(self) -> None:
        received, collectives = _gather([[1, 2]], Moment(1, NUMEL, target=5))
        assert received == [[[1, 2]]]
        assert collectives[0].wire_bytes == 2 * INDEX_BYTES

    @pytest.mark.parametrize(
        ("numel", "dtype"), [(1, torch.int32), (2**31 - 1, torch.int32), (2**31, torch.int64), (2**40, torch.int64)]
    )
    @pytest.mark.parametrize("proposers", [None, (0,)])
    def test_an_index_takes_four_bytes_wherever_they_hold_it(
        self, numel: int, dtype: torch.dtype, proposers: tuple[int, ...] | None
    ) -> None:
        moment = Moment(2, numel, target=1, proposers=proposers)
        received, collectives = _gather([[numel - 1], []], moment)
        assert received[1][0] == [numel - 1]
        assert collectives[0].messages[0].tensor.dtype == dtype
        assert collectives[0].wire_bytes == dtype.itemsize


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
    assert all(own.wire_bytes == most * INDEX_BYTES + len(support) * VALUE_BYTES for own in collectives)
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
        assert [own.wire_bytes for own in collectives] == [8, 8, 16, 8]


def _proposing(orders: Sequence[Sequence[int]], rank: int, done: int, more: int) -> Proposal:
    """The next `more` of each rank's entries in its order of preference, and how to get further ones."""
    pieces = [order[done : done + more] for order in orders]

    async def further(entries: int) -> Proposal:
        return _proposing(orders, rank, done + more, -(-entries // len(orders)))

    counts = tuple(len(piece) for piece in pieces)
    return Proposal(torch.tensor(sorted(pieces[rank]), dtype=torch.int64), counts, (1 / (1 + done + more),), further)


preferences = st.lists(st.permutations(range(NUMEL)), min_size=1, max_size=4)


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

    @given(orders=preferences, target=st.integers(1, NUMEL), first=st.integers(0, NUMEL), ceiling=st.floats(1, 2))
    def test_a_union_too_small_is_filled_up_to_the_target(
        self, orders: list[list[int]], target: int, first: int, ceiling: float
    ) -> None:
        world, acc = len(orders), torch.randn(len(orders), NUMEL)
        proposals = [_proposing(orders, rank, 0, first) for rank in range(world)]
        outcomes, collectives = reduce(SteeredUnion(ceiling), acc, proposals, Moment(world, NUMEL, target))
        assert all(same_outcome(outcome, outcomes[0]) for outcome in outcomes)
        support = positions(outcomes[0].indices)
        assert support == positions(outcomes[0].sent) == sorted(set(support))
        assert 0.95 * target <= len(support) <= min(1.05, ceiling) * target
        torch.testing.assert_close(outcomes[0].mean, acc[:, support].mean(0))
        assert all(own.wire_bytes == sum(map(_num_bytes, own.messages)) for own in collectives)

    @given(orders=preferences, target=st.integers(1, NUMEL), first=st.integers(1, NUMEL))
    def test_counts_add_up_over_the_rounds_and_the_last_thresholds_hold(
        self, orders: list[list[int]], target: int, first: int
    ) -> None:
        proposals = [_proposing(orders, rank, 0, first) for rank in range(len(orders))]
        moment = Moment(len(orders), NUMEL, target)
        (outcome, *_), _ = reduce(SteeredUnion(2.0), torch.zeros(len(orders), NUMEL), proposals, moment)
        (count,) = set(outcome.counts)
        assert outcome.distinct == len({index for order in orders for index in order[:count]})
        assert outcome.thresholds[0] <= 1 / (1 + count)

    def test_a_union_near_the_target_costs_no_second_round(self) -> None:
        proposals = [_proposing([range(60), range(60)], rank, 0, 39) for rank in range(2)]
        outcomes, collectives = reduce(SteeredUnion(2.0), torch.zeros(2, 60), proposals, Moment(2, 60, target=40))
        assert len(positions(outcomes[0].indices)) == 39
        assert all(own.operations == ["all_gather", "all_reduce"] for own in collectives)

    def test_where_nothing_more_can_be_proposed_the_union_stays_small(self) -> None:
        proposals = [_proposing([range(3), range(2, 6)], rank, 0, 2) for rank in range(2)]
        outcomes, _ = reduce(SteeredUnion(2.0), torch.zeros(2, 60), proposals, Moment(2, 60, target=40))
        assert all(positions(outcome.indices) == [0, 1, 2, 3, 4, 5] for outcome in outcomes)


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

    def test_a_bfloat16_vector_is_averaged_in_float32(self) -> None:
        acc = torch.tensor([[256.0, 0.0], [1.0, 0.0]], dtype=torch.bfloat16)
        outcomes, _ = reduce(Union(), acc, _proposals([[0], [0]]), Moment(2, 2, target=1))
        assert all(outcome.mean.dtype == torch.float32 for outcome in outcomes)
        assert all(outcome.mean.tolist() == [128.5] for outcome in outcomes)


def _num_bytes(message: Message) -> int:
    return message.num_bytes
