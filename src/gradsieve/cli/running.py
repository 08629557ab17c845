"""Carries out runs under a display."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradsieve.cli.display import FAILED, INTERRUPTED, Display
from gradsieve.cli.summary import show_summary
from gradsieve.runs import ERROR, read_run
from gradsieve.training.grid import Cell, run_grid
from gradsieve.training.recorder import Sink


def run_and_show(cells: list[Cell], at_once: int = 1) -> int:
    """Carry out a grid, so many runs at a time, and sum it up; returns the exit code."""
    finished_before = sum(cell.state == "finished" for cell in cells)
    with Display() as display:
        display.line(f"{len(cells)} runs, {finished_before} of them finished before; in {cells[0].folder.parent}")
        code = run_cells(display, cells, at_once)
    show_summary(display.console, [read_run(cell.folder) for cell in cells if cell.state != "new"])
    return told(display, code)


def run_cells(
    display: Display, cells: Sequence[Cell], at_once: int, on_finished: Callable[[Cell], None] = lambda _: None
) -> int:
    """Carry out runs, so many at a time; `on_finished` hears of each that is whole. Returns the exit code."""
    display.expect(len(cells), sum(cell.plan.total_steps for cell in cells if cell.state != "finished"))
    models = {cell.plan.config.model for cell in cells}
    statuses = []

    def sinks(cell: Cell) -> list[Sink]:
        return [display.sink(cell.title if len(models) == 1 else f"{cell.plan.config.model}, {cell.title}")]

    for cell, ended in run_grid(cells, sinks, at_once):
        statuses.append(ended.status)
        display.advance()
        if ended.status == "finished":
            on_finished(cell)
        elif ended.status == "failed":
            display.line(f"{cell.name} failed: {ended.error} (more in {cell.folder / ERROR})")
    # a Ctrl-C between two runs interrupts none, but the next is not begun
    if "interrupted" in statuses or len(statuses) < len(cells):
        return INTERRUPTED
    return FAILED if "failed" in statuses else 0


def told(display: Display, code: int) -> int:
    """Say what to do about an interruption."""
    if code == INTERRUPTED:
        display.line("interrupted: start the same command again to go on")
    return code
