"""Train one small network with several methods over real processes and compare them.

    torchrun --nproc-per-node 4 examples/ddp.py

The data are made on the spot: a classification task with noisy labels, its training half shared out among the ranks.
Rank 0 prints one line per method: accuracy on held-out data, the density asked for and the actual one, and the bytes
that a rank hands over in a step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve import Method

METHODS = [
    gradsieve.dense(),
    gradsieve.topk(density=0.01),
    gradsieve.micro(density=0.01),
    gradsieve.exdyna(density=0.01),
    gradsieve.union(density=0.01),
]
NUM_CLASSES = 10
NUM_EPOCHS = 4
BATCH = 64
WARMUP_EPOCHS = 1
PEAK_RATE = 0.1


class Data(NamedTuple):
    inputs: Tensor
    labels: Tensor

    def shard(self, rank: int, world: int) -> Data:
        return Data(self.inputs[rank::world], self.labels[rank::world])


def make_data(num_samples: int, seed: int) -> Data:
    """Points whose class is decided by a fixed random network; one label in twenty is wrong."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, NUM_CLASSES))
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, 64, generator=generator)
    with torch.no_grad():
        labels = teacher(inputs).argmax(1)
    wrong = torch.rand(num_samples, generator=generator) < 0.05
    labels[wrong] = torch.randint(NUM_CLASSES, (int(wrong.sum()),), generator=generator)
    return Data(inputs, labels)


def make_network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, NUM_CLASSES))


def train(method: Method, data: Data) -> tuple[nn.Module, list[gradsieve.StepStats]]:
    model = DistributedDataParallel(make_network())
    optimizer = torch.optim.SGD(model.parameters(), lr=PEAK_RATE, momentum=0.9)
    sieve = gradsieve.sparsify(model, method, optimizer=optimizer)  # the one line
    num_batches = len(data.inputs) // BATCH
    records = []
    for step in range(NUM_EPOCHS * num_batches):
        # from 0: a residual remembers for long what a first step too large stirs up
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(1.0, step / (WARMUP_EPOCHS * num_batches))
        batch = slice(step % num_batches * BATCH, (step % num_batches + 1) * BATCH)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data.inputs[batch]), data.labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if sieve.stats is not None:
            records.append(sieve.stats)
    return model.module, records


def report(method: Method, network: nn.Module, records: list[gradsieve.StepStats], held_out: Data) -> str:
    with torch.no_grad():
        accuracy = (network(held_out.inputs).argmax(1) == held_out.labels).float().mean().item()
    density = sum(record.density for record in records) / len(records)
    wire_bytes = sum(record.wire_bytes for record in records) / len(records)
    return f"{method.name:8}{accuracy:10.1%}{method.density:10.1%}{density:10.2%}{wire_bytes:14,.0f}"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data, held_out = make_data(32_768, seed=2).shard(rank, world), make_data(4096, seed=3)
    if rank == 0:
        print(f"{world} workers\n{'method':8}{'accuracy':>10}{'asked':>10}{'actual':>10}{'bytes a step':>14}")
    for method in METHODS:
        network, records = train(method, data)
        if rank == 0:
            print(report(method, network, records, held_out), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
