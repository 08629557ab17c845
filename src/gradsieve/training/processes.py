"""Workers as processes: DistributedDataParallel with the method as its hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradsieve.checks import UsageError
from gradsieve.clock import Stopwatch
from gradsieve.collectives import GroupCollectives, run
from gradsieve.hook import sparsify
from gradsieve.states import reshard
from gradsieve.training.engine import Engine, Outcome, seed_of, slowest
from gradsieve.training.plan import Plan

PHASES = ("forward", "backward", "select", "exchange", "rest")


class Processes(Engine):
    """One worker in this process, the others in others, over the default process group."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        super().__init__(plan, device)
        config = plan.config
        self.rank = dist.get_rank()
        self._ddp = DistributedDataParallel(
            self.model, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
        )
        self._sieve = sparsify(self._ddp, plan.method, scope=config.scope, wire=config.wire, seed=config.seed)
        assert dist.group.WORLD is not None
        self._collectives = GroupCollectives(dist.group.WORLD, device)
        self._loss = torch.zeros((), device=device)

    def gradients(self, step: int) -> None:
        self._watch = Stopwatch(self.device)
        self._collectives.start_step(step)
        with self.timed("rest"):
            torch.manual_seed(seed_of(self.plan.config.seed, step, self.rank))
            batch = self.batches.take(step, self.rank, workers=1)
        with self.timed("forward"), self._autocast():
            self._loss = self.plan.task.loss(self._ddp(batch.inputs), batch.targets)
        with self.timed("backward"):
            self._loss.backward()  # type: ignore[no-untyped-call]

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.plan.config.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def outcome(self, *, stop: bool) -> Outcome:
        stats = self._sieve.stats
        if stats is None:
            raise UsageError(
                "the model has parameters that its output does not depend on, and DDP waits for their gradients: "
                "freeze them (requires_grad=False) or remove them"
            )
        seconds = dict(self._watch.seconds())
        seconds |= {"select": stats.select_seconds, "exchange": stats.exchange_seconds}
        # the hook runs inside backward
        seconds["backward"] -= stats.select_seconds + stats.exchange_seconds
        own = [float(stop), float(self._loss.detach()), self._sieve.residual_norm(), *(seconds[p] for p in PHASES)]
        rows = self._gathered(own, "outcomes")
        return Outcome(
            loss=sum(row[1] for row in rows) / len(rows),
            error_norm=sum(row[2] for row in rows) / len(rows),
            seconds=slowest([dict(zip(PHASES, row[3:], strict=True)) for row in rows]),
            stats=stats,
            stop=any(row[0] for row in rows),
        )

    def _gathered(self, numbers: list[float], what: str) -> list[list[float]]:
        message = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        rows: list[list[float]] = run(self._collectives.all_gather(message, what)).tolist()
        return rows

    def worker_states(self) -> dict[int, dict[str, Any]]:
        return {self.rank: self._sieve.state_dict()}

    def load_worker_states(self, read: Callable[[int], dict[str, Any]]) -> None:
        self._sieve.load_state_dict(read(self.rank))

    def resized(self, states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return reshard(states, self.plan.world)

    def barrier(self) -> None:
        self._gathered([0.0], "arrivals at a barrier")
