"""Runs that go on with another number of workers than they began with, by themselves or under torchrun."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import small_runs
from command_line import MARK, call, complaint, finish, started, steps_logged, until
from fleet import Fleet
from gradsieve import METHODS
from gradsieve.checks import UsageError
from gradsieve.runs import read_run
from gradsieve.training.checkpoint import load_checkpoint, save_checkpoint
from gradsieve.training.processes import Processes, Sieved
from gradsieve.training.session import _check_beginning
from gradsieve.training.virtual import Virtual
from small_runs import plan

CPU = torch.device("cpu")
EXAMPLE = Path(__file__).parent.parent / "examples" / "elastic.py"


# Without a launcher.


def engine_after(steps: int, **options: Any) -> Virtual:
    engine = Virtual(plan(**options), CPU)
    for step in range(steps):
        engine.gradients(step)
    return engine


def mean_of(engine: Virtual) -> torch.Tensor:
    return engine._simulation.residual.double().mean(0)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "dense"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (3, 2), (4, 2)])
def test_a_checkpoint_of_other_virtual_workers_owes_the_same(
    tmp_path: Path, method: str, before: int, after: int
) -> None:
    engine = engine_after(3, method=method, virtual=before)
    save_checkpoint(tmp_path, engine, {})
    other = engine_after(0, method=method, virtual=after)
    load_checkpoint(tmp_path, other)
    assert float(mean_of(engine).norm()) > 0
    torch.testing.assert_close(mean_of(other), mean_of(engine), rtol=0, atol=1e-7)
    other.gradients(3)


def _saved(folder: Path, steps: int) -> torch.Tensor:
    engine = Processes(plan(workers=torch.distributed.get_world_size()), CPU)
    for step in range(steps):
        engine.gradients(step)
    save_checkpoint(folder, engine, {})
    return _owed(engine)


def _loaded(folder: Path) -> torch.Tensor:
    engine = Processes(plan(workers=torch.distributed.get_world_size()), CPU)
    load_checkpoint(folder, engine)
    owed = _owed(engine)
    engine.gradients(3)
    return owed


def _owed(engine: Processes) -> torch.Tensor:
    assert isinstance(engine._average, Sieved)
    return torch.cat([residual.flatten() for residual in engine._average.sieve.residuals().values()]).double()


@pytest.mark.faults
def test_a_checkpoint_of_other_processes_owes_the_same(tmp_path: Path, fleet2: Fleet, fleet3: Fleet) -> None:
    before = torch.stack(fleet3.run(_saved, tmp_path, 3)).mean(0)
    after = torch.stack(fleet2.run(_loaded, tmp_path)).mean(0)
    assert float(before.norm()) > 0
    torch.testing.assert_close(after, before, rtol=0, atol=1e-7)


def _beginning(folder: Path) -> str:
    try:
        _check_beginning(folder, resume=torch.distributed.get_rank() == 1)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.faults
def test_workers_that_do_not_see_the_same_folder_are_refused(tmp_path: Path, fleet2: Fleet) -> None:
    for line in fleet2.run(_beginning, tmp_path):
        assert line.startswith(f"of 2 workers those of ranks [1] alone see a checkpoint in {tmp_path}")


def test_a_run_goes_on_at_the_same_place_in_its_epochs(tmp_path: Path) -> None:
    """Ten steps an epoch become twenty, and then ten again, while steps are counted on."""
    small_runs.here(tmp_path, steps=15, virtual=2)
    small_runs.resumed_here(tmp_path, {"virtual": 1, "steps": 25})
    run = small_runs.resumed_here(tmp_path, {"virtual": 2, "steps": None})
    assert run.status == "finished"
    assert [record["step"] for record in run.steps] == list(range(1, 36))
    epochs = run.series("epoch").tolist()
    assert epochs[:15] == [step / 10 for step in range(1, 16)]
    assert epochs[15:25] == [1.5 + step / 20 for step in range(1, 11)]
    assert epochs[25:] == pytest.approx([2 + step / 10 for step in range(1, 11)])
    changes = [(time["from_step"], time["from_world"], time["to_world"]) for time in run.header["resumed"]]
    assert changes == [(15, 2, 1), (25, 1, 2)]
    assert (run.world, run.config["virtual"], run.header["total_steps"]) == (2, 2, 35)
    assert run.config["batch_size"] == small_runs.BATCH
    rates = [small_runs.plan().learning_rate(place) for place in (*range(15), *range(20, 30))]
    assert run.series("train/lr")[[*range(15), *range(25, 35)]].tolist() == rates


def test_processes_go_on_with_more_and_with_fewer(tmp_path: Path) -> None:
    small_runs.started(tmp_path, steps=6, workers=2)
    for workers, steps in ((3, 10), (1, 16)):
        run = small_runs.resumed(tmp_path, {"workers": workers, "steps": steps})
        assert (run.world, run.config["workers"], run.steps[-1]["step"]) == (workers, workers, steps)
    losses = run.series("train/loss")
    assert losses[-4:].mean() < losses[:4].mean()
    assert [time["to_world"] for time in run.header["resumed"]] == [3, 1]


def test_processes_do_not_become_virtual_workers_nor_the_reverse(tmp_path: Path) -> None:
    small_runs.here(tmp_path, steps=2)
    line = complaint(call("train", "--resume", tmp_path, "--workers", 2))
    assert "was run with workers None, and a resumed run cannot change it to 2" in line


def test_the_same_command_begins_a_run_and_goes_on_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    asked = ["--task", "small_runs:task", "--method", "micro(control=paper)", "--density", 0.1, "--threads", 1]
    command = ["train", *asked, "--virtual", 2, "--output", folder, "--auto-resume"]
    # as if it had been killed before its first checkpoint
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    assert call(*command, "--steps", 4).code == 0
    assert call(*command, "--steps", 9).code == 0
    run = read_run(folder)
    assert [record["step"] for record in run.steps] == list(range(1, 10))
    assert [time["from_step"] for time in run.header["resumed"]] == [4]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--auto-resume"], "--auto-resume needs --output"),
        (["--auto-resume", "--resume", "run"], "--resume RUN and --auto-resume exclude one another"),
    ],
)
def test_what_cannot_be_resumed_by_itself_is_refused(arguments: list[str], told: str) -> None:
    assert told in complaint(call("train", *arguments))


# Under torchrun.


class Job:
    """An elastic job: agents of torchrun on this machine, each with one worker, and the processes of all of them."""

    def __init__(self, folder: Path, command: list[object]) -> None:
        self.folder = folder
        self._mark = str(folder)
        self._command = command
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._stack = contextlib.ExitStack()

    def agent(self) -> Any:
        """One more machine, as it were."""
        return self._stack.enter_context(started([*self._torchrun(), *self._command], self.folder, mark=self._mark))

    def _torchrun(self) -> list[object]:
        # impatient, so that an agent that is gone is soon noticed
        patience = "join_timeout=60,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", 1),
            *("--max-restarts", 5, "--monitor-interval", 0.1, "--rdzv-backend", "c10d", "--rdzv-id", "job"),
            *("--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-conf", patience, "--local-addr", "127.0.0.1"),
        ]

    def processes(self) -> dict[int, dict[bytes, bytes]]:
        """The environments of the job's processes, by their numbers."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "environ").read_bytes().split(b"\0")
            except OSError:  # it has just ended, or is another user's
                continue
            environment = dict(word.split(b"=", 1) for word in words if b"=" in word)
            if environment.get(MARK.encode()) == self._mark.encode():
                found[int(folder.name)] = environment
        return found

    def worker(self, rank: int) -> int:
        (number,) = [
            number for number, environment in self.processes().items() if environment.get(b"RANK") == str(rank).encode()
        ]
        return number

    def lose(self, agent: Any) -> None:
        """For good, with its worker."""
        mine = [number for number in self.processes() if self._parent(number) == agent.pid]
        for number in (agent.pid, *mine):
            os.kill(number, signal.SIGKILL)

    def _parent(self, number: int) -> int:
        try:
            return int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return 0

    def end(self) -> None:
        """Workers are in sessions of their own."""
        self._stack.close()
        for number in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


@contextlib.contextmanager
def job(folder: Path, *command: object) -> Iterator[Job]:
    made = Job(folder, list(command))
    with pytest.MonkeyPatch.context() as patch:
        # without it, in torch 2.13, an agent that comes later waits in vain for the first one to say where it is
        patch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        try:
            yield made
            until(lambda: made.processes() == {}, "all processes of the job have ended")
        finally:
            made.end()


SLOWLY = f"""
import sys, time
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import elastic

make_batch = elastic.make_batch

def slowly(*arguments, **options):
    time.sleep(0.03)
    return make_batch(*arguments, **options)

elastic.make_batch, elastic.SAVE_EVERY = slowly, 5
elastic.main()
"""


TARGET_ACCURACY = 0.65
"""Of the example, in ten classes; undisturbed it comes to 0.76."""


def last_step(folder: Path) -> int:
    return max((int(path.name[5:]) for path in folder.glob("step-*") if not path.suffix), default=0)


def accuracy_told(text: str) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith("accuracy after 300 steps")]
    return float(line.split()[-1].rstrip("%")) / 100


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("from step")]


@pytest.fixture
def slow_example(tmp_path: Path) -> Path:
    path = tmp_path / "slowly.py"
    path.write_text(SLOWLY)
    return path


def wait_for_more(elastic: Job, workers: int, steps: Callable[[], int], more: int) -> None:
    """Until so many workers have done so many steps more."""

    def at_work() -> bool:
        worlds = [environment.get(b"WORLD_SIZE") for environment in elastic.processes().values()]
        return worlds.count(str(workers).encode()) == workers

    until(at_work, f"{workers} workers are there")
    before = steps()
    until(lambda: steps() >= before + more, f"{workers} workers take steps")


@pytest.mark.faults
def test_the_example_loses_a_worker_and_goes_on_with_a_new_one(tmp_path: Path, slow_example: Path) -> None:
    folder = tmp_path / "checkpoints"
    with job(tmp_path, slow_example, folder) as elastic:
        agents = elastic.agent(), elastic.agent()
        wait_for_more(elastic, 2, lambda: last_step(folder), 20)
        os.kill(elastic.worker(1), signal.SIGKILL)
        done = [finish(agent, seconds=90) for agent in agents]
    assert [agent.code for agent in done] == [0, 0], done
    told = "\n".join(agent.out for agent in done)
    assert lines_of(told)[0].startswith("from step 0 on with ")
    assert lines_of(told)[-1].endswith("with 2 workers")
    assert int(lines_of(told)[-1].split()[2]) >= 20
    assert accuracy_told(told) > TARGET_ACCURACY


@pytest.mark.faults
def test_the_example_gains_a_machine_and_loses_it_for_good(tmp_path: Path, slow_example: Path) -> None:
    folder = tmp_path / "checkpoints"
    with job(tmp_path, slow_example, folder) as elastic:
        first = elastic.agent()
        wait_for_more(elastic, 1, lambda: last_step(folder), 20)
        second = elastic.agent()
        wait_for_more(elastic, 2, lambda: last_step(folder), 20)
        elastic.lose(second)
        done = finish(first, seconds=90)
        told = done.out + second.communicate()[0]
    assert done.code == 0, done
    assert sorted(line.split()[-2] for line in lines_of(told)) == ["1", "1", "2"]
    assert lines_of(done.out)[-1].endswith("with 1 workers")
    assert accuracy_told(done.out) > TARGET_ACCURACY


@pytest.mark.faults
def test_the_command_line_gains_a_machine_and_loses_it_for_good(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    folder = tmp_path / "run"
    asked = ["--task", "command_line:guided", "--data", tmp_path, "--method", "union", "--density", 0.1]
    more = ["--threads", 1, "--epochs", 12, "--checkpoint-every", 5, "--timeout", 20, "--output", folder]
    with job(tmp_path, "-m", "gradsieve", "train", *asked, *more, "--auto-resume") as elastic:
        first = elastic.agent()
        wait_for_more(elastic, 1, lambda: steps_logged(folder), 20)
        second = elastic.agent()
        wait_for_more(elastic, 2, lambda: steps_logged(folder), 20)
        elastic.lose(second)
        done = finish(first, seconds=90)
    assert done.code == 0, done
    run = read_run(folder)
    assert (run.status, run.world) == ("finished", 1)
    assert [record["step"] for record in run.steps] == list(range(1, len(run.steps) + 1))
    changes = [time for time in run.header["resumed"] if "to_world" in time]
    assert [(time["from_world"], time["to_world"]) for time in changes] == [(1, 2), (2, 1)]
    assert run.steps[-1]["epoch"] == 12
    assert run.summary["eval/accuracy"] > 0.65
