from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve import score
from gradsieve.score import Importance, Look, Magnitude, Score, chunks, collect, collect_for_team, joined
from gradsieve.types import Candidates, Setup, Span, Step, View
from gradsieve.weights import Weights

CPU = torch.device("cpu")
BOUNDS = (0, 7, 7, 20, 50)  # the second tensor is empty
NUMEL = BOUNDS[-1]
SCORES: list[Score] = [Magnitude(), Importance(), Importance(eps=0.5, stochastic=True)]
each_score = pytest.mark.parametrize("measure", SCORES, ids=repr)


def view_of(
    acc: Tensor,
    parameters: Tensor | None = None,
    bounds: tuple[int, ...] = BOUNDS,
) -> View:
    step = Step(index=0, rank=0, seed=0, target=1, proposers=(0, 1), setup=Setup(2, len(acc), bounds))
    flat = torch.linspace(-2, 3, len(acc)) if parameters is None else parameters
    return View(step, acc, Weights(lambda: flat, bounds))


def random_view() -> View:
    return view_of(torch.randn(NUMEL), torch.randn(NUMEL))


@each_score
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_scores_are_at_least_single_precision_and_never_negative(measure: Score, dtype: torch.dtype) -> None:
    scores = measure(view_of(torch.randn(NUMEL).to(dtype)), 3, 30)
    assert torch.promote_types(scores.dtype, torch.float32) == scores.dtype
    assert len(scores) == 27
    assert bool((scores >= 0).all())


@each_score
@pytest.mark.parametrize("cuts", [[25], [7, 20], [0, 3, 10, 10, 33, 50]])
def test_scores_do_not_depend_on_how_the_vector_is_cut(measure: Score, cuts: list[int]) -> None:
    view = random_view()
    whole = measure(view, 0, NUMEL)
    pieces = [measure(view, start, stop) for start, stop in itertools.pairwise([0, *cuts, NUMEL])]
    assert torch.equal(torch.cat(pieces), whole)


@each_score
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scoring_leaves_the_accumulator_and_the_parameters_alone(measure: Score, dtype: torch.dtype) -> None:
    acc, parameters = torch.randn(NUMEL).abs().to(dtype), torch.randn(NUMEL)
    before = acc.clone(), parameters.clone()
    measure(view_of(acc, parameters), 0, NUMEL)
    assert torch.equal(acc, before[0])
    assert torch.equal(parameters, before[1])


def test_magnitude_is_the_size_of_an_entry() -> None:
    assert Magnitude()(view_of(torch.tensor([3.0, -4.0, 0.0]), bounds=(0, 3)), 0, 2).tolist() == [3.0, 4.0]


def test_only_importance_asks_for_parameters() -> None:
    assert not Magnitude().needs_weights
    assert Importance().needs_weights


def test_importance_weighs_an_entry_against_its_parameter_and_its_tensor() -> None:
    acc = torch.tensor([1.0, -1.0, 2.0, 2.0])
    parameters = torch.tensor([3.0, -4.0, 0.0, 2.0])
    scores = Importance(eps=0.1)(view_of(acc, parameters, bounds=(0, 2, 4)), 0, 4)
    first, second = 0.1 * 12.5**0.5, 0.1 * 2**0.5
    expected = torch.tensor([1 / (3 + first), 1 / (4 + first), 2 / second, 2 / (2 + second)])
    torch.testing.assert_close(scores, expected)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_importance_is_free_of_the_scale_of_a_layer(scale: float) -> None:
    acc, parameters = torch.randn(NUMEL), torch.randn(NUMEL)
    scores = Importance()(view_of(acc, parameters), 0, NUMEL)
    acc[7:20] *= scale
    parameters[7:20] *= scale
    torch.testing.assert_close(Importance()(view_of(acc, parameters), 0, NUMEL), scores)


@pytest.mark.parametrize("eps", [0.1, 0.0])
def test_an_entry_at_rest_has_no_importance_even_if_its_parameter_is_zero(eps: float) -> None:
    acc, parameters = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.0, 2.0, 2.0])
    scores = Importance(eps=eps)(view_of(acc, parameters, bounds=(0, 3)), 0, 3)
    assert scores[[0, 2]].tolist() == [0.0, 0.0]


def test_stochastic_importance_passes_with_probability_score_over_threshold() -> None:
    numel = 40_000
    view = view_of(torch.full((numel,), 0.3), torch.ones(numel), bounds=(0, numel))
    scores = Importance(eps=0.0, stochastic=True)(view, 0, numel)
    for threshold in (0.4, 1.0, 3.0):
        assert float((scores >= threshold).float().mean()) == pytest.approx(0.3 / threshold, abs=0.015)


def test_stochastic_importance_always_passes_what_reaches_the_threshold_anyway() -> None:
    view = random_view()
    certain, drawn = (Importance(stochastic=stochastic)(view, 0, NUMEL) for stochastic in (False, True))
    assert bool((drawn >= certain).all())


@pytest.mark.parametrize("change", [{"seed": 1}, {"index": 1}, {"rank": 1}])
def test_stochastic_importance_draws_anew_for_each_seed_step_and_rank(change: dict[str, int]) -> None:
    view, measure = random_view(), Importance(stochastic=True)
    elsewhere = replace(view, step=replace(view.step, **change))  # type: ignore[arg-type]
    drawn = measure(view, 0, NUMEL)
    assert torch.equal(drawn, measure(view, 0, NUMEL))
    assert not torch.equal(drawn, measure(elsewhere, 0, NUMEL))


spans_in_order = st.lists(st.integers(0, NUMEL), min_size=2, max_size=8).map(
    lambda borders: [Span(*pair) for pair in itertools.pairwise(sorted(borders))][::2]
)


@given(spans_in_order, st.integers(1, 60))
def test_chunks_cover_the_spans_in_pieces_of_limited_size(spans: list[Span], size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score, "CHUNK", size)
        pieces = list(chunks(spans, CPU))
    assert all(0 < stop - start <= size for start, stop, _ in pieces)
    covered = [entry for start, stop, _ in pieces for entry in range(start, stop)]
    assert covered == [entry for start, stop, _ in spans for entry in range(start, stop)]


@each_score
@pytest.mark.parametrize("threshold", [0.0, 0.5, 1e9])
@pytest.mark.parametrize("chunk", [1, 6, 1000])
def test_collect_finds_what_reaches_the_threshold_in_any_order_of_spans(
    measure: Score, threshold: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "CHUNK", chunk)
    view, spans = random_view(), [Span(30, 45), Span(2, 2), Span(5, 18), Span(18, 19)]
    candidates = collect(measure, view, spans, threshold)
    scores = measure(view, 0, NUMEL)
    entries = [entry for start, stop in ((5, 19), (30, 45)) for entry in range(start, stop)]
    assert candidates.indices.tolist() == [entry for entry in entries if scores[entry] >= threshold]
    assert torch.equal(candidates.scores, scores[candidates.indices])


@pytest.mark.parametrize("spans", [[], [Span(4, 4)]])
def test_collect_of_no_span_finds_nothing(spans: list[Span]) -> None:
    candidates = collect(Magnitude(), random_view(), spans, 0.0)
    assert candidates.indices.dtype == torch.int64
    assert (len(candidates.indices), len(candidates.scores)) == (0, 0)


def looks_of(spans_by_rank: list[list[Span]]) -> list[Look]:
    """What every rank of a team looks at; each has an accumulator of its own, with ties and entries without value."""
    setup, parameters = Setup(len(spans_by_rank), NUMEL, BOUNDS), torch.randn(NUMEL)
    proposers = tuple(range(len(spans_by_rank)))
    looks: list[Look] = []
    for rank, spans in enumerate(spans_by_rank):
        acc = torch.randn(NUMEL)
        acc[::3] = acc[::3].round()
        acc[rank], acc[-1 - rank] = torch.nan, torch.inf
        step = Step(index=3, rank=rank, seed=0, target=1, proposers=proposers, setup=setup)
        looks.append((View(step, acc, Weights(lambda: parameters, BOUNDS)), spans))
    return looks


def assert_collects_like_each_rank(measure: Score, looks: list[Look], threshold: float) -> None:
    team = collect_for_team(measure, looks, threshold)
    each = [collect(measure, view, spans, threshold) for view, spans in looks]
    assert team.indices.dtype == torch.int64
    assert team.indices.tolist() == [
        rank * NUMEL + position for rank, own in enumerate(each) for position in own.indices.tolist()
    ]
    torch.testing.assert_close(team.scores, torch.cat([own.scores for own in each]), rtol=0, atol=0, equal_nan=True)


@each_score
@given(st.lists(spans_in_order, min_size=1, max_size=4), st.sampled_from([0.0, 0.5, 1.0, 1e9]))
@example([[]], 0.0)
@example([[], [Span(0, NUMEL)], []], 1.0)
@example([[Span(0, 0)], [Span(NUMEL, NUMEL)]], 0.0)
def test_a_team_collects_what_each_of_its_ranks_collects(
    measure: Score, spans_by_rank: list[list[Span]], threshold: float
) -> None:
    torch.manual_seed(0)
    assert_collects_like_each_rank(measure, looks_of(spans_by_rank), threshold)


@pytest.mark.parametrize("chunk", [1, 6, 1000])
def test_a_team_collects_the_same_however_ranks_chop_their_work(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score, "CHUNK", chunk)
    looks = looks_of([[Span(0, 20), Span(30, 50)], [Span(10, 11)], [Span(0, NUMEL)]])
    assert_collects_like_each_rank(Magnitude(), looks, 0.7)


def test_joined_orders_stretches_by_index_and_keeps_scores_with_them() -> None:
    # backward finishes the last layers first
    late = Candidates(torch.tensor([40, 41, 47]), torch.tensor([0.1, 0.2, 0.3]), start=38)
    early = Candidates(torch.tensor([3, 9]), torch.tensor([0.4, 0.5]), start=2)
    candidates = joined([late, early], CPU)
    assert candidates.indices.tolist() == [3, 9, 40, 41, 47]
    torch.testing.assert_close(candidates.scores, torch.tensor([0.4, 0.5, 0.1, 0.2, 0.3]))
