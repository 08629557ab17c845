from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gradsieve
from gradsieve.criterion import (
    Above,
    Everything,
    ExponentialFit,
    Fixed,
    Largest,
    Sampled,
    SharedRandom,
    Stages,
    Stepped,
    Stepping,
    shared_draw,
)
from gradsieve.region import RotatingSlices
from gradsieve.score import joined
from gradsieve.types import ALL, Reduced, Span, Territory, View
from ranks import Moment, drawn, pick, positions

SPARSIFYING_RULES = [Fixed(), Stepped(), ExponentialFit(), Sampled()]


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _reduced(support: int, counts: tuple[int, ...]) -> Reduced:
    """An outcome of which only the sizes matter."""
    indices = torch.arange(support)
    return Reduced(indices, torch.ones(support), torch.empty(0), indices, counts, (), distinct=support)


# Small whole numbers: ties are everywhere, and so are zeros.
vectors = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=40).map(torch.tensor)


class TestEverything:
    def test_every_rank_proposes_the_whole_vector_without_a_word(self) -> None:
        picked = pick(Everything(), torch.randn(3, 10), Moment(3, 10, target=10))
        assert [(proposal.indices, proposal.counts) for proposal in picked.proposals] == [(ALL, (10, 10, 10))] * 3
        assert all(not own.messages for own in picked.collectives)


class TestSharedRandom:
    def test_all_ranks_draw_the_same_entries_whatever_their_gradients_without_a_word(self) -> None:
        picked = pick(SharedRandom(), torch.randn(4, 1000), Moment(4, 1000, target=37))
        assert picked.indices == [picked.indices[0]] * 4
        assert all(not own.messages for own in picked.collectives)

    @given(numel=st.integers(1, 200), data=st.data(), index=st.integers(0, 10**6), seed=st.integers(0, 2**31))
    def test_draws_are_distinct_ascending_and_exactly_the_target(
        self, numel: int, data: st.DataObject, index: int, seed: int
    ) -> None:
        target = data.draw(st.integers(1, numel))
        picked = pick(SharedRandom(), torch.zeros(1, numel), Moment(1, numel, target, index, seed))
        (indices,) = picked.indices
        assert len(indices) == target
        assert all(low < high for low, high in pairwise(indices))
        assert 0 <= indices[0] <= indices[-1] < numel
        assert picked.proposals[0].counts == (target,)

    def test_steps_and_seeds_draw_independently(self) -> None:
        moments = [Moment(1, 10_000, target=1000, index=index, seed=seed) for index in range(3) for seed in range(3)]
        draws = [set(pick(SharedRandom(), torch.zeros(1, 10_000), moment).indices[0]) for moment in moments]
        shared = [len(one & other) for place, one in enumerate(draws) for other in draws[:place]]
        # a tenth of a tenth, give or take six standard deviations
        assert all(abs(number - 100) < 60 for number in shared)

    def test_ranks_of_one_process_draw_once_and_none_changes_what_another_drew(self) -> None:
        before = shared_draw.cache_info().misses
        picked = pick(SharedRandom(), torch.zeros(8, 1000), Moment(8, 1000, target=10, index=123_456))
        assert shared_draw.cache_info().misses == before + 1
        first, second, *_ = (own.indices for own in picked.proposals)
        assert isinstance(first, Tensor)
        assert isinstance(second, Tensor)
        expected = second.tolist()
        first += 1
        assert second.tolist() == expected

    def test_over_the_steps_every_entry_gets_its_turn_equally_often(self) -> None:
        numel, target, steps = 50, 5, 2000
        drawn_entries = Counter[int]()
        for index in range(steps):
            drawn_entries.update(
                pick(SharedRandom(), torch.zeros(1, numel), Moment(1, numel, target, index)).indices[0]
            )
        expected = steps * target / numel
        deviation = math.sqrt(expected * (1 - target / numel))
        assert all(abs(drawn_entries[entry] - expected) < 5 * deviation for entry in range(numel))


class TestLargest:
    @given(vector=vectors, data=st.data())
    def test_nothing_left_behind_is_larger_than_anything_taken(self, vector: Tensor, data: st.DataObject) -> None:
        numel = len(vector)
        target = data.draw(st.integers(1, numel))
        (indices,) = pick(Largest(), vector[None], Moment(1, numel, target)).indices
        assert len(indices) == target
        assert indices == sorted(set(indices))
        taken = vector[indices].abs()
        left = vector.abs()[[place for place in range(numel) if place not in indices]]
        assert len(left) == 0 or taken.min() >= left.max()

    def test_each_span_yields_its_own_quota_in_the_order_of_the_vector(self) -> None:
        acc = torch.tensor([[9.0, 1.0, 8.0, 0.1, 0.3, 0.2, 5.0, 5.0, 5.0]])
        territory = Territory((Span(0, 3, 1), Span(3, 6, 2), Span(6, 9, 0)), (3,))
        picked = pick(Largest(), acc, Moment(1, 9, target=3), territories=[territory])
        assert picked.indices == [[0, 4, 5]]
        assert picked.proposals[0].counts == (3,)

    def test_empty_spans_and_no_spans_yield_nothing(self) -> None:
        territories = [Territory((Span(2, 2, 0),), (0, 0)), Territory((), (0, 0))]
        picked = pick(Largest(), torch.ones(2, 4), Moment(2, 4, target=1), territories=territories)
        assert picked.indices == [[], []]

    def test_only_proposers_look(self) -> None:
        picked = pick(Largest(), torch.ones(3, 8), Moment(3, 8, target=2, proposers=(1,)))
        assert [len(indices) for indices in picked.indices] == [0, 2, 0]
        assert {proposal.counts for proposal in picked.proposals} == {(0, 2, 0)}

    def test_sizes_are_known_without_a_word(self) -> None:
        picked = pick(Largest(), torch.randn(3, 100), Moment(3, 100, target=7))
        assert all(not own.messages for own in picked.collectives)
        assert all(proposal.counts == (7, 7, 7) for proposal in picked.proposals)


class TestAbove:
    @given(vector=vectors, threshold=st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0, 5.0]))
    def test_exactly_the_entries_that_reach_the_threshold_are_proposed(self, vector: Tensor, threshold: float) -> None:
        moment = Moment(1, len(vector) + 1, target=1)
        acc = torch.cat([vector, torch.tensor([-threshold])])
        (indices,) = pick(Above(Fixed(threshold)), acc[None], moment).indices
        assert indices == [place for place, value in enumerate(acc.tolist()) if abs(value) >= threshold]

    def test_only_the_rank_itself_knows_its_number(self) -> None:
        picked = pick(Above(Fixed(0.5)), torch.randn(2, 50), Moment(2, 50, target=5))
        assert all(proposal.counts is None for proposal in picked.proposals)
        assert all(not own.messages for own in picked.collectives)

    def test_each_rank_keeps_to_its_slice(self) -> None:
        picked = pick(Above(Fixed(0.5)), torch.ones(3, 10), Moment(3, 10, target=5, index=1), region=RotatingSlices())
        assert picked.indices == [[4, 5, 6], [7, 8, 9], [0, 1, 2, 3]]

    @pytest.mark.parametrize("rule", SPARSIFYING_RULES, ids=repr)
    @pytest.mark.parametrize("bounded", [False, True])
    def test_who_asks_for_everything_gets_everything_zeros_included(
        self, rule: Fixed | Stepped | ExponentialFit | Sampled, bounded: bool
    ) -> None:
        criterion = Above(rule, at_most=1 if bounded else None)
        picked = pick(criterion, torch.tensor([[0.0, 1e-30, 3.0]]), Moment(1, 3, target=3))
        assert picked.indices == [[0, 1, 2]]

    @pytest.mark.parametrize("rule", [Fixed(0.7), Stepped()], ids=repr)
    def test_scans_of_pieces_in_any_order_find_what_one_scan_finds(self, rule: Fixed | Stepped) -> None:
        criterion, acc = Above(rule), torch.randn(1000)
        view = View(Moment(1, 1000, target=10).of(0), acc, None)
        state = criterion.start(view.step.setup)
        whole = criterion.scan(state, view, [Span(0, 1000)])
        pieces = [criterion.scan(state, view, [Span(*piece)]) for piece in ((700, 1000), (0, 1), (1, 700), (5, 5))]
        assert whole is not None
        pieced = joined([piece for piece in pieces if piece is not None], acc.device)
        assert torch.equal(pieced.indices, whole.indices)
        assert torch.equal(pieced.scores, whole.scores)

    def test_a_rank_that_finds_nothing_proposes_another_entry_of_its_slice_in_each_step(self) -> None:
        criterion, numel, world = Above(Fixed(1.0), at_least_one=True), 12, 3
        for index in range(8):
            picked = pick(criterion, torch.zeros(world, numel), Moment(world, numel, 1, index), region=RotatingSlices())
            starts = [(index + rank) % world * 4 for rank in range(world)]
            assert picked.indices == [[start + index % 4] for start in starts]

    def test_a_rank_that_finds_something_adds_nothing_to_it(self) -> None:
        acc = torch.tensor([[0.0, 2.0, 0.0, 0.0]])
        assert pick(Above(Fixed(1.0), at_least_one=True), acc, Moment(1, 4, target=1)).indices == [[1]]

    def test_a_rank_without_a_slice_proposes_nothing(self) -> None:
        moment = Moment(3, 2, target=1)
        picked = pick(Above(Fixed(1.0), at_least_one=True), torch.zeros(3, 2), moment, region=RotatingSlices())
        assert picked.indices == [[0], [1], []]

    @given(vector=vectors, data=st.data())
    def test_at_most_the_target_keeps_the_largest(self, vector: Tensor, data: st.DataObject) -> None:
        acc = torch.cat([vector, torch.zeros(1)])
        target = data.draw(st.integers(1, len(vector)))
        (indices,) = pick(Above(Fixed(1.0), at_most=1), acc[None], Moment(1, len(acc), target)).indices
        reaching = sorted(acc.abs()[acc.abs() >= 1].tolist(), reverse=True)
        assert indices == sorted(set(indices))
        assert sorted(acc[indices].abs().tolist(), reverse=True) == reaching[:target]

    @pytest.mark.parametrize("rule", SPARSIFYING_RULES, ids=repr)
    def test_a_vector_of_zeros_is_not_sent_beyond_the_target(
        self, rule: Fixed | Stepped | ExponentialFit | Sampled
    ) -> None:
        criterion = Above(rule, at_most=1 if isinstance(rule, Sampled) else None)
        picked = pick(criterion, torch.zeros(1, 1000), Moment(1, 1000, target=10))
        assert len(picked.indices[0]) <= 10

    def test_the_threshold_applied_is_the_one_reported(self) -> None:
        acc = torch.randn(1, 2000)
        for rule in SPARSIFYING_RULES:
            (proposal,) = pick(Above(rule), acc, Moment(1, 2000, target=50)).proposals
            (threshold,) = proposal.thresholds
            assert positions(proposal.indices) == (acc[0].abs() >= threshold).nonzero().flatten().tolist()


class TestFixed:
    @pytest.mark.parametrize(("target", "threshold"), [(1, 0.5), (25, 0.1), (10_000, 0.005)])
    def test_by_default_the_target_sets_the_threshold(self, target: int, threshold: float) -> None:
        step = Moment(1, 10**6, target).of(0)
        assert Fixed().early(Fixed().start(step.setup), step) == pytest.approx(threshold, rel=1e-12)

    def test_the_threshold_never_moves(self) -> None:
        trace = gradsieve.simulate(gradsieve.hard_threshold(density=0.01), torch.randn(5, 2, 400) * 100)
        assert {stats.threshold for stats in trace.stats} == {0.25}


class TestStepped:
    @pytest.mark.parametrize(
        ("support", "factor"),
        [
            (0, 0.995),
            (909, 0.995),
            (910, 1.00125),
            (999, 1.00125),
            (1000, 1.00125),
            (1100, 1.00125),
            (1101, 1.005),
            (50_000, 1.005),
        ],
    )
    def test_the_last_support_moves_the_threshold_as_the_published_code_does(self, support: int, factor: float) -> None:
        step = Moment(4, 10**6, target=1000).of(2)
        after = Stepped().observe(Stepping(0.125), step, _reduced(support, (support, 0, 0, 0)))
        assert after.threshold == pytest.approx(0.125 * factor, rel=1e-12)

    def test_the_first_threshold_is_the_targets_and_the_first_step_moves_it_already(self) -> None:
        step = Moment(1, 10**6, target=100).of(0)
        before = Stepped().start(step.setup)
        assert Stepped().early(before, step) == pytest.approx(0.05)
        assert Stepped().observe(before, step, _reduced(0, (0,))).threshold == pytest.approx(0.05 * 0.995)

    def test_following_a_factor_ten_takes_460_steps(self) -> None:
        step, state, steps = Moment(1, 10**6, target=100).of(0), Stepping(1.0), 0
        while state.threshold < 10:
            state, steps = Stepped().observe(state, step, _reduced(1000, (1000,))), steps + 1
        assert steps in range(455, 466)

    def test_all_ranks_hold_the_same_threshold_though_their_counts_differ(self) -> None:
        simulation = gradsieve.Simulation(gradsieve.micro(density=0.05, control="paper"), 3, 600)
        scales = torch.tensor([[1.0], [0.1], [10.0]])
        for _ in range(10):
            simulation.step(torch.randn(3, 600) * scales)
            assert len({worker.learned.criterion for worker in simulation.workers}) == 1


def _proposed_ratios(method: gradsieve.Method, kind: str, *, world: int, numel: int, steps: int) -> list[float]:
    """Proposals per rank over the target, step by step, with error feedback as in training."""
    simulation, generator = gradsieve.Simulation(method, world, numel), _generator()
    records = [simulation.step(drawn(kind, (world, numel), generator))[1] for _ in range(steps)]
    return [sum(stats.counts) / world / stats.target for stats in records]


class TestExponentialFit:
    @pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
    @pytest.mark.parametrize("target", [20_000, 2000, 200])
    def test_one_stage_hits_the_target_on_exponential_data(self, scale: float, target: int) -> None:
        acc = drawn("laplace", (1, 200_000), _generator()) * scale
        (indices,) = pick(Above(ExponentialFit()), acc, Moment(1, 200_000, target)).indices
        # the number that pass is random: five standard deviations
        assert abs(len(indices) - target) < 5 * math.sqrt(target) + 0.01 * target

    @pytest.mark.parametrize("kind", ["normal", "student"])
    def test_more_stages_fit_another_tail_better_than_one(self, kind: str) -> None:
        acc, moment = drawn(kind, (1, 200_000), _generator()), Moment(1, 200_000, target=200)
        errors = [
            abs(
                math.log(max(1, len(pick(Above(ExponentialFit()), acc, moment, state=Stages(n, 0.0)).indices[0])) / 200)
            )
            for n in (1, 4)
        ]
        assert errors[1] < math.log(1.25) < errors[0]

    @pytest.mark.parametrize("world", [1, 2])
    @pytest.mark.parametrize("density", [0.1, 0.01])
    @pytest.mark.parametrize("kind", ["normal", "laplace", "student"])
    def test_stages_adapt_until_the_proposals_are_near_the_target(self, kind: str, density: float, world: int) -> None:
        ratios = _proposed_ratios(gradsieve.sidco(density=density), kind, world=world, numel=20_000, steps=60)
        assert 0.8 <= sum(ratios[-20:]) / 20 <= 1.2

    @given(counts=st.lists(st.integers(0, 10_000), min_size=5, max_size=5), stages=st.integers(1, 4))
    def test_the_number_of_stages_is_looked_at_every_fifth_step_and_moves_by_one_within_limits(
        self, counts: list[int], stages: int
    ) -> None:
        rule, state = ExponentialFit(), Stages(stages, 0.0)
        for index, count in enumerate(counts):
            assert state.stages == stages
            state = rule.observe(state, Moment(1, 100_000, 1000, index).of(0), _reduced(count, (count,)))
        ratio = sum(counts) / 5 / 1000
        assert 1 <= state.stages <= 4
        assert abs(state.stages - stages) <= 1
        assert state.proposed == 0
        if 0.81 < ratio < 1.19:
            assert state.stages == stages

    def test_too_few_proposals_add_a_stage(self) -> None:
        # accumulated gradients have light tails: one stage finds next to nothing in them, and no fewer can help
        rule, state = ExponentialFit(), Stages(1, 0.0)
        for index in range(5):
            state = rule.observe(state, Moment(2, 100_000, 1000, index).of(0), _reduced(20, (10, 10)))
        assert state.stages == 2

    def test_the_mean_over_ranks_decides_so_that_all_adapt_alike(self) -> None:
        simulation = gradsieve.Simulation(gradsieve.sidco(density=0.01), 3, 5000)
        scales = torch.tensor([[1.0], [1e-3], [1e2]])
        for _ in range(12):
            simulation.step(torch.randn(3, 5000) * scales)
            assert len({worker.learned.criterion for worker in simulation.workers}) == 1


class TestSampled:
    @pytest.mark.parametrize("kind", ["normal", "laplace", "student"])
    @pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
    def test_no_rank_ever_proposes_more_than_the_target_and_usually_not_much_less(
        self, kind: str, density: float
    ) -> None:
        ratios = []
        simulation, generator = gradsieve.Simulation(gradsieve.dgc(density=density), 2, 20_000), _generator()
        for _ in range(15):
            _, stats = simulation.step(drawn(kind, (2, 20_000), generator))
            assert max(stats.counts) <= stats.target
            ratios += [count / stats.target for count in stats.counts]
        assert sum(ratios) / len(ratios) > 0.7

    @pytest.mark.parametrize(
        "vector",
        [torch.zeros(500), torch.ones(500), torch.eye(1, 500)[0], torch.full((500,), 1e38), torch.arange(500.0) % 3],
        ids=["zeros", "ties", "one", "huge", "three values"],
    )
    def test_degenerate_vectors_stay_under_the_target_too(self, vector: Tensor) -> None:
        criterion = Above(Sampled(), at_most=1)
        for index in range(5):
            assert len(pick(criterion, vector[None], Moment(1, 500, target=7, index=index)).indices[0]) <= 7

    @given(seed=st.integers(0, 1000), target=st.integers(1, 99))
    def test_a_sample_of_everything_is_exact(self, seed: int, target: int) -> None:
        acc = torch.randn(100, generator=_generator(seed))
        (indices,) = pick(Above(Sampled(fraction=1.0)), acc[None], Moment(1, 100, target)).indices
        assert indices == sorted(acc.abs().topk(target).indices.tolist())

    def test_steps_sample_different_entries(self) -> None:
        acc = drawn("student", (1, 100_000), _generator())
        moments = [Moment(1, 100_000, 10_000, index) for index in range(20)]
        thresholds = {pick(Above(Sampled()), acc, moment).proposals[0].thresholds for moment in moments}
        assert len(thresholds) == 20

    def test_the_density_warms_up_to_the_target(self) -> None:
        trace = gradsieve.simulate(gradsieve.dgc(density=0.01, warmup_steps=8), torch.randn(10, 1, 10_000))
        targets = [stats.target for stats in trace.stats]
        assert targets[0] == 2500
        assert all(earlier > later for earlier, later in pairwise(targets[:9]))
        assert targets[8:] == [100, 100]
        assert all(stats.support <= stats.target for stats in trace.stats)
