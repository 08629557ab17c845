"""Names of labs, and the processes that belong to one.

All processes of a lab have its name in their environment. It says whose lab it is, so that one whose owner has died is
told from one that is at work.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path

MARK = "GRADSIEVE_LAB"
"""The environment variable."""
CLEAN_SECONDS = 10.0
"""That killed processes may take to disappear."""
_serial = itertools.count(1)


def new_name() -> str:
    """Owner, the moment when the owner began, and a number."""
    return f"{os.getpid()}-{_began(os.getpid())}-{next(_serial)}"


def owner_lives(name: str) -> bool:
    """Is the process at work that made the lab? A later one with its number is another."""
    owner, began, _ = name.split("-")
    return _began(int(owner)) == int(began)


def _began(process: int) -> int | None:
    """In ticks since the machine started; None where there is no such process."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    # the name of the program stands in parentheses and may hold blanks; what follows begins with the third field
    state, *fields = text.rpartition(")")[2].split()
    return None if state == "Z" else int(fields[18])


def processes() -> dict[int, str]:
    """All processes of labs on this machine that this user may see, with the name of their lab."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        name = _mark(folder)
        if name is not None:
            found[int(folder.name)] = name
    return found


def _mark(process: Path) -> str | None:
    try:
        words = (process / "environ").read_bytes().split(b"\0")
    except OSError:  # it has just ended, or is another user's
        return None
    start = f"{MARK}=".encode()
    return next((word.removeprefix(start).decode() for word in words if word.startswith(start)), None)


def strays() -> dict[int, str]:
    """Processes of labs whose owner has died."""
    return {process: name for process, name in processes().items() if not owner_lives(name)}


def clean() -> list[str]:
    """End what dead labs left, which takes their networks with it; the names of these labs."""
    found = strays()
    for process in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + CLEAN_SECONDS
    while strays() and time.monotonic() < deadline:
        time.sleep(0.02)
    return sorted(set(found.values()))
