"""A task of your own: two spirals to be told apart.

    cd examples
    gradsieve train --task own_task:spirals --workers 2
    gradsieve compare --task own_task:spirals --method dense,topk,union --virtual 4 --seed 0,1,2

`--task package.module:object` takes a `Task`, or a function that makes one from the path given by `--data`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gradsieve.tasks import Examples, Recipe, Task


def points(count: int, seed: int) -> Examples:
    draw = torch.Generator().manual_seed(seed)
    turns = torch.rand(count, generator=draw).sqrt() * 3 * math.pi
    which = torch.arange(count) % 2
    angle = turns + math.pi * which
    spiral = torch.stack([turns * angle.cos(), turns * angle.sin()], dim=1) / (3 * math.pi)
    return Examples(spiral + 0.01 * torch.randn(count, 2, generator=draw), which)


class Waves(nn.Module):
    """Sines and cosines of the input at several frequencies."""

    def forward(self, inputs: Tensor) -> Tensor:
        scaled = torch.cat([inputs * 2**power for power in range(4)], dim=1)
        return torch.cat([scaled.sin(), scaled.cos()], dim=1)


def network() -> nn.Module:
    return nn.Sequential(Waves(), nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))


spirals = Task(
    name="spirals",
    train=points(4096, seed=1),
    test=points(1024, seed=2),
    models={"network": network},
    recipe=Recipe(batch_size=64, epochs=20, lr=0.2, warmup_epochs=2, schedule="cosine"),
)
