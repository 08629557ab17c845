"""What the terminal says of runs at their end."""

from __future__ import annotations

import rich.table
import rich.text
from rich.console import Console

from gradsieve.cli.display import measure_text
from gradsieve.report import RESULT_KEYS, TIME_KEYS, Table, summary_table
from gradsieve.report.grouping import sections
from gradsieve.report.summary import section_rows
from gradsieve.runs import ERROR, Run, read_run
from gradsieve.training.session import Ended


def show_end(console: Console, ended: Ended) -> None:
    """How one run ended, and where it lies."""
    if ended.status == "failed":
        console.print(f"failed: {ended.error} (more in {ended.folder / ERROR})", markup=False, soft_wrap=True)
    elif ended.status == "interrupted":
        console.print(f"interrupted: go on with gradsieve train --resume {ended.folder}", markup=False, soft_wrap=True)
    for line in _figures(read_run(ended.folder)) if ended.status != "failed" else ():
        console.print(line, markup=False, soft_wrap=True)
    console.print(str(ended.folder), markup=False, soft_wrap=True)


def _figures(run: Run) -> list[str]:
    figures, name = run.summary, f"eval/{run.measure}"
    lines = [f"{run.header['method']}, {run.world} workers, {int(figures['steps'])} steps"]
    if name in figures:
        lines.append(f"{run.measure}: {measure_text(run.header['measure'], figures[name])}")
    if "comm/wire_bytes" in figures:
        asked, actual = figures["sparsity/density_asked"], figures["sparsity/density_actual"]
        lines.append(f"density: {actual:.5f} of {asked:.5f} asked; {figures['comm/wire_bytes']:,.0f} bytes a step")
        seconds = {key: figures[f"time/{key}"] for key in PHASES if f"time/{key}" in figures}
        lines.append("milliseconds a step: " + ", ".join(f"{key} {1000 * s:.2f}" for key, s in seconds.items()))
        lines.append(f"seconds an epoch, really: {figures['time/epoch']:.3f}")
    return lines


PHASES = ("forward", "backward", "compute", "select", "exchange", "rest", "step")


def show_summary(console: Console, runs: list[Run]) -> None:
    """The tables of a grid: what was reached, and what a step took; of a study, for each model."""
    found = sections(runs)
    for section in found:
        table, of = summary_table(section_rows(section)), f": {section.title}" if len(found) > 1 else ""
        for title, keys in (("Results", RESULT_KEYS), ("Times of a step, slowest worker", TIME_KEYS)):
            console.print(_drawn(title + of, table.only(*keys)))


def _drawn(title: str, table: Table) -> rich.table.Table:
    drawn = rich.table.Table(title=title, title_justify="left")
    for column in table.columns:
        drawn.add_column(column.title, justify="right" if column.numeric else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(rich.text.Text(cell.text) for cell in row))
    return drawn
