"""Models whose gradients a test can choose, and the DDP loop around them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve import METHODS, Method, Sieve

SHAPES = ((40, 30), (30,), (7, 5, 3), (0, 4), (1, 1), (90, 11), (11,))
"""Matrices, vectors, an empty and a one-element parameter; about 2,300 entries."""


# every method as it comes, and with options that change what it does
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in METHODS} | {
    "micro-paper": ("micro", {"control": "paper"}),
    "exdyna-paper": ("exdyna", {"control": "paper"}),
    "exdyna-paper-blocks": ("exdyna", {"blocks": "paper"}),
    "exdyna-paper-control": ("exdyna", {"control": "paper", "blocks": "adaptive"}),
    "iwp-per-layer": ("iwp", {"per_layer": True}),
    "iwp-stochastic": ("iwp", {"stochastic": True}),
    "iwp-momentum": ("iwp", {"momentum": 0.9}),
    "dgc-clipped": ("dgc", {"clip": 1.0, "warmup_steps": 4}),
    "union-tight": ("union", {"ceiling": 1.0}),
    "union-overshoot": ("union", {"overshoot": 0.5}),
    "union-warm-up": ("union", {"warmup_steps": 4}),
    "oktopk-tight": ("oktopk", {"ceiling": 1.0}),
}

BY_SUMS = {"gtopk", "oktopk", "oktopk-tight"}
"""The variants that choose among sums over ranks, to which only ranks give that picked an entry."""


def make(variant: str, density: float) -> Method:
    """A method by its name or the name of one of its variants."""
    name, options = VARIANTS[variant]
    return gradsieve.method(name, **({} if name == "dense" else {"density": density}), **options)


class Chosen(nn.Module):
    """The gradient of each parameter is the tensor given to `forward`."""

    def __init__(self, shapes: Sequence[Sequence[int]] = SHAPES, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.linspace(-1, 1, math.prod(shape)).reshape(*shape).to(dtype)) for shape in shapes
        )

    def forward(self, gradients: Sequence[Tensor | None]) -> Tensor:
        terms = [
            (weight * gradient).sum()
            for weight, gradient in zip(self.weights, gradients, strict=True)
            if gradient is not None
        ]
        return torch.stack(terms).sum()


def gradients_of(rank: int, step: int, shapes: Sequence[Sequence[int]] = SHAPES) -> list[Tensor]:
    """A rank's gradient at a step, the same whoever computes it; layers differ in scale."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(*shape, generator=generator) * (1 + layer) for layer, shape in enumerate(shapes)]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def stacked_gradients(steps: int, world: int, shapes: Sequence[Sequence[int]] = SHAPES) -> Tensor:
    """`[steps, world, numel]`: what `simulate` takes, of the gradients that `gradients_of` gives."""
    return torch.stack(
        [torch.stack([flat(gradients_of(rank, step, shapes)) for rank in range(world)]) for step in range(steps)]
    )


def flat_parameters(shapes: Sequence[Sequence[int]] = SHAPES) -> Tensor:
    return flat([parameter.detach() for parameter in Chosen(shapes).parameters()])


def sparsified(
    method: Method, ddp: dict[str, Any] | None = None, device: str = "cpu", **options: Any
) -> tuple[DistributedDataParallel, Sieve]:
    """A DDP model of several buckets with its sieve; by default nothing is excluded."""
    model = DistributedDataParallel(Chosen().to(device), **({"bucket_cap_mb": 0.003} | (ddp or {})))
    return model, gradsieve.sparsify(model, method, **({"exclude": ()} | options))


def backward(model: nn.Module, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The averaged gradients of one step; parameters that nobody used have None."""
    model.zero_grad(set_to_none=True)
    loss: Tensor = model(gradients)
    loss.backward()  # type: ignore[no-untyped-call]
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def averaged(model: nn.Module, steps: int, first: int = 0) -> list[Tensor]:
    """The flat averaged gradient of each step, with this rank's `gradients_of` put in."""
    means = []
    for step in range(first, first + steps):
        device = next(model.parameters()).device
        found = backward(model, [gradient.to(device) for gradient in gradients_of(dist.get_rank(), step)])
        means.append(flat([mean for mean in found if mean is not None]))
    return means
