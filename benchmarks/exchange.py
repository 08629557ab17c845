"""Time and bytes of one training step's gradient exchange, by method, over the running process group.

    torchrun --nproc-per-node 2 benchmarks/exchange.py [--parameters 11173962] [--density 0.01] [--steps 12]

Every method runs in the same processes on the same gradients, so the rows compare. Rank 0 prints JSON: per method the
median and the quartiles of the seconds of one backward pass that does nothing but exchange, with the bytes handed over.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve import Method, Sieve


class Given(nn.Module):
    """A model whose gradients are given: backward costs one copy, and the rest is the exchange."""

    def __init__(self, num_parameters: int, num_tensors: int = 20) -> None:
        super().__init__()
        rows = num_parameters // num_tensors // 64
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(rows, 64)) for _ in range(num_tensors))

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(w * g).sum() for w, g in zip(self.weights, gradients, strict=True)]).sum()


def gradients_of(model: Given, generator: torch.Generator) -> list[Tensor]:
    """Layers differ in scale by a log-normal factor."""
    scales = torch.exp(torch.randn(len(model.weights), generator=torch.Generator().manual_seed(0)))
    return [torch.randn(w.shape, generator=generator) * s for w, s in zip(model.weights, scales, strict=True)]


def measured(method: Method | None, num_parameters: int, steps: int) -> dict[str, object]:
    """The seconds of the second half of the steps (the first half settles), and the last step's bytes."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    module = Given(num_parameters)
    model = DistributedDataParallel(module, bucket_cap_mb=25)
    sieve: Sieve | None = None if method is None else gradsieve.sparsify(model, method)
    seconds = []
    for _ in range(steps):
        gradients = gradients_of(module, generator)
        model.zero_grad(set_to_none=True)
        loss: Tensor = model(gradients)
        dist.barrier()
        start = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        seconds.append(time.perf_counter() - start)
    return summary(seconds[steps // 2 :], sieve, 4 * sum(p.numel() for p in module.parameters()))


def summary(seconds: list[float], sieve: Sieve | None, dense_bytes: int) -> dict[str, object]:
    quartiles = statistics.quantiles(seconds, n=4)
    row: dict[str, object] = {"seconds": statistics.median(seconds), "quartiles": [quartiles[0], quartiles[2]]}
    if sieve is None or sieve.stats is None:
        return row | {"wire_bytes": dense_bytes}
    stats = sieve.stats
    return row | {
        "wire_bytes": stats.wire_bytes,
        "asked_density": sieve.method.density,
        "density": stats.density,
        "select_seconds": stats.select_seconds,
        "exchange_seconds": stats.exchange_seconds,
    }


def provenance(arguments: argparse.Namespace) -> dict[str, object]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return {
        "gradsieve": gradsieve.__version__,
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "world": dist.get_world_size(),
        "backend": dist.get_backend(),
    } | vars(arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=11_173_962)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--methods", nargs="*", default=["dense", "topk", "cltk", "micro", "exdyna", "iwp", "union"])
    parser.add_argument("--network", default="", help="a note on the links, kept with the result")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rows = {"plain DDP": measured(None, arguments.parameters, arguments.steps)}
    for name in arguments.methods:
        options = {} if name == "dense" else {"density": arguments.density}
        rows[name] = measured(gradsieve.method(name, **options), arguments.parameters, arguments.steps)
    if dist.get_rank() == 0:
        print(json.dumps({"provenance": provenance(arguments), "rows": rows}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
