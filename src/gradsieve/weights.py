"""The parameters as criteria see them that weigh a gradient against them."""

from __future__ import annotations

import math
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
        flat = self.flat.float()
        sizes = [stop - start for start, stop in pairwise(self._bounds)]
        *norms, whole = torch._foreach_norm([*torch.split(flat, sizes), flat])
        # from memory that the device can read by itself, so that nobody waits
        roots = torch.tensor([math.sqrt(max(size, 1)) for size in sizes], pin_memory=flat.is_cuda)
        tensors = torch.stack(norms) / roots.to(flat.device, non_blocking=True)
        model = whole / math.sqrt(max(flat.numel(), 1))
        scales = torch.where(tensors > 0, tensors, model)
        return torch.where(scales > 0, scales, torch.ones_like(scales))

    def scale_of_entries(self, start: int, stop: int) -> Tensor:
        """For each entry of a stretch, the scale of its tensor."""
        widths = [max(0, min(stop, high) - max(start, low)) for low, high in pairwise(self._bounds)]
        repeats = torch.tensor(widths, device=self.scales.device)
        return self.scales.repeat_interleave(repeats, output_size=stop - start)
