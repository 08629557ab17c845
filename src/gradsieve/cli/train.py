"""`gradsieve train`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from gradsieve.checks import UsageError
from gradsieve.cli.display import Display, exit_code
from gradsieve.cli.options import CONFIG_HELP, merged, read_config
from gradsieve.cli.summary import show_end
from gradsieve.training import runner
from gradsieve.training.config import TrainConfig, from_mapping
from gradsieve.training.place import find_place


def train(
    given: dict[str, Any],
    config: Annotated[Optional[Path], typer.Option("--config", help=CONFIG_HELP)] = None,  # noqa: UP045
    resume: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--resume", help="Go on with the run in this folder, from its last checkpoint.", metavar="RUN"),
    ] = None,
    auto_resume: Annotated[
        bool, typer.Option("--auto-resume", help="Go on with the run in --output if it has a checkpoint, or begin it.")
    ] = False,
) -> int:
    """Train a task with one method.

    Starts its own processes (--workers), joins those that torchrun, mpirun or srun started, or runs virtual workers
    in one process (--virtual).
    """
    place = find_place(os.environ)
    display = Display(quiet=place is not None and place.rank != 0)
    values = merged(read_config(config), given)
    if resume is not None and auto_resume:
        raise UsageError("--resume RUN and --auto-resume exclude one another: the second looks in --output")
    source = "the command line" if config is None else f"{config}"
    with display:
        if auto_resume:
            ended = runner.train_or_resume(values, source, [display.sink()])
        elif resume is not None:
            ended = runner.resume(resume, values, [display.sink()])
        else:
            ended = runner.train(from_mapping(TrainConfig, values, source), [display.sink()])
    if not display.quiet:
        show_end(display.console, ended)
    return exit_code(ended)
