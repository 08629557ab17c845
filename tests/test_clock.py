from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from gradsieve import clock
from gradsieve.clock import Stopwatch

CPU = torch.device("cpu")
Wait = Callable[[float], None]


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Wait:
    """Let time pass on a host clock that stands still otherwise."""
    now = 100.0

    def passing(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(clock, "perf_counter", lambda: now)
    return passing


def test_a_fresh_watch_has_seen_nothing() -> None:
    assert Stopwatch(CPU).seconds() == {}


def test_phases_add_up_and_what_is_between_them_does_not_count(wait: Wait) -> None:
    watch = Stopwatch(CPU)
    wait(1)
    watch.switch("select")
    wait(2)
    watch.switch("exchange")
    wait(4)
    watch.switch(None)
    wait(8)
    watch.switch("select")
    wait(16)
    watch.switch(None)
    assert watch.seconds() == {"select": 18, "exchange": 4}


def test_switch_returns_the_phase_to_go_back_to(wait: Wait) -> None:
    watch = Stopwatch(CPU)
    assert watch.switch("select") is None
    wait(1)
    interrupted = watch.switch("exchange")
    assert interrupted == "select"
    wait(2)
    assert watch.switch(interrupted) == "exchange"
    wait(4)
    assert watch.switch(None) == "select"
    assert watch.seconds() == {"select": 5, "exchange": 2}


def test_a_phase_switched_to_itself_loses_no_time(wait: Wait) -> None:
    watch = Stopwatch(CPU)
    watch.switch("select")
    wait(1)
    watch.switch("select")
    wait(2)
    watch.switch(None)
    assert watch.seconds() == {"select": 3}


def test_a_running_phase_counts_once_it_has_ended(wait: Wait) -> None:
    watch = Stopwatch(CPU)
    watch.switch("select")
    wait(1)
    assert watch.seconds() == {}
    watch.switch(None)
    assert watch.seconds() == {"select": 1}


def test_reading_changes_nothing(wait: Wait) -> None:
    watch = Stopwatch(CPU)
    watch.switch("select")
    wait(1)
    watch.switch(None)
    assert watch.seconds() == watch.seconds() == {"select": 1}


def test_host_time_is_in_seconds() -> None:
    watch = Stopwatch(CPU)
    watch.switch("select")
    before = time.perf_counter()
    time.sleep(0.02)
    elapsed = time.perf_counter() - before
    watch.switch(None)
    assert elapsed <= watch.seconds()["select"] < elapsed + 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_time_is_that_of_the_device_and_switching_never_waits_for_it() -> None:
    watch = Stopwatch(torch.device("cuda"))
    torch.cuda.synchronize()
    start = time.perf_counter()
    watch.switch("select")
    # in cycles: a quarter of a second at 2 GHz
    torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]
    watch.switch("exchange")
    watch.switch(None)
    on_host = time.perf_counter() - start
    seconds = watch.seconds()
    assert on_host < 0.05
    assert 0.1 < seconds["select"] < 5
    assert 0 <= seconds["exchange"] < 0.05
