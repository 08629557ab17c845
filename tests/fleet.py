"""Real processes for tests: started once, used by many tests, each test with a process group of its own."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT = 60.0
"""Seconds that a task may take; a fleet that is late is killed, and the test fails."""


class Fleet:
    """`world` processes that run the same function, each as one rank."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._ranks: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def run(self, task: Callable[..., Any], *arguments: Any, backend: str = "gloo") -> list[Any]:
        """Call `task(*arguments)` on every rank, inside a fresh process group, and return the results by rank.

        `task` must be importable (a function at the top of a test module). What it raises is raised here.
        """
        self._start()
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            for _, pipe in self._ranks:
                pipe.send((task, arguments, backend, store))
            return self._answers(time.monotonic() + TIMEOUT)

    def stop(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks = []

    def _start(self) -> None:
        if self._ranks and all(process.is_alive() for process, _ in self._ranks):
            return
        self.stop()
        context = multiprocessing.get_context("spawn")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, theirs), daemon=True)
            process.start()
            self._ranks.append((process, ours))

    def _answers(self, deadline: float) -> list[Any]:
        answers: list[tuple[bool, Any]] = []
        for rank, (_, pipe) in enumerate(self._ranks):
            # an error on one rank may leave the others waiting for it: give them a second, not the whole time
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                # one that waits says little: what the others met with says why
                answers += [(False, "no answer"), *(self._said(later) for later in range(rank + 1, len(self._ranks)))]
                self.stop()
                failures = [f"rank {r}: {text}" for r, (ok, text) in enumerate(answers) if not ok]
                raise TimeoutError("\n".join([f"rank {rank} did not answer in time", *failures]))
            answers.append(pipe.recv())
            if not answers[-1][0]:
                deadline = min(deadline, time.monotonic() + 5)
        failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [value for _, value in answers]

    def _said(self, rank: int) -> tuple[bool, Any]:
        """What a rank has answered by now."""
        _, pipe = self._ranks[rank]
        answer: tuple[bool, Any] = pipe.recv() if pipe.poll() else (False, "no answer")
        return answer


def _serve(rank: int, world: int, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            task, arguments, backend, store = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT)
            )
            torch.manual_seed(0)
            answer: tuple[bool, Any] = (True, task(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(answer)
