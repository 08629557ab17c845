"""A network of hosts on this machine, which the kernel takes down whatever happens.

[Note: who holds a lab] Everything of a lab lives in namespaces of its own, the switch with its bridges included, and
nothing has a name on the machine: interfaces, mounts and processes are seen in the lab only. The first process of its
process namespace, the holder, waits for the end of a pipe that this process keeps open. However this process ends, the
pipe ends with it, hence the holder; with the first process of a namespace the kernel kills all others in it, and with
the last process the networks go. So there is nothing to clean up, after `kill -9` either.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

from gradsieve.checks import UsageError
from gradsieve.counters import Traffic, traffic
from gradsieve.lab.layout import Layout, host_name, plan, port_name, uplink_name
from gradsieve.lab.names import MARK, new_name

SCRATCH = "/run/tmp"
"""A folder in the memory of the lab, for what its jobs put away and forget."""
COMMAND_SECONDS = 30.0
"""That a command of a few system calls may take on a busy machine."""
CLOSE_SECONDS = 30.0
"""That the kernel may take to end all of a lab's processes."""
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_HOLD = f"mount -t tmpfs gradsieve-lab /run && mkdir -p /run/netns {SCRATCH} && echo ready && read _"


class LabError(UsageError):
    """A lab cannot be made here; the message is one line that says what is missing."""


def check_tools() -> None:
    """Refuse a machine that lacks what a lab is made with."""
    if sys.platform != "linux":
        raise LabError(f"a lab is made of Linux namespaces, and this is {sys.platform}: run it on Linux, or in a VM")
    missing = [tool for tool in _PACKAGES if shutil.which(tool, path=_path()) is None]
    if missing:
        packages = sorted({_PACKAGES[tool] for tool in missing})
        raise LabError(f"a lab needs {', '.join(missing)}: install them (apt-get install {' '.join(packages)})")


def _path() -> str:
    """Where tools are looked for: root's folders, too, as a user's namespace needs them."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


class Network:
    """Hosts joined by shaped links, as long as the context lasts."""

    def __init__(self, layout: Layout) -> None:
        check_tools()
        self.layout = layout
        self.name = new_name()
        self._as_root = os.geteuid() == 0
        self._holder: subprocess.Popen[str] | None = None

    def __enter__(self) -> Network:
        try:
            self._holder = self._held()
            for command in plan(self.layout):
                self._make(command)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take everything down, the processes in it included."""
        holder, self._holder = self._holder, None
        if holder is None:
            return
        try:
            # ends the pipe; the holder is gone only when all of the lab's processes are
            with contextlib.suppress(subprocess.TimeoutExpired):
                holder.communicate(timeout=CLOSE_SECONDS)
        finally:
            holder.kill()
            holder.wait()

    @property
    def process(self) -> int:
        """One that is in the switch's network namespace."""
        if self._holder is None:
            raise RuntimeError("the lab has no network outside of its context: use `with Network(layout) as network`")
        return self._holder.pid

    def environment(self) -> dict[str, str]:
        """Of the lab's processes, on top of this one's."""
        return {**os.environ, "PATH": _path(), MARK: self.name}

    def inside(self, command: Sequence[str], host: int | None = None) -> list[str]:
        """The command line that runs a command in the lab: on a host, or where the switch is."""
        user = [] if self._as_root else ["--user", "--preserve-credentials"]
        # the process itself is still in the old process namespace: its children are the first in the new one
        spaces = ["--mount", "--net", f"--pid=/proc/{self.process}/ns/pid_for_children"]
        enter = ["nsenter", f"--target={self.process}", *user, *spaces]
        there = [] if host is None else ["nsenter", f"--net=/run/netns/{host_name(host)}"]
        return [*enter, *there, *command]

    def host_traffic(self) -> list[Traffic]:
        """Bytes that each host has received and sent."""
        ports = traffic(self.process)
        # what a port has sent, its host has received
        return [Traffic(*reversed(ports[port_name(host)])) for host in range(self.layout.hosts)]

    def uplink_traffic(self) -> Traffic | None:
        """Bytes that the first rack has received and sent through the link between racks; None without one."""
        return None if self.layout.racks == 1 else traffic(self.process)[uplink_name(0)]

    def uplink_place(self) -> str | None:
        """Where jobs read what passes between racks: an interface, as a process sees it that is none of a host's."""
        return None if self.layout.racks == 1 else f"{self.process}:{uplink_name(0)}"

    def _held(self) -> subprocess.Popen[str]:
        """The process that the lab hangs on, once it is ready."""
        user = [] if self._as_root else ["--user", "--map-root-user"]
        spaces = ["--mount", "--net", "--pid", "--fork", "--kill-child"]
        holder = subprocess.Popen(
            ["unshare", *user, *spaces, "sh", "-c", _HOLD, f"gradsieve-lab-{self.name}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment(),
            start_new_session=True,  # Ctrl-C is this process's affair
        )
        self._holder = holder
        assert holder.stdout is not None
        if holder.stdout.readline() != "ready\n":
            said = _one_line(holder.communicate()[1])
            raise LabError(
                f"a lab needs the right to make namespaces ({said}): run it as root, in a container with "
                "--privileged, or allow user namespaces (sysctl user.max_user_namespaces)"
            )
        return holder

    def _make(self, command: list[str]) -> None:
        done = subprocess.run(
            self.inside(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            env=self.environment(),
            check=False,
        )
        if done.returncode != 0:
            raise LabError(
                f"the lab's network cannot be made: {' '.join(command)} says {_one_line(done.stderr)!r}; "
                "the kernel needs bridge, veth and sch_tbf"
            )


def _one_line(text: str) -> str:
    return " ".join(text.split()) or "without a word"
