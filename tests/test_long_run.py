"""A long run with all that may befall it: nothing of any gradient is lost, and nothing is counted twice.

At every step, what was applied so far and the mean over workers of what they still hold add up to the mean gradients
that were given: through pauses, in which gradients are averaged whole and residuals wait, through states that were
saved and loaded, and through changes of the number of workers.
"""

from __future__ import annotations

import io
import math
import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import gradsieve
import toys
from gradsieve import Method, Simulation, states
from gradsieve.states import Origin, Vectors

SHAPES = {"first": (30, 40), "second": (25, 28), "third": (100,)}
NUMEL = 2000
DENSITY = 0.02
WORLDS = (16, 8, 5, 16, 11, 1, 16, 3)
"""In turn."""
TOLERANCE = 1e-5
"""Relative; residuals are kept in float32."""


class Events(NamedTuple):
    """How often what happened."""

    paused: int
    loaded: int
    resized: int


class Training:
    """Workers, and the books about them in float64."""

    def __init__(self, method: Method, seed: int, **options: Any) -> None:
        self.method = method
        self.seed = seed
        self.options = options
        self.simulation = self._fresh(WORLDS[0])
        self.given = torch.zeros(NUMEL, dtype=torch.float64)
        self.applied = torch.zeros(NUMEL, dtype=torch.float64)
        self.worst = 0.0
        self._draw = torch.Generator().manual_seed(seed)
        scales = torch.cat(
            [torch.full((math.prod(shape),), 4.0**-place) for place, shape in enumerate(SHAPES.values())]
        )
        self._scales = scales * (0.5 + torch.rand(NUMEL, generator=self._draw))
        self._drift = 0.2 * torch.randn(NUMEL, generator=self._draw)

    @property
    def world(self) -> int:
        return len(self.simulation.workers)

    def _fresh(self, world: int) -> Simulation:
        shapes = list(SHAPES.values())
        return Simulation(self.method, world, NUMEL, shapes=shapes, seed=self.seed, **self.options)

    def step(self, *, paused: bool) -> None:
        gradients = self._scales * (torch.randn(self.world, NUMEL, generator=self._draw) + self._drift)
        mean = gradients.mean(0) if paused else self.simulation.step(gradients)[0]
        self.given += gradients.double().mean(0)
        self.applied += mean.double()
        self.check()

    def check(self) -> None:
        held = self.simulation.residual.double().mean(0)
        error = float((self.applied + held - self.given).norm() / self.given.norm())
        assert error < TOLERANCE
        self.worst = max(self.worst, error)

    def load(self) -> None:
        """On from a file, with workers of which nothing is left."""
        before = self.simulation.residual
        stored = _through_a_file(self.simulation.state_dict())
        self.simulation = self._fresh(self.world)
        self.simulation.load_state_dict(stored)
        assert torch.equal(self.simulation.residual, before)
        self.check()

    def resize(self, world: int, *, by_reshard: bool) -> None:
        """To another number of workers: as simulations do it, or as states of sieves are converted."""
        steps = self.simulation.workers[0].step
        self.simulation = self._resharded(world) if by_reshard else self.simulation.resized(world)
        assert (self.world, self.simulation.workers[0].step) == (world, steps)
        self.check()

    def _resharded(self, world: int) -> Simulation:
        converted = gradsieve.reshard(_through_a_file(self._saved()), world)
        made = self._fresh(world)
        made.load_state_dict(
            [
                {"learned": state["learned"]["parts"][0]["learned"], "residual": _flat(state["residuals"])}
                for state in converted
            ]
        )
        return made

    def _saved(self) -> list[dict[str, Any]]:
        """What sieves would save of these workers."""
        found = []
        for rank, worker in enumerate(self.simulation.workers):
            residuals = torch.split(self.simulation.residual[rank], [math.prod(shape) for shape in SHAPES.values()])
            named = {name: part.reshape(SHAPES[name]) for name, part in zip(SHAPES, residuals, strict=True)}
            parts = [{"names": list(SHAPES), "learned": worker.state_dict()}]
            learned = {"step": worker.step, "seed": worker.seed, "rate": None, "parts": parts}
            here = Origin(rank, self.world, self.method, "model", SHAPES, tuple(SHAPES))
            found.append(states.saved(here, Vectors(learned, named, {})))
        return found


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].reshape(-1) for name in SHAPES])


def _through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(training: Training, steps: int) -> Events:
    """So many steps, with something else in between now and then."""
    draw = random.Random(f"events {training.seed}")
    paused_for, paused, loaded, resized = 0, 0, 0, 0
    for _ in range(steps):
        chance = draw.random()
        if chance < 0.02:
            paused_for = draw.randint(1, 12)
        elif chance < 0.04:
            training.load()
            loaded += 1
        elif chance < 0.06:
            resized += 1
            training.resize(WORLDS[resized % len(WORLDS)], by_reshard=draw.random() < 0.5)
        training.step(paused=paused_for > 0)
        paused += paused_for > 0
        paused_for = max(0, paused_for - 1)
    return Events(paused, loaded, resized)


class Course(NamedTuple):
    """A run to be made."""

    method: str
    steps: int
    options: dict[str, Any]


TOGETHER, APART, ROUNDED = {"as_team": True}, {"as_team": False}, {"as_team": True, "wire": "bfloat16"}
SHORT = [
    Course("union", 300, TOGETHER),
    Course("micro", 150, TOGETHER),
    Course("exdyna", 150, TOGETHER),
    Course("topk", 150, ROUNDED),
    Course("micro", 60, APART),
]
WHOLE = [
    Course("union", 10_000, TOGETHER),
    Course("micro", 2_000, TOGETHER),
    Course("exdyna", 2_000, TOGETHER),
    Course("topk", 2_000, TOGETHER),
    Course("union", 500, ROUNDED),
    Course("exdyna", 300, APART),
]


def described(course: Course) -> str:
    return "-".join([course.method, str(course.steps), *(f"{key}={value}" for key, value in course.options.items())])


@pytest.mark.parametrize(
    "course",
    [
        *(pytest.param(course, id=described(course)) for course in SHORT),
        *(pytest.param(course, id=described(course), marks=pytest.mark.faults) for course in WHOLE),
    ],
)
@pytest.mark.timeout(600)
def test_nothing_is_lost_in_a_long_run(course: Course) -> None:
    training = Training(toys.make(course.method, DENSITY), seed=sum(map(ord, described(course))), **course.options)
    events = train(training, course.steps)
    print(described(course), events, f"worst error {training.worst:.2g}")  # noqa: T201 - shown with -s
    assert min(events) >= course.steps // 120
    assert training.simulation.workers[0].step == course.steps - events.paused
    assert training.simulation.residual.abs().sum() > 0
