from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsieve.proposers import Everyone, Proposers, RandomRanks, RotatingLeader

RULES = [Everyone(), RotatingLeader(), RandomRanks(1), RandomRanks(3)]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(st.integers(0, 10_000), st.integers(3, 20), st.integers(0, 2**40))
def test_proposers_are_distinct_ranks_in_order_drawn_alike(rule: Proposers, index: int, world: int, seed: int) -> None:
    ranks = rule.ranks(index, world, seed)
    assert ranks
    assert list(ranks) == sorted(set(ranks))
    assert set(ranks) <= set(range(world))
    assert ranks == rule.ranks(index, world, seed)


@pytest.mark.parametrize("rule", [Everyone(), RotatingLeader(), RandomRanks(1)], ids=repr)
def test_a_world_of_one_proposes_in_every_step(rule: Proposers) -> None:
    rule.check(1)
    assert [rule.ranks(index, 1, 0) for index in range(5)] == [(0,)] * 5


def test_everyone_proposes_in_every_step() -> None:
    assert Everyone().ranks(7, 4, seed=1) == (0, 1, 2, 3)


@pytest.mark.parametrize("start", [0, 5])
def test_every_rank_leads_once_in_world_steps(start: int) -> None:
    leaders = [RotatingLeader().ranks(index, 4, seed=0) for index in range(start, start + 4)]
    assert sorted(leaders) == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_random_ranks_are_as_many_as_asked_for_and_take_even_turns(num_ranks: int) -> None:
    draws = [RandomRanks(num_ranks).ranks(index, 5, seed=3) for index in range(2000)]
    assert {len(ranks) for ranks in draws} == {num_ranks}
    turns = Counter(rank for ranks in draws for rank in ranks)
    assert all(turns[rank] == pytest.approx(2000 * num_ranks / 5, rel=0.15) for rank in range(5))


@pytest.mark.parametrize("stride", [1, 4])
def test_random_draws_of_steps_and_seeds_are_unrelated(stride: int) -> None:
    rule = RandomRanks(1)
    steps = [rule.ranks(index, 4, 0) == rule.ranks(index + stride, 4, 0) for index in range(2000)]
    seeds = [rule.ranks(index, 4, 0) == rule.ranks(index, 4, stride) for index in range(2000)]
    assert sum(steps) == pytest.approx(500, rel=0.2)
    assert sum(seeds) == pytest.approx(500, rel=0.2)


def test_the_draw_is_the_same_in_every_version() -> None:
    # a run resumed with a newer gradsieve, or a rank with another Python, must draw the same ranks
    assert [RandomRanks(2).ranks(index, 8, seed=0) for index in range(3)] == [(3, 5), (5, 7), (4, 5)]


@pytest.mark.parametrize("world", [3, 4, 100])
def test_a_world_with_enough_ranks_is_accepted(world: int) -> None:
    RandomRanks(3).check(world)


def test_a_world_with_too_few_ranks_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"num_broadcasters=3.* only 2 ranks.* at most 2.* more workers"):
        RandomRanks(3).check(2)
