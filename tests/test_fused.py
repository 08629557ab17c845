"""The step by Triton's kernels against the step in plain torch: the same, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsieve
import toys
from fleet import Fleet
from gradsieve import Method, Simulation, StepStats, kernels
from gradsieve.collectives import LocalCollectives, lockstep
from gradsieve.fused import FusedWorker, make_worker
from gradsieve.layout import Layout, Slot
from gradsieve.pipeline import Worker
from gradsieve.types import Setup, Span
from kernel_place import DEVICE, INTERPRETED, MARKS, assert_same_bits

pytestmark = MARKS

METHODS: dict[str, Callable[[float], Method]] = {
    "micro": lambda density: gradsieve.micro(density=density),
    "exdyna": lambda density: gradsieve.exdyna(density=density),
    "union": lambda density: gradsieve.union(density=density),
    "iwp": lambda density: gradsieve.iwp(density=density),
    "iwp by two": lambda density: gradsieve.iwp(density=density, num_broadcasters=2),
}

# --- what the workers are given -----------------------------------------------------------------------------------


def one_is_no_number(noise: Tensor, index: int) -> Tensor:
    gradients = noise.clone()
    gradients[index % len(noise), index % noise.shape[1]] = (torch.nan, torch.inf, -torch.inf)[index % 3]
    return gradients


KINDS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "noise": lambda noise, _: noise,
    "ten times as large": lambda noise, _: 10 * noise,
    "zeros": lambda noise, _: torch.zeros_like(noise),
    "ties": lambda noise, _: torch.ones_like(noise),
    "a tenth": lambda noise, _: noise / 10,
    "one is no number": one_is_no_number,
    "rounded": lambda noise, _: (2 * noise).round(),
    "agreement": lambda noise, _: noise[:1].repeat(len(noise), 1),
    "one rank alone": lambda noise, _: noise * (torch.arange(len(noise)) == 0).unsqueeze(1),
}
"""Makes the gradients of a step out of noise, `[world, numel]`, and the step's number."""
STORIES: dict[str, Sequence[str]] = {
    "unsteady": [*["noise"] * 2, "ten times as large", "zeros", "ties", "one is no number", "a tenth", "noise"],
    "steady": ["noise"] * 7,
    "from nothing": ["zeros", "zeros", "noise", "noise", "zeros", "zeros", "a tenth"],
    "not finite": ["one is no number"] * 4 + ["noise"] * 3,
    "jumps": ["noise", "ten times as large", "noise", "a tenth", "a tenth", "ten times as large", "noise", "noise"],
    "ties": ["ties", "rounded", "rounded", "ties", "zeros", "ties", "rounded"],
    "agreement": [*["noise"] * 5, "agreement", "agreement", "noise", "agreement"],
    "one rank alone": [*["noise"] * 5, "one rank alone", "one rank alone", "noise"],
}


class Case(NamedTuple):
    world: int
    numel: int
    density: float
    residual: torch.dtype = torch.float32
    gradient: torch.dtype = torch.float32

    @property
    def sizes(self) -> list[int]:
        """Of a few parameters, of odd sizes, with an empty one among them."""
        first, second = self.numel // 2, self.numel // 3
        return [first, 0, second, self.numel - first - second]


SOME: list[tuple[str, Case]] = [
    ("micro", Case(1, 5, 0.3)),
    ("micro", Case(5, 6, 0.001, torch.bfloat16)),
    ("micro", Case(3, 300, 0.3, torch.bfloat16, torch.bfloat16)),
    ("micro", Case(2, 9000, 0.01)),
    ("exdyna", Case(2, 1023, 0.3)),
    ("exdyna", Case(3, 40, 0.1, gradient=torch.float16)),
    ("union", Case(1, 40, 0.3)),
    ("union", Case(3, 300, 0.05, torch.bfloat16)),
    ("iwp", Case(2, 300, 0.05, gradient=torch.bfloat16)),
    ("iwp", Case(1, 9, 0.3)),
    ("iwp by two", Case(3, 40, 0.3)),
]
ALL = [
    (name, Case(world, numel, density, residual, gradient))
    for name, world, numel, density, residual, gradient in itertools.product(
        METHODS,
        (1, 2, 3, 5),
        (5, 31, 1023, 9000),
        (0.3, 0.001),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float16),
    )
    if not (name == "iwp by two" and world == 1)
]


class Given(NamedTuple):
    gradients: Tensor
    parameters: Tensor


def told(story: str, case: Case) -> Iterator[Given]:
    """What the workers are given in each step of a story."""
    generator = torch.Generator().manual_seed(1)
    for index, kind in enumerate(STORIES[story]):
        noise = torch.randn(case.world, case.numel, generator=generator)
        parameters = torch.randn(case.numel, generator=generator)
        yield Given(KINDS[kind](noise, index).to(DEVICE, case.gradient), parameters.to(DEVICE))


# --- both paths ---------------------------------------------------------------------------------------------------


def plain_state(state: Any) -> Any:
    """Tensors as what can be compared."""
    if isinstance(state, dict):
        return {key: plain_state(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, Tensor) else state


def assert_same_records(one: StepStats, other: StepStats) -> None:
    for field in ("step", "numel", "target", "support", "density", "threshold", "counts", "imbalance", "dense_numel"):
        assert getattr(one, field) == getattr(other, field), field


class Twins:
    """The same simulation by both paths."""

    def __init__(self, method: Method, case: Case, **options: Any) -> None:
        self._make = lambda: Simulation(
            method,
            case.world,
            case.numel,
            shapes=case.sizes,
            device=DEVICE,
            residual_dtype=case.residual,
            as_team=True,
            **options,
        )
        self.by_kernels, self.plain = self._made("triton"), self._made("plain")
        self._steps = 0

    def _made(self, path: kernels.dispatch.Path) -> Simulation:
        with kernels.using(path):
            simulation = self._make()
        assert (simulation._fused is not None) == (path == "triton")
        return simulation

    def step(self, given: Given) -> None:
        """A step of both, which have to do the same."""
        (mean, stats), (expected, expected_stats) = (
            each.step(given.gradients.clone(), given.parameters) for each in (self.by_kernels, self.plain)
        )
        assert_same_bits(mean, expected)
        assert_same_records(stats, expected_stats)
        self._steps += 1
        # who looks at the state changes when residuals are cleared: let there be steps in which nobody does
        if self._steps % 3 == 1:
            assert_same_bits(self.by_kernels.residual, self.plain.residual)
        elif self._steps % 3 == 2:
            self.assert_same_state()

    def assert_same_state(self) -> None:
        for mine, others in zip(self.by_kernels.state_dict(), self.plain.state_dict(), strict=True):
            assert plain_state(mine["learned"]) == plain_state(others["learned"])
            assert_same_bits(mine["residual"], others["residual"])

    def move(self) -> None:
        """Each goes on from what the other saved."""
        states = self.by_kernels.state_dict(), self.plain.state_dict()
        self.by_kernels, self.plain = self._made("triton"), self._made("plain")
        self.plain.load_state_dict(states[0])
        self.by_kernels.load_state_dict(states[1])


def assert_same_run(method: Method, case: Case, story: str) -> None:
    twins = Twins(method, case)
    for given in told(story, case):
        twins.step(given)
    twins.assert_same_state()


@pytest.mark.parametrize(("name", "case"), SOME, ids=str)
def test_kernels_do_what_plain_torch_does(name: str, case: Case) -> None:
    assert_same_run(METHODS[name](case.density), case, "unsteady")


@pytest.mark.parametrize("story", [story for story in STORIES if story != "unsteady"])
def test_so_they_do_in_every_story(story: str) -> None:
    case = Case(2, 300, 0.1)
    assert_same_run(gradsieve.union(density=case.density), case, story)


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("name", METHODS)
def test_so_they_do_everywhere(name: str, story: str) -> None:
    for method, case in ALL:
        if method == name:
            assert_same_run(METHODS[name](case.density), case, story)
