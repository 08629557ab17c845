"""One process of a run, from its order to its end."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradsieve.checks import UsageError
from gradsieve.runs import Record, Status, read_run, summarise
from gradsieve.training.config import TrainConfig, to_mapping
from gradsieve.training.engine import Engine
from gradsieve.training.folder import new_folder
from gradsieve.training.loop import Training
from gradsieve.training.plan import Plan, make_plan
from gradsieve.training.processes import Processes
from gradsieve.training.provenance import provenance
from gradsieve.training.recorder import Recorder, Sink, TensorBoard, WeightsAndBiases
from gradsieve.training.virtual import Virtual

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Requests to stop."""


@dataclass(frozen=True)
class Order:
    """A run to be carried out; travels to the processes that do it."""

    config: TrainConfig
    folder: Path | None
    """None: the first process makes a new one."""
    resume: bool = False


@dataclass(frozen=True)
class Seat:
    """A process among those of a run."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    meeting: str
    """Where the process group meets: an init_method of torch.distributed."""


class Ended(NamedTuple):
    """How a run ended."""

    folder: Path
    status: Status
    error: str | None = None


class Interruption:
    """Notes a request to stop (Ctrl-C, SIGTERM) so that the step under way can end."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:  # noqa: ARG002 - the signature of a signal handler
        self.requested = True


def carry_out(order: Order, seat: Seat, sinks: list[Sink], interruption: Interruption) -> Ended:
    """Train, as one process of the run; the first one writes the folder and tells the sinks."""
    torch.set_num_threads(order.config.threads or max(1, (os.cpu_count() or 1) // seat.local_world))
    plan = make_plan(order.config, order.config.virtual or seat.world)
    device = _device(plan.config, seat)
    with _process_group(plan.config, seat):
        folder = order.folder or _agreed_folder(plan, seat)
        if plan.config.virtual is None:
            _check_beginning(folder, resume=order.resume)
        recorder = _recorder(plan.config, folder, sinks) if seat.rank == 0 else None
        status = _train(plan, device, folder, recorder, interruption, resume=order.resume)
    return Ended(folder, status)


def _train(
    plan: Plan,
    device: torch.device,
    folder: Path,
    recorder: Recorder | None,
    interruption: Interruption,
    *,
    resume: bool,
) -> Status:
    engine = Processes(plan, device) if plan.config.virtual is None else Virtual(plan, device)
    training = Training(plan, engine, folder, recorder, lambda: interruption.requested)
    steps_done = training.resume() if resume else 0
    if recorder is None:
        return training.run()
    recorder.start(_header(training.plan, engine, folder if resume else None, steps_done), steps_done)
    try:
        status = training.run()
    except Exception as error:
        recorder.end("failed", summary_of(folder), one_line(error, engine.rank))
        raise
    recorder.end(status, summary_of(folder))
    return status


def one_line(error: BaseException, rank: int) -> str:
    """What went wrong in a worker."""
    text = " ".join(str(error).split()) or type(error).__name__
    named = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
    return f"worker {rank}: {named}"


def _device(config: TrainConfig, seat: Seat) -> torch.device:
    assert config.device is not None
    device = torch.device(config.device)
    if device.type == "cuda":
        if device.index is None and config.virtual is None:
            device = torch.device("cuda", seat.local_rank % torch.cuda.device_count())
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


@contextmanager
def _process_group(config: TrainConfig, seat: Seat) -> Iterator[None]:
    if config.virtual is not None:
        yield
        return
    dist.init_process_group(
        backend_for(config, seat.local_world),
        init_method=seat.meeting,
        rank=seat.rank,
        world_size=seat.world,
        timeout=timedelta(seconds=config.timeout),
    )
    try:
        yield
    finally:
        # DDP and its hook hold the group in a cycle, and if its threads are left to the end of the interpreter they
        # now and then abort it
        gc.collect()
        dist.destroy_process_group()


def backend_for(config: TrainConfig, local_world: int) -> str:
    """The one that was asked for, or the one that suits the device."""
    return config.backend or default_backend(str(config.device), local_world)


def default_backend(device: str, local_world: int) -> str:
    """NCCL where every process has a GPU of its own, otherwise gloo."""
    on_cuda = device.startswith("cuda") and dist.is_nccl_available()
    return "nccl" if on_cuda and local_world <= torch.cuda.device_count() else "gloo"


def _agreed_folder(plan: Plan, seat: Seat) -> Path:
    """A new folder that the first process makes; its failure is everyone's."""
    answer: list[Path | str | None] = [None]
    if seat.rank == 0:
        try:
            answer = [new_folder(plan)]
        except UsageError as error:
            answer = [str(error)]
    dist.broadcast_object_list(answer)
    if not isinstance(answer[0], Path):
        raise UsageError(str(answer[0]))
    return answer[0]


def _check_beginning(folder: Path, *, resume: bool) -> None:
    """Refuse a run that some workers find a checkpoint of and others do not."""
    answers = [False] * dist.get_world_size()
    dist.all_gather_object(answers, resume)
    if len(set(answers)) > 1:
        found = [rank for rank, answer in enumerate(answers) if answer]
        raise UsageError(
            f"of {len(answers)} workers those of ranks {found} alone see a checkpoint in {folder}: "
            "put it on storage that all machines share"
        )


def _recorder(config: TrainConfig, folder: Path, sinks: list[Sink]) -> Recorder:
    more = list(sinks)
    if config.tensorboard:
        more.append(TensorBoard(folder))
    if config.wandb is not None:
        more.append(WeightsAndBiases(config.wandb, folder))
    return Recorder(folder, more)


def _header(plan: Plan, engine: Engine, resumed: Path | None, steps_done: int) -> dict[str, Any]:
    """What `run.json` says; of a resumed run also where it first came from."""
    header, now = _description(plan, engine), provenance(engine.device)
    if resumed is None:
        return header | {"provenance": now}
    before = read_run(resumed).header
    worlds = {"from_world": before["world"], "to_world": plan.world} if before["world"] != plan.world else {}
    again = [*before.get("resumed", []), {"from_step": steps_done} | worlds | now]
    return header | {"provenance": before["provenance"], "resumed": again}


def _description(plan: Plan, engine: Engine) -> dict[str, Any]:
    measure = plan.task.measure
    return {
        "label": plan.label,
        "method": repr(plan.method) if plan.config.baseline is None else plan.config.method,
        "density": plan.method.density,
        "world": plan.world,
        "task": plan.task.name,
        "measure": {
            "name": measure.name,
            "higher_is_better": measure.higher_is_better,
            "percent": measure.percent,
        },
        "model": {
            "name": plan.config.model,
            "parameters": engine.layout.numel + engine.layout.dense_numel,
            "sparsified": engine.layout.numel,
            "dense": engine.layout.dense_numel,
        },
        "seconds_alone": engine.seconds_alone,
        "steps_per_epoch": plan.steps_per_epoch,
        "total_steps": plan.total_steps,
        "config": to_mapping(plan.config),
    }


def summary_of(folder: Path) -> Record:
    run = read_run(folder)
    return summarise(run.steps, run.evaluations, run.header["steps_per_epoch"])
