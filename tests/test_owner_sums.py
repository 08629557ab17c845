from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import gradsieve
import toys
from fleet import Fleet
from gradsieve import Method
from gradsieve.control import HUGE, TINY, shares
from gradsieve.criterion import Above, Remeasured
from gradsieve.owner_sums import OwnerSums
from gradsieve.region import even_borders
from gradsieve.types import Owners, Setup
from ranks import Crew, Outcome, positions, same_outcome

LONG = 67
"""Steps: thresholds are measured twice again, borders balanced once."""


def often(density: float, ceiling: float = 2.0) -> Method:
    """Ok-Topk that measures every third step and balances every fifth, so that a short run has all of it."""
    exchange = OwnerSums(ceiling, period=3, border_period=5)
    criterion = Above(Remeasured(period=3), at_most=ceiling)
    return replace(gradsieve.oktopk(density=density), criterion=criterion, exchange=exchange)


def largest(entries: dict[int, float], k: int) -> dict[int, float]:
    return dict(sorted(entries.items(), key=lambda entry: -abs(entry[1]))[:k])


class Naive:
    """Ok-Topk in plain Python, from the text of the method, entry by entry."""

    def __init__(self, world: int, numel: int, target: int, ceiling: float) -> None:
        self.world, self.numel, self.target, self.limit = world, numel, target, int(ceiling * target)
        self.residual = [[0.0] * numel for _ in range(world)]
        self.picking, self.keeping = [0.0] * world, 0.0
        self.borders = even_borders(numel, world)
        self.index = 0

    def step(self, gradients: list[list[float]]) -> tuple[dict[int, float], list[int]]:
        """The sums that are kept, and how many entries each rank picked."""
        acc = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(gradients, self.residual, strict=True)]
        if self.index % 3 == 0:
            self.picking = [sorted(map(abs, row), reverse=True)[self.target - 1] for row in acc]
        picks = [
            largest({i: value for i, value in enumerate(row) if abs(value) >= threshold}, self.limit)
            for row, threshold in zip(acc, self.picking, strict=True)
        ]
        if self.index % 5 == 0:
            self.borders = self._balanced(picks)
        sums: dict[int, float] = {}
        for own in picks:
            for i, value in own.items():
                sums[i] = sums.get(i, 0.0) + value
        if self.index % 3 == 0:
            sizes = sorted(map(abs, sums.values()), reverse=True)
            self.keeping = sizes[min(self.target, len(sizes)) - 1]
        kept = self._bounded({i: value for i, value in sums.items() if abs(value) >= self.keeping})
        self.residual = [
            [0.0 if i in own and i in kept else value for i, value in enumerate(row)]
            for row, own in zip(acc, picks, strict=True)
        ]
        self.index += 1
        return kept, [len(own) for own in picks]

    def _balanced(self, picks: list[dict[int, float]]) -> list[int]:
        cuts = [
            [sorted(own)[p * len(own) // self.world] for p in range(1, self.world)] if own else self.borders[1:-1]
            for own in picks
        ]
        return [0, *(sum(column) // self.world for column in zip(*cuts, strict=True)), self.numel]

    def _bounded(self, reaching: dict[int, float]) -> dict[int, float]:
        if len(reaching) <= self.limit:
            return reaching
        parts = [
            {i: value for i, value in reaching.items() if start <= i < stop} for start, stop in pairwise(self.borders)
        ]
        quotas = shares([len(part) for part in parts], self.limit)
        return {
            i: value for part, quota in zip(parts, quotas, strict=True) for i, value in largest(part, quota).items()
        }


def whole_numbers(world: int, numel: int, index: int) -> Tensor:
    """Gradients whose sums are exact, hardly any two alike; after some steps they are suddenly larger, then small."""
    generator = torch.Generator().manual_seed(100 * world + index)
    noise = torch.randn(world, numel, generator=generator) + torch.randn(1, numel, generator=generator)
    return (noise * (1 << 12) * (1, 1, 1, 1, 8, 8, 1, 1)[index % 8]).round()


def mean_of(outcome: Outcome) -> dict[int, float]:
    return dict(zip(positions(outcome.reduced.indices), outcome.reduced.mean.tolist(), strict=True))


@pytest.mark.parametrize("ceiling", [1.0, 2.0])
@pytest.mark.parametrize(("world", "numel"), [(1, 40), (2, 60), (3, 200), (5, 90)])
def test_the_owners_do_what_plain_python_does(world: int, numel: int, ceiling: float) -> None:
    target = numel // 10
    crew, plain = Crew(often(0.1, ceiling), world, numel), Naive(world, numel, target, ceiling)
    bounded = 0
    for index in range(16):
        gradients = whole_numbers(world, numel, index)
        outcomes, (kept, counts) = crew.step(gradients), plain.step(gradients.tolist())
        expected = {i: value / world for i, value in sorted(kept.items())}
        for outcome in outcomes:
            assert mean_of(outcome) == pytest.approx(expected, rel=1e-6)
            assert outcome.reduced.counts == tuple(counts)
            assert outcome.reduced.owners == outcomes[0].reduced.owners
            assert outcome.reduced.thresholds == (plain.keeping,)
        assert crew.residual.tolist() == plain.residual
        owners = outcomes[0].reduced.owners
        assert owners == Owners(tuple(plain.picking), plain.keeping, tuple(plain.borders))
        bounded += outcomes[0].reduced.support == plain.limit
    assert bounded > 0, "a sudden factor meets the ceiling, or the test shows nothing"


def test_a_run_goes_on_from_its_state_whatever_is_due_next() -> None:
    method = often(0.1)
    crew = Crew(method, 3, 200)
    for index in range(12):
        fresh = Crew(method, 3, 200)
        for ours, theirs in zip(fresh.workers, crew.workers, strict=True):
            ours.load_state_dict(theirs.state_dict())
            ours.residual.acc.copy_(theirs.residual.acc)
        gradients = whole_numbers(3, 200, index)
        outcomes, others = crew.step(gradients), fresh.step(gradients)
        assert all(same_outcome(one.reduced, other.reduced) for one, other in zip(outcomes, others, strict=True))
        assert torch.equal(crew.residual, fresh.residual)


def _long_run() -> tuple[Tensor, Owners | None]:
    model, sieve = toys.sparsified(gradsieve.oktopk(density=0.05))
    means = toys.averaged(model, LONG)
    (part,) = sieve.state_dict()["learned"]["parts"]
    return torch.stack(means), Owners(**part["learned"]["criterion"])


def test_processes_do_what_virtual_workers_do_over_all_that_is_measured(fleet3: Fleet) -> None:
    trace = gradsieve.simulate(gradsieve.oktopk(density=0.05), toys.stacked_gradients(LONG, 3), shapes=toys.SHAPES)
    (means, owners), *others = fleet3.run(_long_run)
    assert torch.equal(means, trace.mean)
    for other_means, other_owners in others:
        assert torch.equal(other_means, means)
        assert other_owners == owners


def test_borders_give_every_owner_about_as_many_entries() -> None:
    """All that is large lies in the last tenth of the vector."""
    scale = torch.ones(5000)
    scale[4500:] = 100
    crew, world = Crew(gradsieve.oktopk(density=0.02), 4, 5000), 4
    for _ in range(3):
        outcomes = crew.step(torch.randn(world, 5000) * scale)
    owners = outcomes[0].reduced.owners
    assert owners is not None
    assert all(border >= 4500 for border in owners.borders[1:-1])
    widths = [stop - start for start, stop in pairwise(owners.borders[1:])]
    assert max(widths) < 2 * min(widths)


def test_a_measured_step_keeps_the_target_and_later_ones_about_as_many() -> None:
    trace = gradsieve.simulate(gradsieve.oktopk(density=0.01), torch.randn(40, 4, 20_000))
    assert [trace.stats[index].support for index in (0, 32)] == [200, 200]
    assert all(stats.support <= 2 * stats.target for stats in trace.stats)
    assert all(stats.threshold == trace.stats[0].threshold for stats in trace.stats[:32])
    assert trace.stats[32].threshold != trace.stats[0].threshold


def test_messages_of_a_step() -> None:
    crew = Crew(often(0.1), 3, 200)
    operations = [crew.step(whole_numbers(3, 200, index))[0].messages for index in range(2)]
    usual = ["all_to_all", "all_to_all_pieces", "all_gather", "all_gather"]
    # the first balances borders, and measures: how many sums there are, and the largest of them
    assert [message.operation for message in operations[0]] == ["all_reduce", *usual, "all_gather", "all_gather"]
    assert [message.operation for message in operations[1]] == usual


def test_after_a_step_of_zeros_the_next_one_measures_again() -> None:
    crew = Crew(gradsieve.oktopk(density=0.1), 2, 50)
    first = crew.step(torch.zeros(2, 50))[0].reduced
    assert first.support == 0
    assert first.owners == Owners((0.0, 0.0), 0.0, (0, 25, 50))
    assert crew.step(torch.randn(2, 50))[0].reduced.support == 5


def test_what_is_no_number_does_not_stay_in_a_threshold() -> None:
    crew = Crew(gradsieve.oktopk(density=0.1), 2, 50)
    for value in (torch.nan, torch.inf):
        owners = crew.step(torch.full((2, 50), value))[0].reduced.owners
        assert owners is not None
        assert (owners.picking, owners.keeping) == ((0.0, 0.0), 0.0)


@pytest.mark.parametrize(
    ("owners", "told"),
    [
        (Owners((1.0,), 1.0, (0, 4, 9)), "picking must be 2 numbers, not 1"),
        (Owners((1.0, TINY), 1.0, (0, 4, 9)), "thresholds must be 0 or lie between"),
        (Owners((1.0, 1.0), HUGE, (0, 4, 9)), "thresholds must be 0 or lie between"),
        (Owners((1.0, 1.0), 1.0, (0, 9)), "borders must be 3 ascending numbers from 0 to 9"),
        (Owners((1.0, 1.0), 1.0, (0, 4, 8)), "borders must be 3 ascending numbers from 0 to 9"),
        (Owners((1.0, 1.0), 1.0, (1, 4, 9)), "borders must be 3 ascending numbers from 0 to 9"),
    ],
)
def test_states_that_never_are_are_refused(owners: Owners, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Remeasured().check(owners, Setup(2, 9, (0, 9)))
    Remeasured().check(Owners((1.0, 0.0), 1.0, (0, 0, 9)), Setup(2, 9, (0, 9)))


def test_for_another_number_of_ranks_borders_go_on_and_thresholds_are_measured_anew() -> None:
    state = Owners((1.0, 2.0), 3.0, (0, 10, 100))
    assert Remeasured().resized(state, 2, 4) == Owners((0.0,) * 4, 0.0, (0, 5, 10, 55, 100))
    assert Remeasured().resized(state, 2, 1) == Owners((0.0,), 0.0, (0, 100))
