"""A lab that is not there, and what one has on the machine, for tests that nothing of it is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from command_line import until
from gradsieve.counters import Traffic
from gradsieve.lab import names
from gradsieve.lab.layout import Layout
from gradsieve.lab.network import Network

TOOLS = ("ip", "tc", "unshare", "nsenter")


class Pretended:
    """A network that is not there."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def __enter__(self) -> Pretended:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def host_traffic(self) -> list[Traffic]:
        return [Traffic(10_000, 20_000)] * self.layout.hosts

    def uplink_place(self) -> str | None:
        return "7:uplink0" if self.layout.racks > 1 else None

    def uplink_traffic(self) -> Traffic | None:
        return Traffic(300, 400) if self.layout.racks > 1 else None


class Belongings(NamedTuple):
    """Of a lab that is at work."""

    processes: frozenset[int]
    networks: frozenset[str]
    """Namespaces, such as net:[4026532000]."""


def processes_of(owner: int) -> frozenset[int]:
    """The processes of all labs that a process has made."""
    return frozenset(process for process, name in names.processes().items() if name.startswith(f"{owner}-"))


def belongings(owner: int) -> Belongings:
    processes = processes_of(owner)
    inside = {space for process in processes for space in _networks(Path(f"/proc/{process}"))}
    return Belongings(processes, frozenset(inside - _networks(Path("/proc/self"))))


def _networks(process: Path) -> set[str]:
    """The network namespaces that a process keeps: the one that it is in, and those that it has mounted."""
    try:
        mounted = (line.split() for line in (process / "mountinfo").read_text().splitlines())
        return {str((process / "ns/net").readlink()), *(words[3] for words in mounted if words[3].startswith("net:"))}
    except OSError:  # it has just ended
        return set()


def interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def assert_gone(owned: Belongings, interfaces_before: set[str]) -> None:
    """Nothing that a lab had is left, or soon is not."""
    assert owned.networks, "the lab had no network, so its end shows nothing"
    until(lambda: not owned.processes & names.processes().keys(), "the end of the lab's processes")
    until(lambda: not owned.networks & _all_networks(), "the end of the lab's networks")
    assert interfaces() == interfaces_before


def _all_networks() -> set[str]:
    return {space for process in Path("/proc").glob("[0-9]*") for space in _networks(process)}


class FakeNetwork(Network):
    """Hosts that are processes of this machine and nothing more; `script` says what each of them runs in place of its
    agent.
    """

    def __init__(self, hosts: int, script: Callable[[int], str]) -> None:
        self.layout = Layout(hosts)
        self.name = names.new_name()
        self._script = script

    def inside(self, command: object, host: int | None = None) -> list[str]:  # noqa: ARG002
        assert host is not None
        return ["sh", "-c", self._script(host)]


def put_tools(folder: Path, **scripts: str) -> None:
    """Stand-ins for the tools that make a lab; those without a script do nothing."""
    for tool in TOOLS:
        path = folder / tool
        path.write_text(f"#!/bin/sh\n{scripts.get(tool, 'exit 0')}\n")
        path.chmod(0o755)
