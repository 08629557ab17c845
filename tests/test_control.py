from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradsieve import control

Scores = npt.NDArray[np.float32]

MOST_ROUNDS = 8
TOLERANCE = 0.03
TINY = float(control.from_bits(np.array([control.TINY_BITS]))[0])
HUGE = float(control.from_bits(np.array([control.HUGE_BITS]))[0])


@pytest.mark.parametrize(
    ("target", "threshold"),
    [(1, 0.5), (100, 0.05), (111_739, 0.00149578)],  # the last: ResNet-18 at density 0.01
)
def test_initial_threshold_is_the_published_one(target: int, threshold: float) -> None:
    assert control.initial_threshold(target) == pytest.approx(threshold, rel=1e-5)


@pytest.mark.parametrize(
    ("support", "factor"),
    [
        (0, 0.995),
        (909, 0.995),
        (910, 1.00125),
        (999, 1.00125),  # a branch for "a little below the target" exists in the published code and never runs
        (1000, 1.00125),
        (1100, 1.00125),
        (1101, 1.005),
        (100_000, 1.005),
    ],
)
def test_stepped_threshold_moves_as_the_published_code(support: int, factor: float) -> None:
    assert control.stepped_threshold(0.2, support, 1000) == pytest.approx(0.2 * factor, rel=1e-12)


def test_stepped_threshold_needs_460_steps_for_a_factor_of_ten() -> None:
    threshold, steps = 1.0, 0
    while threshold < 10:
        threshold, steps = control.stepped_threshold(threshold, support=50, target=10), steps + 1
    assert 455 <= steps <= 465


positive_floats = st.floats(float(np.float32(1e-44)), HUGE, width=32, allow_subnormal=True)


@given(positive_floats, positive_floats)
def test_bits_sort_like_the_numbers_they_stand_for(one: float, other: float) -> None:
    assert (one < other) == (control.to_bits(one) < control.to_bits(other))


@given(positive_floats)
def test_bits_give_the_number_back(number: float) -> None:
    assert float(control.from_bits(np.array([control.to_bits(number)]))[0]) == number


@given(st.integers(control.TINY_BITS, control.HUGE_BITS), st.integers(0, control.HUGE_BITS))
@example(control.TINY_BITS, control.HUGE_BITS)
@example(control.TINY_BITS, 0)
def test_ladder_between_rises_from_end_to_end_in_few_even_rungs(low: int, width: int) -> None:
    high = min(low + width, control.HUGE_BITS)
    ladder = control.ladder_between(low, high)
    steps = np.diff(ladder)
    assert (ladder[0], ladder[-1]) == (low, high)
    assert len(ladder) <= control.NUM_RUNGS
    assert (steps > 0).all()
    assert len(steps) == 0 or steps.max() - steps.min() <= 1


@given(st.floats(TINY, HUGE, width=32))
@example(TINY)
@example(HUGE)
def test_first_ladder_holds_the_last_threshold_among_normal_numbers(last: float) -> None:
    ladder = control.first_ladder(last)
    assert control.to_bits(last) in ladder
    assert (np.diff(ladder) > 0).all()
    assert ladder[0] >= control.TINY_BITS
    assert ladder[-1] <= control.HUGE_BITS
    assert control.lowest_rung(last) == control.from_bits(ladder)[0] <= last


@pytest.mark.parametrize("last", [1e-20, 1e-6, 1.0, 1.25, 1.5, 7.999, 1e20])
def test_first_ladder_is_fine_near_the_last_threshold_and_reaches_a_third_above_it(last: float) -> None:
    thresholds = control.from_bits(control.first_ladder(last)).astype(np.float64) / last
    # lower would let a tenth of the vector pass the first sieve
    assert 0.7 < thresholds[0] < 0.9
    assert 1.3 < thresholds[-1] < 1.7
    near = thresholds[(thresholds > 0.97) & (thresholds < 1.03)]
    assert np.diff(near).max() < 0.005


def test_without_a_last_threshold_the_ladder_spans_every_scale() -> None:
    ladder = control.first_ladder(0.0)
    assert (ladder[0], ladder[-1]) == (control.TINY_BITS, control.HUGE_BITS)


normal_floats = st.floats(TINY, HUGE, width=32)


@given(normal_floats, normal_floats)
@example(TINY, TINY)
@example(HUGE, HUGE)
@example(1.0, HUGE)
@example(1.0, TINY)
@example(1.0, 0.9)
def test_no_rung_of_a_first_ladder_lies_below_a_floor_that_the_last_threshold_reaches(
    last: float, floor: float
) -> None:
    ladder, whole = control.first_ladder(last, floor), control.first_ladder(last)
    assert control.to_bits(last) in ladder
    if floor <= last:
        assert ladder.tolist() == [rung for rung in whole.tolist() if rung >= control.to_bits(floor)]
    else:
        assert ladder.tolist() == whole.tolist()


@pytest.mark.parametrize("last", [TINY, 1e-6, 1.0, HUGE])
def test_a_floor_below_all_rungs_or_none_at_all_changes_nothing(last: float) -> None:
    whole = control.first_ladder(last).tolist()
    assert control.first_ladder(last, 0.0).tolist() == whole
    assert control.first_ladder(last, control.lowest_rung(last)).tolist() == whole


def test_a_floor_at_the_last_threshold_leaves_it_as_the_lowest_rung() -> None:
    ladder = control.first_ladder(0.37, 0.37)
    assert ladder[0] == control.to_bits(0.37)
    assert len(ladder) > 1


@pytest.mark.parametrize("floor", [TINY, 1.0, math.inf])
def test_without_a_last_threshold_a_floor_cuts_nothing_off(floor: float) -> None:
    # nothing was collected yet
    assert control.first_ladder(0.0, floor).tolist() == control.first_ladder(0.0).tolist()


def test_everything_passes_its_only_rung() -> None:
    assert control.from_bits(control.everything()).tolist() == [0.0]


class Outcome(NamedTuple):
    threshold: float
    quotas: tuple[int, ...]
    reached: list[int]
    """Entries of each rank that reach the threshold."""
    tied: bool
    rounds: int


def searched(shards: Sequence[Scores], goal: int, limit: int, last: float = 0.0) -> Outcome:
    """What ranks do with `narrow`: count at the rungs, add up, narrow, until there is no further ladder."""
    ladder = control.first_ladder(last)
    for rounds in range(1, MOST_ROUNDS + 1):
        thresholds = control.from_bits(ladder)
        rows = [(shard[:, None] >= thresholds).sum(0).tolist() for shard in shards]
        verdict = control.narrow(ladder, np.sum(rows, axis=0).tolist(), goal, limit)
        if verdict.ladder is None:
            return _settled(verdict, thresholds, rows, goal, rounds)
        ladder = verdict.ladder
    raise AssertionError(f"no threshold after {MOST_ROUNDS} rounds")


def _settled(verdict: control.Verdict, thresholds: Scores, rows: list[list[int]], goal: int, rounds: int) -> Outcome:
    reached = [row[verdict.rung] for row in rows]
    quotas = tuple(reached)
    if verdict.tied:
        above = [row[verdict.rung + 1] if verdict.rung + 1 < len(row) else 0 for row in rows]
        quotas = control.tied_quotas(reached, above, goal)
    return Outcome(float(thresholds[verdict.rung]), quotas, reached, verdict.tied, rounds)


def _array(numbers: Sequence[float]) -> Scores:
    return np.array(numbers, dtype=np.float32)


def _neighbours(offsets: list[int]) -> Scores:
    """Numbers that differ in their last bits only."""
    return control.from_bits(control.to_bits(0.37) + np.array(offsets, dtype=np.int64))


def _smooth(seed: int, size: int, exponent: float) -> Scores:
    scores: Scores = (np.random.default_rng(seed).standard_exponential(size) * 10.0**exponent).astype(np.float32)
    return scores


heavy_ties = st.lists(st.sampled_from([0.0, 1e-44, 1e-30, 0.5, 1.0, 1e30]), min_size=1, max_size=150)
any_numbers = st.lists(st.floats(0, float(np.float32(1e30)), width=32), min_size=1, max_size=150)
wide_range = st.lists(st.floats(-30, 30).map(lambda exponent: 10.0**exponent), min_size=1, max_size=150)
multisets: st.SearchStrategy[Scores] = st.one_of(
    heavy_ties.map(_array),
    any_numbers.map(_array),
    wide_range.map(_array),
    st.lists(st.integers(0, 300), min_size=1, max_size=150).map(_neighbours),
    st.builds(_smooth, st.integers(0, 99), st.integers(1, 3000), st.floats(-30, 30)),
)
last_thresholds = st.one_of(st.just(0.0), st.floats(TINY, HUGE, width=32), st.floats(0.125, 4, width=32))


@settings(max_examples=300)
@given(multisets, st.floats(0, 1), st.floats(1, 3), st.integers(1, 4), last_thresholds)
@example(_array([0.0] * 9), 0.5, 2.0, 3, 1.0)
@example(_array([1e-44] * 9), 0.5, 2.0, 3, 0.0)
@example(_array([HUGE] * 9), 0.5, 1.0, 2, TINY)
@example(_array([TINY] * 9), 0.5, 1.0, 2, HUGE)
@example(_array([3.0]), 1.0, 1.0, 1, 0.0)
@example(_array([1.0] * 100), 0.5, 1.0, 4, 1.0)
def test_search_meets_the_goal_on_any_scores(
    scores: Scores, share: float, ceiling: float, world: int, last: float
) -> None:
    goal = max(1, round(share * len(scores)))
    limit = int(ceiling * goal)
    shards = [scores[rank::world] for rank in range(world)]
    outcome = searched(shards, goal, limit, last)
    total, not_zero = sum(outcome.quotas), int((scores >= TINY).sum())

    assert total <= limit
    assert abs(total - goal) <= TOLERANCE * goal or total == not_zero < goal
    assert total == goal or not outcome.tied
    assert all(0 <= quota <= reached for quota, reached in zip(outcome.quotas, outcome.reached, strict=True))


@settings(max_examples=300)
@given(multisets, st.floats(0, 1), st.integers(1, 4), last_thresholds)
def test_search_leaves_no_clearly_larger_entry_behind(scores: Scores, share: float, world: int, last: float) -> None:
    goal = max(1, round(share * len(scores)))
    shards = [scores[rank::world] for rank in range(world)]
    outcome = searched(shards, goal, 2 * goal, last)
    clearly_larger = [int((shard.astype(np.float64) > outcome.threshold * (1 + 1e-5)).sum()) for shard in shards]
    assert all(quota >= larger for quota, larger in zip(outcome.quotas, clearly_larger, strict=True))


def test_infinite_scores_are_tied_at_the_largest_number() -> None:
    outcome = searched([_array([math.inf] * 30), _array([math.inf] * 10)], goal=20, limit=20)
    assert outcome.tied
    assert outcome.quotas == (15, 5)


@pytest.mark.parametrize("exponent", [-25, -6, 0, 3, 25])
def test_search_from_nothing_takes_at_most_four_rounds_at_any_scale(exponent: int) -> None:
    scores = _smooth(0, 100_000, exponent)
    assert searched([scores], goal=1000, limit=2000).rounds <= 4


@pytest.mark.parametrize("drift", [0.95, 0.99, 1.0, 1.01, 1.05])
def test_search_near_the_last_threshold_takes_one_round(drift: float) -> None:
    scores = _smooth(0, 100_000, -3)
    exact = float(np.sort(scores)[-1000])
    assert searched([scores], goal=1000, limit=2000, last=exact * drift).rounds == 1


@pytest.mark.parametrize("jump", [0.1, 10.0])
def test_search_follows_a_sudden_factor_of_ten_in_the_same_step(jump: float) -> None:
    scores = _smooth(0, 100_000, 0)
    exact = float(np.sort(scores)[-1000])
    outcome = searched([scores], goal=1000, limit=2000, last=exact * jump)
    assert outcome.rounds <= 5
    assert sum(outcome.quotas) == pytest.approx(1000, rel=TOLERANCE)


@st.composite
def ties(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Counts at a rung, counts above it, and a goal in between."""
    above = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=8))
    tied = draw(st.lists(st.integers(0, 1000), min_size=len(above), max_size=len(above)))
    goal = draw(st.integers(sum(above), sum(above) + sum(tied)))
    return [low + more for low, more in zip(above, tied, strict=True)], above, goal


@given(ties())
@example(([7], [0], 3))
@example(([5, 5, 5], [5, 5, 5], 15))
@example(([0, 0], [0, 0], 0))
def test_tied_quotas_share_out_the_goal_exactly_and_in_proportion(case: tuple[list[int], list[int], int]) -> None:
    at_rung, above_rung, goal = case
    quotas = control.tied_quotas(at_rung, above_rung, goal)
    assert sum(quotas) == goal
    fraction = (goal - sum(above_rung)) / max(sum(at_rung) - sum(above_rung), 1)
    for quota, at, above in zip(quotas, at_rung, above_rung, strict=True):
        assert above <= quota <= at
        assert abs(quota - above - fraction * (at - above)) < 1 + 1e-9


@given(
    st.floats(1e-6, 1),
    st.lists(st.integers(0, 100_000), min_size=1, max_size=10).filter(any),
    st.integers(0, 1_000_000),
)
def test_dithered_shares_of_a_partition_add_up_to_the_target(density: float, sizes: list[int], step: int) -> None:
    borders = np.cumsum([0, *sizes]).tolist()
    target = max(1, int(density * borders[-1]))
    shares = [control.dithered_share(target, borders[-1], start, stop, step) for start, stop in pairwise(borders)]
    assert sum(shares) == target
    assert all(0 <= share <= size for share, size in zip(shares, sizes, strict=True))


@pytest.mark.parametrize(("target", "start", "stop"), [(1000, 0, 40), (100, 12_345, 12_445), (30_000, 7, 12)])
def test_dithered_share_averages_to_the_exact_one(target: int, start: int, stop: int) -> None:
    shares = [control.dithered_share(target, 100_000, start, stop, step) for step in range(2000)]
    assert np.mean(shares) == pytest.approx(target / 100_000 * (stop - start), abs=0.005)


def test_a_tensor_worth_a_tenth_of_an_entry_never_waits_long_for_its_turn() -> None:
    turns = [step for step in range(1000) if control.dithered_share(1, 1000, 500, 600, step)]
    assert max(np.diff(turns)) <= 30


@pytest.mark.parametrize(
    ("stages", "ratio", "density", "following"),
    [
        (1, 1.0, 0.001, 1),
        (3, 0.8, 0.001, 3),
        (3, 1.2, 0.001, 3),
        (1, 0.7, 0.001, 2),
        (3, 1.3, 0.001, 2),
        (1, 9.0, 0.001, 1),
        (5, 0.1, 0.001, 5),  # 0.25**5 < 0.001: a sixth stage would keep less than the target
        (1, 0.1, 1.0, 1),
    ],
)
def test_stages_follow_the_ratio_between_one_and_what_the_density_leaves_room_for(
    stages: int, ratio: float, density: float, following: int
) -> None:
    assert control.next_stages(stages, ratio, density) == following


@given(st.integers(1, 5), st.floats(0, 100), st.floats(1e-4, 1))
def test_every_stage_but_the_last_leaves_at_least_the_target(stages: int, ratio: float, density: float) -> None:
    following = control.next_stages(stages, ratio, density)
    assert following >= 1
    if following > stages:
        assert control.STAGE_RATIO ** (following - 1) >= density * (1 - 1e-9)
