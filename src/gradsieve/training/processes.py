"""Workers as processes: DistributedDataParallel with the method as its hook, or with one of PyTorch's own."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradsieve.baselines import Baseline, link_bytes
from gradsieve.checks import UsageError
from gradsieve.clock import Stopwatch
from gradsieve.collectives import GroupCollectives, run
from gradsieve.counters import passed_bytes, sent_bytes
from gradsieve.hook import sparsify
from gradsieve.layout import Layout
from gradsieve.states import reshard
from gradsieve.training.engine import Engine, Outcome, seed_of, slowest
from gradsieve.training.plan import Plan
from gradsieve.types import StepStats

PHASES = ("forward", "backward", "select", "exchange", "rest")
WARMUP_PASSES = 2
"""Before passes are timed: memory is allocated in them."""


class _Meter:
    """Bytes from lap to lap by a counter of the kernel's; none where there is nothing to count."""

    def __init__(self, read: Callable[[str], int], place: str | None) -> None:
        self._read, self._place = read, place
        self._before = None if place is None else read(place)

    def lap(self) -> int | None:
        if self._place is None or self._before is None:
            return None
        before, self._before = self._before, self._read(self._place)
        return self._before - before


class Sieved:
    """Averages by a method of this library."""

    def __init__(self, ddp: DistributedDataParallel, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
        config = plan.config
        self.sieve = sparsify(
            ddp, plan.method, scope=config.scope, wire=config.wire, seed=config.seed, optimizer=optimizer
        )
        self.state_dict = self.sieve.state_dict
        self.load_state_dict = self.sieve.load_state_dict
        self.residual_norm = self.sieve.residual_norm

    def stats(self, step: int) -> StepStats:  # noqa: ARG002 - it counts itself
        if self.sieve.stats is None:
            raise UsageError(
                "the model has parameters that its output does not depend on, and DDP waits for their gradients: "
                "freeze them (requires_grad=False) or remove them"
            )
        return self.sieve.stats


class ByBaseline:
    """Averages without this library. What it tells of a step is what is known without looking into it."""

    def __init__(self, ddp: DistributedDataParallel, baseline: Baseline, layout: Layout) -> None:
        self._probe = baseline.attach(ddp)
        self._layout = layout

    def stats(self, step: int) -> StepStats:
        numel, dense_numel, wire_bytes = self._layout.numel, self._layout.dense_numel, self._probe()
        return StepStats(
            step=step,
            numel=numel,
            target=numel,
            support=numel,
            density=1.0,
            threshold=None,
            counts=(),
            imbalance=0.0,
            wire_bytes=wire_bytes,
            link_bytes=round(link_bytes(wire_bytes, dist.get_world_size())),
            num_messages=0,  # nobody counts them
            dense_numel=dense_numel,
            dense_bytes=4 * dense_numel,
            select_seconds=0.0,  # inside backward, where nothing tells it from computing
            exchange_seconds=0.0,
        )

    def residual_norm(self) -> float:
        """PowerSGD keeps one to itself."""
        return 0.0

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("a config with a baseline saves no checkpoints")

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: ARG002 - as that of a sieve
        raise AssertionError("a config with a baseline loads no checkpoints")


class Processes(Engine):
    """One worker in this process, the others in others, over the default process group."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        super().__init__(plan, device)
        self.rank = dist.get_rank()
        assert dist.group.WORLD is not None
        self._collectives = GroupCollectives(dist.group.WORLD, device)
        self._loss = torch.zeros((), device=device)
        self.seconds_alone = self._seconds_alone(plan.config.passes_alone)
        baseline = plan.config.baseline
        self._ddp = DistributedDataParallel(
            self.model,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            bucket_cap_mb=baseline.bucket_megabytes(self._num_parameters(), dist.get_backend()) if baseline else None,
        )
        self._average = (
            Sieved(self._ddp, plan, self.optimizer)
            if baseline is None
            else ByBaseline(self._ddp, baseline, self.layout)
        )
        self._steps = 0
        self._meters: tuple[_Meter, _Meter] | None = None

    def _num_parameters(self) -> int:
        return self.layout.numel + self.layout.dense_numel

    def _seconds_alone(self, passes: int) -> float | None:
        """The median over passes of a copy of the model that no hook watches; all workers take them at once."""
        if not passes:
            return None
        twin, batch, seconds = copy.deepcopy(self.model), self.batches.take(0, self.rank, workers=1), []
        for _ in range(WARMUP_PASSES + passes):
            self.barrier()
            began = perf_counter()
            with self._autocast():
                loss = self.plan.task.loss(twin(batch.inputs), batch.targets)
            loss.backward()  # type: ignore[no-untyped-call]
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds.append(perf_counter() - began)
            twin.zero_grad()
        rows = self._gathered([statistics.median(seconds[WARMUP_PASSES:])], "seconds of passes")
        return max(row[0] for row in rows)

    def gradients(self, step: int) -> None:
        self._collectives.start_step(step)
        if self._meters is None:
            self._meters = self._started_meters()
        self._watch = Stopwatch(self.device)
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
        stats = self._average.stats(self._steps)
        self._steps += 1
        seconds = dict(self._watch.seconds())
        seconds |= {"select": stats.select_seconds, "exchange": stats.exchange_seconds}
        # the hook runs inside backward
        seconds["backward"] -= stats.select_seconds + stats.exchange_seconds
        assert self._meters is not None
        sent, between = (meter.lap() for meter in self._meters)
        facts = [float(stop), float(self._loss.detach()), self._average.residual_norm(), float(sent or 0)]
        rows = self._gathered([*facts, *(seconds[phase] for phase in PHASES)], "outcomes")
        return Outcome(
            loss=sum(row[1] for row in rows) / len(rows),
            error_norm=sum(row[2] for row in rows) / len(rows),
            seconds=slowest([dict(zip(PHASES, row[len(facts) :], strict=True)) for row in rows]),
            stats=stats,
            stop=any(row[0] for row in rows),
            sent_bytes=None if sent is None else sum(row[3] for row in rows) / len(rows),
            uplink_bytes=between,
        )

    def _started_meters(self) -> tuple[_Meter, _Meter]:
        """What this machine sends, and what passes between racks, from the first step on."""
        interface, uplink = self.plan.config.interface, self.plan.config.uplink
        if interface is not None or uplink is not None:
            self.barrier()  # whatever was sent before this is on its way no more
        return _Meter(sent_bytes, interface), _Meter(passed_bytes, uplink)

    def _gathered(self, numbers: list[float], what: str) -> list[list[float]]:
        message = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        rows: list[list[float]] = run(self._collectives.all_gather(message, what)).tolist()
        return rows

    def worker_states(self) -> dict[int, dict[str, Any]]:
        return {self.rank: self._average.state_dict()}

    def load_worker_states(self, read: Callable[[int], dict[str, Any]]) -> None:
        self._average.load_state_dict(read(self.rank))

    def resized(self, states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return reshard(states, self.plan.world)

    def agreed(self, wish: bool) -> bool:
        return any(row[0] for row in self._gathered([float(wish)], "wishes at a barrier"))
