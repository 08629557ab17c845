from __future__ import annotations

from collections.abc import Callable

import pytest

from gradsieve.cli import display
from gradsieve.cli.display import Display, Pace

Clock = Callable[[float], None]


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Lets time go by."""
    now = [0.0]
    monkeypatch.setattr(display, "monotonic", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


def test_the_time_to_go_is_told_once_there_is_something_to_tell_by(passing: Clock) -> None:
    pace = Pace(105)
    pace.skip(5)
    for _ in range(4):
        assert pace.seconds_to_go() is None
        passing(1000 if pace._began is None else 10)
        pace.step()
    assert pace.seconds_to_go() == 96 * 10


def _said(passing: Clock, num_steps: int) -> Display:
    shown = Display()
    shown.expect(2, num_steps)
    for _ in range(5):
        passing(10)
        shown.step()
    return shown


def test_long_runs_are_announced_once(passing: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    _said(passing, 45 * 97)
    said = capsys.readouterr().out
    assert said.startswith("about 12 h to go at this pace; it can be stopped and started again")
    assert said.count("to go") == 1


def test_short_ones_are_not(passing: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    _said(passing, 50)
    assert capsys.readouterr().out == ""
