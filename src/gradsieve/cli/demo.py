"""`gradsieve demo`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Optional

import typer

from gradsieve.cli.report import check_packages, write
from gradsieve.cli.running import run_and_show
from gradsieve.digests import read_runs
from gradsieve.training.folder import RUNS
from gradsieve.training.grid import expand, make_grid
from gradsieve.training.runner import refuse_launcher

METHODS = ["dense", "topk", "cltk", "hard_threshold", "micro", "exdyna", "iwp", "union"]


def demo(
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--output", help="Folder to write to. Default: a new one in runs/."),
    ] = None,
    workers: Annotated[int, typer.Option("--workers", help="Processes that train together.", min=1)] = 4,
    density: Annotated[float, typer.Option("--density", help="Share of the gradient to send in a step.")] = 0.01,
    epochs: Annotated[Optional[int], typer.Option("--epochs", help="Epochs of each run.", min=1)] = None,  # noqa: UP045
) -> int:
    """Train on handwritten digits with each method over real processes, compare them, and write a report."""
    check_packages()
    refuse_launcher("demo starts its workers itself and is one process")
    values = {"task": "digits", "method": METHODS, "density": density, "workers": workers, "device": "cpu"}
    folder = output or RUNS / time.strftime("demo-%Y%m%d-%H%M%S")
    cells = make_grid(expand(values | ({"epochs": epochs} if epochs else {}), "the command line"), folder)
    code = run_and_show(cells)
    typer.echo(str(write(read_runs([cells[0].folder.parent]), cells[0].folder.parent / "report")))
    return code
