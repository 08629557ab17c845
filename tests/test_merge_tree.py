from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gradsieve
from gradsieve.merge_tree import strides
from gradsieve.parcel import num_bytes
from gradsieve.wire import Shape
from ranks import Crew, Outcome, positions


def largest(entries: dict[int, float], k: int) -> dict[int, float]:
    return dict(sorted(entries.items(), key=lambda entry: -abs(entry[1]))[:k])


class Naive(NamedTuple):
    total: dict[int, float]
    residual: list[list[float]]


def naive(acc: list[list[float]], k: int) -> Naive:
    """The tree in plain Python, node by node, from the text of the method."""
    picks = [largest(dict(enumerate(row)), k) for row in acc]
    residual = [
        [0.0 if i in own else value for i, value in enumerate(row)] for row, own in zip(acc, picks, strict=True)
    ]
    standing = list(range(len(acc)))
    while len(standing) > 1:
        for left, right in zip(standing[::2], standing[1::2], strict=False):
            both = picks[left].keys() | picks[right].keys()
            sums = {i: picks[left].get(i, 0.0) + picks[right].get(i, 0.0) for i in both}
            picks[left] = largest(sums, k)
            for i in sums.keys() - picks[left].keys():
                residual[left][i] += sums[i]
        standing = standing[::2]
    return Naive(picks[0], residual)


def stepped(acc: Tensor, target: int, wire: torch.dtype = torch.float32) -> tuple[list[Outcome], Tensor]:
    """A step of a fresh crew, and its residuals."""
    world, numel = acc.shape
    crew = Crew(gradsieve.gtopk(density=min(1.0, (target + 0.5) / numel)), world, numel, dtype=acc.dtype, wire=wire)
    return crew.step(acc), crew.residual


def by_index(outcome: Outcome) -> dict[int, float]:
    return dict(zip(positions(outcome.reduced.indices), outcome.reduced.mean.tolist(), strict=True))


def test_a_sum_that_was_dropped_is_not_in_the_total_though_its_index_is() -> None:
    """Rank 1's entry 2 is dropped by rank 0, and ranks 2 and 3 bring the same index to the root."""
    acc = torch.tensor(
        [
            [0.0, 3.0, 0.5, 0.0],
            [0.0, 0.0, 2.0, 0.0],
            [0.0, 0.0, 4.0, 1.0],
            [0.0, 0.0, 1.0, 0.5],
        ]
    )
    outcomes, residual = stepped(acc, 1)
    assert [by_index(outcome) for outcome in outcomes] == [{2: 5.0 / 4}] * 4
    # rank 0 takes over the 2 of rank 1 beside its own 0.5, and its own 3, which the root, itself, dropped
    assert residual.tolist() == [
        [0.0, 3.0, 2.5, 0.0],
        [0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 1.0],
        [0.0, 0.0, 0.0, 0.5],
    ]
    assert [positions(outcome.reduced.sent) for outcome in outcomes] == [[1, 2], [2], [2], [2]]


@given(world=st.integers(1, 9), numel=st.integers(1, 30), data=st.data())
def test_the_tree_does_what_plain_python_does(world: int, numel: int, data: st.DataObject) -> None:
    target, seed = data.draw(st.integers(1, numel)), data.draw(st.integers(0, 1000))
    acc = torch.randn(world, numel, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    # ranks that see much alike
    acc += 2 * acc[:1]
    outcomes, residual = stepped(acc, target)
    expected = naive(acc.tolist(), target)
    mean = {index: value / world for index, value in sorted(expected.total.items())}
    for outcome in outcomes:
        assert by_index(outcome) == pytest.approx(mean, rel=1e-14)
        assert outcome.reduced.support == target
        assert outcome.reduced.counts == (target,) * world
    torch.testing.assert_close(residual, torch.tensor(expected.residual, dtype=torch.float64), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("world", [1, 2, 3, 6, 8])
def test_with_fewer_bits_nothing_is_lost_at_any_node(world: int) -> None:
    acc = torch.randn(world, 50, dtype=torch.float64)
    outcomes, residual = stepped(acc, 7, torch.bfloat16)
    mean = torch.zeros(50, dtype=torch.float64)
    mean[outcomes[0].reduced.indices] = outcomes[0].reduced.mean
    torch.testing.assert_close(world * mean + residual.sum(0), acc.sum(0), rtol=1e-14, atol=1e-14)
    total = world * outcomes[0].reduced.mean
    torch.testing.assert_close(total.bfloat16().double(), total, rtol=1e-15, atol=0)


def test_every_rank_tells_the_bytes_that_passed_its_link() -> None:
    outcomes, _ = stepped(torch.randn(5, 100), 8)
    size = num_bytes(Shape.of(8, 100), torch.float32)
    stats = [outcome.pending.read() for outcome in outcomes]
    # the root hands over what it broadcasts, each other rank what it gives to its neighbour on the left
    assert [each.wire_bytes for each in stats] == [size] * 5
    # merges: of rank 0 with 1, 2 and 4, of 2 with 3; and the broadcast
    assert [each.link_bytes for each in stats] == [4 * size, 2 * size, 3 * size, 2 * size, 2 * size]
    assert [each.num_messages for each in stats] == [len(list(strides(5))) + 1] * 5


def test_no_entries_are_no_message() -> None:
    outcomes = Crew(gradsieve.gtopk(), 3, 0).step(torch.zeros(3, 0))
    assert all(not outcome.messages and outcome.reduced.support == 0 for outcome in outcomes)


def test_what_waits_is_sent_in_time() -> None:
    """Small entries add up at the node that took them over until they pass."""
    given = torch.ones(60, 3, 20) * torch.linspace(1, 2, 20)
    trace = gradsieve.simulate(gradsieve.gtopk(density=0.1), given)
    assert (trace.mean.sum(0) > 0).all()
    assert all(stats.support == 2 for stats in trace.stats)
