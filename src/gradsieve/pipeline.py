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
from gradsieve.collectives import Collectives
from gradsieve.methods import Method
from gradsieve.residual import Residual
from gradsieve.types import Reduced, Setup, Span, Step, StepStats, Territory, View
from gradsieve.weights import Weights


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
    ) -> None:
        method.proposers.check(setup.world)
        check_whole("seed", seed, at_least=0)
        self.method = method
        self.setup = setup
        self.collectives = collectives
        self.seed = seed
        self.step = 0
        self.residual = Residual(setup.numel, method.feedback, collectives.device, dtype)
        self.learned = Learned(method.region.start(setup), method.criterion.start(setup))

    def begin(self, parameters: Callable[[], Tensor] | None = None) -> None:
        """Start a step. One that was begun and not finished is given up; what it fed stays in the residual.

        `parameters` makes the flat parameters, for methods that look at them.
        """
        self.collectives.start_step()
        step = self._now()
        territory = self.method.region.known(self.learned.region, step) or Territory((), ())
        weights = None if parameters is None else Weights(parameters, self.setup.bounds)
        self._view = View(step, self.residual.acc, weights, territory)
        self._found: list[Any] = []

    def feed(self, start: int, gradient: Tensor) -> None:
        """Take in the gradient of the entries from `start` on, and scan those of them in the territory."""
        self.collectives.watch.switch("select")
        self.residual.add(start, gradient)
        spans = [span.cut(start, start + gradient.numel()) for span in self._view.territory.spans]
        self._found.append(self.method.criterion.scan(self.learned.criterion, self._view, spans))
        self.collectives.watch.switch(None)

    async def exchange(self, dense: Tensor | None = None) -> Reduced:
        """Reduce the fed vector, and `dense` whole beside it."""
        self.collectives.watch.switch("select")
        self._view = replace(self._view, found=tuple(self._found), dense=dense)
        reduced = await reduce_step(self.method, self.learned, self._view, self.collectives)
        self.collectives.watch.switch(None)
        return reduced

    def finish(self, reduced: Reduced, unapplied: Sequence[Span] = ()) -> PendingStats:
        """Clear what was sent, learn from the step and count it.

        `unapplied` are spans whose mean nobody applies: what was sent there stays in the residual.
        """
        step = self._view.step
        with self.residual.keeping(unapplied):
            self.residual.clear(reduced.sent)
        if step.numel:
            self.learned = Learned(
                self.method.region.observe(self.learned.region, step, reduced),
                self.method.criterion.observe(self.learned.criterion, step, reduced),
            )
        self.step += 1
        return PendingStats(step, reduced, self.collectives)

    def state_dict(self) -> dict[str, Any]:
        """What the method learned, as plain numbers and tensors."""
        return {"step": self.step, "seed": self.seed} | {
            part: dict(state._asdict()) for part, state in self.learned._asdict().items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.seed = state["step"], state["seed"]
        self.learned = Learned(*(type(current)(**state[part]) for part, current in self.learned._asdict().items()))

    def _now(self) -> Step:
        return Step(
            index=self.step,
            rank=self.collectives.rank,
            seed=self.seed,
            target=self.method.budget.target(self.step, self.setup.numel),
            proposers=self.method.proposers.ranks(self.step, self.setup.world, self.seed),
            setup=self.setup,
        )


class PendingStats:
    """The record of a step, its times not read yet: reading them on CUDA waits for the step to end."""

    def __init__(self, step: Step, reduced: Reduced, collectives: Collectives) -> None:
        self._step = step
        self._support = reduced.support
        self._counts = reduced.counts
        self._thresholds = reduced.thresholds
        self._dense_numel = len(reduced.dense)
        self._dense_bytes = reduced.dense.numel() * reduced.dense.element_size()
        self._wire_bytes = collectives.wire_bytes
        self._watch: Stopwatch = collectives.watch

    def read(self) -> StepStats:
        step, seconds = self._step, self._watch.seconds()
        return StepStats(
            step=step.index,
            numel=step.numel,
            target=step.target,
            support=self._support,
            density=self._support / step.numel if step.numel else 0.0,
            threshold=_typical(self._thresholds),
            counts=self._counts,
            imbalance=imbalance(self._counts),
            wire_bytes=self._wire_bytes,
            dense_numel=self._dense_numel,
            dense_bytes=self._dense_bytes,
            select_seconds=seconds.get("select", 0.0),
            exchange_seconds=seconds.get("exchange", 0.0),
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
