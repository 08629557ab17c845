"""Virtual workers: one process, one device, one copy of the parameters, a gradient per worker, the same pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gradsieve.ahead import reach_of
from gradsieve.clock import Stopwatch
from gradsieve.layout import shaped
from gradsieve.pipeline import PendingStats
from gradsieve.simulation import Simulation
from gradsieve.tasks import Examples
from gradsieve.training.engine import Engine, Outcome, slowest
from gradsieve.training.passes import GraphedPasses, Passes
from gradsieve.training.plan import Plan
from gradsieve.types import StepStats


class Virtual(Engine):
    """All workers in this process."""

    rank = 0

    def __init__(self, plan: Plan, device: torch.device) -> None:
        super().__init__(plan, device)
        self._simulation = Simulation(
            plan.method,
            plan.world,
            self.layout.numel,
            shapes=[slot.parameter.shape for slot in self.layout.sparse],
            seed=plan.config.seed,
            device=device,
            wire=plan.config.wire,
        )
        self._reach = reach_of(plan.method.feedback, self.optimizer)
        kind = GraphedPasses if device.type == "cuda" else Passes
        residual = self._simulation.residual_rows() if self._reach else None
        self._passes = kind(plan, self.model, self.layout, device, residual)
        self._mean = torch.zeros(self.layout.numel, device=device)
        self._dense_mean = torch.zeros(self.layout.dense_numel, device=device)
        self._point_gradients_at_means()
        self._pending: list[PendingStats] = []
        self._ahead: tuple[int, Examples] | None = None

    def _point_gradients_at_means(self) -> None:
        for slot in (*self.layout.sparse, *self.layout.dense):
            mean = self._mean if slot.sparse else self._dense_mean
            slot.parameter.grad = shaped(mean[slot.start : slot.stop], slot.parameter)

    def gradients(self, step: int) -> None:
        self._watch = Stopwatch(self.device)
        with self.timed("rest"):
            batch = self._batch(step)
            rate = self._followed_rate(step)
        self._passes.run(step, batch, self._reach * rate)
        # the next passes write over the gradients
        dense, self._pending = self._simulation.average(
            self._passes.gradients, self._mean, self.layout.flat_parameters, self._passes.dense, use_up=True
        )
        if self.device.type == "cuda":
            # while the device is busy; were it before the selection's launches, that would wait for it
            self._ahead = step + 1, self._batch(step + 1)
        with self.timed("rest"):
            self._dense_mean.copy_(dense)

    def _followed_rate(self, step: int) -> float:
        """The learning rate of a step, with the residuals fitted to it if workers look ahead."""
        rate, before = self.plan.learning_rate(step), self.plan.learning_rate(max(0, step - 1))
        if self._reach:
            if rate != before and rate > 0 and before > 0:
                self._simulation.rescale(before / rate)
            self._simulation.residual_rows()  # the passes read them, and what was sent must not be in them
        return rate

    def _batch(self, step: int) -> Examples:
        """The examples of all workers, in turn."""
        if self._ahead is not None and self._ahead[0] == step:
            return self._ahead[1]
        return self.batches.take(step, first=0, workers=self.plan.world)

    def clear_gradients(self) -> None:
        """The next mean overwrites this one."""

    def outcome(self, *, stop: bool) -> Outcome:
        norms = self._simulation.residual_norms()
        loss, error_norm = torch.stack([self._passes.losses.mean(), norms.mean()]).tolist()
        stats = [pending.read() for pending in self._pending]
        seconds = zip(self._passes.seconds(), self._exchange_seconds(stats), strict=True)
        return Outcome(
            loss=loss,
            error_norm=error_norm,
            seconds=slowest([passes | exchange | self._watch.seconds() for passes, exchange in seconds]),
            stats=stats[0],
            stop=stop,
        )

    def _exchange_seconds(self, stats: Sequence[StepStats]) -> list[dict[str, float]]:
        """For each worker. Those that stepped as one have one record: to each its share."""
        shares = self.plan.world // len(stats)
        seconds = [{"select": own.select_seconds / shares, "exchange": own.exchange_seconds / shares} for own in stats]
        return seconds * shares

    def worker_states(self) -> dict[int, dict[str, Any]]:
        return dict(enumerate(self._simulation.state_dict()))

    def load_worker_states(self, read: Callable[[int], dict[str, Any]]) -> None:
        self._simulation.load_state_dict([read(rank) for rank in range(self.plan.world)])

    def resized(self, states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return self._simulation.converted(states, self.plan.world)

    def agreed(self, wish: bool) -> bool:
        """All workers are here."""
        return wish
