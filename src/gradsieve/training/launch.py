"""Starts the processes of a run on this machine, watches over them, and ends them all when one fails."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
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


class Job(NamedTuple):
    """A run to be launched: in so many processes, heard by these sinks."""

    order: Order
    num_processes: int
    sinks: Sequence[Sink] = ()


def launch(order: Order, num_processes: int, sinks: Sequence[Sink] = ()) -> Ended:
    """Carry out an order in so many new processes, and wait for its end. Ctrl-C ends the run, a second one kills it."""
    (ended,) = launch_each([Job(order, num_processes, sinks)])
    return ended


def launch_each(jobs: Iterable[Job], at_once: int = 1) -> Generator[Ended, None, None]:
    """Carry out jobs, so many at a time, and tell of each when it ends. Ctrl-C ends those under way, and starts no
    more; a second one kills them."""
    fleet = _Fleet()
    waiting = iter(jobs)
    with tempfile.TemporaryDirectory(prefix="gradsieve-") as scratch, _forwarding_interrupts(fleet):
        try:
            while True:
                while len(fleet.crews) < at_once and not fleet.interrupted and (job := next(waiting, None)) is not None:
                    fleet.start(job, f"file://{scratch}")
                if not fleet.crews:
                    return
                for crew in fleet.watch():
                    yield _ended(crew)
        finally:
            fleet.close()


class _Fleet:
    """The crews of the runs under way."""

    def __init__(self) -> None:
        self.crews: list[_Crew] = []
        self.interrupted = False
        self._started = 0

    def start(self, job: Job, meetings: str) -> None:
        crew = _Crew(job)
        self.crews.append(crew)
        self._started += 1
        crew.start(f"{meetings}/meeting-{self._started}")

    def watch(self) -> list[_Crew]:
        """Hear the workers once; returns the crews that are done, which leave."""
        owners = {pipe: crew for crew in self.crews for pipe in crew.pipes}
        for pipe in wait(list(owners), timeout=REMINDER_SECONDS):
            owners[cast("Connection", pipe)].hear(cast("Connection", pipe))
        if self.interrupted:
            self.interrupt()  # again, for a worker that was not there yet
        done = [crew for crew in self.crews if crew.over]
        for crew in done:
            crew.close()
            self.crews.remove(crew)
        return done

    def close(self) -> None:
        """End those that whoever asked for them no longer waits for."""
        for crew in self.crews:
            crew.close()

    def interrupt(self) -> None:
        self.interrupted = True
        for crew in self.crews:
            crew.interrupt()

    def kill(self) -> None:
        for crew in self.crews:
            crew.kill()


def _ended(crew: _Crew) -> Ended:
    """What became of a run whose crew is done."""
    folder, failure = crew.folder, crew.failure
    if crew.interrupted and crew.status != "finished":
        if not (folder / RESULT).exists():
            write_result(folder, "interrupted", _summary_so_far(folder))
        return Ended(folder, "interrupted")
    if failure is not None:
        return _failed(folder, failure)
    return Ended(folder, crew.status)


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
    """The processes of one run, watched over from their start to their end."""

    def __init__(self, job: Job) -> None:
        assert job.order.folder is not None
        self.folder = job.order.folder
        self.status: Status = "interrupted"
        self.interrupted = False
        self._job = job
        self._failures: list[_Failure] = []
        self._deadline = math.inf
        self._pipes: dict[Connection, int] = {}
        self._done: set[int] = set()
        self._processes: list[ForkServerProcess] = []

    @property
    def pipes(self) -> list[Connection]:
        """Of the workers that have not ended."""
        return list(self._pipes)

    @property
    def over(self) -> bool:
        """Have all ended, or had the time to, once one failed?"""
        return not self._pipes or monotonic() >= self._deadline

    @property
    def failure(self) -> _Failure | None:
        """The cause of a failure."""
        failure = min(self._failures, key=lambda failure: CAUSES.index(failure.kind), default=None)
        return None if failure is None else self._with_silent_ones(failure)

    def start(self, meeting: str) -> None:
        order, num_processes, _ = self._job
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

    def close(self) -> None:
        """Nothing is left of it."""
        self.kill()
        for sink in self._job.sinks:
            sink.close()

    def _with_silent_ones(self, failure: _Failure) -> _Failure:
        """Those that were waited for, and did not end by themselves either, hung."""
        if failure.kind != "waited" or not self._pipes:
            return failure
        names = ", ".join(f"worker {rank}" for rank in sorted(self._pipes.values()))
        return failure._replace(line=f"{failure.line}. No answer came from {names}")

    def hear(self, pipe: Connection) -> None:
        """Pass on what a worker tells; once one has failed, the others have little time left."""
        self._failures += self._heard(pipe)
        if self._failures:
            self._deadline = min(self._deadline, monotonic() + GRACE_SECONDS)

    def _heard(self, pipe: Connection) -> list[_Failure]:
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
        for sink in self._job.sinks:
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
def _forwarding_interrupts(fleet: _Fleet) -> Iterator[None]:
    """Ctrl-C asks the workers to end after their step; the second one does not ask."""
    asked = False

    def forward(number: int, frame: Any) -> None:  # noqa: ARG001 - the signature of a signal handler
        nonlocal asked
        fleet.kill() if asked else fleet.interrupt()
        asked = True

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
