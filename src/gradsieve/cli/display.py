"""What the terminal shows while runs go on, and at their end."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
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
LONG = 15 * 60.0
"""Seconds still to go of which a word is said."""
ENOUGH = 3, 20.0
"""Steps, and seconds, after which the time to go is told."""


class Pace:
    """How long so many steps will take, by those done so far."""

    def __init__(self, num_steps: int) -> None:
        self._left = num_steps
        self._done = 0
        self._began: float | None = None

    def skip(self, steps: int) -> None:
        """Those were done before."""
        self._left -= steps

    def step(self) -> None:
        """One is over. The first is not counted: before it things were made ready."""
        if self._began is None:
            self._began = monotonic()
        else:
            self._done += 1
        self._left -= 1

    def seconds_to_go(self) -> float | None:
        """None as long as there is too little to tell by."""
        since = 0.0 if self._began is None else monotonic() - self._began
        steps, seconds = ENOUGH
        return None if self._done < steps or since < seconds else since / self._done * self._left


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
        self._pace: Pace | None = None
        self._warned = False

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

    def expect(self, num_runs: int, num_steps: int) -> None:
        """Show a bar for so many runs in all, of so many steps together."""
        self._num_runs = num_runs
        self._pace = Pace(num_steps)
        self._overall = self._bars.add_task("all runs", total=num_runs, news="")

    def advance(self) -> None:
        if self._overall is not None:
            self._bars.advance(self._overall)

    def sink(self, name: str = "") -> RunDisplay:
        """Follows one run; by default under its method's name."""
        return RunDisplay(self, name)

    def bar(self, name: str, total: int, done: int) -> TaskID:
        if self._pace is not None:
            self._pace.skip(done)
        return self._bars.add_task(name, total=total, completed=done, news="")

    def step(self) -> None:
        """A step of some run is over. Says once if it will be long before all are."""
        if self._pace is None or self._overall is None:
            return
        self._pace.step()
        to_go = self._pace.seconds_to_go()
        if to_go is None:
            return
        self._bars.update(self._overall, news=f"about {duration(to_go)} to go")
        if not self._warned and to_go > LONG:
            self.line(
                f"about {duration(to_go)} to go at this pace; it can be stopped and started again, or have fewer "
                "methods, densities, epochs or --steps"
            )
        self._warned = True

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
            self._display.step()
        self._display.update(self._bar, int(record["step"] or 0), f"{self._news}  {self._judged}")

    def close(self) -> None:
        if self._measure:
            self._display.ended(self._bar, self._name, self._judged)


def duration(seconds: float) -> str:
    """A time in words, to one or two digits.

    >>> [duration(seconds) for seconds in (20, 100, 5000, 40_000, 400_000)]
    ['20 s', '2 min', '83 min', '11 h', '5 days']
    """
    for unit, size, most in (("s", 1, 90), ("min", 60, 120), ("h", 3600, 48)):
        if seconds < most * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def measure_text(measure: Mapping[str, Any], value: float | None) -> str:
    """A figure as the task's measure is shown."""
    if value is None:
        return "-"
    return f"{100 * value:.2f} %" if measure["percent"] else f"{value:.4g}"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def exit_code(ended: Ended) -> int:
    return {"finished": 0, "interrupted": INTERRUPTED}.get(ended.status, FAILED)
