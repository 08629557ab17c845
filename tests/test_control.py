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
@example(control.TINY_BITS, 5)
def test_ladder_between_goes_from_end_to_end_in_64_even_steps(low: int, width: int) -> None:
    high = min(low + width, control.HUGE_BITS)
    assert control.ladder_between(low, high).tolist() == [low + (high - low) * i // 63 for i in range(64)]


def test_a_cold_ladder_spans_every_scale() -> None:
    ladder = control.cold_ladder()
    assert len(ladder) == 64
    assert (ladder[0], ladder[-1]) == (control.TINY_BITS, control.HUGE_BITS)


def test_everything_reaches_every_rung_of_the_ladder_for_everything() -> None:
    assert control.from_bits(control.everything()).tolist() == [0.0] * 64


def test_a_warm_ladder_has_fixed_offsets() -> None:
    last = control.to_bits(1e-20)
    offsets = [(rung - last) / (1 << 15) for rung in control.warm_ladder(last).tolist()]
    assert offsets == [
        *(-64, -52, -42, -34, -27),
        *range(-20, 21),
        *(27, 34, 42, 52, 64, 80, 100, 128, 192, 256, 512, 1024, 2048, 4096, 8192, 16384, 24576, 49152),
    ]


def test_a_warm_ladder_is_clipped_to_the_ends_of_the_scale() -> None:
    assert control.warm_ladder(control.TINY_BITS).tolist()[:26] == [control.TINY_BITS] * 26
    assert control.warm_ladder(control.HUGE_BITS).tolist()[25:] == [control.HUGE_BITS] * 39


@given(st.floats(TINY, HUGE, width=32))
@example(TINY)
@example(HUGE)
def test_a_warm_ladder_holds_the_last_threshold_among_normal_numbers(last: float) -> None:
    ladder = control.warm_ladder(control.to_bits(last))
    assert len(ladder) == control.NUM_RUNGS == 64
    assert control.to_bits(last) in ladder
    assert (np.diff(ladder) >= 0).all()
    assert ladder[0] >= control.TINY_BITS
    assert ladder[-1] <= control.HUGE_BITS
    assert control.lowest_rung(last) == control.from_bits(ladder)[0] <= last


@pytest.mark.parametrize("last", [1e-20, 1e-6, 1.0, 1.25, 1.5, 7.999, 1e20])
def test_a_warm_ladder_is_fine_near_the_last_threshold_and_reaches_far_above_it(last: float) -> None:
    thresholds = control.from_bits(control.warm_ladder(control.to_bits(last))).astype(np.float64) / last
    # lower would let a tenth of the vector pass the first sieve
    assert 0.7 < thresholds[0] < 0.9
    assert thresholds[-1] > 1e18
    near = thresholds[(thresholds > 0.97) & (thresholds < 1.03)]
    assert np.diff(near).max() < 0.005


def _totals(*steps: tuple[int, int]) -> list[int]:
    """Totals at 64 rungs: the given numbers, each so many times."""
    totals = [total for total, times in steps for _ in range(times)]
    assert len(totals) == 64
    return totals


@pytest.mark.parametrize(
    ("totals", "goal", "limit", "verdict"),
    [
        (_totals((500, 10), (103, 20), (90, 34)), 100, 200, (29, False)),  # 3 % above is near enough
        (_totals((500, 10), (104, 20), (97, 34)), 100, 200, (30, False)),  # the rung above is nearer
        (_totals((500, 10), (102, 20), (98, 34)), 100, 200, (29, False)),  # a tie goes to the lower rung
        (_totals((500, 10), (102, 20), (97, 34)), 100, 101, (30, False)),  # the lower one breaks the limit
        (_totals((500, 10), (104, 20), (96, 34)), 100, 200, (29, True)),  # neither is near
        (_totals((500, 10), (102, 20), (96, 34)), 100, 101, (29, True)),  # the near one breaks the limit
        (_totals((500, 64)), 100, 200, (63, True)),  # tied at the top
        (_totals((100, 64)), 100, 100, (63, False)),
        (_totals((96, 1), (50, 63)), 100, 200, (0, False)),  # there are no more
        (_totals((98, 1), (50, 63)), 100, 200, (0, False)),
        (_totals((0, 64)), 1, 2, (0, False)),
        (_totals((2, 32), (0, 32)), 1, 2, (31, True)),
        (_totals((2, 31), (1, 1), (0, 32)), 1, 2, (31, False)),
    ],
)
def test_a_round_settles(totals: list[int], goal: int, limit: int, verdict: tuple[int, bool]) -> None:
    assert control.settle(totals, goal, limit) == verdict


falling_totals = st.lists(st.integers(0, 3000), min_size=64, max_size=64).map(lambda totals: sorted(totals)[::-1])
close_totals = st.lists(st.integers(90, 110), min_size=64, max_size=64).map(lambda totals: sorted(totals)[::-1])


@given(st.one_of(falling_totals, close_totals), st.integers(1, 3100), st.integers(1000, 3000))
def test_the_nearest_of_all_rungs_settles_it_or_the_highest_that_the_goal_reaches(
    totals: list[int], goal: int, ceiling: int
) -> None:
    limit = goal * ceiling // 1000
    rung, thinned = control.settle(totals, goal, limit)
    nearest = min((abs(total - goal) for total in totals if total <= limit), default=goal)
    if 100 * nearest <= 3 * goal:
        assert not thinned
        assert abs(totals[rung] - goal) == nearest
        assert totals[rung] <= limit
    elif totals[0] >= goal:
        assert thinned
        assert [total >= goal for total in totals] == [True] * (rung + 1) + [False] * (63 - rung)
    else:
        assert (rung, thinned) == (0, False)


@given(st.one_of(falling_totals, close_totals), st.integers(1, 3100), st.integers(1000, 3000))
def test_a_further_ladder_lies_between_the_rungs_around_the_goal_and_only_where_one_is_needed(
    totals: list[int], goal: int, ceiling: int
) -> None:
    limit, ladder = goal * ceiling // 1000, control.cold_ladder()
    following = control.next_ladder(ladder, totals, goal, limit)
    rung, thinned = control.settle(totals, goal, limit)
    if not thinned:
        assert following is None
    else:
        assert following is not None
        high = int(ladder[rung + 1]) if rung < 63 else control.HUGE_BITS
        assert following.tolist() == control.ladder_between(int(ladder[rung]), high).tolist()


class Outcome(NamedTuple):
    threshold: float
    quotas: tuple[int, ...]
    reached: list[int]
    """Entries of each rank that reach the threshold."""
    thinned: bool
    rounds: int


def searched(shards: Sequence[Scores], goal: int, limit: int, last: float = 0.0) -> Outcome:
    """What ranks do: count at the rungs, add up, narrow while there are rounds left, settle."""
    ladder = control.warm_ladder(control.to_bits(last)) if last else control.cold_ladder()
    for rounds in range(1, 1 if last else control.COLD_ROUNDS):
        totals = np.sum(_rows(shards, ladder), axis=0).tolist()
        following = control.next_ladder(ladder, totals, goal, limit)
        if following is None:
            return _settled(shards, ladder, goal, limit, rounds)
        ladder = following
    return _settled(shards, ladder, goal, limit, 1 if last else control.COLD_ROUNDS)


def _rows(shards: Sequence[Scores], ladder: control.Bits) -> list[list[int]]:
    return [(shard[:, None] >= control.from_bits(ladder)).sum(0).tolist() for shard in shards]


def _settled(shards: Sequence[Scores], ladder: control.Bits, goal: int, limit: int, rounds: int) -> Outcome:
    rows = _rows(shards, ladder)
    rung, thinned = control.settle(np.sum(rows, axis=0).tolist(), goal, limit)
    reached = [row[rung] for row in rows]
    quotas = control.shares(reached, goal) if thinned else tuple(reached)
    return Outcome(float(control.from_bits(ladder)[rung]), quotas, reached, thinned, rounds)


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
def test_search_meets_the_goal_on_any_scores_that_the_lowest_rung_lets_through(
    scores: Scores, share: float, ceiling: float, world: int, last: float
) -> None:
    goal = max(1, round(share * len(scores)))
    limit = int(ceiling * goal)
    shards = [scores[rank::world] for rank in range(world)]
    outcome = searched(shards, goal, limit, last)
    total = sum(outcome.quotas)
    seen = int((scores >= (control.lowest_rung(last) if last else TINY)).sum())

    assert total <= limit
    assert abs(total - goal) <= TOLERANCE * goal or total == seen < goal
    assert total == goal or not outcome.thinned
    assert all(0 <= quota <= reached for quota, reached in zip(outcome.quotas, outcome.reached, strict=True))


def test_infinite_scores_are_tied_at_the_largest_number() -> None:
    outcome = searched([_array([math.inf] * 30), _array([math.inf] * 10)], goal=20, limit=20)
    assert (outcome.threshold, outcome.thinned) == (HUGE, True)
    assert outcome.quotas == (15, 5)


@pytest.mark.parametrize("exponent", [-25, -6, 0, 3, 25])
def test_search_from_nothing_finds_the_largest_at_any_scale(exponent: int) -> None:
    outcome = searched([_smooth(0, 100_000, exponent)], goal=1000, limit=2000)
    assert outcome.rounds <= control.COLD_ROUNDS == 4
    assert not outcome.thinned


@pytest.mark.parametrize("drift", [0.95, 0.99, 1.0, 1.01, 1.05])
def test_search_near_the_last_threshold_finds_the_largest_in_one_round(drift: float) -> None:
    scores = _smooth(0, 100_000, -3)
    exact = float(np.sort(scores)[-1000])
    outcome = searched([scores], goal=1000, limit=2000, last=exact * drift)
    assert (outcome.rounds, outcome.thinned) == (1, False)


@pytest.mark.parametrize("jump", [1.5, 10.0, 1e6])
def test_search_holds_the_goal_through_a_sudden_growth_in_the_same_step(jump: float) -> None:
    scores = _smooth(0, 100_000, 0)
    exact = float(np.sort(scores)[-1000])
    outcome = searched([scores], goal=1000, limit=2000, last=exact / jump)
    assert outcome.rounds == 1
    assert sum(outcome.quotas) == pytest.approx(1000, rel=TOLERANCE)


@pytest.mark.parametrize("jump", [2.0, 10.0, 1e6])
def test_a_sudden_fall_is_followed_by_a_factor_of_two_a_step(jump: float) -> None:
    scores = _smooth(0, 100_000, 0)
    threshold, steps = float(np.sort(scores)[-1000]) * jump, 0
    while not (total := sum((outcome := searched([scores], 1000, 2000, threshold)).quotas)) >= 970:
        threshold, steps = control.next_threshold(outcome.threshold, total, 1000), steps + 1
    assert steps <= math.log2(jump) + 1


@st.composite
def shared_out(draw: st.DrawFn) -> tuple[list[int], int]:
    """Counts at a rung, and a goal that they reach."""
    counts = draw(st.lists(st.integers(0, 10**12), min_size=1, max_size=8).filter(any))
    return counts, draw(st.integers(0, sum(counts)))


@given(shared_out())
@example(([7], 3))
@example(([5, 5, 5], 15))
@example(([0, 9, 0], 1))
def test_shares_add_up_to_the_goal_and_are_in_proportion(case: tuple[list[int], int]) -> None:
    counts, goal = case
    shares = control.shares(counts, goal)
    assert sum(shares) == goal
    for share, count in zip(shares, counts, strict=True):
        assert 0 <= share <= count
        assert abs(share * sum(counts) - goal * count) < sum(counts)


@pytest.mark.parametrize(
    ("counts", "goal", "shares"),
    [((30, 10), 20, (15, 5)), ((3, 3, 3), 4, (1, 1, 2)), ((1, 0, 1), 1, (0, 0, 1)), ((10, 10, 10), 10, (3, 3, 4))],
)
def test_shares_are_rounded_by_the_running_sum(counts: tuple[int, ...], goal: int, shares: tuple[int, ...]) -> None:
    assert control.shares(counts, goal) == shares


@pytest.mark.parametrize(
    ("applied", "proposed", "goal", "following"),
    [
        (0.75, 100, 100, 0.75),
        (0.75, 200, 100, 0.75),
        (0.75, 50, 100, 0.75),
        (0.75, 49, 100, 0.375),
        (0.75, 0, 1, 0.375),
        (1e-38, 0, 1, TINY),
        (TINY, 0, 1, TINY),
        (0.75, 0, 0, 0.75),
    ],
)
def test_the_next_threshold_is_the_last_or_half_of_it_where_little_passed(
    applied: float, proposed: int, goal: int, following: float
) -> None:
    assert control.next_threshold(applied, proposed, goal) == following


@given(
    before=st.integers(control.OVERLAP_UNIT, 64 * control.OVERLAP_UNIT),
    distinct=st.integers(1, 10_000),
    overlap=st.integers(100, 6400),
)
def test_a_known_overlap_moves_towards_that_of_the_step(before: int, distinct: int, overlap: int) -> None:
    travelled = distinct * overlap // 100
    latest, unit = control.next_overlap(1, 1, travelled, distinct)
    assert latest / unit == pytest.approx(travelled / distinct, abs=1e-4)
    after, unit = control.next_overlap(before, unit, travelled, distinct)
    assert unit == control.OVERLAP_UNIT
    assert min(before, latest) <= after <= max(before, latest)
    assert 0.8 * latest - 1 <= after <= 1.25 * latest


def test_an_overlap_that_jumps_up_and_down_is_foretold_better_than_by_the_last_step() -> None:
    state = (1, 1)
    for step, (overlap, following) in enumerate(pairwise([1.3, 1.9] * 10)):
        state = control.next_overlap(*state, round(1000 * overlap), 1000)
        if step > 4:
            assert abs(state[0] / state[1] / following - 1) < 0.75 * abs(overlap / following - 1)


@pytest.mark.parametrize(("lately", "then"), [(5.0, 1.0), (1.0, 5.0)])
def test_an_overlap_that_really_changes_is_followed_at_once(lately: float, then: float) -> None:
    state = int(lately * control.OVERLAP_UNIT), control.OVERLAP_UNIT
    state = control.next_overlap(*state, int(1000 * then), 1000)
    assert 0.8 <= state[0] / state[1] / then <= 1.25


@pytest.mark.parametrize(
    ("recent", "room"),
    [
        ((), None),
        ((100, 100, 100), None),
        ((0, 0, 0, 0), 16),
        ((100, 100, 100, 100), 100 + 6 + 40 + 16),
        ((1, 100, 1, 1), 162),
        ((1, 1, 100, 1), 162),
        ((1, 1, 1, 100), 1 + 0 + 4 + 16),  # the newest is not known yet
        ((100, 1, 1, 1), 21),  # and the oldest forgotten
        ((10**6,) * 4, 10**6 + 62_500 + 4000 + 16),
    ],
)
def test_room_is_what_was_proposed_two_and_three_steps_ago_and_some_more(
    recent: tuple[int, ...], room: int | None
) -> None:
    assert control.room(recent, even=0) == room


def test_room_is_never_less_than_if_all_proposed_alike() -> None:
    assert control.room((0, 0, 0, 0), even=100) == 162
    assert control.room((0, 0, 0), even=100) is None


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


def test_the_table_of_rungs_tells_of_every_level_what_it_reaches() -> None:
    table = control.rung_table()
    every = np.arange(control.TOP_LEVEL + 1)
    coarse = control.FINE_LEVELS + (every - control.FINE_LEVELS) // control.COARSE_LEVELS
    found = table[np.where(every < control.FINE_LEVELS, every, coarse)]
    assert (found == np.searchsorted(control.LEVELS, every, side="right") - 1).all()
