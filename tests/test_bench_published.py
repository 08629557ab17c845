from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import published
from gradsieve.bench.published import PublishedMicro

SHAPES = [(7, 9), (9,), (5, 5), (3,)]
NUMEL = sum(map(math.prod, SHAPES))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_its_steps_are_those_of_the_yardstick(world: int, scale: float) -> None:
    density, draw = 0.1, np.random.default_rng(world)
    yardstick = published.PublishedMicro(world, NUMEL, density)
    layers = [torch.zeros(shape) for shape in SHAPES]
    ranks = [PublishedMicro(layers, density, world, rank) for rank in range(world)]
    for _ in range(12):
        gradients = (scale * draw.standard_normal((world, NUMEL))).astype(np.float32)
        expected = yardstick.step(gradients)
        accs = [rank.accumulate(cut(own)) for rank, own in zip(ranks, gradients, strict=True)]
        proposed = [rank.select(acc) for rank, acc in zip(ranks, accs, strict=True)]
        assert tuple(map(len, proposed)) == expected.counts
        support = torch.cat(proposed)
        mean = torch.stack([acc[support] for acc in accs]).sum(0) / world
        for rank, acc in zip(ranks, accs, strict=True):
            averaged = torch.cat([layer.flatten() for layer in rank.scatter(acc, support, mean)])
            assert averaged.numpy() == pytest.approx(expected.mean, rel=1e-6)


def cut(vector: published.Floats) -> list[torch.Tensor]:
    parts = torch.split(torch.from_numpy(vector), [math.prod(shape) for shape in SHAPES])
    return [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def test_a_restart_forgets_everything() -> None:
    gradients = [torch.randn(shape) for shape in SHAPES]
    step = PublishedMicro(gradients, 0.1, world=2, rank=0)
    first = step.accumulate(gradients)
    chosen = step.select(first)
    step.scatter(first, chosen, first[chosen])
    step.restart()
    again = step.accumulate(gradients)
    assert torch.equal(again, torch.cat([gradient.flatten() for gradient in gradients]))
    assert torch.equal(step.select(again), chosen)
