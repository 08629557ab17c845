"""From a config to a finished run: everything checked first, then in processes of ours or among a launcher's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gradsieve.checks import UsageError
from gradsieve.counters import check_interface, passed_bytes
from gradsieve.runs import RunError, is_run, read_run
from gradsieve.tasks import Task, build_model
from gradsieve.training.checkpoint import checkpoint_of
from gradsieve.training.config import TrainConfig, from_mapping, make_method, parse_method
from gradsieve.training.folder import make_writable, new_folder
from gradsieve.training.launch import launch
from gradsieve.training.place import Place, find_place, meeting_point
from gradsieve.training.plan import Plan, make_plan
from gradsieve.training.recorder import Sink
from gradsieve.training.session import Ended, Interruption, Order, Seat, carry_out

MAY_CHANGE = {
    *("epochs", "steps", "data", "device", "eval_every", "checkpoint_every", "tensorboard", "wandb", "threads"),
    *("timeout", "workers", "virtual", "stop_at"),
}
"""Options that a resumed run may take anew; but processes stay processes, and virtual workers virtual."""


def train(config: TrainConfig, sinks: Sequence[Sink] = ()) -> Ended:
    """Carry out a new run."""
    return _carried_out(config, None, sinks, resume=False)


def train_or_resume(values: Mapping[str, Any], source: str, sinks: Sequence[Sink] = ()) -> Ended:
    """Go on with the run in the folder `output` if it has a checkpoint, otherwise begin it there.

    So one command starts a run and, given again by whoever sees it die, goes on with it.
    """
    config = from_mapping(TrainConfig, values, source)
    if config.output is None:
        raise UsageError("--auto-resume needs --output: the folder to look for a checkpoint in")
    _refuse_baseline(config)
    folder = config.output.expanduser().resolve()
    if is_run(folder) and checkpoint_of(folder) is not None:
        return resume(folder, {name: value for name, value in values.items() if name != "output"}, sinks)
    make_writable(folder)
    return _carried_out(config, folder, sinks, resume=False)


def resume(folder: Path, changes: Mapping[str, Any], sinks: Sequence[Sink] = ()) -> Ended:
    """Go on with a run from its last checkpoint; `changes` are options given anew."""
    folder = folder.expanduser().resolve()
    place = find_place(os.environ)
    # torchrun may have started again with other workers, be it with one
    if place is not None and (place.world > 1 or place.launcher == "torchrun"):
        changes = _with_workers(folder, changes, place.world)
    return _carried_out(resumed_config(folder, changes), folder, sinks, resume=True)


def _refuse_baseline(config: TrainConfig) -> None:
    if config.baseline is not None:
        raise UsageError(f"{config.method} is PyTorch's own, and its runs cannot be resumed: start it anew")


def _with_workers(folder: Path, changes: Mapping[str, Any], world: int) -> Mapping[str, Any]:
    is_virtual = is_run(folder) and read_run(folder).virtual
    return changes if is_virtual else {"workers": world} | dict(changes)


def resumed_config(folder: Path, changes: Mapping[str, Any]) -> TrainConfig:
    """The config of a run to be resumed, with the changes that it may take."""
    if not is_run(folder):
        raise RunError(f"{folder} holds no run to resume: give the folder that gradsieve train wrote")
    _refuse_baseline(from_mapping(TrainConfig, read_run(folder).config, str(folder)))
    if checkpoint_of(folder) is None:
        raise RunError(f"{folder} has no checkpoint to go on from: it ended before one was written, or wrote none")
    stored = dict(read_run(folder).config)
    for name, value in changes.items():
        if not _may_become(name, value, stored, changes):
            raise UsageError(
                f"{folder} was run with {name} {stored.get(name)!r}, and a resumed run cannot change it to {value!r}; "
                f"it can change: {', '.join(sorted(MAY_CHANGE))}"
            )
    make_writable(folder)
    new = {name: value for name, value in changes.items() if name in MAY_CHANGE}
    return from_mapping(TrainConfig, stored | new, str(folder))


def _may_become(name: str, value: Any, stored: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
    if value == stored.get(name):
        return True
    if name == "method":
        _, options = parse_method(value)
        density = None if "density" in options else changes.get("density", stored["density"])
        return make_method(value, density) == make_method(stored["method"], stored["density"])
    # the states of the two kinds of workers are not alike
    other = {"workers": "virtual", "virtual": "workers"}.get(name)
    return name in MAY_CHANGE and (other is None or stored.get(other) is None)


def _carried_out(config: TrainConfig, folder: Path | None, sinks: Sequence[Sink], *, resume: bool) -> Ended:
    place = find_place(os.environ)
    if place is not None and place.world > 1 and config.virtual is None:
        return _joined(config, place, folder, sinks, resume=resume)
    refuse_launcher("virtual workers share one process")
    plan = checked_plan(config, num_workers(config))
    order = Order(plan.config, folder or new_folder(plan), resume=resume)
    return launch(order, 1 if config.virtual is not None else plan.world, sinks)


def _joined(config: TrainConfig, place: Place, folder: Path | None, sinks: Sequence[Sink], *, resume: bool) -> Ended:
    """Be one of the workers that a launcher started."""
    if config.workers not in (None, place.world):
        raise UsageError(
            f"{place.launcher} started {place.world} workers, but {config.workers} are asked for: leave out --workers, "
            f"or start as many"
        )
    plan = checked_plan(config, place.world)
    meeting = meeting_point(place, os.environ)
    seat = Seat(place.rank, place.world, place.local_rank, place.local_world, meeting)
    interruption = Interruption()
    interruption.install()
    order = Order(plan.config, folder, resume=resume)
    return carry_out(order, seat, list(sinks) if place.rank == 0 else [], interruption)


def refuse_launcher(reason: str) -> None:
    """For what must be started once."""
    place = find_place(os.environ)
    if place is not None and place.world > 1:
        raise UsageError(f"{reason}, but {place.launcher} started {place.world}: start it without {place.launcher}")


def num_workers(config: TrainConfig) -> int:
    """Of a run that no launcher started."""
    asked = config.virtual or config.workers
    if asked is not None:
        return asked
    on_cpu = config.device is not None and config.device.startswith("cpu")
    return 1 if on_cpu else max(1, torch.cuda.device_count())


def checked_plan(config: TrainConfig, world: int, task: Task | None = None) -> Plan:
    """The plan of a run, with all found that can be wrong before anything is started."""
    check_device(config.device)
    _check_sinks(config)
    plan = make_plan(config, world, task)
    _check_backend(plan.config)
    check_interface(plan.config.interface)
    if plan.config.uplink is not None:
        passed_bytes(plan.config.uplink)
    if plan.config.model not in plan.task.models:
        build_model(plan.task, plan.config.model)
    try:
        plan.method.proposers.check(world)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return replace(plan, config=replace(plan.config, workers=None if config.virtual is not None else world))


def _check_sinks(config: TrainConfig) -> None:
    for name, wanted in (("tensorboard", config.tensorboard), ("wandb", config.wandb is not None)):
        if wanted and find_spec(name) is None:
            raise UsageError(f"--{name} needs the package {name}: pip install 'gradsieve[{name}]'")


def _check_backend(config: TrainConfig) -> None:
    if config.backend not in (None, "gloo", "nccl"):
        raise UsageError(f"backend must be gloo or nccl, not {config.backend!r}")
    if config.backend == "nccl" and not str(config.device).startswith("cuda"):
        raise UsageError(f"backend nccl needs CUDA devices, and the device is {config.device}: give --backend gloo")


def check_device(name: str | None) -> None:
    """Refuse a device that is not here; None is whatever there is."""
    if name is None:
        return
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device must be cpu, cuda or cuda:N, not {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device must be cpu, cuda or cuda:N, not {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {name} is not here: this machine has {torch.cuda.device_count()} GPUs")
