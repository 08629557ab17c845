"""A grid of runs over one task: every method at every density, number of workers and seed."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gradsieve.baselines import BASELINES
from gradsieve.checks import UsageError
from gradsieve.runs import ERROR, METRICS, RESULT, RUN, is_run, read_run
from gradsieve.tasks import Task, load_task
from gradsieve.training.checkpoint import checkpoint_of
from gradsieve.training.config import TrainConfig, from_mapping, parse_method, to_mapping
from gradsieve.training.folder import RUNS, make_writable, run_name
from gradsieve.training.launch import Job, launch_each
from gradsieve.training.plan import Plan
from gradsieve.training.recorder import Sink
from gradsieve.training.runner import checked_plan, num_workers
from gradsieve.training.session import Ended, Order

AXES = ("method", "density", "workers", "virtual", "seed")
"""Options that may have several values, slowest first."""
NO_MATTER = {"output", "tensorboard", "wandb", "threads", "checkpoint_every"}
"""Options that may differ between a finished run and the one asked for."""


OWN_FILES = (RUN, METRICS, RESULT, ERROR, "checkpoint", "events.")


@dataclass(frozen=True)
class Cell:
    """One run of a grid, and its folder."""

    plan: Plan
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def title(self) -> str:
        """What it is, for a display."""
        density = "" if self.plan.config.density is None else f" {self.plan.config.density:g}"
        return f"{self.plan.label}{density}, {self.plan.world} workers, seed {self.plan.config.seed}"

    @property
    def state(self) -> Literal["new", "finished", "started"]:
        if not is_run(self.folder):
            return "new"
        return "finished" if read_run(self.folder).status == "finished" else "started"


def expand(values: Mapping[str, Any], source: str) -> list[TrainConfig]:
    """The configs of a grid from one mapping, whose axes may hold lists; each config once."""
    lists = [_listed(axis, values[axis]) if values.get(axis) is not None else [None] for axis in AXES]
    configs = []
    for chosen in itertools.product(*lists):
        cell = {**values, **dict(zip(AXES, chosen, strict=True))}
        given = {name: value for name, value in cell.items() if value is not None}
        if parse_method(str(given.get("method", "")) or TrainConfig.method).name in ("dense", *BASELINES):
            given.pop("density", None)  # they have none, and are run once beside the others
        configs.append(from_mapping(TrainConfig, given, source))
    return list(dict.fromkeys(configs))


def _listed(axis: str, value: Any) -> list[Any]:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if not values:
        raise UsageError(f"{axis} is an empty list: give at least one value, or leave it out")
    return values


def make_grid(configs: Sequence[TrainConfig], output: Path | None) -> list[Cell]:
    """The cells of a grid, all checked: for the data, the models, and what their folders hold already."""
    task = load_task(configs[0].task, configs[0].data)
    folder = (output or RUNS / f"compare-{task.name}").expanduser().resolve()
    cells: dict[str, Cell] = {}
    for config in configs:
        plan = plan_of(config, task)
        cell = Cell(plan, folder / run_name(plan))
        if cells.setdefault(cell.name, cell).plan.config != plan.config:
            raise UsageError(
                f"two runs of the grid would share the folder {cell.folder}: run them by grids of their own"
            )
    for cell in cells.values():
        check_folder(cell)
    make_writable(folder)
    return list(cells.values())


def plan_of(config: TrainConfig, task: Task) -> Plan:
    """The plan of a run in a grid: its folder is the grid's affair, and checkpoints are written if asked for only."""
    plain = replace(config, output=None, checkpoint_every=config.checkpoint_every or 0)
    return checked_plan(plain, num_workers(config), task)


def check_folder(cell: Cell) -> None:
    """A folder of that name must hold a run like that, or the beginning of one."""
    if not is_run(cell.folder):
        strange = [path for path in cell.folder.glob("*") if not path.name.startswith(OWN_FILES)]
        if strange:
            raise UsageError(f"{strange[0]} is no file of a run, and would be removed: give another --output")
        return
    asked, found = to_mapping(cell.plan.config), read_run(cell.folder).config
    for name, value in asked.items():
        if name not in NO_MATTER and found.get(name) != value:
            raise UsageError(
                f"{cell.folder} holds a run with {name} {found.get(name)!r}, and {value!r} is asked for: "
                "give another --output, or remove that folder"
            )


def run_grid(
    cells: Sequence[Cell], sinks: Callable[[Cell], Sequence[Sink]], at_once: int = 1
) -> Iterator[tuple[Cell, Ended]]:
    """Carry out what is not finished yet, so many runs at a time; one that fails does not stop the others, a Ctrl-C
    does."""
    unfinished = {cell.folder: cell for cell in cells if cell.state != "finished"}
    yield from ((cell, Ended(cell.folder, "finished")) for cell in cells if cell.folder not in unfinished)
    jobs = (_job(cell, sinks(cell), at_once) for cell in unfinished.values())
    with closing(launch_each(jobs, at_once)) as ends:
        for ended in ends:
            yield unfinished[ended.folder], ended


def _job(cell: Cell, sinks: Sequence[Sink], at_once: int) -> Job:
    num_processes = 1 if cell.plan.config.virtual is not None else cell.plan.world
    order = _order(cell)
    if at_once > 1 and order.config.threads is None:
        # each would take all cores
        share = max(1, (os.cpu_count() or 1) // (at_once * num_processes))
        order = replace(order, config=replace(order.config, threads=share))
    return Job(order, num_processes, sinks)


def _order(cell: Cell) -> Order:
    """Go on where there is a checkpoint, otherwise begin anew."""
    resume = cell.state == "started" and checkpoint_of(cell.folder) is not None
    if not resume:
        shutil.rmtree(cell.folder, ignore_errors=True)
        cell.folder.mkdir(parents=True)
    return Order(cell.plan.config, cell.folder, resume=resume)
