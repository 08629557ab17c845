"""The command line for tests: called in this process or started as one of its own, and a task that can be guided."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import small_runs
from gradsieve.cli.app import run
from gradsieve.runs import METRICS, RESULT
from gradsieve.tasks import Task

TESTS = Path(__file__).parent
MODULE = [sys.executable, "-m", "gradsieve"]
SECONDS = 60.0
"""That a command may take."""
SMALL = ["--task", "small_runs:task", "--method", "micro", "--density", "0.1", "--threads", "1"]
"""A run that takes a second, with processes of one thread: tests share few cores."""
MARK = "GRADSIEVE_TEST"


class Done(NamedTuple):
    """What a command left: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        return self.out.splitlines()[-1]


def call(*arguments: object) -> Done:
    """Run the command line in this process; workers come from the server that other tests use, too."""
    small_runs.warm_up()
    out, err, path = io.StringIO(), io.StringIO(), list(sys.path)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            run([str(argument) for argument in arguments])
    except SystemExit as ended:
        return Done(int(ended.code or 0), out.getvalue(), err.getvalue())
    finally:
        sys.path[:] = path
    raise AssertionError("the command line returned")


def complaint(done: Done) -> str:
    """The one line of a command that was refused."""
    assert done.err.startswith("gradsieve: "), done
    assert done.err.count("\n") == 1, done
    assert done.err.endswith("\n")
    assert done.out == ""
    assert done.code == 2
    return done.err


@contextlib.contextmanager
def started(command: list[object], cwd: Path, mark: str = "") -> Iterator[subprocess.Popen[str]]:
    """A command in a process group of its own; none of it outlives the block."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200", MARK: mark}
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.communicate()


def finish(process: subprocess.Popen[str], seconds: float = SECONDS) -> Done:
    out, err = process.communicate(timeout=seconds)
    return Done(process.returncode, out, err)


def spawn(*command: object, cwd: Path, seconds: float = SECONDS) -> Done:
    """Run a command to its end."""
    with started(list(command), cwd) as process:
        return finish(process, seconds)


def until(condition: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.02)


def marked(mark: str) -> list[str]:
    """The processes alive with a mark in their environment, as their command lines."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            alive = wanted in (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has just ended, or is another user's
            continue
        if alive:
            found.append(" ".join(words))
    return found


def steps_logged(folder: Path) -> int:
    path = folder / METRICS
    return path.read_text().count('"train/loss"') if path.exists() else 0


def result_bytes(folder: Path) -> tuple[int, bytes]:
    """When the result was written, and what it says."""
    return (folder / RESULT).stat().st_mtime_ns, (folder / RESULT).read_bytes()


class Guided(nn.Module):
    """The small model. `slow` in its folder makes its steps take time, `fails` those of seed 1 fail."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.plain = small_runs.plain()
        self._pause = 0.05 if (folder / "slow").exists() else 0.0
        self._fails = (folder / "fails").exists() and torch.initial_seed() == 1

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            time.sleep(self._pause)
            if self._fails:
                raise RuntimeError("born under\na bad star")
        outputs: Tensor = self.plain(inputs)
        return outputs


def guided(data: Path | None) -> Task:
    """The small task with the guided model; `--data` is the folder that guides it."""
    assert data is not None
    return replace(small_runs.task, models={"guided": lambda: Guided(data)})
