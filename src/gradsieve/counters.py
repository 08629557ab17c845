"""Bytes through network interfaces, as the kernel counts them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from gradsieve.checks import UsageError, nearest


class Traffic(NamedTuple):
    """Bytes through an interface since it was made."""

    received: int
    sent: int


def parse(text: str) -> dict[str, Traffic]:
    """By interface, from the contents of /proc/net/dev: two lines of headings, then eight numbers each way."""
    lines = (line.partition(":") for line in text.splitlines()[2:])
    numbers = {name.strip(): [int(number) for number in rest.split()] for name, _, rest in lines}
    return {name: Traffic(received=row[0], sent=row[8]) for name, row in numbers.items()}


def traffic(process: int | None = None) -> dict[str, Traffic]:
    """By interface, as a process sees them; by default this one."""
    # those under /sys are of the network namespace of whoever mounted it, these of the process's own
    path = Path("/proc") / ("self" if process is None else str(process)) / "net" / "dev"
    try:
        return parse(path.read_text())
    except OSError as error:
        raise UsageError(f"bytes are counted by {path}, which Linux has and which cannot be read here") from error


def sent_bytes(interface: str) -> int:
    """That left through an interface of this machine since it was made."""
    return traffic()[interface].sent


def passed_bytes(place: str) -> int:
    """Both ways, through an interface that another process sees: `PROCESS:INTERFACE`.

    A link between switches belongs to no host, so its bytes are read from where the switches are.
    """
    process, _, interface = place.partition(":")
    if not process.isdecimal() or not interface:
        raise UsageError(f"--uplink is the number of a process and an interface that it sees, 7:eth0, not {place!r}")
    seen = traffic(int(process))
    if interface not in seen:
        raise UsageError(f"--uplink: process {process} sees no {interface!r}; {nearest(interface, seen)}")
    return sum(seen[interface])


def check_interface(interface: str | None) -> None:
    """Refuse an interface that this machine does not have."""
    if interface is None:
        return
    here = traffic()
    if interface not in here:
        raise UsageError(f"--interface: there is no {interface!r} on this machine; {nearest(interface, here)}")
