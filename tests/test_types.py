from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsieve import StepStats
from gradsieve.types import Setup, Span, Step

STATS = StepStats(
    step=3,
    numel=1000,
    target=10,
    support=8,
    density=0.008,
    threshold=None,
    counts=(5, 3),
    imbalance=0.25,
    wire_bytes=140,
    link_bytes=210,
    num_messages=2,
    dense_numel=15,
    dense_bytes=60,
    select_seconds=0.1,
    exchange_seconds=0.2,
)

position = st.integers(0, 30)


@given(position, position, position, position)
def test_cut_is_the_intersection(start: int, stop: int, low: int, high: int) -> None:
    cut = Span(start, stop, quota=7).cut(low, high)
    assert list(range(*cut[:2])) == [place for place in range(start, stop) if low <= place < high]
    assert cut.quota == 7


def test_a_rank_proposes_if_it_is_among_the_proposers() -> None:
    setup = Setup(world=3, numel=10, bounds=(0, 10))
    steps = [Step(index=0, rank=rank, seed=0, target=1, proposers=(0, 2), setup=setup) for rank in range(3)]
    assert [step.proposes for step in steps] == [True, False, True]
    assert (steps[0].world, steps[0].numel) == (3, 10)


def test_ratios_leave_excluded_parameters_out() -> None:
    assert STATS.ratio_values == 1000 / 8
    assert STATS.ratio_wire == 4000 / (140 - 60)


def test_a_step_that_sent_nothing_compresses_without_end() -> None:
    nothing = dataclasses.replace(STATS, support=0, wire_bytes=60)
    assert nothing.ratio_values == nothing.ratio_wire == math.inf


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        STATS.support = 9  # type: ignore[misc]
