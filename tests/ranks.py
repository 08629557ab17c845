"""Ranks in this process for tests of single parts: `lockstep` drives them, and every message is kept for inspection."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradsieve.collectives import LocalCollectives, lockstep
from gradsieve.criterion import Criterion
from gradsieve.exchange import Exchange
from gradsieve.methods import Method
from gradsieve.pipeline import PendingStats, Worker
from gradsieve.region import Region, Whole
from gradsieve.types import Proposal, Reduced, Setup, Span, Step, Territory, View
from gradsieve.weights import Weights

CPU = torch.device("cpu")


class Message(NamedTuple):
    """What a rank brought to a collective, as it was then."""

    operation: str
    tensor: Tensor
    source: int | None = None

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


class Recording(LocalCollectives):
    """Collectives in process that keep a copy of what their rank handed over since `messages` was emptied."""

    writes_letters = True

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world, CPU)
        self.messages: list[Message] = []

    @property
    def operations(self) -> list[str]:
        return [message.operation for message in self.messages]

    async def _all_gather(self, tensor: Tensor) -> Tensor:
        self.messages.append(Message("all_gather", tensor.clone()))
        return await super()._all_gather(tensor)

    async def _all_reduce(self, tensor: Tensor) -> Tensor:
        self.messages.append(Message("all_reduce", tensor.clone()))
        return await super()._all_reduce(tensor)

    async def _all_to_all(self, tensor: Tensor) -> Tensor:
        self.messages.append(Message("all_to_all", tensor.clone()))
        return await super()._all_to_all(tensor)

    async def _all_to_all_pieces(self, pieces: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        self.messages.append(Message("all_to_all_pieces", torch.cat(list(pieces))))
        return await super()._all_to_all_pieces(pieces, lengths)

    async def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        self.messages.append(Message("broadcast", tensor.clone(), source))
        return await super()._broadcast(tensor, source)


def recorders(world: int) -> list[Recording]:
    return [Recording(rank, world) for rank in range(world)]


@dataclass(frozen=True)
class Moment:
    """A step, seen from no rank in particular."""

    world: int
    numel: int
    target: int
    index: int = 0
    seed: int = 0
    proposers: tuple[int, ...] | None = None
    bounds: tuple[int, ...] | None = None

    def of(self, rank: int) -> Step:
        setup = Setup(self.world, self.numel, self.bounds or (0, self.numel))
        proposers = tuple(range(self.world)) if self.proposers is None else self.proposers
        return Step(self.index, rank, self.seed, self.target, proposers, setup)

    def view(self, rank: int, acc: Tensor) -> View:
        """What a rank sees that looks at the whole vector."""
        step = self.of(rank)
        return View(step, acc, None, Whole().known(Whole().start(step.setup), step))


class Picked(NamedTuple):
    """What `pick` made of it on every rank."""

    proposals: list[Proposal]
    collectives: list[Recording]

    @property
    def indices(self) -> list[list[int]]:
        return [positions(proposal.indices) for proposal in self.proposals]


def positions(indices: Tensor | slice) -> list[int]:
    assert isinstance(indices, Tensor)
    numbers: list[int] = indices.tolist()
    return numbers


def pick(
    criterion: Criterion,
    acc: Tensor,
    moment: Moment,
    *,
    state: Any = None,
    region: Region | None = None,
    territories: Sequence[Territory] | None = None,
    parameters: Tensor | None = None,
) -> Picked:
    """Let every rank scan and pick from its row of `acc`, all in one territory each."""
    region = region or Whole()
    state = criterion.start(moment.of(0).setup) if state is None else state
    views = []
    for rank in range(moment.world):
        step = moment.of(rank)
        weights = None if parameters is None else Weights(_giving(parameters), step.setup.bounds)
        territory = territories[rank] if territories else region.known(region.start(step.setup), step)
        assert territory is not None
        view = View(step, acc[rank], weights, territory)
        found = (criterion.scan(state, view, territory.spans),)
        views.append(View(step, acc[rank], weights, territory, found))
    collectives = recorders(moment.world)
    picks = [criterion.pick(state, view, own) for view, own in zip(views, collectives, strict=True)]
    return Picked(lockstep(picks), collectives)


def reduce(
    exchange: Exchange,
    acc: Tensor,
    proposals: Sequence[Proposal],
    moment: Moment,
    *,
    dense: Tensor | None = None,
    wire: torch.dtype = torch.float32,
) -> tuple[list[Reduced], list[Recording]]:
    """Let every rank exchange its proposal, and its row of `dense` beside it."""
    collectives = recorders(moment.world)
    steps = [
        exchange.reduce(
            replace(moment.view(rank, acc[rank]), dense=None if dense is None else dense[rank], wire=wire),
            proposals[rank],
            collectives[rank],
        )
        for rank in range(moment.world)
    ]
    return lockstep(steps), collectives


def _giving(parameters: Tensor) -> Callable[[], Tensor]:
    return lambda: parameters


class Outcome(NamedTuple):
    """A step of one rank of a crew."""

    reduced: Reduced
    pending: PendingStats
    messages: list[Message]


class Crew:
    """The workers of all ranks, with recording collectives."""

    def __init__(
        self,
        method: Method,
        world: int,
        numel: int,
        *,
        bounds: tuple[int, ...] | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        wire: torch.dtype = torch.float32,
    ) -> None:
        self.collectives = recorders(world)
        setup = Setup(world, numel, bounds or (0, numel))
        self.workers = [Worker(method, setup, own, seed=seed, dtype=dtype, wire=wire) for own in self.collectives]

    @property
    def residual(self) -> Tensor:
        return torch.stack([worker.residual.acc for worker in self.workers])

    def feed(
        self, gradients: Tensor, parameters: Tensor | None = None, pieces: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """Begin a step on every rank and feed it, whole or in the given pieces."""
        for worker, gradient in zip(self.workers, gradients, strict=True):
            worker.begin(None if parameters is None else _giving(parameters))
            for start, stop in [(0, len(gradient))] if pieces is None else pieces:
                worker.feed(start, gradient[start:stop])

    def exchange(self, dense: Tensor | None = None) -> list[Reduced]:
        for own in self.collectives:
            own.messages.clear()
        rows = [None] * len(self.workers) if dense is None else list(dense)
        return lockstep([worker.exchange(row) for worker, row in zip(self.workers, rows, strict=True)])

    def finish(self, outcomes: Sequence[Reduced], unapplied: Sequence[Span] = ()) -> list[Outcome]:
        return [
            Outcome(reduced, worker.finish(reduced, unapplied), list(own.messages))
            for worker, reduced, own in zip(self.workers, outcomes, self.collectives, strict=True)
        ]

    def step(
        self,
        gradients: Tensor,
        parameters: Tensor | None = None,
        *,
        pieces: Sequence[tuple[int, int]] | None = None,
        dense: Tensor | None = None,
        unapplied: Sequence[Span] = (),
    ) -> list[Outcome]:
        """A whole step of all ranks."""
        self.feed(gradients, parameters, pieces)
        return self.finish(self.exchange(dense), unapplied)


def same(left: Tensor | slice, right: Tensor | slice) -> bool:
    """The same positions or numbers, bit for bit."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return not isinstance(left, Tensor) and not isinstance(right, Tensor) and left == right


def same_support(left: Reduced, right: Reduced) -> bool:
    """The same support, means and counts, bit for bit: what ranks agree on even if each has a threshold of its own."""
    vectors = zip(_shared(left), _shared(right), strict=True)
    return (left.counts, left.distinct) == (right.counts, right.distinct) and all(same(a, b) for a, b in vectors)


def same_outcome(left: Reduced, right: Reduced) -> bool:
    """The same in every field, bit for bit."""
    return (
        (left.thresholds, left.owners) == (right.thresholds, right.owners)
        and same_support(left, right)
        and same(left.sent, right.sent)
        and (left.rest is None) == (right.rest is None)
        and (left.rest is None or right.rest is None or same(left.rest, right.rest))
    )


def _shared(reduced: Reduced) -> tuple[Tensor | slice, ...]:
    return reduced.indices, reduced.mean, reduced.dense


def drawn(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Noise on the generator's device: `normal`, `laplace` or `student` (three degrees of freedom)."""
    noise = torch.empty(shape, device=generator.device)
    if kind == "normal":
        return noise.normal_(generator=generator)
    if kind == "laplace":
        signs = torch.randint(0, 2, shape, generator=generator, device=generator.device) * 2 - 1
        return noise.exponential_(generator=generator) * signs
    assert kind == "student"
    squares = torch.empty((3, *shape), device=generator.device).normal_(generator=generator).square()
    return noise.normal_(generator=generator) / squares.mean(0).sqrt()


class Noise:
    """Gradients for many steps, cheap: every row is a stretch of one long draw, at a place of its own."""

    def __init__(self, kind: str, numel: int, *, seed: int = 0, device: str = "cpu") -> None:
        self._numel = numel
        self._pool = drawn(kind, (8 * numel,), torch.Generator(device).manual_seed(seed))
        self._places = random.Random(seed)

    def rows(self, world: int) -> Tensor:
        """Independent gradients of all ranks, `[world, numel]`."""
        starts = [self._places.randrange(7 * self._numel) for _ in range(world)]
        return torch.stack([self._pool[start : start + self._numel] for start in starts])
