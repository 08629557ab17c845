"""The processes of a run: what they tell, how one that fails ends them all, and how a run is interrupted."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import small_runs
from gradsieve.runs import METRICS, RESULT, RUN, Record, read_records, read_run
from gradsieve.training import launch
from gradsieve.training.session import Ended, one_line
from small_runs import WORLD, Trouble, assert_same_state, checkpoint, children_of, told, workers_alive

KINDS: dict[str, dict[str, Any]] = {"virtual": {}, "processes": {"workers": WORLD}}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """After every test: no process, and the handlers of signals as they were."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert own_children() == []
    assert gone(workers_alive)


def own_children() -> list[Any]:
    """The processes that runs have started; there may be others, for other tests."""
    return [process for process in multiprocessing.active_children() if process.name.startswith("worker ")]


def gone(processes: Callable[[], list[int]], seconds: float = 5.0) -> bool:
    """Do they end, if not at once?"""
    deadline = time.monotonic() + seconds
    while processes():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Listener:
    """A sink that acts when a step is done."""

    def __init__(self, step: int = -1, act: Callable[[], object] = int) -> None:
        self.heard: list[Any] = []
        self._step = step
        self._act = act

    def start(self, header: Mapping[str, Any], steps_done: int) -> None:
        self.heard.append((header["label"], steps_done))

    def write(self, record: Record) -> None:
        self.heard.append(record)
        if record["step"] == self._step and "train/loss" in record:
            self._act()

    def close(self) -> None:
        self.heard.append("close")


def troubled(folder: Path, trouble: Trouble, *sinks: Any, **options: Any) -> Ended:
    data = trouble.write(folder.parent / "trouble.json")
    return small_runs.trained(folder, *sinks, task="small_runs:troubled", data=data, **options)


@each_kind
def test_a_run_tells_its_records_as_they_are_written(tmp_path: Path, kind: str) -> None:
    listener = Listener()
    ended = small_runs.trained(tmp_path, listener, steps=3, **KINDS[kind])
    assert ended == Ended(tmp_path, "finished")
    records = list(read_records(tmp_path / METRICS))
    assert listener.heard == [("micro", 0), *records, "close"]
    assert [record["step"] for record in records] == [1, 2, 3, 3]
    assert not (tmp_path / "error.txt").exists()


def assert_failed(ended: Ended, error: str, steps: int) -> None:
    """The run is marked, and what it did is kept."""
    assert ended == Ended(ended.folder, "failed", error)
    run = read_run(ended.folder)
    assert (run.status, run.error) == ("failed", error)
    assert [record["step"] for record in run.steps] == list(range(1, steps + 1))
    assert run.summary["steps"] == steps
    assert run.summary["train/loss"] == run.steps[-1]["train/loss"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_raises_ends_the_run_with_its_error(tmp_path: Path, rank: int) -> None:
    listener = Listener()
    ended = troubled(tmp_path / "run", Trouble("raise", at=4, rank=rank), listener, workers=2)
    assert_failed(ended, f"worker {rank}: RuntimeError: the model broke down", steps=3)
    text = (tmp_path / "run" / "error.txt").read_text()
    assert text.startswith("Traceback (most recent call last):")
    assert "in strike" in text
    assert text.endswith("RuntimeError: the model\nbroke down\n")
    assert listener.heard[-1] == "close"


def test_virtual_workers_that_raise_do_so_too(tmp_path: Path) -> None:
    ended = troubled(tmp_path / "run", Trouble("raise", at=8))
    assert_failed(ended, "worker 0: RuntimeError: the model broke down", steps=3)
    assert "in strike" in (tmp_path / "run" / "error.txt").read_text()


@pytest.mark.parametrize(("kind", "reason"), [("kill", "signal SIGKILL"), ("exit", "exit code 3")])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_dies_without_a_word_is_named(tmp_path: Path, kind: str, reason: str, rank: int) -> None:
    ended = troubled(tmp_path / "run", Trouble(kind, at=4, rank=rank), workers=2)
    assert_failed(ended, f"worker {rank} died ({reason})", steps=3)
    assert (tmp_path / "run" / "error.txt").read_text() == f"worker {rank} died ({reason})"


def test_virtual_workers_die_together(tmp_path: Path) -> None:
    assert_failed(troubled(tmp_path / "run", Trouble("kill", at=8)), "worker 0 died (signal SIGKILL)", steps=3)


def test_workers_that_do_not_end_by_themselves_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fails, one sleeps."""
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.5)
    data = tmp_path / "trouble.json"
    data.write_text(json.dumps([vars(Trouble("raise", 2, 0)), vars(Trouble("sleep", 2, 1))]))
    began = time.monotonic()
    ended = small_runs.trained(tmp_path / "run", task="small_runs:troubled", data=data, workers=2)
    assert_failed(ended, "worker 0: RuntimeError: the model broke down", steps=1)
    assert time.monotonic() - began < 10


def test_a_run_that_fails_before_its_first_step_is_marked(tmp_path: Path) -> None:
    ended = small_runs.trained(tmp_path, model="broken")
    assert ended == Ended(tmp_path, "failed", "worker 0: RuntimeError: no model today")
    result = json.loads((tmp_path / RESULT).read_text())
    assert result == {"status": "failed", "error": ended.error, "summary": {}}
    assert "no model today" in (tmp_path / "error.txt").read_text()
    assert not (tmp_path / RUN).exists()


def test_a_usage_error_of_a_worker_is_told_without_its_type() -> None:
    assert one_line(ValueError("give\n  fewer"), 3) == "worker 3: give fewer"
    assert one_line(KeyError("x"), 0) == "worker 0: KeyError: 'x'"
    assert one_line(AssertionError(), 1) == "worker 1: AssertionError: AssertionError"


@each_kind
def test_a_sink_that_raises_leaves_no_worker_behind(tmp_path: Path, kind: str) -> None:
    def broken() -> None:
        raise BrokenPipeError

    try:
        with pytest.raises(BrokenPipeError):
            small_runs.trained(tmp_path, Listener(2, broken), steps=100_000, **KINDS[kind])
        assert workers_alive() == []
    finally:
        for process in own_children():
            process.kill()
            process.join()


@each_kind
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_after_its_step_and_can_go_on(
    tmp_path: Path, kind: str, number: signal.Signals
) -> None:
    folder = tmp_path / "run"
    listener = Listener(3, lambda: signal.raise_signal(number))
    ended = small_runs.trained(folder, listener, steps=100_000, **KINDS[kind])
    assert ended == Ended(folder, "interrupted")
    run = read_run(folder)
    done = len(run.steps)
    assert (run.status, run.error, run.summary["steps"]) == ("interrupted", None, done)
    assert 3 <= done < 100_000
    assert checkpoint(folder)["shared/steps_done"] == done
    assert listener.heard[-1] == "close"
    again = small_runs.resumed(folder, {"steps": done + 2})
    whole = small_runs.started(tmp_path / "whole", steps=done + 2, **KINDS[kind])
    assert told(again) == told(whole)
    assert_same_state(checkpoint(folder), checkpoint(whole.folder))


def test_an_interrupted_run_without_checkpoints_writes_none(tmp_path: Path) -> None:
    listener = Listener(3, lambda: signal.raise_signal(signal.SIGINT))
    ended = small_runs.trained(tmp_path, listener, steps=100_000, checkpoint_every=0)
    assert ended.status == "interrupted"
    assert sorted(file.name for file in tmp_path.iterdir()) == [METRICS, RESULT, RUN]


def test_a_second_interruption_does_not_wait_for_the_step(tmp_path: Path) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    ended = troubled(tmp_path / "run", Trouble("sleep", at=7), Listener(3, twice))
    assert ended.status == "interrupted"
    run = read_run(tmp_path / "run")
    assert (run.status, len(run.steps)) == ("interrupted", 3)


@each_kind
def test_a_run_can_be_interrupted_before_its_workers_are_there(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = launch._Crew.start

    def interrupted_at_once(crew: launch._Crew, meeting: str) -> None:
        start(crew, meeting)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(launch, "GRACE_SECONDS", 1.0)
    monkeypatch.setattr(launch._Crew, "start", interrupted_at_once)
    ended = small_runs.trained(tmp_path, steps=200, **KINDS[kind])
    assert ended.status == "interrupted"
    assert json.loads((tmp_path / RESULT).read_text())["status"] == "interrupted"


SCRIPT = """
import sys
from pathlib import Path
import small_runs
from gradsieve.training import runner

if __name__ == "__main__":
    small_runs.warm_up()
    config = small_runs.config(Path(sys.argv[1]), workers=2, steps=100_000)
    print(runner.train(config).status)
"""


class Program:
    """A run in a session of its own, as from a terminal."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "run"
        (folder / "script.py").write_text(SCRIPT)
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, str(folder / "script.py"), str(self.run)],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for_steps(self) -> None:
        deadline = time.monotonic() + 60
        while len(list(read_records(self.run / METRICS))) < 5:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def members(self) -> list[int]:
        """The processes of the session."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(session) == self.process.pid and state != "Z":
                found.append(int(folder.name))
        return found


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    yield program
    if program.members():
        os.killpg(program.process.pid, signal.SIGKILL)
    program.process.communicate()


def test_ctrl_c_reaches_all_processes_at_once_and_the_run_can_go_on(program: Program) -> None:
    program.wait_for_steps()
    os.killpg(program.process.pid, signal.SIGINT)
    output, errors = program.process.communicate(timeout=60)
    assert (output, errors) == ("interrupted\n", "")
    assert gone(program.members)
    run = read_run(program.run)
    assert (run.status, run.summary["steps"]) == ("interrupted", len(run.steps))
    again = small_runs.resumed(program.run, {"steps": len(run.steps) + 1})
    assert [record["step"] for record in again.steps] == list(range(1, len(run.steps) + 2))
    assert again.steps[:-1] == run.steps


@pytest.mark.faults
def test_workers_whose_parent_is_killed_end_by_themselves(program: Program) -> None:
    program.wait_for_steps()
    assert len(children_of(program.process.pid)) > 0
    os.kill(program.process.pid, signal.SIGKILL)
    program.process.communicate(timeout=60)
    assert gone(program.members, seconds=30)
    assert read_run(program.run).status in ("unfinished", "failed")
