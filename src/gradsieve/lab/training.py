"""Trainings over the hosts of a lab: the command that a host runs, and what is read from the run that it leaves."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gradsieve.baselines import BASELINES, PLAIN
from gradsieve.bench.figures import Spread, spread
from gradsieve.expressions import written
from gradsieve.lab.layout import INTERFACE
from gradsieve.runs import Record, Run
from gradsieve.training.config import TrainConfig, from_mapping, parse_method
from gradsieve.training.folder import plain_name

UNSTEADY_STEPS = 5
"""Left out of the times of a step: DDP lays its buckets out anew, PowerSGD begins, memory is allocated."""
PASSES = 5
"""Timed alone, before the first step."""


@dataclass(frozen=True)
class TrainSetting:
    """What is trained at every rate: the same task with each method and seed."""

    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    options: Mapping[str, Any]
    """Of `gradsieve train`, by name."""
    accuracy: float | None = None
    """Whose first sight is timed."""
    stop: bool = False
    """Does a run end there?"""

    def cells(self) -> list[Cell]:
        """The runs at one rate, method by method."""
        return [Cell(self, method, seed) for method in self.methods for seed in self.seeds]

    def as_record(self) -> dict[str, Any]:
        record = {"methods": list(self.methods), "seeds": list(self.seeds), "accuracy": self.accuracy}
        return dict(self.options) | record | {"stop_at_accuracy": self.stop}


class Cell(NamedTuple):
    """One run at one rate."""

    setting: TrainSetting
    method: str
    seed: int

    def config(self) -> TrainConfig:
        """What is asked of `gradsieve train`, checked; the network is the lab's affair."""
        return from_mapping(TrainConfig, self.values(), "--train")

    def values(self) -> dict[str, Any]:
        """Options of `gradsieve train`. A method's wire and scope stand in its expression, as for `bench step`."""
        name, options = parse_method(self.method)
        values = dict(self.setting.options)
        if name in BASELINES:
            values = {key: value for key, value in values.items() if key not in ("wire", "scope")}
        values |= {key: options.pop(key) for key in ("wire", "scope") if key in options and name not in BASELINES}
        if name == "dense" or name in BASELINES or "density" in options:
            values.pop("density", None)
        stop = {"stop_at": self.setting.accuracy} if self.setting.stop else {}
        return values | stop | {"method": written(name, options), "seed": self.seed, "checkpoint_every": 0}

    @property
    def folder_name(self) -> str:
        return plain_name(f"{self.method}-s{self.seed}")


def train_command(cell: Cell, folder: Path, threads: int, uplink: str | None) -> list[str]:
    """What a host's worker runs; the first one writes the folder."""
    own = {"device": "cpu", "threads": threads, "output": folder, "interface": INTERFACE, "passes_alone": PASSES}
    between = {} if uplink is None else {"uplink": uplink}
    options = cell.values() | own | between
    return ["-m", "gradsieve", "train", *(word for name, value in options.items() for word in _option(name, value))]


def _option(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    return [flag, str(value)]


class Reached(NamedTuple):
    """What it took until an evaluation first saw the accuracy that was asked for."""

    steps: int
    seconds: float
    """Of training, without evaluations."""
    wire_bytes: float
    """Handed to collectives by a worker."""
    counted_bytes: float | None
    """Sent by a host, as the kernel counted."""


class TrainRow(NamedTuple):
    """What one run came to; nothing but its names and an error where it failed."""

    name: str
    method: str
    seed: int
    seconds: Spread | None = None
    """Of a step, on the slowest host."""
    compute_seconds: float | None = None
    """Forward and backward alone, measured before the first step, and batch and optimizer of a step."""
    select_seconds: float | None = None
    exchange_seconds: float | None = None
    """What is left of a step."""
    wire_bytes: float | None = None
    link_bytes: float | None = None
    counted_bytes: float | None = None
    uplink_bytes: float | None = None
    density: float | None = None
    steps: int | None = None
    whole: bool | None = None
    """Did it run to its full length? Then its accuracy is the final one."""
    accuracy: float | None = None
    reached: Reached | None = None
    error: str | None = None

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> TrainRow:
        told = {name: record[name] for name in cls._fields}
        seconds, reached = record["seconds"], record["reached"]
        return cls(
            **told
            | {
                "seconds": None if seconds is None else Spread.from_record(seconds),
                "reached": None if reached is None else Reached(**reached),
            }
        )

    def as_record(self, zero_line: TrainRow | None) -> dict[str, Any]:
        seconds = None if self.seconds is None else self.seconds.as_record()
        reached = None if self.reached is None else self.reached._asdict()
        ratios = {"ratio_to_dense": self.ratio(zero_line), "ratio_to_formula": self.ratio_to_formula()}
        return self._asdict() | {"seconds": seconds, "reached": reached} | ratios

    def ratio(self, zero_line: TrainRow | None) -> float | None:
        """Of its step's time to that of plain DDP."""
        if self.seconds is None or zero_line is None or zero_line.seconds is None:
            return None
        return self.seconds.median / zero_line.seconds.median

    def ratio_to_formula(self) -> float | None:
        """Of the bytes that were counted to those that the formula for rings foretells."""
        return self.counted_bytes / self.link_bytes if self.counted_bytes is not None and self.link_bytes else None


def zero_line_of(rows: Sequence[TrainRow]) -> TrainRow | None:
    return next((row for row in rows if row.name == PLAIN), None)


def levelled(rows: Sequence[TrainRow]) -> list[TrainRow]:
    """Rows of one rate with one figure for computing, the median: it is the same work for all of them, and what one run
    measured of it alone is noisy where hosts share cores.
    """
    known = [row.compute_seconds for row in rows if row.compute_seconds is not None]
    return [_with_compute(row, statistics.median(known)) if row.seconds is not None else row for row in rows]


def _with_compute(row: TrainRow, compute: float) -> TrainRow:
    assert row.seconds is not None
    left = row.seconds.median - compute - (row.select_seconds or 0.0)
    return row._replace(compute_seconds=compute, exchange_seconds=max(0.0, left))


def row_name(method: str) -> str:
    """As tables show it: the names of baselines are those of `bench step`."""
    name, options = parse_method(method)
    return BASELINES[name](options).name if name in BASELINES else method


def row_of(cell: Cell, run: Run) -> TrainRow:
    """What a run's folder tells."""
    steady = run.steps[min(UNSTEADY_STEPS, len(run.steps) - 1) :]
    alone = float(run.header["seconds_alone"])
    row = TrainRow(
        name=row_name(cell.method),
        method=cell.method,
        seed=cell.seed,
        seconds=spread(_column(steady, "time/step")),
        select_seconds=statistics.median(_column(steady, "time/select")),
        wire_bytes=_mean(steady, "comm/wire_bytes"),
        link_bytes=_mean(steady, "comm/link_bytes"),
        counted_bytes=_mean(steady, "comm/sent_bytes"),
        uplink_bytes=_mean(steady, "comm/uplink_bytes"),
        density=_mean(steady, "sparsity/density_actual"),
        steps=len(run.steps),
        whole=len(run.steps) >= int(run.header["total_steps"]),
        accuracy=float(run.evaluations[-1][f"eval/{run.measure}"] or 0),
        reached=None if cell.setting.accuracy is None else reached(run, cell.setting.accuracy),
    )
    return _with_compute(row, alone + statistics.median(_column(steady, "time/rest")))


def reached(run: Run, accuracy: float) -> Reached | None:
    """Steps, seconds and bytes until an evaluation was so good for the first time; None if none was."""
    name, sign = f"eval/{run.measure}", 1 if run.header["measure"]["higher_is_better"] else -1
    for evaluation in run.evaluations:
        value = evaluation[name]
        if value is not None and sign * value >= sign * accuracy:
            done = int(evaluation["step"] or 0)
            taken = [record for record in run.steps if int(record["step"] or 0) <= done]
            counted = _column(taken, "comm/sent_bytes")
            return Reached(
                done,
                float(evaluation["time/elapsed"] or 0),
                sum(_column(taken, "comm/wire_bytes")),
                sum(counted) if counted else None,
            )
    return None


def _column(records: Sequence[Record], name: str) -> list[float]:
    return [float(value) for record in records if (value := record.get(name)) is not None]


def _mean(records: Sequence[Record], name: str) -> float | None:
    values = _column(records, name)
    return statistics.mean(values) if values else None
