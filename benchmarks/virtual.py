"""Seconds per epoch of virtual workers on one device, by method.

    python benchmarks/virtual.py --data DIR --output benchmarks/results/virtual.json

Trains a few epochs with each method and takes the median over the epochs after the first (which captures the graph),
without evaluation. Every row is from the same run of this script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from gradsieve.runs import Run, read_run
from gradsieve.training.config import TrainConfig
from gradsieve.training.provenance import provenance
from gradsieve.training.runner import train

METHODS = ["dense", "topk", "cltk", "hard_threshold", "micro", "exdyna", "iwp", "union"]


def epoch_seconds(run: Run) -> list[float]:
    """Of each epoch after the first."""
    length = run.header["steps_per_epoch"]
    wall = run.series("time/wall")
    return [float(wall[start : start + length].sum()) for start in range(length, len(wall), length)]


def measure(method: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config = TrainConfig(
        task="cifar10",
        model=arguments.model,
        data=arguments.data,
        method=method,
        density=None if method == "dense" else arguments.density,
        virtual=arguments.workers,
        device=arguments.device,
        precision=arguments.precision,
        epochs=arguments.epochs,
        eval_every=0,
        checkpoint_every=0,
        output=folder / method,
    )
    ended = train(config)
    if ended.status != "finished":
        return {"method": method, "error": ended.error}
    run = read_run(ended.folder)
    seconds = epoch_seconds(run)
    return {
        "method": method,
        "seconds_per_epoch": statistics.median(seconds),
        "spread": [min(seconds), max(seconds)],
        "milliseconds_per_step": 1000 * statistics.median(seconds) / run.header["steps_per_epoch"],
        "milliseconds_of_passes": 1000 * run.summary.get("time/compute", 0) * run.world,
        "messages_per_step": run.summary["comm/messages"],
        "accuracy": run.summary["eval/accuracy"],
        "density": run.summary["sparsity/density_actual"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bfloat16")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for method in arguments.methods:
            rows.append(measure(method, arguments, Path(scratch)))
            print(json.dumps(rows[-1]), flush=True)
    setting = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    report = {"setting": setting, "provenance": provenance(torch.device(arguments.device)), "rows": rows}
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
