"""Ranks that are made to die or to hang: processes of their own, and what each of them has to tell at its end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
import small_runs

PATIENCE = 60.0
"""Seconds for what a loaded machine may be slow at: processes that start, a rank that is to take a step."""


class Job(NamedTuple):
    """What every rank does: train a toy for ever, or until it is hit."""

    world: int
    store: Path
    timeout: float
    method: gradsieve.Method
    options: dict[str, Any]


class Last(NamedTuple):
    """The last word of a rank."""

    where: str
    kind: str
    text: str
    cause: str
    seconds: float
    """Since its last step."""


class Ranks:
    """The processes of a job."""

    def __init__(self, job: Job) -> None:
        small_runs.warm_up()
        context = multiprocessing.get_context("forkserver")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(job.world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_live, args=(rank, job, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def wait_for_step(self, step: int) -> None:
        for pipe in self._pipes:
            while self._told(pipe) < step:
                pass

    def _told(self, pipe: Connection) -> int:
        assert pipe.poll(PATIENCE), "a rank takes no steps"
        told = pipe.recv()
        assert isinstance(told, int), told
        return told

    def hit(self, rank: int, number: signal.Signals) -> None:
        os.kill(self._processes[rank].pid, number)

    def last_words(self, rank: int, seconds: float) -> Last:
        """Of a rank that ends by itself within so many seconds."""
        deadline = time.monotonic() + seconds
        while self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
            told = self._pipes[rank].recv()
            if isinstance(told, Last):
                return told
        raise AssertionError(f"rank {rank} went on or hung for {seconds} s")

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


@contextmanager
def ranks(
    folder: Path, world: int, method: gradsieve.Method, timeout: float = PATIENCE, **options: Any
) -> Iterator[Ranks]:
    """Ranks that train; none of them outlives the block."""
    crew = Ranks(Job(world, folder / "store", timeout, method, options))
    try:
        yield crew
    finally:
        crew.end()


def _live(rank: int, job: Job, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.store}",
        rank=rank,
        world_size=job.world,
        timeout=timedelta(seconds=job.timeout),
    )
    pipe.send(_trained(job, pipe))
    # as after an error in a script: with the connections to the others goes the hope of those who still wait
    os._exit(1)


def _trained(job: Job, pipe: Connection) -> Last:
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    model = DistributedDataParallel(network, bucket_cap_mb=0.004)
    gradsieve.sparsify(model, job.method, **job.options)
    where, step = "", 0
    began = time.monotonic()
    try:
        while True:
            where = "forward"
            loss = model(torch.randn(4, 32)).square().mean()
            where = "backward"
            loss.backward()
            step, began = step + 1, time.monotonic()
            pipe.send(step)
    except RuntimeError as error:
        cause = type(error.__cause__).__name__
        return Last(where, type(error).__name__, str(error), cause, time.monotonic() - began)
