from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import gradsieve
import small_runs
from gradsieve.checks import UsageError
from gradsieve.runs import METRICS, RUN, RunError, read_run
from gradsieve.training import folder as folders
from gradsieve.training import provenance, runner
from gradsieve.training.config import TrainConfig, from_mapping, to_mapping
from gradsieve.training.runner import MAY_CHANGE, checked_plan, num_workers, resumed_config
from gradsieve.training.session import backend_for
from small_runs import WORLD, Trouble, config, plan, told

OTHERS: dict[str, Any] = {
    "task": "digits",
    "model": "dropout",
    "data": "/some/where",
    "method": "topk",
    "density": 0.2,
    "workers": 2,
    "virtual": 3,
    "device": None,
    "backend": "gloo",
    "timeout": 5.0,
    "seed": 1,
    "batch_size": 6,
    "epochs": 7,
    "steps": 9,
    "stop_at": 0.5,
    "lr": 0.5,
    "warmup_epochs": 2.0,
    "schedule": "step",
    "optimizer": "adamw",
    "momentum": 0.5,
    "weight_decay": 0.5,
    "clip": 1.0,
    "precision": "bfloat16",
    "scope": "bucket",
    "wire": "bfloat16",
    "eval_every": 2.0,
    "eval_examples": 10,
    "checkpoint_every": 3,
    "output": "/some/where",
    "tensorboard": True,
    "wandb": "project",
    "threads": 2,
    "interface": "lo",
    "uplink": "1:lo",
    "passes_alone": 3,
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps."""
    folder = tmp_path_factory.mktemp("done") / "run"
    small_runs.here(folder, steps=3)
    return folder


def test_the_changes_below_are_of_all_options(done: Path) -> None:
    stored = read_run(done).config
    assert list(OTHERS) == [field.name for field in fields(TrainConfig)] == list(stored)
    assert all(stored[name] != value for name, value in OTHERS.items())


@pytest.mark.parametrize("name", sorted(MAY_CHANGE - {"workers"}))
def test_a_resumed_run_may_take_some_options_anew(done: Path, name: str) -> None:
    stored = read_run(done).config
    found = resumed_config(done, {name: OTHERS[name]})
    assert found == from_mapping(TrainConfig, {**stored, name: OTHERS[name]}, "here")


@pytest.mark.parametrize("name", ["workers", *sorted(OTHERS.keys() - MAY_CHANGE)])
def test_a_resumed_run_keeps_the_others(done: Path, name: str) -> None:
    stored = read_run(done).config
    message = f"{done} was run with {name} {stored[name]!r}, and a resumed run cannot change it to {OTHERS[name]!r}; "
    with pytest.raises(UsageError, match=re.escape(message) + "it can change: checkpoint_every, data, device, e"):
        resumed_config(done, {name: OTHERS[name]})
    assert resumed_config(done, {name: stored[name]}) == resumed_config(done, {})


def test_the_same_method_may_be_written_in_another_way(done: Path) -> None:
    same = resumed_config(done, {})
    same_again: list[dict[str, Any]] = [
        {"method": "micro(density=0.1)"},
        {"method": "micro()", "density": 0.1},
        {"method": "micro(control=adaptive)"},
    ]
    for said in same_again:
        assert resumed_config(done, said).make_method() == same.make_method()
    with pytest.raises(UsageError, match="was run with method"):
        resumed_config(done, {"method": "micro(density=0.2)"})


def test_a_change_is_checked_like_any_option(done: Path) -> None:
    with pytest.raises(UsageError, match="steps must be at least 1, not 0"):
        resumed_config(done, {"steps": 0})
    with pytest.raises(UsageError, match="eval_every must be a number, not 'often'"):
        resumed_config(done, {"eval_every": "often"})
    with pytest.raises(UsageError, match="stepps"):
        resumed_config(done, {"stepps": 5})


def test_only_a_run_with_a_checkpoint_can_be_resumed(tmp_path: Path) -> None:
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(RunError, match="holds no run to resume: give the folder that gradsieve train wrote"):
            runner.resume(folder, {})
    small_runs.here(tmp_path / "run", steps=2, checkpoint_every=0)
    with pytest.raises(RunError, match="has no checkpoint to go on from: it ended before one was written"):
        runner.resume(tmp_path / "run", {})


def test_a_resumed_run_needs_its_task(tmp_path: Path) -> None:
    small_runs.here(tmp_path / "run", steps=2)
    header = json.loads((tmp_path / "run" / RUN).read_text())
    header["config"]["task"] = "small_runs:lost"
    (tmp_path / "run" / RUN).write_text(json.dumps(header))
    with pytest.raises(UsageError, match="the module small_runs has no 'lost'"):
        runner.resume(tmp_path / "run", {})


@pytest.mark.parametrize("device", ["tpu", "", "cpu:x", "gpu", "meta", "xpu", "cuda:-1", "cuda: 0"])
def test_a_device_that_is_none_is_refused(device: str) -> None:
    with pytest.raises(UsageError, match=f"^device must be cpu, cuda or cuda:N, not {device!r}$"):
        plan(device=device)


@pytest.mark.parametrize(("device", "number"), [("cuda", 0), ("cuda:0", 0), ("cuda:3", 3), ("cuda:1", 1)])
def test_a_device_that_is_not_here_is_refused(device: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    with pytest.raises(UsageError, match=f"^device {device} is not here: this machine has {number} GPUs$"):
        plan(device=device)


@pytest.mark.parametrize("backend", ["mpi", "", "GLOO", "gloo,nccl"])
def test_a_backend_that_is_none_is_refused(backend: str) -> None:
    with pytest.raises(UsageError, match=f"^backend must be gloo or nccl, not {backend!r}$"):
        plan(backend=backend)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "plane"}, "the task small has no model 'plane'; did you mean 'plain'"),
        ({"model": "small_runs:broken"}, "small_runs:broken raised RuntimeError: no model today"),
        ({"model": "small_runs:task"}, "small_runs:task is a Task"),
        ({"task": "small"}, "unknown task 'small'"),
        ({"task": "no_such_module:task"}, "there is no module 'no_such_module'"),
        ({"data": Path("/some/where")}, "small_runs:task is a Task as it stands and reads no file"),
        ({"task": "small_runs:troubled", "data": Path("/some/where")}, "/some/where"),
        ({"batch_size": 1000}, "2 workers with a batch of 1000 need 2000 training examples"),
    ],
)
def test_what_can_be_wrong_is_found_before_anything_is_made(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        small_runs.trained(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_method_that_does_not_fit_the_workers_is_found_too(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="num_broadcasters=3, but there are only 2 ranks"):
        small_runs.trained(tmp_path / "run", method="iwp(num_broadcasters=3)")


@pytest.mark.parametrize("model", ["plain", "dropout", "small_runs:plain"])
def test_the_config_of_a_run_is_the_plans_with_its_workers(model: str) -> None:
    asked = config(model=model, workers=3)
    found = checked_plan(asked, num_workers(asked))
    assert (found.world, found.config.workers, found.config.virtual) == (3, 3, None)
    found = plan(model=model)
    assert (found.world, found.config.workers, found.config.virtual) == (WORLD, None, WORLD)


@pytest.mark.parametrize(
    ("options", "gpus", "expected"),
    [
        ({}, 0, 1),
        ({}, 4, 4),
        ({"device": "cpu"}, 4, 1),
        ({"device": "cuda"}, 4, 4),
        ({"workers": 3}, 4, 3),
        ({"virtual": 6}, 4, 6),
        ({"workers": 2, "device": "cpu"}, 0, 2),
    ],
)
def test_without_a_word_there_is_one_worker_for_each_gpu(
    options: dict[str, Any], gpus: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert num_workers(TrainConfig(**options)) == expected


@pytest.mark.parametrize(
    ("options", "gpus", "local_world", "expected"),
    [
        ({"device": "cpu"}, 4, 2, "gloo"),
        ({"device": "cuda"}, 4, 4, "nccl"),
        ({"device": "cuda"}, 1, 4, "gloo"),
        ({"device": "cuda", "backend": "gloo"}, 4, 4, "gloo"),
    ],
)
def test_nccl_is_for_processes_with_a_gpu_of_their_own(
    options: dict[str, Any], gpus: int, local_world: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert backend_for(TrainConfig(**options), local_world) == expected


def test_a_folder_that_holds_a_run_is_not_overwritten(done: Path) -> None:
    before = (done / METRICS).read_bytes()
    with pytest.raises(UsageError, match=f"{done} holds a run already: go on with it by --resume {done}, or give"):
        small_runs.trained(done)
    assert (done / METRICS).read_bytes() == before


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below" / "it"):
        with pytest.raises(UsageError, match=f"^cannot write to the folder {folder}: (Not a directory|File exists)$"):
            small_runs.trained(folder)
    assert (tmp_path / "file").read_text() == ""


def test_a_folder_with_other_files_will_do(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    small_runs.here(tmp_path, steps=1)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_run_without_a_folder_gets_a_new_one_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20251115-101500")
    found = [folders.new_folder(plan()) for _ in range(3)]
    stem = "20251115-101500-small-plain-micro-0.1-v2-s0"
    assert found == [tmp_path.resolve() / "runs" / name for name in (stem, f"{stem}-2", f"{stem}-3")]
    assert all(folder.is_dir() for folder in found)


def test_the_folder_of_a_run_tells_what_it_is(done: Path) -> None:
    header = read_run(done).header
    assert header["format"] == 1
    assert (header["label"], header["density"], header["world"], header["task"]) == ("micro", 0.1, 2, "small")
    assert header["method"] == repr(gradsieve.micro(density=0.1))
    assert header["measure"] == {"name": "accuracy", "higher_is_better": True, "percent": True}
    assert header["model"] == {"name": "plain", "parameters": 308, "sparsified": 256, "dense": 52}
    assert (header["steps_per_epoch"], header["total_steps"]) == (10, 3)
    assert header["config"] == to_mapping(plan(output=done, steps=3).config)


def test_every_record_of_a_step_has_the_names_that_runs_promises(done: Path) -> None:
    run = read_run(done)
    names = re.findall(r"\b(?:train|sparsity|comm|time|eval)/\w+", gradsieve.runs.__doc__ or "")
    promised = {"step", "epoch", *names} - {"time/compute", "comm/sent_bytes", "comm/uplink_bytes"}
    assert {name for record in run.steps for name in record} == {n for n in promised if not n.startswith("eval/")}
    assert run.evaluations[-1].keys() == {"step", "epoch", "time/elapsed", "eval/loss", "eval/accuracy"}
    for number, record in enumerate(run.steps, start=1):
        assert (record["step"], record["epoch"]) == (number, number / 10)
        assert record["sparsity/support"] == 25
        assert record["sparsity/density_asked"] == record["sparsity/density_actual"] == 25 / 256
    assert run.summary["steps"] == 3


def test_a_model_is_judged_on_some_examples_if_asked(tmp_path: Path) -> None:
    some, every = (small_runs.here(tmp_path / str(n), steps=2, eval_examples=n) for n in (10, 1000))
    assert some.evaluations[-1]["eval/loss"] != every.evaluations[-1]["eval/loss"]
    assert (some.evaluations[-1]["eval/accuracy"] or 0) * 10 % 1 == pytest.approx(0)


def test_tensorboard_events_are_written_into_the_folder(tmp_path: Path) -> None:
    small_runs.here(tmp_path, steps=2, tensorboard=True)
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1


def test_provenance_tells_versions_machine_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/lib/gradsieve/__main__.py", "train", "--method", "micro(control=paper)"])
    found = provenance.provenance(torch.device("cpu"))
    assert json.loads(json.dumps(found)) == found
    assert found["command"] == "python -m gradsieve train --method 'micro(control=paper)'"
    assert (found["torch"], found["gradsieve"]) == (torch.__version__, gradsieve.__version__)
    assert found["device_name"] is None
    assert found["cores"] == os.cpu_count()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["started"])


def test_provenance_tells_the_commit_and_what_differs_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert provenance._commit(tmp_path) is None
    assert provenance._commit(tmp_path / "missing") is None
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    (tmp_path / "file").write_text("one")
    identity = ["-c", "user.name=x", "-c", "user.email=x@x"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "x"], ["tag", "v1"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    commit = provenance._commit(tmp_path)
    assert commit is not None
    assert re.fullmatch("[0-9a-f]{40}", commit)
    (tmp_path / "file").write_text("two")
    assert provenance._commit(tmp_path) == f"{commit}-dirty"
    monkeypatch.setenv("PATH", "")
    assert provenance._commit(tmp_path) is None


def environment(kind: str, rank: int, world: int) -> dict[str, str]:
    """Of a rank that a launcher started, at a port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    if kind == "mpirun":
        names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    return dict(zip(names, map(str, (rank, world, rank, world)), strict=True)) | meeting


def _joined(settings: dict[str, str], asked: TrainConfig | Path, pipe: Connection) -> None:
    """The life of a rank that a launcher started; a folder is resumed."""
    os.environ |= settings
    try:
        pipe.send(runner.resume(asked, {"steps": 4}) if isinstance(asked, Path) else runner.train(asked))
    except Exception as error:
        pipe.send(error)


def joined(kind: str, asked: TrainConfig | Path, world: int = 2) -> list[Any]:
    """What becomes of each rank."""
    small_runs.warm_up()
    context = multiprocessing.get_context("forkserver")
    shared = environment(kind, 0, world)
    ranks = []
    for rank in range(world):
        ours, theirs = context.Pipe()
        settings = environment(kind, rank, world) | {name: shared[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
        process = context.Process(target=_joined, args=(settings, asked, theirs), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        return [pipe.recv() for _, pipe in ranks]
    finally:
        for process, pipe in ranks:
            pipe.close()
            process.join(10)
            process.kill()
            process.join()


@pytest.mark.parametrize("kind", ["torchrun", "mpirun"])
def test_workers_that_a_launcher_started_find_one_another(kind: str, tmp_path: Path) -> None:
    asked = config(tmp_path / "joined", workers=None, steps=3)
    first, second = joined(kind, asked)
    assert first == second
    assert (first.status, first.folder) == ("finished", tmp_path / "joined")
    ours = small_runs.started(tmp_path / "launched", workers=2, steps=3)
    found = read_run(tmp_path / "joined")
    assert told(found) == told(ours)
    assert found.config["workers"] == found.world == 2
    if kind == "mpirun":
        again, _ = joined(kind, tmp_path / "joined")
        assert again.status == "finished"
        assert len(read_run(tmp_path / "joined").steps) == 4


def test_all_workers_of_a_launcher_learn_that_the_folder_will_not_do(done: Path) -> None:
    for error in joined("mpirun", config(done, workers=None)):
        assert isinstance(error, UsageError)
        assert "holds a run already" in str(error)


def test_a_run_of_a_launcher_that_fails_is_marked(tmp_path: Path) -> None:
    data = Trouble("raise", at=3).write(tmp_path / "trouble.json")
    asked = config(tmp_path / "run", task="small_runs:troubled", data=data, workers=None)
    assert all(isinstance(error, RuntimeError) for error in joined("mpirun", asked))
    run = read_run(tmp_path / "run")
    assert (run.status, run.error) == ("failed", "worker 0: RuntimeError: the model broke down")
    assert run.summary["steps"] == len(run.steps) == 2


@pytest.fixture
def under_mpirun(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for name, value in environment("mpirun", 0, 2).items():
        monkeypatch.setenv(name, value)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("under_mpirun")
def test_a_launcher_must_have_started_as_many_as_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^mpirun started 2 workers, but 3 are asked for: leave out --workers, or st"):
        runner.train(config(tmp_path / "run", workers=3))
    with pytest.raises(UsageError, match=r"^virtual workers share one process, but mpirun started 2: start it without"):
        runner.train(config(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
