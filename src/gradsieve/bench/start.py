"""Measures steps over the processes that a launcher started, or over some of its own on this machine."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, ProcessException, start_processes

from gradsieve.bench.links import Circumstances, circumstances
from gradsieve.bench.step import Hear, StepRow, StepSetting, measure
from gradsieve.checks import UsageError, check_whole
from gradsieve.training.place import Place, meeting_point
from gradsieve.training.session import Seat, default_backend

WORKERS = 2
"""Of a measurement on the CPU that no launcher started."""
POLL_SECONDS = 0.1


class Crew(NamedTuple):
    """Who measures."""

    world: int
    device: str
    backend: str
    threads: int | None = None
    """Of a process on the CPU; None: its share of the machine's cores."""


class WorkerError(RuntimeError):
    """A process of the measurement ended before its time; the message is one line."""


def make_crew(place: Place | None, workers: int | None, device: str | None, threads: int | None = None) -> Crew:
    """From what was asked for, or what there is."""
    kind = device or default_device()
    for name, number in (("workers", workers), ("threads", threads)):
        _check_number(name, number)
    if place is not None:
        if workers not in (None, place.world):
            raise UsageError(
                f"{place.launcher} started {place.world} workers, but {workers} are asked for: leave out --workers"
            )
        return Crew(place.world, kind, default_backend(kind, place.local_world), threads)
    world = workers or (WORKERS if kind == "cpu" else max(1, torch.cuda.device_count()))
    return Crew(world, kind, default_backend(kind, world), threads)


def _check_number(name: str, number: int | None) -> None:
    try:
        check_whole(name, 1 if number is None else number, at_least=1)
    except ValueError as error:
        raise UsageError(str(error)) from error


def joined(setting: StepSetting, crew: Crew, place: Place, hear: Hear, environment: Mapping[str, str]) -> None:
    """Measure as one of the workers that a launcher started."""
    meeting = meeting_point(place, environment)
    seat = Seat(place.rank, place.world, place.local_rank, place.local_world, meeting)
    _measure(setting, crew, seat, hear)


def surveyed(numel: int, crew: Crew, place: Place, environment: Mapping[str, str]) -> Circumstances:
    """What steps of so many parameters would be measured under, as one of the workers that a launcher started."""
    seat = Seat(place.rank, place.world, place.local_rank, place.local_world, meeting_point(place, environment))
    with _group(crew, seat) as device:
        assert dist.group.WORLD is not None
        return circumstances(numel, dist.group.WORLD, device)


def started(setting: StepSetting, crew: Crew, hear: Hear) -> None:
    """Measure in new processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gradsieve.bench.step"])  # torch is imported once
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="gradsieve-") as scratch, ours:
        arguments = (setting, crew, f"file://{scratch}/meeting", theirs)
        processes = start_processes(  # type: ignore[no-untyped-call]
            _work, arguments, crew.world, join=False, daemon=True, start_method="forkserver"
        )
        theirs.close()
        try:
            _follow(processes, ours, hear)
        finally:
            _end(processes)


def _follow(processes: ProcessContext, pipe: Connection, hear: Hear) -> None:
    """Pass on the rows until all processes have ended."""
    try:
        while not processes.join(timeout=POLL_SECONDS):
            _drain(pipe, hear)
    except ProcessException as error:
        _drain(pipe, hear)
        raise WorkerError(f"worker {error.error_index}: {_last_line(str(error))}") from error
    _drain(pipe, hear)


def _last_line(text: str) -> str:
    """Of a traceback, what was raised."""
    return text.strip().splitlines()[-1]


def _drain(pipe: Connection, hear: Hear) -> None:
    try:
        while pipe.poll():
            hear(pipe.recv())
    except EOFError:  # the first worker has closed it
        pass


def _end(processes: ProcessContext) -> None:
    for process in processes.processes:
        if process.is_alive():
            process.kill()
        process.join()


def _work(rank: int, setting: StepSetting, crew: Crew, meeting: str, pipe: Connection) -> None:
    """The life of one worker; the first one tells the rows."""
    # local workers meet on the loopback interface, whatever the machine's name resolves to
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def tell(heard: StepRow | Circumstances) -> None:
        if rank == 0:
            pipe.send(heard)

    _measure(setting, crew, Seat(rank, crew.world, rank, crew.world, meeting), tell)


def _measure(setting: StepSetting, crew: Crew, seat: Seat, hear: Hear) -> None:
    with _group(crew, seat) as device:
        measure(setting, device, hear)


@contextmanager
def _group(crew: Crew, seat: Seat) -> Iterator[torch.device]:
    """The process group of all that measure; yields this one's device."""
    torch.set_num_threads(crew.threads or max(1, (os.cpu_count() or 1) // seat.local_world))
    device = own_device(crew.device, seat.local_rank)
    dist.init_process_group(
        crew.backend,
        init_method=seat.meeting,
        rank=seat.rank,
        world_size=seat.world,
        timeout=timedelta(minutes=10),
    )
    try:
        yield device
        # one that left early would break off what another has not ended yet
        dist.barrier()
    finally:
        gc.collect()
        dist.destroy_process_group()


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def own_device(kind: str, local_rank: int) -> torch.device:
    """The device of one of several processes on a machine, which is the current one from then on."""
    device = torch.device(kind)
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return device
