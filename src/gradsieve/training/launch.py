"""Starts the processes of a run on this machine, watches over them, and ends them all when one fails."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, cast

from gradsieve.collectives import ExchangeError
from gradsieve.runs import ERROR, RESULT, Record, Status
from gradsieve.training.recorder import Sink, write_result, write_text
from gradsieve.training.session import SIGNALS, Ended, Interruption, Order, Seat, carry_out, one_line, summary_of

GRACE_SECONDS = 5.0
"""For the other processes to end by themselves once one has failed."""
REMINDER_SECONDS = 0.5
"""The longest silence of the workers before it is seen to whether they are to end."""


class _Message(NamedTuple):
    """From a worker to the process that started it: `start`, `record`, `ended` or `failed`."""

    kind: str
    content: Any


class _PipeSink:
    """Hands a run's records to the process that started it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def start(self, header: Mapping[str, Any], steps_done: int) -> None:
        self._pipe.send(_Message("start", (header, steps_done)))

    def write(self, record: Record) -> None:
        self._pipe.send(_Message("record", record))

    def close(self) -> None:
        """The end of the process says it."""


def launch(order: Order, num_processes: int, sinks: Sequence[Sink] = ()) -> Ended:
    """Carry out an order in so many new processes, and wait for its end. Ctrl-C ends the run, a second one kills it."""
    assert order.folder is not None
    with tempfile.TemporaryDirectory(prefix="gradsieve-") as scratch:
        crew = _Crew()
        with _forwarding_interrupts(crew):
            crew.start(order, num_processes, f"file://{scratch}/meeting")
            failure = crew.watch(sinks)
    if crew.interrupted and crew.status != "finished":
        if not (order.folder / RESULT).exists():
            write_result(order.folder, "interrupted", _summary_so_far(order.folder))
        return Ended(order.folder, "interrupted")
    if failure is not None:
        return _failed(order.folder, failure)
    return Ended(order.folder, crew.status)


def _failed(folder: Path, failure: _Failure) -> Ended:
    write_text(folder / ERROR, failure.details)
    write_result(folder, "failed", _summary_so_far(folder), failure.line)
    return Ended(folder, "failed", failure.line)


def _summary_so_far(folder: Path) -> Record:
    try:
        return summary_of(folder)
    except ValueError:  # it failed before there was anything
        return {}


class _Failure(NamedTuple):
    line: str
    details: str
    kind: str = "raised"
    """What a worker died of comes before what others say of it."""


CAUSES = ("died", "raised", "waited")
"""Kinds of failures, the likeliest cause of the others first: no word at all, an error, an exchange given up."""


class _Crew:
    """The processes of one run."""

    def __init__(self) -> None:
        self.status: Status = "interrupted"
        self.interrupted = False
        self._pipes: dict[Connection, int] = {}
        self._done: set[int] = set()
        self._processes: list[ForkServerProcess] = []

    def start(self, order: Order, num_processes: int, meeting: str) -> None:
        context = multiprocessing.get_context("forkserver")
        # torch is imported once, in the server that the workers are forked from, with what optimizers import
        context.set_forkserver_preload(["gradsieve.training.session", "torch._dynamo"])
        with _signals_held():
            for rank in range(num_processes):
                ours, theirs = context.Pipe(duplex=False)
                seat = Seat(rank, num_processes, rank, num_processes, meeting)
                process = context.Process(target=_work, args=(order, seat, theirs), name=f"worker {rank}", daemon=True)
                process.start()
                theirs.close()
                self._pipes[ours] = rank
                self._processes.append(process)

    def watch(self, sinks: Sequence[Sink]) -> _Failure | None:
        """Pass on what the workers tell until all have ended; returns the cause of a failure."""
        failures: list[_Failure] = []
        deadline = math.inf
        try:
            while self._pipes and monotonic() < deadline:
                for pipe in wait(list(self._pipes), timeout=REMINDER_SECONDS):
                    failures += self._hear(cast("Connection", pipe), sinks)
                if failures:
                    deadline = min(deadline, monotonic() + GRACE_SECONDS)
                if self.interrupted:
                    self.interrupt()  # again, for a worker that was not there yet
        finally:
            self.kill()
            for sink in sinks:
                sink.close()
        failure = min(failures, key=lambda failure: CAUSES.index(failure.kind), default=None)
        return None if failure is None else self._with_silent_ones(failure)

    def _with_silent_ones(self, failure: _Failure) -> _Failure:
        """Those that were waited for, and did not end by themselves either, hung."""
        if failure.kind != "waited" or not self._pipes:
            return failure
        names = ", ".join(f"worker {rank}" for rank in sorted(self._pipes.values()))
        return failure._replace(line=f"{failure.line}. No answer came from {names}")

    def _hear(self, pipe: Connection, sinks: Sequence[Sink]) -> list[_Failure]:
        rank = self._pipes[pipe]
        try:
            message: _Message = pipe.recv()
        except (EOFError, OSError):
            return self._lost(pipe, rank)
        if message.kind == "failed":
            return [_Failure(*message.content)]
        if message.kind == "ended":
            self._done.add(rank)
            self.status = message.content if rank == 0 else self.status
        for sink in sinks:
            if message.kind == "start":
                sink.start(*message.content)
            elif message.kind == "record":
                sink.write(message.content)
        return []

    def _lost(self, pipe: Connection, rank: int) -> list[_Failure]:
        """A worker has closed its pipe: it is done, or it is dead."""
        del self._pipes[pipe]
        if rank in self._done:
            return []
        process = self._processes[rank]
        process.join(GRACE_SECONDS)
        code = process.exitcode
        reason = f"exit code {code}"
        if code is not None and code < 0:
            reason = f"signal {signal.Signals(-code).name}"
        line = f"worker {rank} died ({reason})"
        return [] if code == WORKER_FAILED else [_Failure(line, line, "died")]

    def interrupt(self) -> None:
        """Ask the workers to end after their step."""
        self.interrupted = True
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                with suppress(ProcessLookupError):  # it may end at this moment
                    os.kill(process.pid, signal.SIGINT)

    def kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()


@contextmanager
def _signals_held() -> Iterator[None]:
    """What is started within, and the server of forks for good, gets no signal before it asks for them."""
    resource_tracker.ensure_running()  # its start would let signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


WORKER_FAILED = 70
"""Exit code of a worker that has told why."""


def _work(order: Order, seat: Seat, pipe: Connection) -> None:
    """The life of one worker."""
    interruption = Interruption()
    interruption.install()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    # local workers meet on the loopback interface, whatever the machine's name resolves to
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        ended = carry_out(order, seat, [_PipeSink(pipe)] if seat.rank == 0 else [], interruption)
        pipe.send(_Message("ended", ended.status))
    except BaseException as error:
        with suppress(OSError):  # nobody may be left to hear it
            kind = "waited" if isinstance(error, ExchangeError) else "raised"
            pipe.send(_Message("failed", (one_line(error, seat.rank), traceback.format_exc(), kind)))
        os._exit(WORKER_FAILED)


@contextmanager
def _forwarding_interrupts(crew: _Crew) -> Iterator[None]:
    """Ctrl-C asks the workers to end after their step; the second one does not ask."""
    asked = False

    def forward(number: int, frame: Any) -> None:  # noqa: ARG001 - the signature of a signal handler
        nonlocal asked
        crew.kill() if asked else crew.interrupt()
        asked = True

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
