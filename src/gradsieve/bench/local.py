"""What a rank does in a step by itself, for each method: everything but the messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from gradsieve import control, kernels, wire
from gradsieve.bench.given import heavy_tailed
from gradsieve.bench.timing import Case
from gradsieve.collectives import Collectives, run
from gradsieve.exchange import Exchange
from gradsieve.fused import Fused, Outcome, suits
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


class FusedStep:
    """A rank's step by kernels: take in, select, write back, and what lies between, without messages.

    The support of all ranks is a stand-in for what messages would bring, and they bring as much as this rank does.
    """

    def __init__(self, method: Method, setup: Setup, device: torch.device) -> None:
        self._setup = setup
        self._given = heavy_tailed(setup.numel, device, seed=1)
        self.gradient = self._given.clone()
        self.fused = Fused(
            method, setup, AsIfAlike(0, setup.world, device), torch.zeros((1, setup.numel), device=device)
        )
        self._target = method.budget.target(0, setup.numel)
        nothing = torch.empty(0, device=device)
        parameters = heavy_tailed(setup.numel, device, seed=2) if method.criterion.needs_weights else nothing
        self._weights = Weights(lambda: parameters, setup.bounds)
        self.support = spread_indices(setup.numel, self._target, device).to(self.fused.tiling.edges.dtype)
        borders = torch.searchsorted(self.support, self.fused.tiling.edges)
        self.outcome = Outcome(self.support, borders, self._given[self.support.long()], nothing, None, nothing, nothing)
        # as after some steps: how many a rank proposes is known
        share = -(-self._target // setup.world)
        self.fused.learn(method.region.start(setup), SearchState((0.0,), recent=(share,) * control.RECENT))
        self._num_steps = 0

    def _step(self, index: int) -> Step:
        return Step(index, 0, 0, self._target, tuple(range(self._setup.world)), self._setup)

    def refill(self) -> None:
        """A gradient again, where the last mean is."""
        self.gradient.copy_(self._given)

    def begin(self) -> None:
        self.fused.begin(self._step(self._num_steps), self._weights)
        self._num_steps += 1

    def take_in(self) -> None:
        self.fused.feed(self.gradient, self.fused.tiling.whole)

    def write_back(self) -> None:
        self.fused.write_back(self.gradient, self.fused.tiling.whole, self.outcome, self.fused.sent(self.outcome))

    def __call__(self) -> None:
        self.begin()
        self.take_in()
        run(self.fused.select())
        self.write_back()


def fused_step(method: Method, setup: Setup, device: torch.device) -> Case:
    step = FusedStep(method, setup, device)
    return Case(step, step.refill)


SETTLING = 5
"""Steps before a kernel is looked at alone, so that it finds a threshold."""


def single_kernels(numel: int, density: float, partitions: int, device: torch.device) -> dict[str, Callable[[], Case]]:
    """What makes each kernel of a step, alone, where there are kernels; for a partition, and for the whole vector."""
    if not kernels.uses_triton(device):
        return {}
    setup = Setup(partitions, numel, (0, numel))
    made: dict[str, Callable[[], Case]] = {}
    for method in (micro(density=density), union(density=density)):
        for name in ("sieve", "count", "decide", "pick", "pack", "unpack"):
            made[f"{name}, {method.name}"] = partial(_single_kernel, name, method, setup, device)
    for name in ("merge", "gather", "write_back"):
        made[name] = partial(_single_kernel, name, union(density=density), setup, device)
    return made


def _single_kernel(name: str, method: Method, setup: Setup, device: torch.device) -> Case:
    step = FusedStep(method, setup, device)
    for _ in range(SETTLING):
        step.refill()
        step()
    step.refill()
    step.begin()
    if name == "sieve":
        return Case(step.take_in, step.refill)
    step.take_in()
    return Case(_alone(name, step, method.budget.target(0, setup.numel), setup, device))


def _alone(name: str, step: FusedStep, target: int, setup: Setup, device: torch.device) -> Callable[[], None]:
    """One kernel, again and again on what it finds in a step."""
    from gradsieve.kernels import ladder, merge, packing, pick, scatter

    fused, decision, looking = step.fused, step.fused.decision, step.fused.looking
    picked = run(fused.select())
    shape = wire.Shape.of(picked.shape[1], fused.extent)
    packed = (picked, fused.sight, decision, shape, 0)
    messages = packing.pack(*packed).repeat(setup.world, 1)
    ranks = torch.arange(setup.world, device=device)
    found = step.support.clone()
    marks = torch.zeros(-(-setup.numel // 32), dtype=torch.int32, device=device)
    bits = torch.ones_like(step.support, dtype=torch.int32) << (step.support % 32).int()
    marks.index_add_(0, step.support.long() // 32, bits)
    values = torch.empty((1, target), device=device)
    counts = decision.counts.expand(setup.world, -1).clone()
    decision.record[7] = target
    calls: dict[str, Callable[[], object]] = {
        "count": lambda: ladder.count(*looking, rungs=None),
        "decide": lambda: fused.decide(counts),
        "pick": lambda: pick.pick(*looking, picked, rungs=None, rung=decision.record[1:2], first_rank=0),
        "pack": lambda: packing.pack(*packed),
        "unpack": lambda: packing.unpack(messages, ranks, decision, shape, found, None, shift=0, numel=setup.numel),
        "merge": lambda: merge.merge(marks, decision, found, numel=setup.numel, target=target, percent=105),
        "gather": lambda: scatter.gather(looking[0], step.support, decision, values),
        "write_back": step.write_back,
    }
    call = calls[name]
    return lambda: _done(call())


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
        gradient.scatter_(0, reduced.indices, reduced.mean)

    return Case(call, lambda: _done(gradient.copy_(given)))


def _done(result: object) -> None:
    """A call returns nothing."""


@dataclass(frozen=True)
class _NoExchange(Exchange):
    """The support is what this rank proposes, with what the others might have; the means are any numbers."""

    others: Tensor

    async def reduce(self, view: View, proposal: Proposal, collectives: Collectives) -> Reduced:
        assert isinstance(proposal.indices, Tensor)
        support = torch.cat([proposal.indices, self.others])
        values = view.acc[: len(support)]
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
