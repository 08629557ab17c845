"""The same simulation by both paths, Triton's kernels and plain torch, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gradsieve
from gradsieve import Method, Simulation, StepStats, kernels
from gradsieve.kernels.dispatch import Path
from kernel_place import DEVICE, assert_same_bits

METHODS: dict[str, Callable[[float], Method]] = {
    "micro": lambda density: gradsieve.micro(density=density),
    "exdyna": lambda density: gradsieve.exdyna(density=density),
    "union": lambda density: gradsieve.union(density=density),
    "union that overshoots": lambda density: gradsieve.union(density=density, overshoot=0.5),
    "union that warms up": lambda density: gradsieve.union(density=density, warmup_steps=6),
    "iwp": lambda density: gradsieve.iwp(density=density),
    "iwp by two": lambda density: gradsieve.iwp(density=density, num_broadcasters=2),
}

PATHS: list[Path] = ["triton", "plain"]


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
    "from nothing": ["zeros", "zeros", "one is no number", "one is no number", "noise", "zeros", "noise"],
    "jumps": ["noise", "ten times as large", "noise", "a tenth", "a tenth", "ten times as large", "noise"],
    "ties": ["ties", "rounded", "rounded", "ties", "zeros", "ties", "rounded"],
    "agreement": [*["noise"] * 4, "agreement", "agreement", "one rank alone", "noise"],
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


class Given(NamedTuple):
    gradients: Tensor
    parameters: Tensor


def told(story: str, case: Case, *, exact: bool = True) -> Iterator[Given]:
    """What the workers are given in each step of a story.

    If it is to be exact, numbers whose sums do not depend on an order: how torch adds up the rows of a table depends on
    the number of its columns, and that is not the same in both paths.
    """
    generator = torch.Generator().manual_seed(1)
    for index, kind in enumerate(STORIES[story]):
        noise = torch.randn(case.world, case.numel, generator=generator)
        parameters = torch.randn(case.numel, generator=generator)
        gradients = KINDS[kind](noise, index)
        if exact:
            gradients = (1024 * gradients).round() / 1024
        yield Given(gradients.to(DEVICE, case.gradient), parameters.to(DEVICE))


def plain_state(state: Any) -> Any:
    """Tensors as what can be compared."""
    if isinstance(state, dict):
        return {key: plain_state(value) for key, value in state.items()}
    if isinstance(state, list):
        return [plain_state(value) for value in state]
    return state.tolist() if isinstance(state, Tensor) else state


def assert_same_records(one: StepStats, other: StepStats) -> None:
    for field in ("step", "numel", "target", "support", "density", "threshold", "counts", "imbalance", "dense_numel"):
        assert getattr(one, field) == getattr(other, field), field


class Twins:
    """The same simulation by both paths."""

    def __init__(self, method: Method, case: Case, **options: Any) -> None:
        self._make: Callable[[], Simulation] = lambda: Simulation(
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

    def _made(self, path: Path) -> Simulation:
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
