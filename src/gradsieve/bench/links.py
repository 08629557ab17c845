"""Measures what the cost model goes by: the link between the ranks, and this machine's share of a step.

Every rank calls these functions alike, inside a process group. Work is timed while all ranks do it at once, as in a
step, and the slowest rank's time counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

from gradsieve import collectives, kernels, wire
from gradsieve.bench.given import heavy_tailed
from gradsieve.bench.local import plain_step, spread_indices
from gradsieve.collectives import GroupCollectives, run
from gradsieve.cost.machine import H200, Machine
from gradsieve.cost.messages import Link, Message, goes_directly, link_bytes, rounds
from gradsieve.methods import micro
from gradsieve.nonfinite import is_finite, pieces
from gradsieve.score import Importance, Magnitude, Score, collect
from gradsieve.types import Setup, Span, Step, View
from gradsieve.weights import Weights

SHORT_BYTES, SHORT_REPEATS = 8, 15
FIRST_BYTES, MOST_BYTES = 1 << 20, 1 << 26
LONG_SECONDS, LONG_REPEATS = 0.2, 3
"""A message grows until it takes so long: then its latency is nothing beside its bytes."""
MOST_ENTRIES = 1 << 23
"""Of the vectors that local work is timed on: more than a cache holds, and done in a few seconds."""
DENSITY = 0.01
REPEATS, SORT_REPEATS = 5, 5
SMALL_ENTRIES, NUM_TENSORS = 4096, 32
NUM_MATRICES, HIGHER_RANK = 8, 4

Call: TypeAlias = Callable[[], object]


class Circumstances(NamedTuple):
    """What steps are measured under."""

    link: Link
    machine: Machine

    def as_record(self) -> dict[str, Any]:
        return {"link": self.link.as_record(), "machine": self.machine.as_record()}


def circumstances(numel: int, group: dist.ProcessGroup, device: torch.device) -> Circumstances:
    """Both, as one rank of a group."""
    return Circumstances(measured_link(group, device), measured_machine(numel, group, device))


class _Rank(NamedTuple):
    """One rank of a group, which times what all ranks do at once."""

    group: dist.ProcessGroup
    device: torch.device

    @property
    def world(self) -> int:
        return dist.get_world_size(self.group)

    def meet(self) -> None:
        """Go on when every rank has come this far."""
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        self.wait()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Call, repeats: int) -> float:
        """The median time of a call that all ranks begin at once, on the slowest; the first call does not count."""
        call()
        laps = [self._lap(call) for _ in range(repeats)]
        return statistics.median(self.slowest(laps))

    def slowest(self, laps: list[float]) -> list[float]:
        longest = torch.tensor(laps, dtype=torch.float64, device=self.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.group)
        found: list[float] = longest.tolist()
        return found

    def _lap(self, call: Call) -> float:
        self.meet()
        start = perf_counter()
        call()
        self.wait()
        return perf_counter() - start


def measured_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Latency by a message of nothing, bandwidth by one that is as long as it takes."""
    rank, team = _Rank(group, device), GroupCollectives(group, device)
    world = rank.world
    link = Link(math.inf, 0.0, direct_bytes(dist.get_backend(group), device.type))
    short = Message("all_gather", SHORT_BYTES)
    own = torch.zeros(SHORT_BYTES // 8, dtype=torch.int64, device=device)
    waiting = rank.seconds(lambda: run(team.all_gather(own)), SHORT_REPEATS)
    num_rounds = rounds(short, world, direct=goes_directly(short, world, link))
    latency = waiting / max(1, num_rounds)
    return replace(link, latency=latency, bandwidth=_bandwidth(rank, latency))


def direct_bytes(backend: str, device_type: str) -> int:
    """Up to which size this library sends messages directly: gloo knows rings only, others choose by themselves."""
    return collectives.DIRECT_BYTES if (backend, device_type) == ("gloo", "cpu") else 0


def _bandwidth(rank: _Rank, latency: float) -> float:
    size = FIRST_BYTES
    while True:
        message = Message("all_reduce", size, ours=False)
        call = partial(_reduce, rank, torch.zeros(size // 4, device=rank.device))
        spent = rank.seconds(call, 1)
        if spent >= LONG_SECONDS or size >= MOST_BYTES:
            spent = rank.seconds(call, LONG_REPEATS)
            waiting = rounds(message, rank.world, direct=False) * latency
            return 8 * link_bytes(message, rank.world) / max(spent - waiting, spent / 2)
        # all ranks know the same slowest time, so they agree on the next size
        size = min(MOST_BYTES, 2 * size * max(1, int(LONG_SECONDS / spent / 2)))


def _reduce(rank: _Rank, tensor: Tensor) -> None:
    dist.all_reduce(tensor, group=rank.group)


def measured_machine(numel: int, group: dist.ProcessGroup, device: torch.device) -> Machine:
    """What a rank's own work takes, on vectors of up to `numel` entries.

    On CUDA the kernels' figures are those of an H200, in proportion to what memory does here.
    """
    rank = _Rank(group, device)
    num_entries = max(SMALL_ENTRIES, min(numel, MOST_ENTRIES))
    if rank.device.type == "cuda":
        return _scaled(H200, rank, num_entries)
    entries = _Entries(num_entries, rank.device)
    timed = partial(rank.seconds, repeats=REPEATS)
    one_rank, four_ranks = (timed(partial(entries.project, columns)) for columns in (1, HIGHER_RANK))
    many, small = num_entries, Setup(rank.world, SMALL_ENTRIES, (0, SMALL_ENTRIES))
    whole_step = plain_step(micro(density=DENSITY), small, rank.device)
    return Machine(
        add=timed(entries.take_in) / many,
        sweep=timed(entries.gradient.zero_) / many,
        copy=timed(entries.gradient.clone) / many,
        scan=timed(partial(entries.look, Magnitude())) / many,
        weigh=timed(partial(entries.look, Importance())) / many,
        sort=rank.seconds(entries.sort, SORT_REPEATS) / many,
        index=timed(entries.decode) / len(entries.indices),
        merge=timed(entries.merge) / (2 * len(entries.indices)),
        value=timed(entries.write) / len(entries.indices),
        cast=timed(entries.cast) / many,
        low_rank=one_rank / many,
        low_rank_more=max(0.0, four_ranks - one_rank) / (HIGHER_RANK - 1) / many,
        column=0.0,  # within the two before
        tensor=timed(entries.take_in_tensors) / NUM_TENSORS,
        step=timed(whole_step.call),
        crowding=_crowding(rank, partial(entries.look, Importance())),
    )


def _crowding(rank: _Rank, call: Call) -> float:
    """How much longer a call takes while all ranks do it than on the first rank while the others wait.

    Taken in turns, so that what else the machine does meets both alike.
    """
    alone = call if dist.get_rank(rank.group) == 0 else lambda: None
    ratios = [rank.seconds(call, 1) / rank.seconds(alone, 1) for _ in range(REPEATS)]
    return max(1.0, statistics.median(ratios))


def _scaled(known: Machine, rank: _Rank, num_entries: int) -> Machine:
    residual, gradient = torch.zeros(num_entries, device=rank.device), torch.ones(num_entries, device=rank.device)

    def sweep() -> None:
        residual.add_(gradient)
        gradient.zero_()

    factor = rank.seconds(sweep, REPEATS) / num_entries / (known.add + known.sweep)
    of_the_host = {"column", "tensor", "step", "crowding"}
    names = [field.name for field in fields(known) if field.name not in of_the_host]
    changed = {name: factor * getattr(known, name) for name in names}
    return replace(known, **changed)


class _Entries:
    """A vector to work on, as in a step."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.gradient, self.residual = torch.ones(numel, device=device), torch.zeros(numel, device=device)
        self._acc = heavy_tailed(numel, device, seed=1)
        self._parameters = heavy_tailed(numel, device, seed=2)
        target = max(1, int(DENSITY * numel))
        self._step = Step(0, 0, 0, target, (0,), Setup(1, numel, (0, numel)))
        self.indices = spread_indices(numel, target, device)
        self._shape = wire.Shape.of(target, numel)
        self._message = wire.encode(self.indices, 0, self._shape)
        self._thresholds: dict[Score, float] = {
            score: self._reached(score(self._view(), 0, numel)) for score in (Magnitude(), Importance())
        }
        side = math.isqrt(numel // NUM_MATRICES)
        self._matrices = self._acc[: NUM_MATRICES * side * side].view(NUM_MATRICES, side, side)
        self._errors = torch.zeros_like(self._matrices)
        self._side = side

    def _view(self) -> View:
        """Of a step: where parameters are looked at, it flattens and measures them anew."""
        return View(self._step, self._acc, Weights(self._parameters.clone, self._step.setup.bounds))

    def _reached(self, scores: Tensor) -> float:
        return float(scores.topk(len(self.indices)).values[-1])

    def take_in(self) -> None:
        start = 0
        for piece in pieces(self.gradient):
            is_finite(piece)
            self.residual[start : start + len(piece)].add_(piece)
            start += len(piece)

    def take_in_tensors(self) -> None:
        """Small tensors one by one: what they cost beside their entries."""
        view = self._view()
        for place in range(NUM_TENSORS):
            piece, stretch = self.gradient[place : place + 1], Span(place, place + 1)
            is_finite(piece)
            self.residual[place : place + 1].add_(piece)
            collect(Magnitude(), view, [stretch], math.inf)
            piece.zero_()
            piece.scatter_(0, self.indices[:0], self._acc[:0])

    def look(self, score: Score) -> None:
        collect(score, self._view(), [Span(0, len(self._acc))], self._thresholds[score])

    def sort(self) -> None:
        kernels.largest(self._acc.abs(), len(self.indices))

    def decode(self) -> None:
        wire.decode(self._message, self._shape)

    def merge(self) -> None:
        """What several ranks chose, in part the same."""
        kernels.merged(torch.cat([self.indices, self.indices]))

    def write(self) -> None:
        values = self.residual.index_select(-1, self.indices)
        self.residual.index_fill_(-1, self.indices, 0)
        self.gradient.scatter_(0, self.indices, values)

    def cast(self) -> None:
        self.gradient.copy_(self.gradient.half().div_(2))

    def project(self, rank: int) -> None:
        """A step of PowerSGD without its messages."""
        self._errors.add_(self._matrices)
        given = self._errors.clone()
        rights = torch.ones(NUM_MATRICES, self._side, rank, device=self._acc.device)
        for matrix, right in zip(torch.split(self._errors, 1), torch.split(rights, 1), strict=True):
            left = torch.bmm(matrix, right)
            _orthogonalize(left)  # type: ignore[no-untyped-call]
            torch.bmm(matrix.transpose(1, 2), left, out=right)
            torch.bmm(left, right.transpose(1, 2), out=matrix)
        self._errors = given - self._errors
