"""What a rank does in a step by itself, for each method: everything but the messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from gradsieve.bench.given import heavy_tailed
from gradsieve.collectives import Collectives, run
from gradsieve.exchange import Exchange
from gradsieve.methods import Method, exdyna, iwp, micro, union
from gradsieve.pipeline import Worker
from gradsieve.types import Proposal, Reduced, Setup, View

PARTITIONED: Mapping[str, Callable[..., Method]] = MappingProxyType({"micro": micro, "exdyna": exdyna})
WHOLE: Mapping[str, Callable[..., Method]] = MappingProxyType({"union": union, "iwp": iwp})
"""Methods whose ranks look at the whole vector: one rank's work is that of the only one."""


def local_steps(numel: int, density: float, partitions: int, device: torch.device) -> dict[str, Callable[[], None]]:
    """A call for each method: one local step on a vector of `numel` entries, as one rank of `partitions`."""
    gradient = heavy_tailed(numel, device, seed=1)
    made = {name: (make(density=density), partitions) for name, make in PARTITIONED.items()}
    made |= {name: (make(density=density), 1) for name, make in WHOLE.items()}
    return {name: _LocalStep(method, world, gradient) for name, (method, world) in made.items()}


def stand_in(numel: int, density: float, world: int, device: torch.device) -> Tensor:
    """Indices as the other ranks would send them: the target, but for this rank's share."""
    count = int(density * numel) * (world - 1) // world
    draw = torch.Generator().manual_seed(0)
    return torch.randint(numel, (count,), generator=draw).sort().values.to(device)


class _LocalStep:
    """Accumulate, select, clear what is sent, write the result where the gradient was."""

    def __init__(self, method: Method, world: int, gradient: Tensor) -> None:
        others = stand_in(len(gradient), method.density, world, gradient.device)
        self._method = replace(method, exchange=_NoExchange(others))
        self._world = world
        self._given = gradient
        self._worker: Worker | None = None

    def __call__(self) -> None:
        # made late: not all methods have their residuals in memory at the same time
        self._worker = self._worker or self._make()
        self._worker.begin(self._parameters)
        self._worker.feed(0, self._gradient)
        reduced = run(self._worker.exchange())
        self._worker.finish(reduced)
        self._result.zero_()
        self._result[reduced.indices] = reduced.mean

    def _make(self) -> Worker:
        numel, device = len(self._given), self._given.device
        # the result has a place of its own, or the second step would find no gradient
        self._gradient, self._result = self._given, torch.empty_like(self._given)
        self._flat_parameters = torch.ones_like(self._given)
        return Worker(self._method, Setup(self._world, numel, (0, numel)), _AsIfAlike(0, self._world, device))

    def _parameters(self) -> Tensor:
        return self._flat_parameters


@dataclass(frozen=True)
class _NoExchange(Exchange):
    """The support is what this rank proposes, with what the others might have."""

    others: Tensor

    async def reduce(self, view: View, proposal: Proposal, collectives: Collectives) -> Reduced:
        assert isinstance(proposal.indices, Tensor)
        support = torch.cat([proposal.indices, self.others])
        values = view.acc[support]
        return Reduced(
            indices=support,
            mean=values,
            dense=values[:0],
            sent=support,
            counts=proposal.counts or (len(proposal.indices),) * collectives.world,
            thresholds=proposal.thresholds,
            distinct=len(support),
        )


class _AsIfAlike(Collectives):
    """Of a rank whose fellows bring what it brings: no message, and counts as over all of them."""

    async def _all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.expand(self.world, *tensor.shape)

    async def _all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.mul_(self.world)

    async def _broadcast(self, tensor: Tensor, source: int) -> Tensor:  # noqa: ARG002 - all bring the same
        return tensor

    async def _all_to_all(self, tensor: Tensor) -> Tensor:
        return tensor
