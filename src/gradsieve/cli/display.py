"""What the terminal shows while runs go on, and at their end."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from gradsieve.runs import Record
from gradsieve.training.session import Ended

FAILED, INTERRUPTED = 1, 130


class Display:
    """Progress of one run after the other: bars on a terminal, lines elsewhere."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = Console(quiet=quiet, highlight=False, soft_wrap=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[news]}"),
            console=self.console,
            disable=quiet or not self.console.is_terminal,
        )
        self._overall: TaskID | None = None

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    @property
    def live(self) -> bool:
        return not self._bars.disable

    def expect(self, num_runs: int) -> None:
        """Show a bar for so many runs in all."""
        self._overall = self._bars.add_task("all runs", total=num_runs, news="")

    def advance(self) -> None:
        if self._overall is not None:
            self._bars.advance(self._overall)

    def sink(self, name: str | None = None) -> RunDisplay:
        """Follows one run; by default under its method's name."""
        return RunDisplay(self, name)

    def bar(self, name: str, total: int, done: int) -> TaskID:
        return self._bars.add_task(name, total=total, completed=done, news="")

    def update(self, bar: TaskID, done: int, news: str) -> None:
        self._bars.update(bar, completed=done, news=news)

    def line(self, text: str) -> None:
        self.console.print(text, markup=False)


class RunDisplay:
    """A `Sink` that shows a run."""

    def __init__(self, display: Display, name: str | None) -> None:
        self._display = display
        self._name = name
        self._bar = TaskID(0)
        self._measure: Mapping[str, Any] = {}
        self._judged = ""

    def start(self, header: Mapping[str, Any], steps_done: int) -> None:
        self._name = self._name or f"{header['label']}"
        self._measure = header["measure"]
        self._bar = self._display.bar(self._name, header["total_steps"], steps_done)

    def write(self, record: Record) -> None:
        name = f"eval/{self._measure['name']}"
        if name in record:
            self._judged = f"{self._measure['name']} {measure_text(self._measure, record[name])}"
            if not self._display.live:
                self._display.line(f"{self._name}  step {record['step']}  epoch {record['epoch']:.2f}  {self._judged}")
            return
        news = (
            f"loss {_short(record['train/loss'])}  density {_short(record['sparsity/density_actual'])}  {self._judged}"
        )
        self._display.update(self._bar, int(record["step"] or 0), news)

    def close(self) -> None:
        """The bar stays."""


def measure_text(measure: Mapping[str, Any], value: float | None) -> str:
    """A figure as the task's measure is shown."""
    if value is None:
        return "-"
    return f"{100 * value:.2f} %" if measure["percent"] else f"{value:.4g}"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def table_of(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    """A table, its first column left-justified and the others right."""
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def exit_code(ended: Ended) -> int:
    return {"finished": 0, "interrupted": INTERRUPTED}.get(ended.status, FAILED)
