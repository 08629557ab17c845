"""The parameters as criteria see them that weigh a gradient against them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor


class Weights:
    """The parameters of one step, flattened on first use: most ranks of most steps never ask."""

    def __init__(self, flatten: Callable[[], Tensor], bounds: tuple[int, ...]) -> None:
        self._flatten = flatten
        self._bounds = bounds

    @cached_property
    def flat(self) -> Tensor:
        return self._flatten()

    @cached_property
    def scales(self) -> Tensor:
        """The RMS of each tensor; one that is all zeros borrows the model's."""
        parts = [self.flat[start:stop] for start, stop in pairwise(self._bounds)]
        tensors = torch.stack([_rms(part) for part in parts])
        model = _rms(self.flat)
        scales = torch.where(tensors > 0, tensors, model)
        return torch.where(scales > 0, scales, torch.ones_like(scales))


def _rms(values: Tensor) -> Tensor:
    return values.float().square().sum().div(max(values.numel(), 1)).sqrt()
