"""What carries the workers of a run: real processes or virtual ones, to the training loop all alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from gradsieve.clock import Stopwatch
from gradsieve.layout import Layout, excluded_names, fewer_than_two_dimensions
from gradsieve.tasks import build_model
from gradsieve.training.batches import Batches
from gradsieve.training.plan import Plan
from gradsieve.types import StepStats


class Outcome(NamedTuple):
    """What a step tells, over all workers."""

    loss: float
    """The mean."""
    error_norm: float
    """Of the residual, the mean."""
    seconds: Mapping[str, float]
    """By phase, of the slowest worker."""
    stats: StepStats
    """As rank 0 sees it."""
    stop: bool
    """Some worker was asked to end."""
    sent_bytes: float | None = None
    """Through a machine's interface since the step before, as the kernel counted, the mean; None: not counted."""
    uplink_bytes: float | None = None
    """Likewise between racks, both ways."""


class Engine(ABC):
    """The workers of a run, or this process's one of them."""

    rank: int
    """Of this process."""
    seconds_alone: float | None = None
    """Of forward and backward without any exchange, on the slowest worker; None where nobody asked."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan = plan
        self.device = device
        self.batches = Batches(plan.task, plan.batch_size, plan.world, plan.config.seed, device)
        torch.manual_seed(plan.config.seed)
        self.model: nn.Module = build_model(plan.task, plan.config.model).to(device)
        # what convolutions are fastest with: on a CPU passes of GoogLeNet take half the time
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        named = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        self.layout = Layout(named, excluded_names(named, fewer_than_two_dimensions))
        self.optimizer = _optimizer(plan, self.model, device)
        self._watch = Stopwatch(device)

    @abstractmethod
    def gradients(self, step: int) -> None:
        """Forward, backward and exchange: leave the averaged gradient in the parameters."""

    def clear_gradients(self) -> None:
        """Make the parameters ready for the next step."""
        self.model.zero_grad()

    @abstractmethod
    def outcome(self, *, stop: bool) -> Outcome:
        """What the step told, once the optimizer is done with it; `stop` asks all workers to end."""

    @abstractmethod
    def worker_states(self) -> dict[int, dict[str, Any]]:
        """By rank, the state of the workers in this process."""

    @abstractmethod
    def load_worker_states(self, read: Callable[[int], dict[str, Any]]) -> None:
        """The inverse; `read` brings the state of a rank."""

    @abstractmethod
    def resized(self, states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The states of all workers, from those of another number: the mean over workers of what they have not sent
        stays what it is."""

    @abstractmethod
    def agreed(self, wish: bool) -> bool:
        """Does any process wish it? Waits until every one has come here."""

    def barrier(self) -> None:
        """Wait until every process has come here."""
        self.agreed(False)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the time within as this phase of the step."""
        self._watch.switch(phase)
        yield
        self._watch.switch(None)


def _optimizer(plan: Plan, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    config, parameters = plan.config, model.parameters()
    assert config.weight_decay is not None
    assert config.momentum is not None
    assert config.lr is not None
    if config.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(
        parameters,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        fused=device.type == "cuda",
    )


def slowest(seconds: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """The times of the worker that took longest."""
    return max(seconds, key=lambda own: sum(own.values()))


def seed_of(seed: int, step: int, rank: int) -> int:
    """For what a worker draws at random in a step, dropout for one."""
    return hash((seed, step, rank)) & 0x7FFF_FFFF_FFFF
