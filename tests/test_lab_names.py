from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gradsieve.lab import names

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc, as a lab does")
DEAD = f"{2**22 + 1}-1-1"
"""Of a lab whose owner cannot be, as processes have smaller numbers."""


def sleeper(name: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], env={**os.environ, names.MARK: name})


def test_names_differ_and_say_whose_a_lab_is() -> None:
    first, second = names.new_name(), names.new_name()
    assert first != second
    assert first.startswith(f"{os.getpid()}-")
    assert names.owner_lives(first)


def test_a_later_process_of_the_same_number_is_not_the_owner() -> None:
    owner, began, serial = names.new_name().split("-")
    assert not names.owner_lives(f"{owner}-{int(began) + 1}-{serial}")
    assert not names.owner_lives(DEAD)


def test_an_owner_that_waits_to_be_reaped_is_dead() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert names._began(process.pid) is None
    process.wait()


def test_what_dead_labs_left_is_ended_and_nothing_else() -> None:
    living = names.new_name()
    stray, busy = sleeper(DEAD), sleeper(living)
    try:
        assert names.processes().items() >= {stray.pid: DEAD, busy.pid: living}.items()
        assert names.strays()[stray.pid] == DEAD
        assert busy.pid not in names.strays()
        assert DEAD in names.clean()
        assert stray.wait(timeout=10) == -9
        assert busy.poll() is None
        assert DEAD not in names.clean()
    finally:
        for process in (stray, busy):
            process.kill()
            process.wait()
