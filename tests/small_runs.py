"""A tiny task for tests of training, models of it that get into trouble when a file says so, and runs of it."""

from __future__ import annotations

import functools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsieve.runs import Run, read_run
from gradsieve.tasks import Examples, Noise, Recipe, Task
from gradsieve.training import runner
from gradsieve.training.config import TrainConfig
from gradsieve.training.folder import empty_folder
from gradsieve.training.plan import Plan
from gradsieve.training.recorder import Sink
from gradsieve.training.session import Ended, Interruption, Order, Seat, carry_out

TRAIN, TEST, FEATURES, CLASSES = 240, 60, 12, 4
WORLD, BATCH, STEPS_PER_EPOCH = 2, 12, 10

ALIKE = (
    "step",
    "epoch",
    "train/loss",
    "train/lr",
    "sparsity/density_asked",
    "sparsity/density_actual",
    "sparsity/support",
    "sparsity/threshold",
    "sparsity/imbalance",
    "sparsity/error_norm",
    "comm/wire_bytes",
    "comm/link_bytes",
    "comm/messages",
    "eval/loss",
    "eval/accuracy",
)
"""What a record says that is no time."""


def _examples(count: int, seed: int) -> Examples:
    draw = torch.Generator().manual_seed(seed)
    targets = torch.arange(count) % CLASSES
    centres = torch.linspace(-2, 2, CLASSES * FEATURES).view(CLASSES, FEATURES).sin()
    return Examples(centres[targets] + torch.randn(count, FEATURES, generator=draw), targets)


def plain() -> nn.Module:
    """Matrices, biases, and buffers that each worker changes in its own way."""
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, CLASSES))


def convolved() -> nn.Module:
    """The features as an image of three channels."""
    return nn.Sequential(
        *(nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 8, 2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(72, CLASSES)),
    )


def frozen() -> nn.Module:
    """With parameters that are not trained."""
    model = plain()
    for parameter in model[0].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    return model


def broken() -> nn.Module:
    raise RuntimeError("no model today")


def noisy(batch: Examples, noise: Noise | None) -> Examples:
    """Augmentation: a little of the examples' places in the epoch goes into them."""
    if noise is None:
        return batch
    return Examples(batch.inputs + 0.1 * noise.uniform(batch.inputs.shape[1]), batch.targets)


task = Task(
    "small",
    _examples(TRAIN, seed=1),
    _examples(TEST, seed=2),
    {"plain": plain, "dropout": dropout, "broken": broken},
    prepare=noisy,
    recipe=Recipe(batch_size=BATCH, epochs=3, lr=0.2, warmup_epochs=0.5, schedule="cosine"),
)


@dataclass(frozen=True)
class Trouble:
    """What befalls the model of one worker when it is in training for the so manieth time."""

    kind: str = "none"
    """raise, kill, stop, sleep, exit, nan"""
    at: int = 0
    rank: int = 0

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(vars(self)))
        return path

    def strike(self, outputs: Tensor) -> Tensor:
        if self.kind == "raise":
            raise RuntimeError("the model\nbroke down")
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.kind == "exit":
            os._exit(3)
        if self.kind == "sleep":
            time.sleep(3600)
        return outputs * torch.nan


class Troubled(nn.Module):
    """The plain model, with trouble."""

    def __init__(self, troubles: Sequence[Trouble]) -> None:
        super().__init__()
        self.plain = plain()
        self._troubles = troubles
        self._passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._passes += self.training
        outputs: Tensor = self.plain(inputs)
        for trouble in self._troubles:
            if self.training and (trouble.at, trouble.rank) == (self._passes, rank):
                outputs = trouble.strike(outputs)
        return outputs


def troubled(data: Path | None) -> Task:
    """The task with a model whose troubles stand in the file."""
    found = [] if data is None else json.loads(data.read_text())
    troubles = [Trouble(**values) for values in (found if isinstance(found, list) else [found])]
    return replace(task, models={"troubled": lambda: Troubled(troubles)})


def config(output: Path | None = None, **options: Any) -> TrainConfig:
    """The config of a small run: virtual workers, unless `workers` are given."""
    small = {"task": "small_runs:task", "device": "cpu", "threads": 1, "method": "micro", "output": output}
    if options.get("method") != "dense":
        small["density"] = 0.1
    if "workers" not in options:
        small["virtual"] = WORLD
    return TrainConfig(**{**small, **options})


def plan(**options: Any) -> Plan:
    """The plan of a small run."""
    asked = config(**options)
    return runner.checked_plan(asked, runner.num_workers(asked))


def here(folder: Path, **options: Any) -> Run:
    """Carry out a run of virtual workers in this process."""
    asked = runner.checked_plan(config(folder, **options), options.get("virtual", WORLD)).config
    return _read(_carried_out(Order(asked, empty_folder(folder))))


def resumed_here(folder: Path, changes: Mapping[str, Any]) -> Run:
    """Go on with a run of virtual workers in this process."""
    return _read(_carried_out(Order(runner.resumed_config(folder, changes), folder, resume=True)))


def _carried_out(order: Order) -> Ended:
    return carry_out(order, Seat(0, 1, 0, 1, ""), [], Interruption())


def trained(folder: Path, *sinks: Sink, **options: Any) -> Ended:
    """Carry out a run in processes of its own."""
    warm_up()
    return runner.train(config(folder, **options), sinks)


def started(folder: Path, **options: Any) -> Run:
    """Carry out a run in processes of its own, to its end."""
    return _read(trained(folder, **options))


def resumed(folder: Path, changes: Mapping[str, Any]) -> Run:
    """Go on with a run in processes of its own, to its end."""
    warm_up()
    return _read(runner.resume(folder, changes))


@functools.cache
def warm_up() -> None:
    """Fork workers from a server that has imported all that they need, which saves each of them a second."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["gradsieve.training.session", "torch._dynamo"])
    multiprocessing.forkserver.ensure_running()


def workers_alive() -> list[int]:
    """The processes that were forked from the server, and have not ended."""
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return children_of(server)


def children_of(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, ppid = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        if int(ppid) == parent and state != "Z":
            found.append(int(folder.name))
    return found


def _read(ended: Ended) -> Run:
    assert ended.status == "finished", ended
    return read_run(ended.folder)


def told(run: Run) -> list[dict[str, Any]]:
    """The records, without their times."""
    return [{name: record[name] for name in ALIKE if name in record} for record in [*run.steps, *run.evaluations]]


def checkpoint(folder: Path) -> dict[str, Any]:
    """All that a run's checkpoint holds, by file and path in it; `elapsed` is a time."""
    files = sorted((folder / "checkpoint").glob("*.pt"))
    return {
        name: value for file in files for name, value in leaves(torch.load(file), file.stem) if "elapsed" not in name
    }


def leaves(value: Any, name: str) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [leaf for key, part in value.items() for leaf in leaves(part, f"{name}/{key}")]
    if isinstance(value, (list, tuple)):
        return [leaf for key, part in enumerate(value) for leaf in leaves(part, f"{name}/{key}")]
    return [(name, value)]


def assert_same_state(left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        if isinstance(value, Tensor):
            assert value.dtype == right[name].dtype, name
            assert torch.equal(value, right[name]), name
        else:
            assert value == right[name], name
