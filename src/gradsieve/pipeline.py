"""The step of one rank, whatever carries it: a DDP hook or a simulation."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradsieve.checks import check_whole
from gradsieve.clock import Stopwatch
from gradsieve.collectives import Collectives, TeamCollectives, run
from gradsieve.layout import Slot, write_back
from gradsieve.methods import Method
from gradsieve.nonfinite import are_finite, is_finite, pieces
from gradsieve.region import Region
from gradsieve.residual import Residual
from gradsieve.types import Reduced, Setup, Span, Step, StepStats, Territory, View
from gradsieve.weights import Weights

SUMMED = (
    *("numel", "target", "support", "wire_bytes", "link_bytes", "num_messages", "dense_numel", "dense_bytes"),
    *("select_seconds", "exchange_seconds"),
)
"""The fields of a record that add up over the parts of a model."""


class Learned(NamedTuple):
    """What a method's parts learned so far; alike on every rank."""

    region: Any
    criterion: Any


async def reduce_step(method: Method, learned: Learned, view: View, collectives: Collectives) -> Reduced:
    """From an accumulated vector, scanned as far as it could be, to the mean over ranks at the support."""
    if not view.territory.quotas:  # it was not known before the gradient was
        territory = await method.region.settle(learned.region, view, collectives)
        scanned = method.criterion.scan(learned.criterion, view, territory.spans)
        view = replace(view, territory=territory, found=(scanned,))
    proposal = await method.criterion.pick(learned.criterion, view, collectives)
    return await method.exchange.reduce(view, proposal, collectives)


class Worker:
    """One rank: its residual, what its method learned, and the step under way.

    A step is `begin`, `feed` for each stretch of the gradient, `exchange`, `finish`.
    """

    def __init__(
        self,
        method: Method,
        setup: Setup,
        collectives: Collectives,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        wire: torch.dtype = torch.float32,
        residual: Residual | None = None,
        checks: bool = False,
    ) -> None:
        method.proposers.check(setup.world)
        check_whole("seed", seed, at_least=0)
        self.method = method
        self.setup = setup
        self.collectives = collectives
        self.seed = seed
        self.wire = wire
        self.checks = checks
        """Is a gradient looked at for what is not finite? See [Note: a fault is everyone's] in `nonfinite`."""
        self.scale = 1.0
        """What gradients come multiplied with, and go; the residual is free of it."""
        self.step = 0
        self.residual = residual or Residual.zeros((setup.numel,), method.feedback, collectives.device, dtype)
        self._dtype = self.residual.acc.dtype
        self.learned = Learned(method.region.start(setup), method.criterion.start(setup))

    @property
    def device(self) -> torch.device:
        return self.collectives.device

    @property
    def value_dtype(self) -> torch.dtype:
        """What values are averaged in."""
        return torch.promote_types(self._dtype, torch.float32)

    def begin(self, parameters: Callable[[], Tensor] | None = None) -> None:
        """Start a step. One that was begun and not finished is given up; what it fed stays in the residual.

        `parameters` makes the flat parameters, for methods that look at them.
        """
        self._fault = 0
        self.collectives.start_step(self.step)
        step = self.now()
        territory = self.method.region.known(self.learned.region, step) or Territory((), ())
        weights = None if parameters is None else Weights(parameters, self.setup.bounds)
        overshoot = self.method.feedback.overshoot
        self.view = View(step, self.residual.acc, weights, territory, wire=self.wire, overshoot=overshoot)
        self._found: list[Any] = []

    def feed(self, start: int, gradient: Tensor) -> bool:
        """Take in the gradient of the entries from `start` on, and scan those of them in the territory.

        Returns whether all of it was finite, if that is looked at; what was not is zero from then on.
        """
        self.collectives.watch.switch("select")
        finite = self._take_in(start, gradient, None if self.checks else True)
        self.collectives.watch.switch(None)
        return finite

    def take(self, arrived: Sequence[tuple[Slot, Tensor]]) -> None:
        """`feed` what a bucket brings: flat gradients, and where they belong."""
        self.collectives.watch.switch("select")
        for (slot, gradient), finite in zip(arrived, self._seen(arrived), strict=True):
            if not self._take_in(slot.start, gradient, finite):
                self._fault = slot.place + 1
        self.collectives.watch.switch(None)

    def _seen(self, arrived: Sequence[tuple[Slot, Tensor]]) -> Sequence[bool | None]:
        """Which gradients are finite; None: it is seen to when they are taken in, while they are in the cache."""
        if self.checks and self.device.type == "cpu":
            return [None] * len(arrived)
        # elsewhere every look would be a wait for the device
        return are_finite([gradient for _, gradient in arrived]) if self.checks else [True] * len(arrived)

    def _take_in(self, start: int, gradient: Tensor, finite: bool | None) -> bool:
        finite = self._add_in_pieces(start, gradient) if finite is None else self._add(start, gradient, finite)
        spans = [span.cut(start, start + gradient.numel()) for span in self.view.territory.spans]
        self._found.append(self.method.criterion.scan(self.learned.criterion, self.view, spans))
        return finite

    def _add(self, start: int, gradient: Tensor, finite: bool) -> bool:
        if not finite:
            gradient.zero_()
        self.residual.add(start, gradient, 1 / self.scale)
        return finite

    def _add_in_pieces(self, start: int, gradient: Tensor) -> bool:
        finite = True
        for piece in pieces(gradient):
            finite &= self._add(start, piece, is_finite(piece))
            start += len(piece)
        return finite

    @property
    def fault(self) -> Tensor:
        """1 + the number of a parameter that was not finite in this step; 0 if all were."""
        return torch.tensor(self._fault)

    @property
    def tells_late(self) -> bool:
        """Is a fault found when the step is over?"""
        return False

    def give_back(self, gradients: Sequence[tuple[Slot, Tensor]]) -> None:
        """Take what was fed out of the residual again, in place of `finish`."""
        for slot, gradient in gradients:
            if slot.sparse:
                self.residual.take_back(slot.start, gradient, 1 / self.scale)

    async def exchange(self, dense: Tensor | None = None) -> Any:
        """Reduce the fed vector, and `dense` whole beside it."""
        self.collectives.watch.switch("select")
        self.view = replace(self.view, found=tuple(self._found), dense=dense)
        reduced = await reduce_step(self.method, self.learned, self.view, self.collectives)
        self.collectives.watch.switch(None)
        return reduced

    def finish(
        self, reduced: Any, unapplied: Sequence[Span] = (), gradients: Sequence[tuple[Slot, Tensor]] = ()
    ) -> PendingStats:
        """Clear what was sent, write the means into the gradients that were taken, learn from the step and count it.

        `unapplied` are spans whose mean nobody applies: what was sent there stays in the residual.
        """
        with self.residual.keeping(unapplied):
            self.residual.clear(reduced.sent, reduced.rest)
        mean = reduced.mean if self.scale == 1 else reduced.mean * self.scale
        write_back(reduced._replace(mean=mean), gradients, self.setup.bounds)
        self.learn(reduced)
        return PendingStats(self.view.step, numbers_of(reduced), reduced.dense, self.collectives)

    def learn(self, reduced: Reduced) -> None:
        """Go on to the next step, with what this one told."""
        step = self.view.step
        if step.numel:
            self.learned = Learned(
                self.method.region.observe(self.learned.region, step, reduced),
                self.method.criterion.observe(self.learned.criterion, step, reduced),
            )
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """What the method learned, as plain numbers and tensors."""
        return {"step": self.step, "seed": self.seed} | {
            part: _copied(state._asdict()) for part, state in self.learned._asdict().items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.seed = state["step"], state["seed"]
        self.learned = Learned(
            *(type(current)(**_copied(state[part])) for part, current in self.learned._asdict().items())
        )

    def now(self) -> Step:
        """The step that comes."""
        return Step(
            index=self.step,
            rank=self.collectives.rank,
            seed=self.seed,
            target=self.method.budget.target(self.step, self.setup.numel),
            proposers=self.method.proposers.ranks(self.step, self.setup.world, self.seed),
            setup=self.setup,
        )


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


class Team:
    """Workers that share a process and step as one, in a few operations for all: the same outcome, bit for bit.

    For methods whose region is known before the gradient is and whose criterion and exchange know teams.
    """

    def __init__(self, workers: Sequence[Worker], residual: Residual) -> None:
        self._workers = workers
        self._residual = residual
        """Of all workers; their own are its rows."""
        first = workers[0]
        self._method = first.method
        self._collectives = TeamCollectives(first.setup.world, first.collectives.device)

    @staticmethod
    def suits(method: Method) -> bool:
        knowing = method.criterion.knows_teams and method.exchange.knows_teams
        return knowing and type(method.region).settle is Region.settle

    def reduce(
        self, gradients: Tensor, parameters: Callable[[], Tensor] | None, dense: Tensor | None
    ) -> tuple[Reduced, PendingStats]:
        """A whole step."""
        for worker in self._workers:
            worker.begin(parameters)
        first, collectives = self._workers[0], self._collectives
        collectives.start_step()
        collectives.watch.switch("select")
        self._residual.add(0, gradients)
        reduced = run(self._exchange([worker.view for worker in self._workers], dense))
        self._residual.clear(reduced.sent, reduced.rest)
        first.learn(reduced)
        for worker in self._workers[1:]:
            worker.learned, worker.step = first.learned, first.step
        collectives.watch.switch(None)
        return reduced, PendingStats(first.view.step, numbers_of(reduced), reduced.dense, collectives)

    async def _exchange(self, views: Sequence[View], dense: Tensor | None) -> Reduced:
        state = self._workers[0].learned.criterion
        proposal = await self._method.criterion.pick_for_team(state, views, self._collectives)
        together = replace(views[0], acc=self._residual.acc, dense=dense)
        return await self._method.exchange.reduce(together, proposal, self._collectives)


class Numbers(NamedTuple):
    """What a step says of itself."""

    support: int
    counts: tuple[int, ...]
    thresholds: tuple[float, ...]


def numbers_of(reduced: Reduced) -> Callable[[], Numbers]:
    numbers = Numbers(reduced.support, reduced.counts, reduced.thresholds)
    return lambda: numbers


class PendingStats:
    """The record of a step, its numbers and times not read yet: reading them on CUDA waits for the step to end."""

    def __init__(self, step: Step, numbers: Callable[[], Numbers], dense: Tensor, collectives: Collectives) -> None:
        self._step = step
        self._numbers = numbers
        self._dense_numel = len(dense)
        self._dense_bytes = dense.numel() * dense.element_size()
        self._wire_bytes = collectives.wire_bytes
        self._link_bytes = round(collectives.link_bytes)
        self._num_messages = collectives.num_messages
        self._watch: Stopwatch = collectives.watch

    def read(self) -> StepStats:
        step, seconds = self._step, self._watch.seconds()
        support, counts, thresholds = self._numbers()
        return StepStats(
            step=step.index,
            numel=step.numel,
            target=step.target,
            support=support,
            density=support / step.numel if step.numel else 0.0,
            threshold=_typical(thresholds),
            counts=counts,
            imbalance=imbalance(counts),
            wire_bytes=self._wire_bytes,
            link_bytes=self._link_bytes,
            num_messages=self._num_messages,
            dense_numel=self._dense_numel,
            dense_bytes=self._dense_bytes,
            select_seconds=seconds.get("select", 0.0),
            exchange_seconds=seconds.get("exchange", 0.0),
        )


def summed(records: Sequence[StepStats]) -> StepStats:
    """One record of a step whose parts were exchanged each on its own."""
    counts = tuple(map(sum, zip(*(record.counts for record in records), strict=True)))
    thresholds = [record.threshold for record in records if record.threshold is not None]
    totals = {name: sum(getattr(record, name) for record in records) for name in SUMMED}
    return replace(
        records[0],
        **totals,
        density=totals["support"] / totals["numel"] if totals["numel"] else 0.0,
        threshold=_typical(thresholds),
        counts=counts,
        imbalance=imbalance(counts),
    )


def _typical(thresholds: Sequence[float]) -> float | None:
    """The median, tensors without a share in this step left out."""
    if not thresholds:
        return None
    return statistics.median([threshold for threshold in thresholds if threshold] or thresholds)


def imbalance(counts: Sequence[int]) -> float:
    """How far the largest count exceeds the mean one; 0 where there is nothing."""
    total = sum(counts)
    return max(counts) * len(counts) / total - 1 if total else 0.0
