"""`gradsieve lab --train`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import rich.table
import torch
from rich.console import Console

from gradsieve.bench.figures import result, write
from gradsieve.checks import UsageError, check_fraction
from gradsieve.cli.bench import add_row, make_table, milliseconds, news, ratio_text, whole
from gradsieve.cli.display import FAILED
from gradsieve.counters import Traffic
from gradsieve.lab.jobs import JobError, run_job
from gradsieve.lab.layout import Layout
from gradsieve.lab.network import Network
from gradsieve.lab.training import (
    Cell,
    TrainRow,
    TrainSetting,
    levelled,
    row_name,
    row_of,
    train_command,
    zero_line_of,
)
from gradsieve.runs import RESULT, RUN, read_run
from gradsieve.tasks import build_model
from gradsieve.training.folder import RUNS, make_writable
from gradsieve.training.runner import checked_plan

METHODS = (
    "ddp,fp16,powersgd(rank=1),powersgd(rank=4),topk,cltk,micro,micro(wire=bfloat16),micro(scope=bucket),"
    "union,union(wire=bfloat16),union(scope=bucket),exdyna"
)
DENSITY = 0.01
OPTIONS = {"task": "digits", "model": "mlp(hidden=3310)", "density": DENSITY}
"""Of `gradsieve train`, where the user says nothing: 11.2 million parameters on real data that is built in."""
FILE = "lab-training.json"
KIND = "lab-training"


class Trained(NamedTuple):
    """What came of one run at one rate."""

    layout: Layout
    row: TrainRow
    traffic: list[Traffic]
    """Of each host, over the whole job."""


@dataclass(frozen=True)
class Lesson:
    """Trainings at several rates, and where they are written."""

    layouts: Sequence[Layout]
    setting: TrainSetting
    threads: int
    timeout: float
    output: Path

    def record(self, told: dict[str, Any], trained: Sequence[Trained]) -> Any:
        """As JSON holds it."""
        rows = []
        for layout in self.layouts:
            here = [one for one in trained if one.layout == layout]
            for one, row in zip(here, levelled([one.row for one in here]), strict=True):
                zero_line = zero_line_of([other.row for other in here if other.row.seed == row.seed])
                hosts = [traffic._asdict() for traffic in one.traffic]
                rows.append({"rate": layout.rate.name, **row.as_record(zero_line), "hosts": hosts})
        return result(KIND, torch.device("cpu"), told, rows)


def check(setting: TrainSetting, hosts: int) -> int:
    """Refuse, before anything is started, what a run would refuse; returns the number of parameters."""
    if setting.accuracy is not None:
        try:
            check_fraction("accuracy", setting.accuracy)
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from error
    elif setting.stop:
        raise UsageError("--stop-at-accuracy needs --accuracy: how good is good enough")
    names = [(cell.method, cell.seed) for cell in setting.cells()]
    repeated = sorted({method for method, seed in names if names.count((method, seed)) > 1})
    if repeated:
        raise UsageError(f"--methods or --seed names {', '.join(repeated)} twice: once is enough")
    plans = [checked_plan(cell.config(), hosts) for cell in setting.cells()]
    plan = plans[0]
    return sum(parameter.numel() for parameter in build_model(plan.task, plan.config.model).parameters())


def folder_for(output: Path | None, task: str) -> Path:
    """A folder without earlier results."""
    folder = (output or RUNS / f"lab-{task}").expanduser().resolve()
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty: give another --output, or remove it")
    make_writable(folder)
    return folder


def train_in_lab(lesson: Lesson, told: dict[str, Any], console: Console) -> int:
    """One job after the other; what there is is written after each."""
    trained: list[Trained] = []
    for layout in lesson.layouts:
        for cell in lesson.setting.cells():
            with news(console, f"training at {layout.rate.name}: {cell.method}, seed {cell.seed}"):
                trained.append(_trained(lesson, layout, cell))
            write(lesson.record(told, trained), str(lesson.output / FILE))
            if not console.is_terminal:
                console.print(_line(trained[-1]), markup=False, soft_wrap=True)
        rows = levelled([one.row for one in trained if one.layout == layout])
        console.print(training_table(_title(told, layout), rows))
        for row in rows:
            if row.error is not None:
                console.print(f"{row.name}, seed {row.seed}: {row.error}", markup=False, soft_wrap=True)
    console.print(str(lesson.output / FILE), markup=False, soft_wrap=True)
    return FAILED if any(one.row.error is not None for one in trained) else 0


def _trained(lesson: Lesson, layout: Layout, cell: Cell) -> Trained:
    folder = lesson.output / layout.rate.name / cell.folder_name
    with Network(layout) as network:
        try:
            script = train_command(cell, folder, lesson.threads, network.uplink_place())
            run_job(network, script, seconds=lesson.timeout)
            row = row_of(cell, read_run(folder))
        except (JobError, ValueError) as error:
            row = TrainRow(row_name(cell.method), cell.method, cell.seed, error=_told(folder, str(error)))
        return Trained(layout, row, network.host_traffic())


def _told(folder: Path, said: str) -> str:
    """What the run itself says of its end, which is more than what a job left."""
    if (folder / RUN).exists() and (folder / RESULT).exists():
        with suppress(ValueError):
            return read_run(folder).error or said
    return said


def _line(one: Trained) -> str:
    row = one.row
    if row.error is not None or row.seconds is None:
        return f"{one.layout.rate.name} {row.name} seed {row.seed}: {row.error}"
    seen = (
        "" if row.reached is None else f", good enough after {row.reached.steps} steps and {row.reached.seconds:.1f} s"
    )
    return f"{one.layout.rate.name} {row.name} seed {row.seed}: {1000 * row.seconds.median:.0f} ms a step{seen}"


def _title(told: dict[str, Any], layout: Layout) -> str:
    link = "no limit" if layout.rate.bits is None else f"{layout.rate.name} each way"
    racks = f" in {layout.racks} racks, {layout.uplink.name} between them" if layout.racks > 1 else ""
    goal = "" if told["accuracy"] is None else f"; until {100 * told['accuracy']:g} % was seen"
    return (
        f"{link}: {layout.hosts} hosts{racks}, {told['task']}, {told['parameters']:,} parameters: milliseconds and "
        f"bytes of a step, slowest host{goal}"
    )


def training_table(title: str, rows: Sequence[TrainRow]) -> rich.table.Table:
    columns = ["", "seed", "step", "10 % to 90 %", "compute", "select", "exchange", "of dense"]
    columns += ["bytes", "by counter", "of formula"]
    between = any(row.uplink_bytes is not None for row in rows)
    columns += ["between racks"] if between else []
    columns += ["steps", "accuracy", "reached: steps", "seconds", "megabytes"]
    table = make_table(title, columns)
    for row in rows:
        zero_line = zero_line_of([other for other in rows if other.seed == row.seed])
        add_row(table, row.name, [str(row.seed), *_cells(row, zero_line, between=between)])
    return table


def _cells(row: TrainRow, zero_line: TrainRow | None, *, between: bool) -> list[str]:
    if row.error is not None or row.seconds is None:
        return ["-"] * (15 + between)
    low, high = milliseconds(row.seconds.low), milliseconds(row.seconds.high)
    parts = [milliseconds(part) for part in (row.compute_seconds, row.select_seconds, row.exchange_seconds)]
    cells = [milliseconds(row.seconds.median), f"{low} to {high}", *parts, ratio_text(row.ratio(zero_line))]
    cells += [whole(row.wire_bytes), whole(row.counted_bytes), ratio_text(row.ratio_to_formula())]
    cells += [whole(row.uplink_bytes)] if between else []
    accuracy = "-" if row.accuracy is None else f"{100 * row.accuracy:.2f} %"
    cells += [str(row.steps), accuracy]
    seen = row.reached
    if seen is None:
        return [*cells, "-", "-", "-"]
    counted = "-" if seen.counted_bytes is None else f"{seen.counted_bytes / 1e6:,.1f}"
    return [*cells, str(seen.steps), f"{seen.seconds:.1f}", counted]
