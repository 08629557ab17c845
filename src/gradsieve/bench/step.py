"""The time of a whole gradient exchange over a process group, row by row."""

from __future__ import annotations

import gc
import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradsieve.bench.contenders import DEFAULT, HEADROOM, ZERO_LINE, Contender, Seen, contenders
from gradsieve.bench.figures import Spread, spread
from gradsieve.bench.given import GivenModel, Noise, Shape, shapes_of_model, shapes_of_size
from gradsieve.bench.links import Circumstances, circumstances
from gradsieve.checks import UsageError, check_choice, check_fraction, check_whole
from gradsieve.counters import passed_bytes, sent_bytes
from gradsieve.types import WAYS

DEFAULT_MODEL = "resnet18"
ROW_SECONDS = 60.0
"""That one message of a row may take: where one rank has failed the others wait for it no longer than this."""


@dataclass(frozen=True)
class StepSetting:
    """What is to be measured; travels to the processes that do it."""

    parameters: int | None = None
    model: str | None = None
    density: float = 0.01
    steps: int = 20
    warmup: int = 5
    methods: tuple[str, ...] = tuple(DEFAULT.split(","))
    wire: str = WAYS["wire"][0]
    scope: str = WAYS["scope"][0]
    interface: str | None = None
    """Through which a machine reaches the others; what leaves through it is counted."""
    links: bool = False
    """Measure link and machine first, for the cost model."""
    uplink: str | None = None
    """A link between switches, as `passed_bytes` takes it; what passes through it is counted, too."""

    def __post_init__(self) -> None:
        try:
            check_fraction("density", self.density)
            check_whole("steps", self.steps, at_least=1)
            check_whole("warmup", self.warmup, at_least=0)
            check_choice("wire", self.wire, WAYS["wire"])
            check_choice("scope", self.scope, WAYS["scope"])
            if self.parameters is not None:
                check_whole("parameters", self.parameters, at_least=1)
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from error
        if self.parameters is not None and self.model is not None:
            raise UsageError("--parameters and --model exclude one another: a size, or the shapes of a model")
        self.shapes()
        self.contenders()

    def shapes(self) -> list[Shape]:
        if self.parameters is not None:
            return shapes_of_size(self.parameters)
        return shapes_of_model(self.model or DEFAULT_MODEL)

    def contenders(self) -> list[Contender]:
        asked = {"wire": self.wire, "scope": self.scope}
        options = {name: value for name, value in asked.items() if value != WAYS[name][0]}
        return contenders(list(self.methods), self.density, options)

    def as_record(self) -> dict[str, Any]:
        numel = sum(math.prod(shape) for shape in self.shapes())
        model = None if self.parameters is not None else self.model or DEFAULT_MODEL
        return asdict(self) | {"model": model, "parameters": numel, "methods": list(self.methods)}


class StepRow(NamedTuple):
    """What one contender took; nothing but a name and an error where it failed."""

    name: str
    seconds: Spread | None = None
    wire_bytes: int | None = None
    density: float | None = None
    select_seconds: float | None = None
    exchange_seconds: float | None = None
    error: str | None = None
    link_bytes: int | None = None
    """Through a rank's link in a step, each way, if collectives run in rings."""
    counted_bytes: int | None = None
    """Sent through a machine's interface in a step, as the kernel counted."""
    uplink_bytes: int | None = None
    """Between racks in a step, both ways, likewise."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> StepRow:
        """The row that `as_record` told of."""
        seconds = record["seconds"]
        told: dict[str, Any] = {name: record.get(name) for name in cls._fields}
        return cls(**told | {"seconds": None if seconds is None else Spread.from_record(seconds)})

    def as_record(self, rows: Sequence[StepRow] = ()) -> dict[str, Any]:
        """With what it is beside the other rows of its table."""
        seconds = None if self.seconds is None else self.seconds.as_record()
        beside = {"added_seconds": self.added(rows), "ratio_to_dense": self.ratio(rows)}
        return self._asdict() | {"seconds": seconds} | beside | {"ratio_to_formula": self.ratio_to_formula()}

    def ratio(self, rows: Sequence[StepRow]) -> float | None:
        """Of its time to that of plain DDP."""
        plain = _median_of(ZERO_LINE, rows)
        return None if self.seconds is None or plain is None else self.seconds.median / plain

    def added(self, rows: Sequence[StepRow]) -> float | None:
        """What the exchange of gradients adds to a step that has none: selection, messages and all between them."""
        idle = _median_of(HEADROOM, rows)
        return None if self.seconds is None or idle is None else self.seconds.median - idle

    def ratio_to_formula(self) -> float | None:
        """Of the bytes that were counted to those that the formula for rings foretells."""
        return self.counted_bytes / self.link_bytes if self.counted_bytes is not None and self.link_bytes else None


Hear: TypeAlias = Callable[[StepRow | Circumstances], None]


def _median_of(name: str, rows: Sequence[StepRow]) -> float | None:
    return next((row.seconds.median for row in rows if row.name == name and row.seconds is not None), None)


class _Lap(NamedTuple):
    """One step on one rank."""

    seconds: float
    seen: Seen


class _Outcome(NamedTuple):
    """A row on one rank."""

    laps: list[_Lap]
    error: str | None
    counted_bytes: int | None = None
    """Of all its laps."""
    uplink_bytes: int | None = None
    """Likewise."""


def measure(setting: StepSetting, device: torch.device, hear: Hear) -> None:
    """Measure all rows as one rank of the running process group; each rank hears every row.

    Rows run over a group of their own, and outcomes travel over the main one. What a failed row leaves half-way in its
    group disturbs no other row: the next ones get a new group.
    """
    # none is let go of before the end: a thread of its own that held the last reference could not end it
    groups = [_row_group()]
    if setting.links and dist.get_world_size() > 1:
        hear(circumstances(sum(map(math.prod, setting.shapes())), groups[0], device))
    for contender in setting.contenders():
        outcomes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, _outcome(contender, setting, device, groups[-1]))
        row = _row(contender.name, outcomes)
        hear(row)
        if row.error is not None:
            groups.append(_row_group())


def _row_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(timeout=timedelta(seconds=ROW_SECONDS))
    return group


def _outcome(contender: Contender, setting: StepSetting, device: torch.device, group: dist.ProcessGroup) -> _Outcome:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch says of its own hooks is no matter of the user's
            return _laps(contender, setting, device, group)
    except _RefusedError as refused:
        return _Outcome([], f"not supported here: {_told(refused.__cause__)}")
    except Exception as error:  # whatever it is, the other rows go on
        return _Outcome([], f"failed: {_told(error)}")
    finally:
        gc.collect()  # DDP and its hook hold one another, and much memory


class _RefusedError(Exception):
    """A contender cannot be put on a model here."""


def _told(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _laps(contender: Contender, setting: StepSetting, device: torch.device, group: dist.ProcessGroup) -> _Outcome:
    shapes = setting.shapes()
    model = _model(contender, shapes, device, group)
    try:
        probe = contender.attach(model)
    except Exception as error:
        raise _RefusedError from error
    noise = Noise(shapes, setting.density, device, seed=1 + dist.get_rank())

    def laps(number: int) -> list[_Lap]:
        return [_lap(model, noise.gradients(), probe, device, group) for _ in range(number)]

    laps(max(setting.warmup, contender.settle))
    if setting.interface is None:
        return _Outcome(laps(setting.steps), None)
    before = _counters(setting, device, group)
    counted = laps(setting.steps)
    after = _counters(setting, device, group)
    return _Outcome(counted, None, after[0] - before[0], None if setting.uplink is None else after[1] - before[1])


def _counters(setting: StepSetting, device: torch.device, group: dist.ProcessGroup) -> tuple[int, int]:
    """What this machine has sent, and what has passed between racks, once every rank has all that it waited for:
    nothing is in a queue any more.
    """
    _meet(device, group)
    assert setting.interface is not None
    return sent_bytes(setting.interface), 0 if setting.uplink is None else passed_bytes(setting.uplink)


def _model(
    contender: Contender, shapes: Sequence[Shape], device: torch.device, group: dist.ProcessGroup
) -> DistributedDataParallel:
    one_bucket = contender.one_bucket_on_gloo and dist.get_backend(group) == "gloo"
    megabytes = 4 * sum(math.prod(shape) for shape in shapes) // (1 << 20) + 1
    # None is DDP's default, as users have it
    cap = 2 * megabytes if one_bucket else None
    return DistributedDataParallel(
        GivenModel(shapes, device), process_group=group, bucket_cap_mb=cap, gradient_as_bucket_view=True
    )


def _lap(
    model: DistributedDataParallel,
    gradients: list[Tensor],
    probe: Callable[[], Seen],
    device: torch.device,
    group: dist.ProcessGroup,
) -> _Lap:
    """One backward, which is all that is timed, from the moment when every rank is ready for it."""
    model.zero_grad(set_to_none=True)
    loss: Tensor = model(gradients)
    _meet(device, group)
    start = perf_counter()
    loss.backward()  # type: ignore[no-untyped-call]
    _wait(device)
    return _Lap(perf_counter() - start, probe())


def _meet(device: torch.device, group: dist.ProcessGroup) -> None:
    """Go on when every rank has come this far."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    _wait(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _row(name: str, outcomes: Sequence[_Outcome]) -> StepRow:
    """From all ranks' laps: each step is as long as on the slowest, and its phases are that rank's."""
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None:
            everywhere = all(other.error == outcome.error for other in outcomes)
            return StepRow(name, error=outcome.error + ("" if everywhere else f" (on rank {rank})"))
    steps = list(zip(*(outcome.laps for outcome in outcomes), strict=True))
    slowest = [max(laps, key=lambda lap: lap.seconds) for laps in steps]
    return StepRow(
        name,
        seconds=spread([lap.seconds for lap in slowest]),
        wire_bytes=round(statistics.mean(lap.seen.wire_bytes for laps in steps for lap in laps)),
        density=_mean([lap.seen.density for lap in slowest]),
        select_seconds=_median([lap.seen.select_seconds for lap in slowest]),
        exchange_seconds=_median([lap.seen.exchange_seconds for lap in slowest]),
        link_bytes=_rounded(_mean([lap.seen.link_bytes for laps in steps for lap in laps])),
        counted_bytes=_rounded(_mean([_per_lap(outcome, outcome.counted_bytes) for outcome in outcomes])),
        uplink_bytes=_rounded(_per_lap(outcomes[0], outcomes[0].uplink_bytes)),
    )


def _per_lap(outcome: _Outcome, counted: int | None) -> float | None:
    return None if counted is None else counted / len(outcome.laps)


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None
