"""Train with workers that come and go, and lose nothing: neither steps nor what was not sent yet.

    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        examples/elastic.py FOLDER

on one machine or two. Kill a worker, or a whole machine: torchrun starts the script again with those that are left, it
goes on from the last checkpoint in FOLDER (on storage that all machines share), and the residuals of the old workers
are shared out among the new ones.
"""

from __future__ import annotations

import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve

NUM_STEPS = 300
SAVE_EVERY = 20
BATCH = 32
TIMEOUT = timedelta(minutes=1)
"""That a worker waits for one that is stopped or cut off; one that dies is noticed at once."""


class Training:
    """All that a run consists of."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.model = DistributedDataParallel(network)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.sieve = gradsieve.sparsify(self.model, gradsieve.union(density=0.05), optimizer=self.optimizer)
        self.steps_done = 0

    def step(self) -> None:
        inputs, labels = make_batch(seed=self.steps_done * dist.get_world_size() + dist.get_rank())
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.steps_done += 1

    def save(self, folder: Path) -> None:
        """Every worker its own residual; the rest is alike on all."""
        whole, rank = folder / f"step-{self.steps_done}", dist.get_rank()
        partial = whole.with_suffix(".partial")
        partial.mkdir(parents=True, exist_ok=True)
        write(partial / f"rank-{rank}.pt", self.sieve.state_dict())
        if rank == 0:
            write(
                partial / "shared.pt",
                {
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "steps_done": self.steps_done,
                    "world": dist.get_world_size(),
                },
            )
        dist.barrier()
        if rank == 0:
            # at once, so that whoever is killed now leaves a whole checkpoint
            partial.rename(whole)
            for old in set(folder.glob("step-*")) - {whole}:
                shutil.rmtree(old)
        dist.barrier()

    def load(self, folder: Path) -> None:
        """Go on from the last checkpoint, however many workers saved it."""
        whole = [path for path in folder.glob("step-*") if path.suffix != ".partial"]
        if not whole:
            return
        last = max(whole, key=lambda path: int(path.name.removeprefix("step-")))
        shared = read(last / "shared.pt")
        self.model.load_state_dict(shared["model"])
        self.optimizer.load_state_dict(shared["optimizer"])
        self.steps_done = shared["steps_done"]
        states = [read(last / f"rank-{rank}.pt") for rank in range(shared["world"])]
        if shared["world"] != dist.get_world_size():
            states = gradsieve.reshard(states, dist.get_world_size())
        self.sieve.load_state_dict(states[dist.get_rank()])


def write(path: Path, value: Any) -> None:
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def make_batch(seed: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """Points whose class is decided by a fixed random network."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    inputs = torch.randn(size, 64, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return inputs, teacher(inputs).argmax(1)


def accuracy(model: nn.Module) -> float:
    inputs, labels = make_batch(seed=2**40, size=2048)
    with torch.no_grad():
        right = model(inputs).argmax(1) == labels
    return float(right.float().mean())


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=TIMEOUT)
    training, is_first = Training(), dist.get_rank() == 0
    training.load(folder)
    # all have read it before anyone writes the next one
    dist.barrier()
    if is_first:
        print(f"from step {training.steps_done} on with {dist.get_world_size()} workers", flush=True)
    while training.steps_done < NUM_STEPS:
        training.step()
        if training.steps_done % SAVE_EVERY == 0 or training.steps_done == NUM_STEPS:
            training.save(folder)
    if is_first:
        print(f"accuracy after {training.steps_done} steps: {accuracy(training.model.module):.1%}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
