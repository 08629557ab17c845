"""The step of MiCRO as its published code takes it, restated: what a straightforward implementation costs.

Layer by layer the residual is added, all is put into one vector, the slice is searched with `torch.where`, indices
travel with 64 bits and the result is scattered into zeros. Communication is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from gradsieve import control


class PublishedMicro:
    """One rank's residual and threshold."""

    def __init__(self, gradients: Sequence[Tensor], density: float, world: int, rank: int) -> None:
        self._world, self._rank = world, rank
        self._shapes = [gradient.shape for gradient in gradients]
        self._numel = sum(map(math.prod, self._shapes))
        self._target = max(1, int(density * self._numel))
        self._residuals = [torch.zeros_like(gradient) for gradient in gradients]
        self._index = 0
        self._threshold = control.initial_threshold(self._target)

    def restart(self) -> None:
        """As before the first step."""
        for residual in self._residuals:
            residual.zero_()
        self._index = 0
        self._threshold = control.initial_threshold(self._target)

    def accumulate(self, gradients: Sequence[Tensor]) -> Tensor:
        """Gradient plus residual as one vector."""
        acc = [residual + gradient for residual, gradient in zip(self._residuals, gradients, strict=True)]
        return torch.cat([layer.reshape(-1) for layer in acc])

    def select(self, acc: Tensor) -> Tensor:
        """Indices in this rank's slice that reach the threshold; one index where none does."""
        sizes = [self._numel // self._world + (part < self._numel % self._world) for part in range(self._world)]
        owned = (self._index + self._rank) % self._world
        start, stop = [0, *accumulate(sizes)][owned : owned + 2]
        found = torch.where(acc[start:stop].abs() >= self._threshold)[0] + start
        if found.numel() == 0 and stop > start:
            found = torch.tensor([start + self._index % (stop - start)], device=acc.device)
        return found

    def scatter(self, acc: Tensor, support: Tensor, mean: Tensor) -> list[Tensor]:
        """The averaged gradient by layer; what was sent leaves the residual, and the threshold follows the support."""
        averaged = torch.zeros_like(acc)
        averaged[support] = mean
        acc[support] = 0
        self._residuals = self._by_layer(acc)
        self._threshold = control.stepped_threshold(self._threshold, len(support), self._target)
        self._index += 1
        return self._by_layer(averaged)

    def _by_layer(self, vector: Tensor) -> list[Tensor]:
        layers = torch.split(vector, [math.prod(shape) for shape in self._shapes])
        return [layer.view(shape) for layer, shape in zip(layers, self._shapes, strict=True)]
