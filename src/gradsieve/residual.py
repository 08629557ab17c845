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
    ahead: float | None = 0.0
    """How much of its residual a rank looks ahead by; None: all of it, where the rate is known. See `ahead`."""
    overshoot: float = 0.0
    """How much more than what waited is applied where entries were sent: see [Note: overshooting] in `exchange`."""

    def clip_factor(self, gradients: Sequence[Tensor], world: int, factor: float = 1.0) -> Tensor | None:
        """What to scale this rank's gradient with, if at all; the gradient is that which is given, times `factor`."""
        if self.clip is None:
            return None
        norm = torch.stack([gradient.float().norm() for gradient in gradients]).norm() * factor
        limit = norm.new_tensor(self.clip / math.sqrt(world))
        return torch.where(norm > limit, limit / norm, torch.ones_like(norm))


class Residual:
    """One rank's residual, as a flat vector. Between accumulation and `clear` it holds gradient plus residual."""

    def __init__(self, acc: Tensor, velocity: Tensor | None, momentum: float) -> None:
        self.acc = acc
        self.velocity = velocity
        self.momentum = momentum

    @classmethod
    def zeros(cls, shape: tuple[int, ...], feedback: Feedback, device: torch.device, dtype: torch.dtype) -> Residual:
        """Of one rank, `(numel,)`, or of several in one piece of memory, `(ranks, numel)`."""
        acc = torch.zeros(shape, dtype=dtype, device=device)
        return cls(acc, torch.zeros_like(acc) if feedback.momentum else None, feedback.momentum)

    def rows(self) -> list[Residual]:
        """Of several ranks' residuals, those of each."""
        velocities = [None] * len(self.acc) if self.velocity is None else list(self.velocity)
        return [Residual(acc, velocity, self.momentum) for acc, velocity in zip(self.acc, velocities, strict=True)]

    def add(self, start: int, gradient: Tensor, factor: float = 1.0) -> None:
        """Take in the gradient of the entries from `start` on, times `factor`."""
        update = gradient if gradient.dim() == self.acc.dim() else gradient.reshape(-1)
        stretch = slice(start, start + update.shape[-1])
        if self.velocity is not None:
            update = self.velocity[..., stretch].mul_(self.momentum).add_(update, alpha=factor)
            factor = 1.0
        self.acc[..., stretch].add_(update, alpha=factor)

    def take_back(self, start: int, gradient: Tensor, factor: float = 1.0) -> None:
        """Undo `add`, to the rounding of an addition."""
        stretch = slice(start, start + gradient.shape[-1])
        if self.velocity is None:
            self.acc[..., stretch].sub_(gradient, alpha=factor)
        else:
            velocity = self.velocity[..., stretch]
            self.acc[..., stretch].sub_(velocity)
            velocity.sub_(gradient, alpha=factor).div_(self.momentum)

    def clear(self, sent: Indices, rest: Tensor | None = None) -> None:
        """Forget what was sent, but for the `rest` of it that did not travel."""
        for _, vector in self.named():
            if isinstance(sent, Tensor):
                vector.index_fill_(-1, sent, 0)
            else:
                vector[..., sent] = 0
        if rest is not None:
            self.acc[..., sent] = rest.to(self.acc.dtype)

    def rescale(self, factor: float) -> None:
        """See [Note: residuals follow the learning rate] in `ahead`."""
        for _, vector in self.named():
            vector.mul_(factor)

    def norm(self) -> float:
        return float(self.acc.float().norm())

    @contextmanager
    def keeping(self, spans: Sequence[Span]) -> Iterator[None]:
        """Put these spans back afterwards as they were."""
        parts = [vector[span.start : span.stop] for _, vector in self.named() for span in spans]
        kept = [part.clone() for part in parts]
        try:
            yield
        finally:
            for part, saved in zip(parts, kept, strict=True):
                part.copy_(saved)

    def named(self) -> list[tuple[str, Tensor]]:
        """The vectors that are this rank's state."""
        vectors = [("residual", self.acc), ("velocity", self.velocity)]
        return [(name, vector) for name, vector in vectors if vector is not None]
