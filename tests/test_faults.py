"""Ranks that die, hang or are stopped, at any time: the others say so, no process is left, and no work is lost.

`make test` runs a part of it, `make test-faults` all.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import gradsieve
import small_runs
from command_line import MODULE, SMALL, finish, marked, started, until
from fault_ranks import PATIENCE, ranks
from gradsieve import Method
from gradsieve.runs import Record, read_run
from gradsieve.training import runner
from gradsieve.training.checkpoint import CURRENT, checkpoint_of, load_checkpoint, save_checkpoint
from gradsieve.training.config import TrainConfig
from gradsieve.training.virtual import Virtual
from small_runs import Trouble, assert_same_state, leaves, workers_alive

TIMEOUT = 2.0
"""Of a process group in which someone is to be waited for in vain."""
SLACK = 15.0
"""Seconds that a loaded machine may add to a time-out."""


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    if multiprocessing.forkserver._forkserver._forkserver_pid is not None:  # type: ignore[attr-defined]
        until(lambda: workers_alive() == [], "all workers have ended")


# What a rank says that was waited for or lost.

METHODS: dict[str, tuple[Method, dict[str, Any]]] = {
    "union": (gradsieve.union(density=0.1), {}),
    "union by bucket": (gradsieve.union(density=0.1), {"scope": "bucket"}),
    "topk": (gradsieve.topk(density=0.1), {}),
    "iwp": (gradsieve.iwp(density=0.1), {}),
    "deft": (gradsieve.deft(density=0.1), {}),
    "gtopk by bucket": (gradsieve.gtopk(density=0.1), {"scope": "bucket"}),
    "oktopk": (gradsieve.oktopk(density=0.1), {}),
    "dense by bucket": (gradsieve.dense(), {"scope": "bucket"}),
    "rounded": (gradsieve.micro(density=0.1), {"wire": "bfloat16"}),
}
WITHOUT_HASTE = [
    name if name in ("union", "union by bucket") else pytest.param(name, marks=pytest.mark.faults) for name in METHODS
]
NAMED = re.compile(
    r"rank (\d) of 3 waited (\d+\.\d) s in vain for the (all-gather|all-reduce|all-to-all|broadcast) of the [a-z ]+"
    r"(?: from rank \d)? \([\d,]+ bytes, collective \d+ of step \d+\): another rank has died, hangs or is stopped\. "
)


@pytest.mark.parametrize("name", WITHOUT_HASTE)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_the_others_in_backward(tmp_path: Path, name: str, victim: int) -> None:
    """At once, whatever the time-out."""
    method, options = METHODS[name]
    with ranks(tmp_path, 3, method, **options) as crew:
        crew.wait_for_step(3)
        crew.hit(victim, signal.SIGKILL)
        for rank in {0, 1, 2} - {victim}:
            last = crew.last_words(rank, SLACK)
            assert (last.where, last.kind, last.cause) == ("backward", "ExchangeError", "RuntimeError")
            named = NAMED.match(last.text)
            assert named is not None, last.text
            assert int(named[1]) == rank


@pytest.mark.parametrize("name", WITHOUT_HASTE)
def test_a_rank_that_is_stopped_ends_the_others_within_the_time_out(tmp_path: Path, name: str) -> None:
    method, options = METHODS[name]
    with ranks(tmp_path, 3, method, TIMEOUT, **options) as crew:
        crew.wait_for_step(3)
        crew.hit(1, signal.SIGSTOP)
        for rank in (0, 2):
            last = crew.last_words(rank, TIMEOUT + SLACK)
            assert (last.where, last.kind, last.cause) == ("backward", "ExchangeError", "RuntimeError")
            named = NAMED.match(last.text)
            assert named is not None, last.text
            assert TIMEOUT - 0.5 < float(named[2]) <= last.seconds + 0.1
            assert "longer timeout" in last.text


# What a run of the command line does then.


@pytest.mark.faults
def test_a_worker_that_is_stopped_fails_the_run_in_one_line(tmp_path: Path) -> None:
    data = Trouble("stop", at=4, rank=1).write(tmp_path / "trouble.json")
    began = time.monotonic()
    ended = small_runs.trained(tmp_path / "run", task="small_runs:troubled", data=data, workers=2, timeout=TIMEOUT)
    assert time.monotonic() - began < TIMEOUT + PATIENCE
    assert ended.status == "failed"
    assert ended.error is not None
    assert re.match(
        r"worker 0: ExchangeError: rank 0 of 2 waited 2\.\d s in vain for the all-gather of the counts \(\d+ bytes, "
        r"collective 1 of step 3\): another rank has died, hangs or is stopped\.",
        ended.error,
    )
    assert ended.error.endswith(". No answer came from worker 1")
    run = read_run(tmp_path / "run")
    assert (run.status, run.error, len(run.steps)) == ("failed", ended.error, 3)
    details = (tmp_path / "run" / "error.txt").read_text()
    assert "The above exception was the direct cause" in details
    assert "backward" in details


def test_the_cause_goes_before_what_others_say_of_it(tmp_path: Path) -> None:
    data = Trouble("raise", at=4, rank=1).write(tmp_path / "trouble.json")
    ended = small_runs.trained(tmp_path / "run", task="small_runs:troubled", data=data, workers=3)
    assert ended.error == "worker 1: RuntimeError: the model broke down"


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_command_that_lost_a_worker_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    data = Trouble("kill" if number == signal.SIGKILL else "stop", at=4, rank=1).write(tmp_path / "trouble.json")
    asked = ["--task", "small_runs:troubled", "--data", data, "--workers", 2, "--timeout", TIMEOUT, "--output", "run"]
    with started([*MODULE, "train", *SMALL, *asked], tmp_path, mark=str(tmp_path)) as process:
        done = finish(process)
        assert done.code == 1, done
        (line,) = [line for line in done.out.splitlines() if line.startswith("failed: ")]
        told = "worker 1 died (signal SIGKILL)" if number == signal.SIGKILL else "No answer came from worker 1"
        assert told in line
        assert "Traceback" not in done.err
        until(lambda: marked(str(tmp_path)) == [], "all processes have ended")


# What a kill leaves of a checkpoint.

CPU = torch.device("cpu")
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate"}


def _engine(steps: int) -> Virtual:
    engine = Virtual(small_runs.plan(), CPU)
    for step in range(steps):
        engine.gradients(step)
    return engine


def _saved_until_killed(folder: Path, operation: int) -> None:
    """Save, and be killed before the so manieth operation on files."""
    torch.set_num_threads(1)
    engine, left = _engine(2), operation

    def due() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and (event != "open" or str(arguments[0]).startswith(str(folder))):
            due()

    flush = os.fsync

    def fsync(fd: Any) -> None:
        due()
        flush(fd)

    os.fsync = fsync
    sys.addaudithook(hear)
    save_checkpoint(folder, engine, {"version": 2})
    os._exit(0)


def _saving_without_end(folder: Path) -> None:
    torch.set_num_threads(1)
    engine = _engine(2)
    for version in itertools.count():
        save_checkpoint(folder, engine, {"version": version})


def in_a_process(target: Callable[..., None], *arguments: Any) -> Any:
    small_runs.warm_up()
    process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


@pytest.mark.faults
def test_a_kill_before_any_operation_on_files_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Really killed, one process for each operation."""
    first, second = _engine(1), _engine(2)
    versions = {1: dict(leaves(first.worker_states(), "")), 2: dict(leaves(second.worker_states(), ""))}
    found = []
    for operation in itertools.count():
        folder = tmp_path / str(operation)
        save_checkpoint(folder, first, {"version": 1})
        process = in_a_process(_saved_until_killed, folder, operation)
        process.join(PATIENCE)
        engine = _engine(0)
        version = load_checkpoint(folder, engine)["version"]
        assert_same_state(dict(leaves(engine.worker_states(), "")), versions[version])
        found.append(version)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    # the old one until the very rename, the new one ever after
    assert found == sorted(found)
    assert found.count(1) > 8
    assert found.count(2) > 2


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.faults) for seed in range(1, 20))])
def test_a_kill_at_any_instant_leaves_a_whole_checkpoint(tmp_path: Path, seed: int) -> None:
    process = in_a_process(_saving_without_end, tmp_path)
    until(lambda: checkpoint_of(tmp_path) is not None, "a checkpoint is written")
    time.sleep(random.Random(seed).uniform(0, 0.3))
    process.kill()
    process.join()
    engine = _engine(0)
    version = load_checkpoint(tmp_path, engine)["version"]
    assert version >= 0
    assert_same_state(dict(leaves(engine.worker_states(), "")), dict(leaves(_engine(2).worker_states(), "")))


# What a run that was killed comes to.


class Killer:
    """A sink that kills one of the workers once a step is done."""

    def __init__(self, step: int, rank: int) -> None:
        self._step = step
        self._rank = rank

    def start(self, header: Mapping[str, Any], steps_done: int) -> None: ...

    def write(self, record: Record) -> None:
        if record["step"] == self._step and "train/loss" in record:
            for process in multiprocessing.active_children():
                if process.name == f"worker {self._rank}":
                    process.kill()

    def close(self) -> None: ...


TARGET_ACCURACY = 0.85
"""Of four epochs over the digits; without a kill they come to more than 0.9."""
EPOCHS = 4


def digits(folder: Path, workers: int) -> dict[str, Any]:
    return {
        "task": "digits",
        "method": "union",
        "density": 0.05,
        "workers": workers,
        "batch_size": 32,
        "epochs": EPOCHS,
        "checkpoint_every": 5,
        "timeout": 20.0,
        "device": "cpu",
        "threads": 1,
        "output": str(folder),
    }


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_loses_a_random_worker_at_a_random_step_reaches_its_accuracy(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    workers = draw.choice([2, 3])
    folder, values = tmp_path / "run", digits(tmp_path / "run", workers)
    total = runner.checked_plan(TrainConfig(**values | {"output": folder}), workers).total_steps
    killer = Killer(step=draw.randrange(10, total - 4), rank=draw.randrange(workers))
    small_runs.warm_up()
    ended = runner.train_or_resume(values, "here", [killer])
    assert ended.status == "failed"
    assert "died (signal SIGKILL)" in str(ended.error)
    assert workers_alive() == []
    files = list((checkpoint_of(folder) or folder / CURRENT).glob("*.pt"))
    assert len(files) == workers + 1
    for file in files:
        assert torch.load(file, weights_only=True)
    # on with as many workers, or with fewer
    again = runner.train_or_resume(values | {"workers": draw.randint(1, workers)}, "here")
    assert again.status == "finished", again
    run = read_run(folder)
    assert run.summary["eval/accuracy"] > TARGET_ACCURACY
    assert run.header["resumed"][0]["from_step"] % values["checkpoint_every"] == 0
    assert [record["step"] for record in run.steps] == list(range(1, len(run.steps) + 1))
