"""What the terminal shows while runs go on, and at their end."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from gradsieve.runs import Record
from gradsieve.training.session import Ended

FAILED, INTERRUPTED = 1, 130
MOST_BARS = 12
PLAIN_WIDTH = 200
"""Of what goes to a file or a pipe, where nobody knows the width."""


class Display:
    """Progress of one run after the other: bars on a terminal, lines elsewhere."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = Console(quiet=quiet, highlight=False)
        if not self.console.is_terminal:
            self.console.width = PLAIN_WIDTH
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
        self._num_runs = 1

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
        self._num_runs = num_runs
        self._overall = self._bars.add_task("all runs", total=num_runs, news="")

    def advance(self) -> None:
        if self._overall is not None:
            self._bars.advance(self._overall)

    def sink(self, name: str = "") -> RunDisplay:
        """Follows one run; by default under its method's name."""
        return RunDisplay(self, name)

    def bar(self, name: str, total: int, done: int) -> TaskID:
        return self._bars.add_task(name, total=total, completed=done, news="")

    def judged(self, name: str, place: str, figure: str) -> None:
        """An evaluation; where there are no bars and no other runs, it gets a line."""
        if not self.live and self._num_runs == 1:
            self.line(f"{name}  {place}  {figure}")

    def ended(self, bar: TaskID, name: str, figure: str) -> None:
        """A run is over: its bar stays, unless there are too many."""
        if self.live and self._num_runs > MOST_BARS:
            self._bars.remove_task(bar)
        if self._num_runs > (MOST_BARS if self.live else 1):
            self.line(f"{name}  {figure}")

    def update(self, bar: TaskID, done: int, news: str) -> None:
        self._bars.update(bar, completed=done, news=news)

    def line(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


class RunDisplay:
    """A `Sink` that shows a run."""

    def __init__(self, display: Display, name: str) -> None:
        self._display = display
        self._name = name
        self._bar = TaskID(0)
        self._measure: Mapping[str, Any] = {}
        self._news = ""
        self._judged = ""

    def start(self, header: Mapping[str, Any], steps_done: int) -> None:
        self._name = self._name or str(header["label"])
        self._measure = header["measure"]
        self._bar = self._display.bar(self._name, header["total_steps"], steps_done)

    def write(self, record: Record) -> None:
        name = f"eval/{self._measure['name']}"
        if name in record:
            self._judged = f"{self._measure['name']} {measure_text(self._measure, record[name])}"
            self._display.judged(self._name, f"step {record['step']}  epoch {record['epoch']:.2f}", self._judged)
        else:
            loss, density = _short(record["train/loss"]), _short(record["sparsity/density_actual"])
            self._news = f"loss {loss}  density {density}"
        self._display.update(self._bar, int(record["step"] or 0), f"{self._news}  {self._judged}")

    def close(self) -> None:
        if self._measure:
            self._display.ended(self._bar, self._name, self._judged)


def measure_text(measure: Mapping[str, Any], value: float | None) -> str:
    """A figure as the task's measure is shown."""
    if value is None:
        return "-"
    return f"{100 * value:.2f} %" if measure["percent"] else f"{value:.4g}"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def exit_code(ended: Ended) -> int:
    return {"finished": 0, "interrupted": INTERRUPTED}.get(ended.status, FAILED)
