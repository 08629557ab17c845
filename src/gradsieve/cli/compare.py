"""`gradsieve compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from gradsieve.cli.display import FAILED, INTERRUPTED, Display
from gradsieve.cli.options import CONFIG_HELP, merged, read_config
from gradsieve.cli.summary import show_summary
from gradsieve.runs import ERROR, read_run
from gradsieve.training.grid import Cell, expand, make_grid, run_grid
from gradsieve.training.runner import refuse_launcher


def compare(
    given: dict[str, Any],
    config: Annotated[Optional[Path], typer.Option("--config", help=CONFIG_HELP)] = None,  # noqa: UP045
) -> int:
    """Run a grid of methods, densities, numbers of workers and seeds over one task, and sum it up.

    Takes the options of train; --method, --density, --workers or --virtual, and --seed take several values. Started
    again, it goes on where it stopped: finished runs are not repeated, failed ones are tried again.
    """
    refuse_launcher("compare starts its workers itself and is one process")
    values = merged(read_config(config), given)
    output = values.pop("output", None)
    configs = expand(values, "the command line" if config is None else str(config))
    return run_and_show(make_grid(configs, None if output is None else Path(output)))


def run_and_show(cells: list[Cell]) -> int:
    """Carry out a grid under a display; returns the exit code."""
    finished_before = sum(cell.state == "finished" for cell in cells)
    with Display() as display:
        display.line(f"{len(cells)} runs, {finished_before} of them finished before; in {cells[0].folder.parent}")
        display.expect(len(cells))
        statuses = []
        for cell, ended in run_grid(cells, lambda cell: [display.sink(cell.title)]):
            statuses.append(ended.status)
            display.advance()
            if ended.status == "failed":
                display.line(f"{cell.name} failed: {ended.error} (more in {cell.folder / ERROR})")
    show_summary(display.console, [read_run(cell.folder) for cell in cells if cell.state != "new"])
    if "interrupted" in statuses:
        display.line("interrupted: start the same command again to go on")
        return INTERRUPTED
    return FAILED if "failed" in statuses else 0
