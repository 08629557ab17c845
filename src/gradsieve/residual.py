"""Error feedback: what a rank has not sent yet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve.types import Indices, Span


@dataclass(frozen=True)
class Feedback:
    """How gradients enter the residual."""

    momentum: float = 0.0
    """Momentum correction: the residual takes in a velocity, and both are cleared where entries were sent (DGC)."""
    clip: float | None = None
    """Largest norm of the ranks' gradient; each rank clips its own to `clip / sqrt(world)`."""

    def clip_factor(self, gradients: Sequence[Tensor], world: int) -> Tensor | None:
        """What to scale this rank's gradient with, if at all."""
        if self.clip is None:
            return None
        norm = torch.stack([gradient.float().norm() for gradient in gradients]).norm()
        limit = norm.new_tensor(self.clip / math.sqrt(world))
        return torch.where(norm > limit, limit / norm, torch.ones_like(norm))


class Residual:
    """One rank's residual, as a flat vector. Between accumulation and `clear` it holds gradient plus residual."""

    def __init__(self, numel: int, feedback: Feedback, device: torch.device, dtype: torch.dtype) -> None:
        self.acc = torch.zeros(numel, dtype=dtype, device=device)
        self.momentum = feedback.momentum
        self.velocity = torch.zeros_like(self.acc) if feedback.momentum else None

    def add(self, start: int, gradient: Tensor) -> None:
        """Take in the gradient of the entries from `start` on."""
        stretch = slice(start, start + gradient.numel())
        update = gradient.reshape(-1)
        if self.velocity is not None:
            update = self.velocity[stretch].mul_(self.momentum).add_(update)
        self.acc[stretch] += update

    def clear(self, sent: Indices) -> None:
        for vector in self._vectors():
            vector[sent] = 0

    @contextmanager
    def keeping(self, spans: Sequence[Span]) -> Iterator[None]:
        """Put these spans back afterwards as they were."""
        parts = [vector[span.start : span.stop] for vector in self._vectors() for span in spans]
        kept = [part.clone() for part in parts]
        try:
            yield
        finally:
            for part, saved in zip(parts, kept, strict=True):
                part.copy_(saved)

    def _vectors(self) -> list[Tensor]:
        return [self.acc] if self.velocity is None else [self.acc, self.velocity]
