from __future__ import annotations

import copy
import io
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gradsieve
import toys
from gradsieve import METHODS, Method, wire
from gradsieve.collectives import lockstep
from gradsieve.exchange import Disjoint, SteeredUnion
from gradsieve.pipeline import Learned, imbalance, reduce_step
from gradsieve.types import ALL, Span, StepStats, View
from gradsieve.wire import Shape, decode, encode
from ranks import Crew, Moment, Outcome, positions, recorders, same_outcome, same_support

WORLD, NUMEL, DENSITY = 3, 600, 0.05
BOUNDS = (0, 7, 207, 500, 600)

# Every method as it comes, and every option that makes a step remember or look at something else.
METHODS_AS_THEY_COME = [
    constructor() if name == "dense" else constructor(density=DENSITY) for name, constructor in METHODS.items()
]
METHODS_WITH_OPTIONS = [
    gradsieve.micro(density=DENSITY, control="paper"),
    gradsieve.exdyna(density=DENSITY, control="paper"),
    gradsieve.exdyna(density=DENSITY, blocks="paper"),
    gradsieve.iwp(density=DENSITY, num_broadcasters=2, per_layer=True, momentum=0.5, stochastic=True),
    gradsieve.dgc(density=DENSITY, warmup_steps=6, sample=0.2),
    gradsieve.union(density=DENSITY, ceiling=1.0),
    gradsieve.oktopk(density=DENSITY, ceiling=1.0),
]
ALL_METHODS = METHODS_AS_THEY_COME + METHODS_WITH_OPTIONS
every_method = pytest.mark.parametrize("method", ALL_METHODS, ids=repr)
with_momentum, without_momentum = (
    pytest.mark.parametrize("method", [m for m in ALL_METHODS if bool(m.feedback.momentum) == momentum], ids=repr)
    for momentum in (True, False)
)


def _crew(method: Method, *, seed: int = 0, world: int = WORLD, dtype: torch.dtype = torch.float32) -> Crew:
    return Crew(method, world, NUMEL, bounds=BOUNDS, seed=seed, dtype=dtype)


def _gradients(step: int, world: int = WORLD) -> Tensor:
    """Gradients of a step: the same whenever they are asked for, layers of different scales."""
    generator = torch.Generator().manual_seed(step)
    scales = torch.tensor([1.0, 0.01, 3.0, 0.1]).repeat_interleave(torch.tensor(BOUNDS).diff())
    return torch.randn(world, NUMEL, generator=generator) * scales


def _whole_numbers(step: int) -> Tensor:
    """Gradients whose sums are exact, in whatever order they are made."""
    return torch.randint(-50, 51, (WORLD, NUMEL), generator=torch.Generator().manual_seed(step)).float()


PARAMETERS = torch.linspace(-2, 3, NUMEL)


def _same_outcomes(left: Sequence[Outcome], right: Sequence[Outcome]) -> bool:
    return all(same_outcome(one.reduced, other.reduced) for one, other in zip(left, right, strict=True))


def _vectors(crew: Crew) -> list[Tensor]:
    """All that error feedback remembers, by rank."""
    kept = [(worker.residual.acc, worker.residual.velocity) for worker in crew.workers]
    return [vector for vectors in kept for vector in vectors if vector is not None]


def _same_vectors(left: Crew, right: Crew) -> bool:
    return all(torch.equal(one, other) for one, other in zip(_vectors(left), _vectors(right), strict=True))


def _cut(numel: int, seed: int) -> list[tuple[int, int]]:
    """The vector in a dozen pieces of random sizes, empty ones among them, in random order."""
    draw = random.Random(seed)
    cuts = sorted([0, numel, *(draw.randrange(numel + 1) for _ in range(11))])
    pieces = list(itertools.pairwise(cuts))
    draw.shuffle(pieces)
    return pieces


def _through_a_file(state: Any) -> Any:
    """Saved and loaded as a careful user does."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _continued(crew: Crew, method: Method) -> Crew:
    """Fresh workers that go on from what the crew saved."""
    fresh = _crew(method, seed=99)
    for ours, theirs in zip(fresh.workers, crew.workers, strict=True):
        ours.load_state_dict(_through_a_file(theirs.state_dict()))
    for ours_kept, theirs_kept in zip(_vectors(fresh), _vectors(crew), strict=True):
        ours_kept.copy_(theirs_kept)
    return fresh


class TestState:
    @pytest.mark.parametrize("saved_after", [0, 1, 7])
    @every_method
    def test_a_loaded_worker_goes_on_bit_for_bit(self, method: Method, saved_after: int) -> None:
        crew = _crew(method, seed=5)
        for step in range(saved_after):
            crew.step(_gradients(step), PARAMETERS)
        loaded = _continued(crew, method)
        for step in range(saved_after, saved_after + 6):
            original, continued = (runner.step(_gradients(step), PARAMETERS) for runner in (crew, loaded))
            assert _same_outcomes(original, continued)
            assert _same_vectors(crew, loaded)
        assert str(crew.workers[0].state_dict()) == str(loaded.workers[0].state_dict())

    @every_method
    def test_a_saved_state_does_not_change_when_training_goes_on(self, method: Method) -> None:
        crew = _crew(method)
        for step in range(3):
            crew.step(_gradients(step), PARAMETERS)
        state = crew.workers[0].state_dict()
        before = copy.deepcopy(state)
        for step in range(3, 9):
            crew.step(_gradients(step), PARAMETERS)
        assert str(state) == str(before)
        assert _flat(state) == _flat(before)

    @every_method
    def test_what_is_learned_is_the_same_on_all_ranks_and_names_step_and_seed(self, method: Method) -> None:
        crew = _crew(method, seed=11)
        for step in range(4):
            crew.step(_gradients(step), PARAMETERS)
        states = [worker.state_dict() for worker in crew.workers]
        assert all(_flat(state) == _flat(states[0]) for state in states)
        assert (states[0]["step"], states[0]["seed"]) == (4, 11)

    def test_the_seed_comes_back_with_the_state(self) -> None:
        crew = _crew(gradsieve.randomk(density=DENSITY), seed=5)
        crew.step(_gradients(0))
        stranger = _crew(gradsieve.randomk(density=DENSITY), seed=6)
        stranger.step(_gradients(0))
        draws = [positions(runner.step(_gradients(1))[0].reduced.indices) for runner in (crew, stranger)]
        assert draws[0] != draws[1], "seeds draw differently, or the round trip above shows nothing"


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    """Tensors as lists, so that states can be compared."""
    parts = {key: value if isinstance(value, dict) else {"": value} for key, value in state.items()}
    return {
        f"{key}.{name}": value.tolist() if isinstance(value, Tensor) else value
        for key, part in parts.items()
        for name, value in part.items()
    }


class TestFeeding:
    @pytest.mark.parametrize("seed", range(3))
    @every_method
    def test_pieces_in_any_order_give_the_same_as_the_whole_bit_for_bit(self, method: Method, seed: int) -> None:
        whole, pieced = _crew(method), _crew(method)
        for step in range(8):
            gradients = _gradients(step)
            at_once = whole.step(gradients, PARAMETERS)
            in_pieces = pieced.step(gradients, PARAMETERS, pieces=_cut(NUMEL, seed=100 * seed + step))
            assert _same_outcomes(at_once, in_pieces)
            assert _same_vectors(whole, pieced)

    @every_method
    def test_entry_by_entry_backwards_gives_the_same_as_the_whole(self, method: Method) -> None:
        whole, pieced = _crew(method), _crew(method)
        backwards = [(place, place + 1) for place in reversed(range(NUMEL))]
        for step in range(2):
            gradients = _gradients(step)
            assert _same_outcomes(
                whole.step(gradients, PARAMETERS), pieced.step(gradients, PARAMETERS, pieces=backwards)
            )
            assert _same_vectors(whole, pieced)

    @every_method
    def test_ranks_may_feed_in_different_orders(self, method: Method) -> None:
        whole, pieced = _crew(method), _crew(method)
        for step in range(4):
            gradients = _gradients(step)
            expected = whole.step(gradients, PARAMETERS)
            for rank, worker in enumerate(pieced.workers):
                worker.begin(lambda: PARAMETERS)
                for start, stop in _cut(NUMEL, seed=10 * step + rank):
                    worker.feed(start, gradients[rank, start:stop])
            assert _same_outcomes(expected, pieced.finish(pieced.exchange()))

    def test_gradients_of_any_shape_and_layout_are_taken_in_by_their_elements(self) -> None:
        crew = _crew(gradsieve.dense(), world=1)
        crew.workers[0].begin()
        crew.workers[0].feed(0, torch.arange(300.0).view(20, 15))
        crew.workers[0].feed(300, torch.arange(600.0)[::2])
        assert torch.equal(crew.residual[0], torch.cat([torch.arange(300.0), torch.arange(600.0)[::2]]))

    @every_method
    def test_the_gradients_are_left_as_they_were(self, method: Method) -> None:
        crew, gradients = _crew(method), _gradients(0)
        crew.step(gradients, PARAMETERS)
        assert torch.equal(gradients, _gradients(0))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_gradients_and_residual_may_differ_in_precision(
        self, dtype: torch.dtype, residual_dtype: torch.dtype
    ) -> None:
        crew = _crew(gradsieve.dgc(density=DENSITY), dtype=residual_dtype)
        gradients = _gradients(0).to(dtype)
        (outcome, *_) = crew.step(gradients)
        assert crew.residual.dtype == residual_dtype
        assert outcome.reduced.mean.dtype == torch.promote_types(residual_dtype, torch.float32)


class TestGivenUpSteps:
    @without_momentum
    def test_a_step_begun_and_not_finished_loses_nothing(self, method: Method) -> None:
        interrupted, expected = _crew(method), _crew(method)
        for crew in (interrupted, expected):
            crew.step(_whole_numbers(0), PARAMETERS)
        interrupted.feed(_whole_numbers(1), PARAMETERS)
        outcomes = interrupted.step(_whole_numbers(2), PARAMETERS)
        assert _same_outcomes(outcomes, expected.step(_whole_numbers(1) + _whole_numbers(2), PARAMETERS))
        assert _same_vectors(interrupted, expected)
        assert [worker.step for worker in interrupted.workers] == [2] * WORLD

    @without_momentum
    def test_whenever_it_is_given_up(self, method: Method) -> None:
        # after a part of the gradient, and after the exchange, whose outcome nobody takes
        interrupted, expected = _crew(method), _crew(method)
        interrupted.feed(_whole_numbers(0), PARAMETERS, pieces=[(0, 100), (350, NUMEL)])
        interrupted.feed(_whole_numbers(1), PARAMETERS)
        interrupted.exchange()
        outcomes = interrupted.step(_whole_numbers(2), PARAMETERS)
        first = _whole_numbers(0)
        first[:, 100:350] = 0
        total = first + _whole_numbers(1) + _whole_numbers(2)
        assert _same_outcomes(outcomes, expected.step(total, PARAMETERS))
        assert _same_vectors(interrupted, expected)

    @with_momentum
    def test_with_momentum_the_velocity_goes_on_from_the_step_given_up(self, method: Method) -> None:
        crew, momentum = _crew(method), method.feedback.momentum
        crew.feed(_gradients(0), PARAMETERS)
        crew.feed(torch.zeros(WORLD, NUMEL), PARAMETERS)
        torch.testing.assert_close(crew.residual, (1 + momentum) * _gradients(0))

    @every_method
    def test_the_record_of_the_next_step_counts_that_step_alone(self, method: Method) -> None:
        crew, undisturbed = _crew(method), _crew(method)
        crew.feed(torch.zeros(WORLD, NUMEL), PARAMETERS)
        crew.exchange()
        records = [runner.step(_gradients(0), PARAMETERS)[1].pending.read() for runner in (crew, undisturbed)]
        assert [(stats.step, stats.wire_bytes) for stats in records] == [(0, records[1].wire_bytes)] * 2


class TestUnapplied:
    @every_method
    def test_spans_that_nobody_applies_keep_their_residual(self, method: Method) -> None:
        crew, spans = _crew(method), [Span(207, 500), Span(0, 7)]
        for step in range(5):
            crew.feed(_gradients(step), PARAMETERS)
            before = _named_vectors(crew)
            outcomes = crew.finish(crew.exchange(), spans)
            for kept, vectors, outcome in zip(_named_vectors(crew), before, outcomes, strict=True):
                for name, whole in vectors.items():
                    expected = _left(name, whole, outcome)
                    for span in spans:
                        expected[span.start : span.stop] = whole[span.start : span.stop]
                    assert torch.equal(kept[name], expected)

    @every_method
    def test_the_sum_over_ranks_is_what_was_applied_and_what_is_left(self, method: Method) -> None:
        crew, span = _crew(method, dtype=torch.float64), Span(100, 450)
        for step in range(6):
            crew.feed(_gradients(step), PARAMETERS)
            before = crew.residual.sum(0)
            (first, *_) = crew.finish(crew.exchange(), [span])
            mean = torch.zeros(NUMEL, dtype=torch.float64)
            mean[first.reduced.indices] = first.reduced.mean
            mean[span.start : span.stop] = 0
            assert torch.allclose(WORLD * mean + crew.residual.sum(0), before, rtol=1e-12, atol=1e-12)

    @every_method
    def test_nothing_applied_is_nothing_cleared_and_the_method_learns_all_the_same(self, method: Method) -> None:
        applied, unapplied = _crew(method), _crew(method)
        applied.step(_gradients(0), PARAMETERS)
        unapplied.step(_gradients(0), PARAMETERS, unapplied=[Span(0, NUMEL)])
        assert torch.equal(unapplied.residual, _gradients(0))
        assert _flat(applied.workers[0].state_dict()) == _flat(unapplied.workers[0].state_dict())


def _support(outcome: Outcome) -> Tensor:
    indices = outcome.reduced.indices
    return indices if isinstance(indices, Tensor) else torch.arange(NUMEL)[indices]


def _named_vectors(crew: Crew) -> list[dict[str, Tensor]]:
    """A copy of all that error feedback remembers, by rank and name."""
    return [{name: vector.clone() for name, vector in worker.residual.named()} for worker in crew.workers]


def _left(name: str, whole: Tensor, outcome: Outcome) -> Tensor:
    """What is left of a rank's vector once its step is over."""
    reduced, left = outcome.reduced, whole.clone()
    left[reduced.sent] = 0
    if name == "residual" and reduced.rest is not None:
        left[reduced.sent] = reduced.rest
    return left


class TestWorker:
    @every_method
    def test_all_ranks_come_to_the_same_outcome_bit_for_bit(self, method: Method) -> None:
        crew = _crew(method)
        for step in range(6):
            (first, *others) = crew.step(_gradients(step), PARAMETERS)
            assert all(same_support(other.reduced, first.reduced) for other in others)

    @pytest.mark.parametrize("world", [2, 5])
    @every_method
    def test_what_is_sent_leaves_the_residual_and_nothing_else_does(self, method: Method, world: int) -> None:
        crew = _crew(method, world=world)
        for step in range(4):
            crew.feed(_gradients(step, world), PARAMETERS)
            before = _named_vectors(crew)
            outcomes = crew.finish(crew.exchange())
            assert all(same_support(outcome.reduced, outcomes[0].reduced) for outcome in outcomes)
            for kept, vectors, outcome in zip(_named_vectors(crew), before, outcomes, strict=True):
                assert all(torch.equal(kept[name], _left(name, whole, outcome)) for name, whole in vectors.items())
                # where everyone gives its values, all of the support leaves every residual, and nothing comes
                if method.name not in toys.BY_SUMS:
                    assert torch.equal(torch.arange(NUMEL)[outcome.reduced.sent], _support(outcomes[0]))
                    assert outcome.reduced.rest is None

    @every_method
    def test_what_goes_dense_is_averaged_beside_and_changes_nothing_else(self, method: Method) -> None:
        alone, beside, dense = _crew(method), _crew(method), torch.randn(WORLD, 9)
        for step in range(3):
            plain = alone.step(_gradients(step), PARAMETERS)
            outcomes = beside.step(_gradients(step), PARAMETERS, dense=dense)
            for outcome, expected in zip(outcomes, plain, strict=True):
                torch.testing.assert_close(outcome.reduced.dense, dense.mean(0))
                assert same_outcome(outcome.reduced._replace(dense=expected.reduced.dense), expected.reduced)
            assert _same_vectors(alone, beside)

    def test_a_world_that_does_not_fit_the_method_is_refused_at_construction(self) -> None:
        with pytest.raises(ValueError, match="num_broadcasters=4, but there are only 3 ranks"):
            _crew(gradsieve.iwp(num_broadcasters=4))

    @pytest.mark.parametrize("method", [*ALL_METHODS, gradsieve.iwp(density=DENSITY, per_layer=True)], ids=repr)
    @pytest.mark.parametrize("bounds", [(0, 0), (0,)], ids=["an empty tensor", "no tensor"])
    def test_a_vector_without_entries_is_not_special(self, method: Method, bounds: tuple[int, ...]) -> None:
        crew = Crew(method, WORLD, 0, bounds=bounds)
        for _ in range(2):
            outcomes = crew.step(torch.zeros(WORLD, 0), torch.zeros(0), dense=torch.ones(WORLD, 2))
            assert all(outcome.reduced.dense.tolist() == [1.0, 1.0] for outcome in outcomes)
            assert outcomes[0].pending.read().support == 0

    @pytest.mark.parametrize("name", ["dgc", "iwp", "micro", "exdyna", "union"])
    def test_the_target_follows_the_budget_of_the_step(self, name: str) -> None:
        crew = _crew(gradsieve.method(name, density=DENSITY, warmup_steps=4))
        records = [crew.step(_gradients(step), PARAMETERS)[0].pending.read() for step in range(6)]
        targets = [record.target for record in records]
        assert targets == sorted(targets, reverse=True)
        assert (targets[0], targets[-1]) == (150, 30)
        if name != "dgc":
            # in the first step `union` does not know yet how many entries ranks propose alike
            first = 1 if name == "union" else 0
            assert [record.support for record in records[first:]] == pytest.approx(targets[first:], rel=0.1)


class TestReduceStep:
    def test_a_region_that_needs_the_gradient_settles_before_the_criterion_scans(self) -> None:
        method, acc = gradsieve.deft(density=0.1), torch.zeros(2, 40)
        acc[:, 20:] = torch.arange(1.0, 21.0)
        moment, collectives = Moment(2, 40, target=4, bounds=(0, 20, 40)), recorders(2)
        learned = Learned(method.region.start(moment.of(0).setup), method.criterion.start(moment.of(0).setup))
        views = [View(moment.of(rank), acc[rank], None) for rank in range(2)]
        steps = [reduce_step(method, learned, view, own) for view, own in zip(views, collectives, strict=True)]
        outcomes = lockstep(steps)
        assert all(same_outcome(outcome, outcomes[0]) for outcome in outcomes)
        # the norms are all in the second tensor, which both ranks share out, and its largest entries go first
        assert {38, 39} <= set(positions(outcomes[0].indices))
        assert isinstance(method.exchange, Disjoint)

    @every_method
    def test_the_vector_is_read_and_not_written(self, method: Method) -> None:
        crew = _crew(method)
        crew.feed(_gradients(0), PARAMETERS)
        before = [vector.clone() for vector in _vectors(crew)]
        crew.exchange()
        assert all(torch.equal(now, then) for now, then in zip(_vectors(crew), before, strict=True))


def _records(method: Method, steps: int = 3, dense: Tensor | None = None) -> list[tuple[Outcome, StepStats]]:
    """Rank 1's steps and the records of them."""
    crew = _crew(method)
    outcomes = [crew.step(_gradients(step), PARAMETERS, dense=dense)[1] for step in range(steps)]
    return [(outcome, outcome.pending.read()) for outcome in outcomes]


class TestPendingStats:
    @every_method
    def test_the_record_says_what_happened(self, method: Method) -> None:
        for step, (outcome, stats) in enumerate(_records(method)):
            support = len(_support(outcome))
            assert (stats.step, stats.numel, stats.support) == (step, NUMEL, support)
            assert stats.target == method.budget.target(step, NUMEL)
            assert stats.density == pytest.approx(support / NUMEL)
            assert stats.counts == outcome.reduced.counts
            assert stats.imbalance == pytest.approx(imbalance(stats.counts))
            assert stats.ratio_values == pytest.approx(NUMEL / support)
            assert stats.select_seconds > 0
            assert stats.exchange_seconds > 0

    @pytest.mark.parametrize("num_dense", [0, 13])
    @every_method
    def test_the_bytes_are_those_handed_over_to_collectives(self, method: Method, num_dense: int) -> None:
        for outcome, stats in _records(method, dense=torch.ones(WORLD, num_dense)):
            # a rank that receives a broadcast hands over nothing
            handed = [message for message in outcome.messages if message.source in (None, 1)]
            assert stats.wire_bytes == sum(message.num_bytes for message in handed)
            assert (stats.dense_numel, stats.dense_bytes) == (num_dense, 4 * num_dense)
            assert stats.ratio_wire == pytest.approx(4 * NUMEL / (stats.wire_bytes - 4 * num_dense))

    @pytest.mark.parametrize("method", [m for m in ALL_METHODS if m.name not in toys.BY_SUMS], ids=repr)
    def test_the_indices_handed_over_are_those_proposed(self, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
        shapes: dict[bytes, Shape] = {}

        def encode_and_note(indices: Tensor, start: int, shape: Shape) -> Tensor:
            message = encode(indices, start, shape)
            shapes[message.numpy().tobytes()] = shape
            return message

        monkeypatch.setattr(wire, "encode", encode_and_note)
        for outcome, stats in _records(method):
            handed = [message.tensor for message in outcome.messages if message.source in (None, 1)]
            messages = [message for message in handed if message.dtype == torch.uint8]
            proposed = [decode(message, shapes[message.numpy().tobytes()]).indices for message in messages]
            if proposed:
                assert sum(map(len, proposed)) == stats.counts[1]
            if not isinstance(method.exchange, SteeredUnion):  # which may leave some of them out
                assert all(torch.isin(indices, _support(outcome)).all() for indices in proposed)

    @pytest.mark.parametrize(
        ("method", "most"),
        [
            (gradsieve.micro(density=0.01), 1.5),
            (gradsieve.micro(density=0.001), 2.1),
            (gradsieve.union(density=0.01), 2.4),
            # of some 125 indices of a rank: the header takes 0.2 of it, and what is padded to the longest 0.3
            (gradsieve.union(density=0.001), 2.7),
        ],
        ids=repr,
    )
    def test_indices_travel_in_few_bytes(self, method: Method, most: float) -> None:
        """The bytes of all messages of indices, headers and what is padded included, for each entry of the support."""
        world, numel = 16, 2_000_000
        crew = Crew(method, world, numel)
        for _ in range(3):
            outcome = crew.step(torch.randn(world, numel))[0]
            stats = outcome.pending.read()
            (num_bytes,) = [message.num_bytes for message in outcome.messages if message.tensor.dtype == torch.uint8]
            assert world * num_bytes <= most * stats.support
            assert stats.wire_bytes == sum(message.num_bytes for message in outcome.messages)

    def test_dense_sends_every_value_and_nothing_else(self) -> None:
        (_, stats) = _records(gradsieve.dense(), steps=1)[0]
        assert (stats.support, stats.wire_bytes, stats.threshold) == (NUMEL, 4 * NUMEL, None)
        assert (stats.ratio_values, stats.ratio_wire, stats.imbalance) == (1.0, 1.0, 0.0)

    @every_method
    def test_a_record_read_late_is_still_that_of_its_step(self, method: Method) -> None:
        crew, reading = _crew(method), _crew(method)
        pending = [crew.step(_gradients(step), PARAMETERS)[0].pending for step in range(5)]
        at_once = [reading.step(_gradients(step), PARAMETERS)[0].pending.read() for step in range(5)]
        late = [record.read() for record in pending]
        assert [_untimed(stats) for stats in late] == [_untimed(stats) for stats in at_once]
        assert [record.read() for record in pending] == late

    @pytest.mark.parametrize("name", ["dense", "topk", "randomk", "cltk", "deft", "gtopk"])
    def test_methods_without_a_threshold_report_none(self, name: str) -> None:
        method = gradsieve.method(name)
        assert all(stats.threshold is None for _, stats in _records(method))

    @pytest.mark.parametrize("name", ["hard_threshold", "sidco", "dgc", "micro", "exdyna", "union", "iwp", "oktopk"])
    def test_methods_with_a_threshold_report_it(self, name: str) -> None:
        for outcome, stats in _records(gradsieve.method(name, density=DENSITY)):
            assert stats.threshold == outcome.reduced.thresholds[0] > 0

    def test_the_threshold_of_many_tensors_is_the_median_of_those_that_were_applied(self) -> None:
        # nine tensors in ten are worth less than an entry: they have no threshold in most steps, which is not zero
        sizes = [5] * 36 + [NUMEL - 180]
        bounds = tuple(itertools.accumulate(sizes, initial=0))
        crew = Crew(gradsieve.iwp(density=DENSITY, per_layer=True), WORLD, NUMEL, bounds=bounds)
        for step in range(4):
            (first, *_) = crew.step(_gradients(step), PARAMETERS)
            applied = [threshold for threshold in first.reduced.thresholds if threshold]
            assert len(applied) < len(sizes) / 2, "few enough, or the test shows nothing"
            reported = first.pending.read().threshold
            assert reported is not None
            assert min(applied) <= reported <= max(applied)

    def test_an_empty_support_compresses_without_limit(self) -> None:
        crew = _crew(gradsieve.micro(density=DENSITY))
        stats = crew.step(torch.zeros(WORLD, NUMEL))[0].pending.read()
        assert (stats.support, stats.density, stats.imbalance) == (0, 0.0, 0.0)
        assert stats.ratio_values == float("inf")


def _untimed(stats: StepStats) -> tuple[object, ...]:
    return (
        *(stats.step, stats.numel, stats.target, stats.support, stats.density, stats.threshold, stats.counts),
        *(
            stats.imbalance,
            stats.wire_bytes,
            stats.link_bytes,
            stats.num_messages,
            stats.dense_numel,
            stats.dense_bytes,
        ),
    )


class TestImbalance:
    @given(count=st.integers(1, 10**9), world=st.integers(1, 64))
    def test_equal_counts_are_balanced(self, count: int, world: int) -> None:
        assert imbalance([count] * world) == pytest.approx(0)

    @given(world=st.integers(1, 64), place=st.integers(0, 63), count=st.integers(1, 10**9))
    def test_one_rank_with_everything_is_the_worst_there_is(self, world: int, place: int, count: int) -> None:
        counts = [0] * world
        counts[place % world] = count
        assert imbalance(counts) == pytest.approx(world - 1)

    @given(counts=st.lists(st.integers(0, 10**6), min_size=1, max_size=20), factor=st.integers(1, 1000))
    def test_it_lies_between_and_does_not_depend_on_scale_or_order(self, counts: list[int], factor: int) -> None:
        value = imbalance(counts)
        assert -1e-12 <= value <= len(counts) - 1 + 1e-9
        assert imbalance([factor * count for count in counts]) == pytest.approx(value)
        assert imbalance(sorted(counts)) == value

    def test_nothing_is_balanced(self) -> None:
        assert imbalance((0, 0, 0)) == 0

    def test_it_says_how_much_longer_the_padded_gather_is(self) -> None:
        counts = (30, 10, 20)
        assert (1 + imbalance(counts)) * sum(counts) == pytest.approx(len(counts) * max(counts))


def test_everything_is_all() -> None:
    """`dense` moves no index: its support is a slice, and so is what it clears."""
    crew = _crew(gradsieve.dense())
    (first, *_) = crew.step(_gradients(0))
    assert first.reduced.indices == first.reduced.sent == ALL
    assert crew.residual.count_nonzero() == 0
