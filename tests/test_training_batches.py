from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import small_runs
from gradsieve.tasks import Examples, Task
from gradsieve.tasks.task import as_they_are
from gradsieve.training.batches import Batches
from gradsieve.training.engine import seed_of

CPU = torch.device("cpu")


def numbered(count: int) -> Task:
    """A task whose examples are their own numbers, as they are."""
    examples = Examples(torch.arange(count), torch.arange(count))
    return replace(small_runs.task, train=examples, prepare=as_they_are)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Workers, batch size, and examples for at least one step."""
    world, batch_size = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    return world, batch_size, draw(st.integers(world * batch_size, 80))


def seen(batches: Batches, epoch: int, world: int) -> list[list[Tensor]]:
    """By step and rank, what each worker takes."""
    steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
    return [[batches.take(step, rank, 1).inputs for rank in range(world)] for step in steps]


@given(shape=shapes(), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_an_example_is_seen_once_in_an_epoch_at_most_by_one_worker(
    shape: tuple[int, int, int], seed: int, epoch: int
) -> None:
    world, batch_size, count = shape
    batches = Batches(numbered(count), batch_size, world, seed, CPU)
    taken = [entry for ranks in seen(batches, epoch, world) for part in ranks for entry in part.tolist()]
    assert len(taken) == batches.steps_per_epoch * world * batch_size
    assert len(set(taken)) == len(taken)
    assert set(taken) <= set(range(count))
    assert count - len(taken) < world * batch_size


@given(shape=shapes(), seed=st.integers(0, 2**40), step=st.integers(0, 500))
def test_the_examples_of_all_are_those_of_the_ranks_side_by_side(
    shape: tuple[int, int, int], seed: int, step: int
) -> None:
    world, batch_size, _ = shape
    batches = Batches(small_runs.task, batch_size, world, seed, CPU)
    together = batches.take(step, 0, world)
    parts = [batches.take(step, rank, 1) for rank in range(world)]
    assert torch.equal(together.inputs, torch.cat([part.inputs for part in parts]))
    assert torch.equal(together.targets, torch.cat([part.targets for part in parts]))
    assert {len(part) for part in parts} == {batch_size}


@given(seed=st.integers(0, 2**40), steps=st.lists(st.integers(0, 300), min_size=1, max_size=6))
def test_a_batch_is_a_function_of_seed_and_step_whatever_came_before(seed: int, steps: list[int]) -> None:
    def fresh() -> Batches:
        return Batches(small_runs.task, 12, 2, seed, CPU)

    used = fresh()
    for step in steps:
        found, expected = used.take(step, 1, 1), fresh().take(step, 1, 1)
        assert torch.equal(found.inputs, expected.inputs)
        assert torch.equal(found.targets, expected.targets)


def order(seed: int, epoch: int, world: int = 2) -> list[int]:
    """The examples of an epoch, as the workers see them."""
    batches = Batches(numbered(48), 24 // world, world, seed, CPU)
    return [entry for ranks in seen(batches, epoch, world) for part in ranks for entry in part.tolist()]


def test_epochs_and_seeds_differ_in_their_order() -> None:
    orders = [tuple(order(seed, epoch)) for seed in range(10) for epoch in range(10)]
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_number_of_workers_does_not_change_which_examples_a_step_sees(world: int) -> None:
    assert order(5, 3, world) == order(5, 3, 1)


def test_a_shift_is_added_to_the_number_of_a_step() -> None:
    shifted, plain = (Batches(small_runs.task, 12, 2, 0, CPU) for _ in range(2))
    shifted.shift = 7
    assert torch.equal(shifted.take(6, 0, 2).inputs, plain.take(13, 0, 2).inputs)


def test_the_augmentation_of_an_example_differs_between_epochs() -> None:
    still = replace(small_runs.task, train=Examples(torch.zeros(24, 12), torch.zeros(24)))
    batches = Batches(still, 12, 2, 0, CPU)
    first, second = (batches.take(step, 0, 2).inputs for step in (0, 1))
    assert not torch.equal(first.sort(0).values, second.sort(0).values)


def test_what_workers_draw_differs_by_seed_step_and_rank() -> None:
    seeds = {seed_of(seed, step, rank) for seed in range(10) for step in range(20) for rank in range(10)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)
