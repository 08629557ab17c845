from __future__ import annotations

import importlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import yaml

import gradsieve
from command_line import MODULE, SMALL, Done, call, complaint, finish, marked, spawn, started, steps_logged, until
from gradsieve.runs import Run, read_run
from gradsieve.training import runner
from gradsieve.training.config import TrainConfig
from small_runs import told

OWN = """
import torch
from torch import nn
from gradsieve.tasks import Examples, Recipe, Task

def examples(count, seed):
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return Examples(inputs, inputs[:, :3].argmax(1))

def net():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

def number():
    return 3

def failing():
    raise KeyError("of\\nmine")

bare = Task("bare", examples(64, 1), examples(32, 2), {})
task = Task("own", examples(64, 1), examples(32, 2), {"net": net}, recipe=Recipe(8, epochs=2, warmup_epochs=1))
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


def trained(folder: Path, *arguments: object) -> Run:
    """A run that must finish, and says where it lies."""
    done = call("train", *SMALL, "--output", folder, *arguments)
    assert done.code == 0, done
    assert done.err == ""
    assert done.last == str(folder.resolve())
    return read_run(folder)


@pytest.fixture(scope="module")
def over_processes(shared: Path) -> Run:
    return trained(shared / "processes", "--workers", 2)


@pytest.fixture(scope="module")
def virtual(shared: Path) -> Run:
    return trained(shared / "virtual", "--virtual", 2, "--checkpoint-every", 0, "--steps", 4)


def write_cifar10(folder: Path) -> None:
    """Files of the right names, and nothing right in them."""
    folder.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(b"\x80\x04no pickle")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--task cifar10", "the task cifar10 needs --data: the folder cifar-10-batches-py"),
        ("--task cifar10 --data nowhere", "--data nowhere: there is no such file or folder"),
        ("--task cifar10 --data empty", "empty has no data_batch_1"),
        ("--task cifar10 --data file", "--data file is a file"),
        ("--task cifar10 --data cifar", "data_batch_1 is no whole CIFAR batch file"),
        ("--task words --data empty", "empty"),
        ("--data file", "the task digits comes with scikit-learn and reads no file"),
        ("--task nope", "unknown task 'nope'; valid are: digits, cifar10"),
        ("--task nope:task", "there is no module 'nope'"),
        ("--task raises:task", "importing raises raised RuntimeError: of its own"),
        ("--task leaves:task", "importing leaves raised SystemExit: 3"),
        ("--task broken:task", "importing broken raised SyntaxError"),
        ("--task mine:tusk", "the module mine has no 'tusk'"),
        ("--task mine:net", "mine:net raised TypeError"),
        ("--task mine:torch", "mine:torch is a module"),
        ("--task mine:task --data file", "mine:task is a Task as it stands and reads no file"),
        ("--task mine:bare", "bare"),
        ("--task mine:", "'mine:' is not of the form package.module:object"),
        ("--model nope", "the task digits has no model 'nope'; valid are: mlp, cnn"),
        ("--model mine:number", "mine:number returned a int, not a torch.nn.Module"),
        ("--model mine:failing", "mine:failing raised KeyError"),
        ("--model mine:bare", "mine:bare is a Task: a function without arguments that makes a model is needed"),
        ("--model nope:net", "there is no module 'nope'"),
        ("--method nope", "unknown method 'nope'"),
        ("--method micro(colour=red)", "micro() has no option 'colour'; valid are: density, control"),
        ("--method micro(control=none)", "control must be one of 'adaptive', 'paper', not 'none'"),
        ("--method micro(", "'micro(' is not a method"),
        ("--method micro(0.1)", "'micro(0.1)' is not a method"),
        ("--method micro(density=open('x'))", "is not a method: write a name (dense, topk"),
        ("--method micro,topk", "'micro,topk' is not a method"),
        ("--method=", "'' is not a method"),
        ("--method micro(density=0.1) --density 0.1", "the density is given twice"),
        ("--method dense --density 0.1", "dense sends everything and takes no density: leave --density out"),
        ("--density 0", "density must lie in (0, 1], not 0.0"),
        ("--density 1.5", "density must lie in (0, 1], not 1.5"),
        ("--density=-0.1", "density must lie in (0, 1], not -0.1"),
        ("--density nan", "density must lie in (0, 1], not nan"),
        ("--density text", "Invalid value for '--density'"),
        ("--output file/below", "cannot write to the folder"),
        ("--output file", "file: File exists"),
        ("--workers 2 --virtual 2", "workers and virtual exclude one another"),
        ("--workers 0", "workers must be at least 1, not 0"),
        ("--virtual 0", "virtual must be at least 1, not 0"),
        ("--resume empty", "empty holds no run to resume"),
        ("--resume nowhere", "nowhere holds no run to resume"),
        ("--device cuda", "device cuda is not here: this machine has 0 GPUs"),
        ("--device cuda:1", "device cuda:1 is not here"),
        ("--device tpu", "device must be cpu, cuda or cuda:N, not 'tpu'"),
        ("--device meta", "device must be cpu, cuda or cuda:N, not 'meta'"),
        ("--backend foo", "backend must be gloo or nccl, not 'foo'"),
        ("--batch-size 5000", "1 workers with a batch of 5000 need 5000 training examples a step"),
        ("--batch-size 500 --virtual 3", "3 workers with a batch of 500 need 1500 training examples a step"),
        ("--batch-size 0", "batch_size must be at least 1, not 0"),
        ("--steps 0", "steps must be at least 1, not 0"),
        ("--seed=-1", "seed must be at least 0, not -1"),
        ("--seed 18446744073709551616", "seed"),
        ("--lr 0", "lr must be above 0, not 0.0"),
        ("--lr inf", "lr must be above 0"),
        ("--momentum 1", "momentum must be at least 0 and below 1, not 1.0"),
        ("--clip 0", "clip must be above 0, not 0.0"),
        ("--schedule sometimes", "schedule must be 'step' or 'cosine' or 'constant', not 'sometimes'"),
        ("--optimizer adam", "optimizer must be 'sgd' or 'adamw', not 'adam'"),
        ("--precision float16", "precision must be 'float32' or 'bfloat16' or 'auto', not 'float16'"),
        ("--wire float16", "wire must be 'float32' or 'bfloat16' or 'float8', not 'float16'"),
        ("--eval-every nan", "eval_every must be"),
        ("--checkpoint-every=-1", "checkpoint_every must be at least 0, not -1"),
        ("--threads 0", "threads must be at least 1, not 0"),
    ],
)
def test_what_the_user_can_mend_ends_with_one_line(
    arguments: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for module, text in {"mine": OWN, "raises": "raise RuntimeError('of its\\nown')", "broken": "x = ="}.items():
        (tmp_path / f"{module}.py").write_text(text)
        monkeypatch.delitem(sys.modules, module, raising=False)
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    importlib.invalidate_caches()
    Path("file").write_text("something")
    Path("empty").mkdir()
    write_cifar10(tmp_path / "cifar")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert named in complaint(call("train", *arguments.split()))
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == before


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="there is NCCL here")
def test_a_backend_that_torch_lacks_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    assert "nccl" in complaint(call("train", *SMALL, "--backend", "nccl", "--output", tmp_path / "run"))


@pytest.mark.parametrize(("option", "package"), [(["--wandb", "project"], "wandb"), (["--tensorboard"], "tensorboard")])
def test_a_package_that_is_missing_is_named_before_anything_is_started(
    option: list[str], package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    line = complaint(call("train", *SMALL, "--virtual", 2, "--steps", 2, *option, "--output", tmp_path / "run"))
    assert f"pip install 'gradsieve[{package}]'" in line


def test_a_folder_that_holds_a_run_is_not_overwritten(virtual: Run) -> None:
    before = {path: path.read_bytes() for path in virtual.folder.iterdir()}
    line = complaint(call("train", *SMALL, "--output", virtual.folder))
    assert "holds a run already: go on with it by --resume" in line
    assert {path: path.read_bytes() for path in virtual.folder.iterdir()} == before


def test_a_run_without_checkpoint_cannot_be_resumed(virtual: Run) -> None:
    assert "has no checkpoint to go on from" in complaint(call("train", "--resume", virtual.folder))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--method topk", "was run with method 'micro', and a resumed run cannot change it to 'topk'"),
        ("--density 0.2", "was run with density 0.1"),
        ("--seed 1", "was run with seed 0"),
        ("--lr 3", "was run with lr"),
        ("--virtual 2", "was run with"),
        ("--output other", "was run with output"),
        ("--steps 0", "steps must be at least 1"),
        ("--config absent.toml", "absent.toml cannot be read"),
    ],
)
def test_a_resumed_run_stays_what_it_was(arguments: str, told: str, over_processes: Run) -> None:
    assert told in complaint(call("train", "--resume", over_processes.folder, *arguments.split()))
    assert read_run(over_processes.folder) == over_processes


def test_a_run_is_resumed_with_what_may_change_and_what_is_said_again(over_processes: Run, tmp_path: Path) -> None:
    shutil.copytree(over_processes.folder, tmp_path / "copy")
    done = call("train", "--resume", "copy", "--steps", 40, "--method", "micro", "--density", 0.1)
    assert done.code == 0, done
    assert done.last == str(tmp_path / "copy")
    longer, again = read_run(tmp_path / "copy"), trained(tmp_path / "whole", "--workers", 2, "--steps", 40)
    assert told(longer)[:30] == told(over_processes)[:30]
    assert [record["step"] for record in longer.steps] == list(range(1, 41))
    assert longer.header["resumed"][0]["from_step"] == 30
    assert longer.header["provenance"] == over_processes.header["provenance"]
    # the evaluation at step 30 was the last one of the shorter run, and is one between for the longer
    assert told(longer) == told(again)


def test_the_summary_tells_what_the_run_came_to(over_processes: Run, tmp_path: Path) -> None:
    shutil.copytree(over_processes.folder, tmp_path / "copy")
    done = call("train", "--resume", "copy")
    accuracy, bytes_a_step = over_processes.summary["eval/accuracy"], over_processes.summary["comm/wire_bytes"]
    assert f"{gradsieve.micro(density=0.1)!r}, 2 workers, 30 steps" in done.out
    assert f"accuracy: {100 * accuracy:.2f} %" in done.out
    assert f"of {over_processes.summary['sparsity/density_asked']:.5f} asked; {bytes_a_step:,.0f} bytes" in done.out
    assert "milliseconds a step: forward " in done.out


def test_evaluations_are_told_as_they_come(tmp_path: Path) -> None:
    done = call("train", *SMALL, "--virtual", 2, "--output", tmp_path / "run")
    run = read_run(tmp_path / "run")
    expected = []
    for record in run.evaluations:
        place = f"step {record['step']}  epoch {record['epoch']:.2f}"
        expected.append(f"micro  {place}  accuracy {100 * float(record['eval/accuracy'] or 0):.2f} %")
    assert len(expected) == 3
    assert done.out.splitlines()[:3] == expected


def test_a_terminal_sees_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    done = call("train", *SMALL, "--virtual", 2, "--steps", 12, "--output", tmp_path / "run")
    assert done.code == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.out)
    last = f"accuracy {100 * read_run(tmp_path / 'run').summary['eval/accuracy']:.2f} %"
    assert re.search(rf"micro ━+ 12/12 .* loss .* density .* {last}", shown)


def test_the_folder_holds_the_resolved_config_and_where_it_comes_from(over_processes: Run) -> None:
    header, config = over_processes.header, over_processes.config
    assert list(config) == [field.name for field in fields(TrainConfig)]
    asked = {"task": "small_runs:task", "method": "micro", "density": 0.1, "workers": 2, "seed": 0, "threads": 1}
    recipe = {"model": "plain", "batch_size": 12, "epochs": 3, "warmup_epochs": 0.5, "schedule": "cosine"}
    filled = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 1e-4, "lr": 0.1, "checkpoint_every": 10}
    chosen = {**asked, **recipe, **filled, "virtual": None, "output": str(over_processes.folder)}
    assert {name: config[name] for name in chosen} == chosen
    assert config["device"] in ("cpu", "cuda")
    assert (header["world"], header["task"], header["label"]) == (2, "small", "micro")
    provenance = header["provenance"]
    assert provenance["gradsieve"] == gradsieve.__version__
    assert provenance["torch"] == torch.__version__
    assert provenance["numpy"] == numpy.__version__
    assert provenance["python"] == platform.python_version()
    assert {"started", "command", "host", "cpu", "cores", "platform"} <= provenance.keys()
    git = ["git", "-C", str(Path(gradsieve.__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    assert str(provenance["package_commit"] or "").startswith(commit)


def as_toml(config: dict[str, Any]) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in config.items() if value is not None)


@pytest.mark.parametrize(("suffix", "dump"), [("toml", as_toml), ("yaml", yaml.safe_dump)])
def test_a_run_made_again_from_its_stored_config_is_the_same(
    suffix: str, dump: Callable[[dict[str, Any]], str], over_processes: Run, tmp_path: Path
) -> None:
    Path(f"again.{suffix}").write_text(dump(dict(over_processes.config)))
    done = call("train", "--config", f"again.{suffix}", "--output", tmp_path / "again")
    assert done.code == 0, done
    assert told(read_run(tmp_path / "again")) == told(over_processes)


def test_another_seed_is_another_run(over_processes: Run, tmp_path: Path) -> None:
    other = trained(tmp_path / "other", "--workers", 2, "--seed", 1)
    assert [record["train/loss"] for record in other.steps] != [record["train/loss"] for record in over_processes.steps]


def test_an_own_task_lies_beside_its_user(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(OWN)
    done = call("train", "--task", "beside:task", "--model", "beside:net", "--virtual", 2, "--threads", 1)
    assert done.code == 0, done
    run = read_run(Path(done.last))
    assert run.folder.parent == tmp_path / "runs"
    assert run.config["model"] == "beside:net"
    assert len(run.steps) == 8


def test_digits_need_nothing(tmp_path: Path) -> None:
    arguments = ["--model", "mlp", "--steps", 5, "--batch-size", 8, "--virtual", 2, "--threads", 1]
    done = call("train", *arguments, "--output", tmp_path / "run")
    assert (done.code, done.err, done.last) == (0, "", str(tmp_path / "run"))
    run = read_run(tmp_path / "run")
    assert [record["step"] for record in run.steps] == [1, 2, 3, 4, 5]
    assert (run.method, run.density, run.measure) == ("union", 0.01, "accuracy")


def test_a_run_that_fails_says_why_and_where(tmp_path: Path) -> None:
    (tmp_path / "fails").touch()
    arguments = ["--task", "command_line:guided", "--data", tmp_path, "--seed", 1, "--workers", 2]
    done = call("train", *arguments, "--output", tmp_path / "run")
    assert (done.code, done.err) == (1, "")
    failed, last = done.out.splitlines()[-2:]
    assert failed.startswith("failed: worker ")
    assert "RuntimeError: born under a bad star (more in " in failed
    assert last == str(tmp_path / "run")
    assert read_run(tmp_path / "run").status == "failed"
    assert "Traceback" in (tmp_path / "run" / "error.txt").read_text()


def test_tensorboard_gets_every_record_under_its_flat_name(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = trained(tmp_path / "run", "--virtual", 2, "--tensorboard")
    found = accumulators.EventAccumulator(str(tmp_path / "run")).Reload()
    records = [*run.steps, *run.evaluations]
    names = {name for record in records for name, value in record.items() if value is not None and name != "step"}
    assert set(found.Tags()["scalars"]) == names
    assert {"train/loss", "sparsity/density_actual", "comm/wire_bytes", "eval/accuracy"} <= names
    for name in ("train/loss", "sparsity/support", "eval/accuracy"):
        logged = [(record["step"], record[name]) for record in records if name in record]
        events = [(event.step, event.value) for event in found.Scalars(name)]
        assert [step for step, _ in events] == [step for step, _ in logged]
        assert [value for _, value in events] == pytest.approx([value for _, value in logged])


WANDB = """
import json
from pathlib import Path

class Config:
    def __init__(self, path):
        self.path = path

    def update(self, values):
        note(self.path, ["config", values])

class Run:
    def __init__(self, project, name, dir):
        self.path = Path(dir) / "wandb.jsonl"
        self.config = Config(self.path)
        note(self.path, ["init", [project, name]])

    def log(self, values, step):
        note(self.path, ["log", [values, step]])

    def finish(self):
        note(self.path, ["finish", None])

def note(path, message):
    with path.open("a") as file:
        file.write(json.dumps(message) + chr(10))

def init(project, name, dir):
    return Run(project, name, dir)
"""


def test_weights_and_biases_gets_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    importlib.invalidate_caches()
    run = trained(tmp_path / "named", "--virtual", 2, "--wandb", "my-project")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    notes = [json.loads(line) for line in (tmp_path / "named" / "wandb.jsonl").read_text().splitlines()]
    assert notes[0] == ["init", ["my-project", "named"]]
    kind, header = notes[1]
    assert kind == "config"
    assert header["config"] == run.config
    logged = {"train/loss": run.steps, "eval/loss": run.evaluations}
    for name, records in logged.items():
        expected = [[{k: v for k, v in record.items() if v is not None}, record["step"]] for record in records]
        assert [content for kind, content in notes if kind == "log" and name in content[0]] == expected
    assert notes[-1] == ["finish", None]


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "-m", "gradsieve"]
MPIRUN = ["mpirun", "--oversubscribe", "-np", 2, *MODULE]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def has_open_mpi() -> bool:
    if shutil.which("mpirun") is None:
        return False
    asked = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=30, check=False)
    return "Open MPI" in asked.stdout


needs_mpi = pytest.mark.skipif(not has_open_mpi(), reason="there is no mpirun of Open MPI here")


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in AS_ROOT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize(
    "launcher",
    [pytest.param(TORCHRUN, id="torchrun"), pytest.param(MPIRUN, id="mpirun", marks=needs_mpi)],
)
@pytest.mark.slow
def test_a_launchers_workers_do_the_same_bit_for_bit(
    launcher: list[object], over_processes: Run, tmp_path: Path
) -> None:
    done = spawn(*launcher, "train", *SMALL, "--output", "run", cwd=tmp_path)
    assert done.code == 0, done
    assert "Traceback" not in done.err
    assert done.out.count("2 workers, 30 steps") == 1
    assert done.out.count(str(tmp_path / "run")) == 1
    run = read_run(tmp_path / "run")
    assert run.status == "finished"
    assert told(run) == told(over_processes)
    assert {**run.config, "output": None} == {**over_processes.config, "output": None}


def complaints(done: Done) -> list[str]:
    return [line for line in done.err.splitlines() if line.startswith("gradsieve: ")]


@pytest.mark.slow
@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("train --density nan", "density must lie in (0, 1], not nan"),
        ("train --workers 3", "2 workers, but 3 are asked for"),
        ("train --config virtual.toml", "virtual workers share one process"),
        ("train --output file/below", "cannot write to the folder"),
        ("train --task late:task --model nope", "has no model 'nope'"),
        ("compare", "compare starts its workers itself"),
    ],
)
@pytest.mark.parametrize(
    "launcher", [pytest.param(TORCHRUN, id="torchrun"), pytest.param(MPIRUN, id="mpirun", marks=needs_mpi)]
)
def test_a_launchers_workers_complain_once(launcher: list[object], arguments: str, told: str, tmp_path: Path) -> None:
    # the first worker is late, and its line must not be lost when the launcher sees the other one fail
    late = (
        "import os, time\nif '0' in map(os.environ.get, ('LOCAL_RANK', 'OMPI_COMM_WORLD_LOCAL_RANK')): time.sleep(1)\n"
    )
    (tmp_path / "late.py").write_text(late + "from small_runs import task")
    (tmp_path / "file").touch()
    (tmp_path / "virtual.toml").write_text("virtual = 2")  # torchrun would take --virtual for an option of its own
    done = spawn(*launcher, *arguments.split(), cwd=tmp_path)
    assert done.code != 0
    (line,) = complaints(done)
    assert told in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("train --workers 3", "torchrun started 2 workers, but 3 are asked for"),
        ("train --density nan", "density must lie in (0, 1]"),
        ("train --virtual 2", "virtual workers share one process, but torchrun started 2"),
        ("train --stepz 2", "No such option"),
        ("compare", "compare starts its workers itself and is one process, but torchrun started 2"),
        ("demo", "demo starts its workers itself and is one process, but torchrun started 2"),
    ],
)
def test_the_first_of_a_launchers_workers_complains_for_all(
    rank: int, lines: int, arguments: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # noqa: ARG005 - those who are silent may wait
    done = call(*arguments.split())
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == lines
    assert told in done.err or rank > 0


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"RANK": "first", "WORLD_SIZE": "2"}, "the environment variable RANK is 'first', not a whole number"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "MASTER_ADDR"),
    ],
)
@pytest.mark.parametrize("arguments", ["train", "train --density nan", "compare --virtual 2"])
def test_a_launcher_that_tells_too_little_is_named(
    environment: dict[str, str], told: str, arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    line = complaint(call(*arguments.split()))
    assert told in line or "density" in line


def interrupt_group(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)


def interrupt_parent(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGINT)


def terminate_parent(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGTERM)


STEPS = 30
GUIDED = ["--task", "command_line:guided", *SMALL[2:], "--workers", 2, "--steps", STEPS]


@pytest.fixture(scope="module")
def uninterrupted(shared: Path) -> Run:
    done = call("train", *GUIDED, "--data", shared, "--output", shared / "uninterrupted")
    assert done.code == 0, done
    return read_run(shared / "uninterrupted")


def gone(mark: str) -> None:
    until(lambda: not marked(mark), "all processes end", seconds=30)


@pytest.mark.parametrize(
    "interrupt",
    [interrupt_group, *(pytest.param(other, marks=pytest.mark.slow) for other in (interrupt_parent, terminate_parent))],
)
def test_an_interrupted_run_goes_on_to_the_same_end(
    interrupt: Callable[[subprocess.Popen[str]], None], uninterrupted: Run, tmp_path: Path
) -> None:
    (tmp_path / "slow").touch()
    command = [*MODULE, "train", *GUIDED, "--data", tmp_path, "--checkpoint-every", 7, "--output", "run"]
    with started(command, tmp_path, mark=str(tmp_path)) as process:
        until(lambda: steps_logged(tmp_path / "run") >= 9, "steps are done")
        assert len(marked(str(tmp_path))) >= 3
        interrupt(process)
        done = finish(process)
        gone(str(tmp_path))
    assert (done.code, done.err) == (130, "")
    assert f"interrupted: go on with gradsieve train --resume {tmp_path / 'run'}" in done.out
    assert done.last == str(tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert (run.status, run.error) == ("interrupted", None)
    assert 9 <= len(run.steps) < STEPS
    assert run.summary["steps"] == len(run.steps)
    assert run.provenance["command"] == " ".join(["python -m gradsieve", *map(str, command[3:])])
    assert (tmp_path / "run" / "checkpoint").is_dir()
    (tmp_path / "slow").unlink()
    again = call("train", "--resume", tmp_path / "run")
    assert again.code == 0, again
    resumed = read_run(tmp_path / "run")
    assert resumed.header["resumed"][0]["from_step"] == len(run.steps)
    assert resumed.status == "finished"
    assert told(resumed) == told(uninterrupted)


def test_an_interrupt_during_the_checks_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:  # noqa: ARG001 - stands in for `make_plan`
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "make_plan", interrupted)
    assert call("train", *SMALL, "--output", tmp_path / "run") == (130, "", "")


@pytest.mark.faults
@pytest.mark.parametrize("interrupt", [interrupt_group, interrupt_parent])
def test_an_interrupt_while_the_workers_start_leaves_nothing_behind(
    interrupt: Callable[[subprocess.Popen[str]], None], tmp_path: Path
) -> None:
    with started([*MODULE, "train", *SMALL, "--workers", 2, "--output", "run"], tmp_path, str(tmp_path)) as process:
        until(lambda: any("forkserver" in line for line in marked(str(tmp_path))), "the workers are being started")
        time.sleep(0.4)  # torch is being imported, which takes longer
        interrupt(process)
        done = finish(process)
        gone(str(tmp_path))
    assert done.code == 130
    assert "Traceback" not in done.err


@pytest.mark.slow
def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    command = [*MODULE, "train", *GUIDED, "--data", tmp_path, "--checkpoint-every", 3, "--output", "run"]
    with started(command, tmp_path, mark=str(tmp_path)) as process:
        until(lambda: steps_logged(tmp_path / "run") >= 4, "steps are done")
        # the workers are stopped, so that the first one has no effect
        workers = [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if _is_worker(folder, str(tmp_path))]
        assert len(workers) == 2
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        until(lambda: all(_is_stopped(worker) for worker in workers), "the workers stop")
        interrupt_parent(process)
        until(lambda: all(_has_pending_interrupt(worker) for worker in workers), "the first interrupt is passed on")
        interrupt_parent(process)
        done = finish(process)
        gone(str(tmp_path))
    assert done.code == 130
    assert read_run(tmp_path / "run").status == "interrupted"
    assert call("train", "--resume", tmp_path / "run").code == 0


def _is_worker(folder: Path, mark: str) -> bool:
    """Was it forked from the server?"""
    try:
        words = (folder / "cmdline").read_bytes()
        parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        above = Path("/proc", parent, "cmdline").read_bytes()
        return b"forkserver" in words and b"forkserver" in above and mark.encode() in (folder / "environ").read_bytes()
    except OSError:
        return False


def _is_stopped(pid: int) -> bool:
    """With all its threads."""
    stats = [path.read_text() for path in Path("/proc", str(pid), "task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def _has_pending_interrupt(pid: int) -> bool:
    lines = Path("/proc", str(pid), "status").read_text().splitlines()
    pending = next(int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd"))
    return bool(pending >> (signal.SIGINT - 1) & 1)


@pytest.mark.slow
def test_workers_do_not_outlive_a_parent_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    with started(
        [*MODULE, "train", *GUIDED, "--data", tmp_path, "--output", "run"], tmp_path, str(tmp_path)
    ) as process:
        until(lambda: steps_logged(tmp_path / "run") >= 2, "steps are done")
        process.kill()
        gone(str(tmp_path))
    assert read_run(tmp_path / "run").status in ("unfinished", "failed")  # by who noticed first
