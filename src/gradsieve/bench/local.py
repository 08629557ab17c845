"""What a rank does in a step by itself, for each method: everything but the messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from gradsieve import control, kernels
from gradsieve.bench.given import heavy_tailed
from gradsieve.bench.timing import Case
from gradsieve.collectives import Collectives, run
from gradsieve.exchange import Exchange
from gradsieve.fused import Fused, Late, Outcome, suits
from gradsieve.methods import Method, exdyna, iwp, micro, union
from gradsieve.pipeline import Worker
from gradsieve.search import SearchState
from gradsieve.types import Proposal, Reduced, Setup, Step, View
from gradsieve.weights import Weights

METHODS: Mapping[str, Callable[..., Method]] = MappingProxyType({"micro": micro, "exdyna": exdyna, "union": union})
"""Methods in which every rank looks and proposes."""


def local_steps(numel: int, density: float, partitions: int, device: torch.device) -> dict[str, Callable[[], Case]]:
    """For each method, what makes one local step on a vector of `numel` entries, as one rank of `partitions`."""
    made = {name: (make(density=density), partitions) for name, make in METHODS.items()}
    # of the ranks that broadcast, and have the most to do, there is one
    made["iwp"] = iwp(density=density), 1

    def maker(method: Method, world: int) -> Callable[[], Case]:
        setup = Setup(world, numel, (0, numel))
        by_kernels = kernels.uses_triton(device) and suits(method, setup, torch.float32)
        return lambda: (fused_step if by_kernels else plain_step)(method, setup, device)

    return {name: maker(method, world) for name, (method, world) in made.items()}


def stand_in(numel: int, density: float, world: int, device: torch.device) -> Tensor:
    """Indices as the other ranks would send them: the target, but for this rank's share."""
    count = int(density * numel) * (world - 1) // world
    return spread_indices(numel, count, device)


def spread_indices(numel: int, count: int, device: torch.device) -> Tensor:
    """So many ascending indices: one at random out of each of as many equal stretches."""
    draw = torch.Generator(device).manual_seed(0)
    width = numel // max(count, 1)
    return torch.arange(count, device=device) * width + torch.randint(
        width, (count,), generator=draw, device=device
    )  # fmt: skip


def fused_step(method: Method, setup: Setup, device: torch.device) -> Case:
    """By kernels: take in, select, write back. The support of all ranks is a stand-in for what messages would bring."""
    given = heavy_tailed(setup.numel, device, seed=1)
    gradient = given.clone()
    fused = Fused(
        method, setup, AsIfAlike(0, setup.world, device), torch.zeros((1, setup.numel), device=device)
    )  # fmt: skip
    target = method.budget.target(0, setup.numel)
    support = spread_indices(setup.numel, target, device).to(fused.tiling.edges.dtype)
    borders = torch.searchsorted(support, fused.tiling.edges)
    nothing = torch.empty(0, device=device)
    late = Late(_step_of(setup, target, 0), nothing, nothing, nothing, None)
    outcome = Outcome(support, borders, given[support.long()], nothing, None, late)
    parameters = heavy_tailed(setup.numel, device, seed=2) if method.criterion.needs_weights else nothing
    weights = Weights(lambda: parameters, setup.bounds)
    # as after some steps: how many a rank proposes is known
    fused.learn(method.region.start(setup), SearchState((0.0,), recent=(-(-target // setup.world),) * control.RECENT))
    num_steps = 0

    def call() -> None:
        nonlocal num_steps
        fused.begin(_step_of(setup, target, num_steps), weights)
        fused.feed(gradient, fused.tiling.whole)
        run(fused.select())
        fused.write_back(gradient, fused.tiling.whole, outcome, fused.sent(outcome))
        num_steps += 1

    return Case(call, lambda: _done(gradient.copy_(given)))


def _step_of(setup: Setup, target: int, index: int) -> Step:
    return Step(index, 0, 0, target, tuple(range(setup.world)), setup)


def plain_step(method: Method, setup: Setup, device: torch.device) -> Case:
    """By plain torch: the same."""
    given = heavy_tailed(setup.numel, device, seed=1)
    gradient, parameters = given.clone(), heavy_tailed(setup.numel, device, seed=2)
    others = stand_in(setup.numel, method.density, setup.world, device)
    worker = Worker(replace(method, exchange=_NoExchange(others)), setup, AsIfAlike(0, setup.world, device))

    def call() -> None:
        worker.begin(lambda: parameters)
        worker.feed(0, gradient)
        reduced = run(worker.exchange())
        worker.finish(reduced)
        gradient.zero_()
        gradient[reduced.indices] = reduced.mean

    return Case(call, lambda: _done(gradient.copy_(given)))


def _done(result: Tensor) -> None:
    """A call returns nothing."""


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
            distinct=sum(proposal.counts or (len(proposal.indices),) * collectives.world),
        )


class AsIfAlike(Collectives):
    """Of a rank whose fellows bring what it brings: no message, and counts as over all of them."""

    async def _all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.expand(self.world, *tensor.shape)

    async def _all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.mul_(self.world)

    async def _broadcast(self, tensor: Tensor, source: int) -> Tensor:  # noqa: ARG002 - all bring the same
        return tensor

    async def _all_to_all(self, tensor: Tensor) -> Tensor:
        return tensor
