"""The passes over a vector that a rank makes in a step, beside the floor that memory sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradsieve.bench.figures import Spread, spread
from gradsieve.bench.given import SLACK, fitting_factor, heavy_tailed, shapes_of_size
from gradsieve.bench.local import local_steps, single_kernels, stand_in
from gradsieve.bench.published import PublishedMicro
from gradsieve.bench.timing import Case, Timer
from gradsieve.checks import UsageError, check_fraction, check_whole

DEFAULT_NUMELS = (11_173_962, 25_600_000, 124_000_000)
"""ResNet-18, ResNet-50, GPT-2."""
FLOOR_BYTES = 16
"""Per entry: gradient and residual are read once and written once."""
COPY_BYTES = 8
COPY = "copy"


@dataclass(frozen=True)
class KernelSetting:
    """What is to be measured."""

    numels: tuple[int, ...] = DEFAULT_NUMELS
    density: float = 0.01
    partitions: int = 16
    repeats: int = 30

    def __post_init__(self) -> None:
        try:
            for numel in self.numels:
                check_whole("numel", numel, at_least=1)
            check_fraction("density", self.density)
            check_whole("partitions", self.partitions, at_least=1)
            check_whole("repeats", self.repeats, at_least=1)
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from error

    def as_record(self) -> dict[str, Any]:
        return asdict(self) | {"numels": list(self.numels)}


class KernelRow(NamedTuple):
    """What one call took on a vector of one size; nothing but names and an error where it failed."""

    numel: int
    name: str
    seconds: Spread | None = None
    host_seconds: Spread | None = None
    extra_bytes: int | None = None
    floor_seconds: float | None = None
    error: str | None = None

    @property
    def ratio(self) -> float | None:
        """Of its time to the floor."""
        return None if self.seconds is None or not self.floor_seconds else self.seconds.median / self.floor_seconds

    @property
    def extra_percent(self) -> float | None:
        """Memory that it took for itself, of that of a gradient."""
        return None if self.extra_bytes is None else 100 * self.extra_bytes / (4 * self.numel)

    def as_record(self) -> dict[str, Any]:
        return self._asdict() | {
            "seconds": None if self.seconds is None else self.seconds.as_record(),
            "host_seconds": None if self.host_seconds is None else self.host_seconds.as_record(),
            "ratio_to_floor": self.ratio,
            "extra_percent": self.extra_percent,
        }


def measure(setting: KernelSetting, device: torch.device, timer: Timer) -> Iterator[KernelRow]:
    """All rows, one size after the other."""
    for numel in setting.numels:
        floor = None
        for name, make in cases(numel, setting, device).items():
            row = _row(numel, name, make, timer, floor)
            if name == COPY and row.seconds is not None:
                floor = row.seconds.median * FLOOR_BYTES / COPY_BYTES
                row = row._replace(floor_seconds=floor)
            yield row


def _row(numel: int, name: str, make: Callable[[], Case], timer: Timer, floor: float | None) -> KernelRow:
    try:
        timing = timer(make())
    except Exception as error:  # whatever it is, the other rows go on
        return KernelRow(numel, name, floor_seconds=floor, error=f"failed: {type(error).__name__}: {_one_line(error)}")
    host = None if timing.host is None else spread(timing.host)
    return KernelRow(numel, name, spread(timing.device), host, timing.extra_bytes, floor)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def cases(numel: int, setting: KernelSetting, device: torch.device) -> dict[str, Callable[[], Case]]:
    """What makes each call; made one after the other, they need not be in memory together."""
    steps = local_steps(numel, setting.density, setting.partitions, device)
    alone = single_kernels(numel, setting.density, setting.partitions, device)
    return {
        COPY: partial(_copy, numel, device),
        "add_ + zero_": partial(_add_and_zero, numel, device),
        "topk": partial(_topk, numel, setting.density, device),
        "published micro": partial(_published, numel, setting, device),
        **{f"{name}, local step": make for name, make in steps.items()},
        **{f"kernel {name}": make for name, make in alone.items()},
    }


def _copy(numel: int, device: torch.device) -> Case:
    source, goal = heavy_tailed(numel, device, seed=1), torch.empty(numel, device=device)
    return Case(lambda: _done(goal.copy_(source)))


def _add_and_zero(numel: int, device: torch.device) -> Case:
    """The four passes that error feedback cannot do without, by the shortest code."""
    acc, gradient = torch.zeros(numel, device=device), heavy_tailed(numel, device, seed=1)

    def call() -> None:
        acc.add_(gradient)
        gradient.zero_()

    return Case(call)


def _topk(numel: int, density: float, device: torch.device) -> Case:
    acc, count = heavy_tailed(numel, device, seed=1), max(1, int(density * numel))
    return Case(lambda: _done(torch.topk(acc.abs(), count, sorted=False).indices))


def _published(numel: int, setting: KernelSetting, device: torch.device) -> Case:
    """One rank's part of the published step. Its law could not follow the same gradient again and again, so each call
    is a first step, at the target."""
    flat = heavy_tailed(numel, device, seed=1)
    flat.mul_(fitting_factor(flat[:SLACK].cpu(), setting.density, numel))
    shapes = shapes_of_size(numel)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    gradients = [part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]
    step = PublishedMicro(gradients, setting.density, setting.partitions, rank=0)
    others = stand_in(numel, setting.density, setting.partitions, device)

    def call() -> None:
        acc = step.accumulate(gradients)
        support = torch.cat([step.select(acc), others])
        step.scatter(acc, support, acc[support])

    return Case(call, step.restart)


def _done(result: Tensor) -> None:
    """A call returns nothing."""
