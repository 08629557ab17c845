"""What happens to a step in which a gradient is not finite.

[Note: a fault is everyone's]
A rank that meets an inf or a nan puts zeros in its place and a code, the number of the parameter, into the message that
all values travel in. So all ranks know of it at the end of the same exchange, without a message more. Then, before
anything was cleared or learned, each takes back what it fed: the residual is what it was, to the rounding of one
addition, and to the bit where that addition was exact. The kernels of `fused` overwrite the gradients they take, so
nothing can be taken back there: they serve where a fault ends the run, and the host, which does not wait for them,
learns of it some steps later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

OnNonfinite: TypeAlias = Literal["raise", "skip", "propagate"]

PIECE = 1 << 18
"""Entries that are looked at and then taken in, on the CPU: they are still in the cache."""


class NonFiniteError(ArithmeticError):
    """A gradient was not finite, on one rank at least. Raised on every rank."""


class LateNonFiniteError(NonFiniteError):
    """The same, seen when the step was over."""

    def __init__(self, step: int, codes: Sequence[int]) -> None:
        self.step = step
        self.codes = codes
        ranks = [rank for rank, code in enumerate(codes) if code]
        super().__init__(f"step {step}: gradients were not finite on ranks {ranks}")


def pieces(gradient: Tensor) -> Sequence[Tensor]:
    """A flat gradient in parts that stay in the cache of a CPU."""
    return torch.split(gradient, PIECE)


def is_finite(gradient: Tensor) -> bool:
    """Are all entries numbers, and finite?"""
    # a sum is not finite if an entry is not; the reverse is not so, but seldom
    if gradient.numel() == 0 or math.isfinite(gradient.sum()):
        return True
    return all(math.isfinite(extreme) for extreme in torch.stack(torch.aminmax(gradient)).tolist())


def are_finite(gradients: Sequence[Tensor]) -> list[bool]:
    """The same of each of several flat ones, with one wait for the device."""
    filled = [gradient for gradient in gradients if gradient.numel()]
    if not filled:
        return [True] * len(gradients)
    told = iter(torch.stack(torch._foreach_norm(filled, math.inf)).isfinite().tolist())
    return [gradient.numel() == 0 or next(told) for gradient in gradients]


def described(step: int, faults: Mapping[int, str], *, late: bool, scaled: bool) -> str:
    """The text of an error: which rank had what."""
    named = ", ".join(f"{name!r} on rank {rank}" for rank, name in sorted(faults.items()))
    when = " (found now, because a step on CUDA is not waited for)" if late else ""
    hint = (
        "give on_nonfinite='skip' to leave such steps out"
        if scaled
        else "look for a learning rate that is too high; with a GradScaler, give it: sparsify(..., scaler=scaler); "
        "on_nonfinite='skip' leaves such steps out, 'propagate' sends what is there, as plain DDP does"
    )
    return f"step {step}: the gradient is not finite: {named}{when}; {hint}"
