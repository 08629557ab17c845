from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsieve
from gradsieve import Method
from gradsieve.collectives import LocalCollectives, lockstep
from gradsieve.layout import Layout
from gradsieve.part import Part, Parts
from gradsieve.pipeline import Worker
from gradsieve.types import Setup

SHAPES = {"a": (4, 3), "b": (3,), "c": (5, 2), "d": (2, 2), "e": (6,)}
DENSE = {"e"}
SILENT = gradsieve.hard_threshold(threshold=1e9)
"""Sends nothing."""


class Model:
    """A layout and the parts of it, in a world of one."""

    def __init__(self, method: Method, *, channels_last: bool = False) -> None:
        self.parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        if channels_last:
            self.parameters["c"] = nn.Parameter(torch.zeros(2, 5).t())
        self.layout = Layout(list(self.parameters.items()), DENSE)
        self.method = method
        self.parts = Parts(self.layout, self._build, seed=0)

    def _build(self, layout: Layout, seed: int) -> Part:
        setup = Setup(1, layout.numel, layout.bounds)
        return Part(layout, Worker(self.method, setup, LocalCollectives(0, 1, torch.device("cpu")), seed=seed), None)

    def step(self, buckets: list[str], gradients: dict[str, Tensor]) -> None:
        """A step with buckets such as `["edc", "ba"]`."""
        self.parts.begin()
        for bucket in buckets:
            parameters = [self.parameters[name] for name in bucket]
            part = self.parts.of(self.layout.names_of(parameters))
            part.take(parameters, [gradients[name] for name in bucket])
            lockstep([part.exchange()])
            part.finish()
        self.parts.step += 1

    def gradients(self, seed: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        return {
            name: torch.empty_like(parameter, requires_grad=False).copy_(torch.randn(parameter.shape, generator=draw))
            for name, parameter in self.parameters.items()
        }


ARRANGEMENTS = [["abcde"], ["edc", "ba"], ["ce", "bd", "a"], ["d", "a", "c", "e", "b"], ["ba", "edc"]]


@pytest.mark.parametrize("channels_last", [False, True])
def test_unsent_moves_by_parameter_whatever_the_buckets(channels_last: bool) -> None:
    model = Model(SILENT, channels_last=channels_last)
    sums = {name: torch.zeros(SHAPES[name]) for name in SHAPES.keys() - DENSE}
    for seed, buckets in enumerate(ARRANGEMENTS):
        gradients = model.gradients(seed)
        for name in sums:
            sums[name] += gradients[name]
        model.step(buckets, gradients)
        residuals = model.parts.residuals()
        assert list(residuals) == ["a", "b", "c", "d"]
        assert all(torch.equal(residuals[name], sums[name]) for name in sums)
        norm = torch.cat([total.flatten() for total in sums.values()]).norm()
        assert model.parts.residual_norm() == pytest.approx(float(norm), rel=1e-6)


def test_velocity_moves_too() -> None:
    """With momentum, other buckets in every step come to the same as one part."""
    method = gradsieve.dgc(density=1e-9, momentum=0.5)
    moved, whole = Model(method), Model(method)
    moved.step(ARRANGEMENTS[1], moved.gradients(0))
    whole.parts.load(moved.parts.learned(), moved.parts.residuals(), moved.parts.velocities())
    velocities = moved.parts.velocities()
    assert list(velocities) == ["a", "b", "c", "d"]
    assert any(velocity.any() for velocity in velocities.values())
    moved.parts.begin()
    moved.parts.of(("c", "e"))
    for found in (moved.parts, whole.parts):
        assert all(torch.equal(velocities[name], velocity) for name, velocity in found.velocities().items())


def test_unsent_of_buckets_that_have_not_arrived_yet_is_there() -> None:
    """A step that ends half-way leaves parameters between the old and the new buckets."""
    model = Model(SILENT)
    model.step(["edc", "ba"], model.gradients(0))
    before, norm = model.parts.residuals(), model.parts.residual_norm()
    model.parts.begin()
    model.parts.of(("b", "d"))
    assert list(model.parts.residuals()) == list(before)
    assert all(torch.equal(before[name], residual) for name, residual in model.parts.residuals().items())
    assert model.parts.residual_norm() == pytest.approx(norm, rel=1e-6)


def test_buckets_in_another_order_are_the_same_parts() -> None:
    model = Model(SILENT)
    model.step(["edc", "ba"], model.gradients(0))
    part = model.parts.of(("a", "b"))
    model.step(["ab", "cde"], model.gradients(1))
    assert model.parts.of(("a", "b")) is part


def names(parts: Parts) -> set[tuple[str, ...]]:
    return {tuple(part["names"]) for part in parts.learned()["parts"]}


def learned(parts: Parts, wanted: tuple[str, ...]) -> dict[str, Any]:
    return next(part["learned"] for part in parts.learned()["parts"] if tuple(part["names"]) == wanted)


def test_learned_state_waits_for_its_bucket() -> None:
    model, other = Model(gradsieve.union(density=0.3)), Model(gradsieve.union(density=0.3))
    for seed in range(3):
        model.step(["edc", "ba"], model.gradients(seed))
    state = learned(model.parts, ("a", "b"))
    assert state["criterion"] != learned(other.parts, tuple("abcde"))["criterion"]
    other.parts.load(model.parts.learned(), model.parts.residuals(), model.parts.velocities())
    assert names(other.parts) == {("a", "b"), ("c", "d", "e"), tuple("abcde")}
    assert other.parts.step == 3
    assert learned(other.parts, ("a", "b")) == state
    other.parts.begin()
    assert other.parts.of(("a", "b")).worker.state_dict() == state
    fresh = other.parts.of(("c",)).worker
    assert fresh.step == 3
    assert fresh.learned == other._build(model.layout.part(("c",)), 0).worker.learned


def test_loaded_tensors_are_copied() -> None:
    model, other = Model(SILENT), Model(SILENT)
    model.step(["abcde"], model.gradients(0))
    residuals = model.parts.residuals()
    other.parts.load(model.parts.learned(), residuals, {})
    for residual in residuals.values():
        residual.zero_()
    assert other.parts.residual_norm() == model.parts.residual_norm() > 0


def test_step_of_a_new_part_is_that_of_the_others() -> None:
    """So that a warm-up of the density goes on, and leaders take turns."""
    model = Model(gradsieve.dgc(density=0.01, warmup_steps=100))
    for seed, buckets in enumerate(ARRANGEMENTS):
        model.step(buckets, model.gradients(seed))
    assert {part["learned"]["step"] for part in model.parts.learned()["parts"]} == {len(ARRANGEMENTS)}
