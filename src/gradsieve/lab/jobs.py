"""Jobs of torchrun over the hosts of a lab."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from gradsieve.lab.layout import INTERFACE, address
from gradsieve.lab.network import SCRATCH, Network

PORT = 29_500
"""Where host 0 serves the meeting; every lab has its own ports."""
POLL_SECONDS = 0.1
_RANK = re.compile(r"^\[rank\d+\]:")
"""With which torch begins the lines of a worker's traceback."""
_RAISED = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b(?:: .*)?|gradsieve: .*")


class Ended(NamedTuple):
    """What a host's agent left."""

    host: int
    code: int
    """Of its exit; negative: the signal that ended it."""
    output: str
    errors: str


class JobError(RuntimeError):
    """A job failed or took too long; the message is one line."""

    def __init__(self, message: str, ended: Sequence[Ended]) -> None:
        super().__init__(message)
        self.ended = ended


def agent_command(hosts: int, host: int, script: Sequence[str]) -> list[str]:
    """What a host runs: torchrun's agent with one worker; `script` is what follows torchrun's own options."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={hosts}",
        f"--node-rank={host}",
        "--nproc-per-node=1",
        "--max-restarts=0",
        f"--master-addr={address(0)}",
        f"--master-port={PORT}",
        *script,
    ]


def agent_environment() -> dict[str, str]:
    """Of a host, on top of this process's: hosts share the cores, and gloo is to use the shaped link."""
    return {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE, "TMPDIR": SCRATCH}


def run_job(
    network: Network, script: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None
) -> list[Ended]:
    """Run a job over all hosts to its end, and return what each agent left.

    When one fails or `seconds` have passed, all of them are ended, and it is a `JobError`.
    """
    hosts = network.layout.hosts
    agents: list[_Agent] = []
    with contextlib.ExitStack() as files:
        try:
            for host in range(hosts):
                command = agent_command(hosts, host, script)
                agents.append(_start(network, host, command, environment or {}, files))
            failure = _followed(agents, seconds)
        finally:
            for agent in agents:
                agent.end()
        ended = [agent.ended() for agent in agents]
    if failure is not None:
        raise JobError(failure.told(ended), ended)
    return ended


@dataclass(frozen=True)
class _Agent:
    """One host's part of a job."""

    host: int
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]

    def end(self) -> None:
        """Kill what is left of it: with the first process of its own namespace go the workers in theirs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ended(self) -> Ended:
        return Ended(self.host, self.process.wait(), _read(self.output), _read(self.errors))


def _start(
    network: Network,
    host: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    files: contextlib.ExitStack,
) -> _Agent:
    # workers are in sessions of their own, which no signal to the agent's reaches
    alone = ["unshare", "--pid", "--fork", "--kill-child", f"--wd={Path.cwd()}"]
    # files without a name: none is left, however this ends
    output = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
    errors = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
    process = subprocess.Popen(
        network.inside([*alone, *command], host),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        env={**network.environment(), **agent_environment(), **environment},
        start_new_session=True,
    )
    return _Agent(host, process, output, errors)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


class _Failure(NamedTuple):
    """Why a job was ended before its time, and by which hosts."""

    hosts: list[int]
    seconds: float | None
    """That were up; None where the hosts failed."""

    def told(self, ended: Sequence[Ended]) -> str:
        names = ("host " if len(self.hosts) == 1 else "hosts ") + ", ".join(map(str, self.hosts))
        if self.seconds is not None:
            return f"after {self.seconds:g} s {names} had not come to an end: give the job more time"
        first = ended[self.hosts[0]]
        return f"{names} ended with exit code {first.code}: {last_words(first.errors)}"


def _followed(agents: Sequence[_Agent], seconds: float) -> _Failure | None:
    """Wait until all have ended well, one has failed, or the time is up."""
    deadline = time.monotonic() + seconds
    while True:
        codes = [agent.process.poll() for agent in agents]
        failed = [agent.host for agent, code in zip(agents, codes, strict=True) if code]
        if failed:
            return _Failure(failed, None)
        busy = [agent.host for agent, code in zip(agents, codes, strict=True) if code is None]
        if not busy:
            return None
        if time.monotonic() > deadline:
            return _Failure(busy, seconds)
        time.sleep(POLL_SECONDS)


def last_words(errors: str) -> str:
    """Of what a failed agent wrote, the line that says most: what a worker raised, or else the last.

    >>> last_words("Traceback\\nValueError: bad\\ntorch.distributed.elastic.ChildFailedError:\\n====\\n")
    'ValueError: bad'
    """
    stripped = (_RANK.sub("", line).strip() for line in errors.splitlines())
    lines = [line for line in stripped if any(map(str.isalnum, line))]  # not those that only underline
    raised = [line for line in lines if _RAISED.fullmatch(line)]
    return raised[-1] if raised else (lines[-1] if lines else "without a word")
