"""The time of a call on a device, with cold caches.

[Note: cold caches]
Before each call a buffer larger than any cache is overwritten. So every call finds nothing of its data in a cache, as
after a backward pass, and pays for writing back as many dirty lines as it leaves behind: what it moves is counted
once, and a vector that would fit into a cache shows no bandwidth that memory does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple, TypeAlias

import torch

Call: TypeAlias = Callable[[], None]

FLUSH_BYTES = 128 << 20
"""More than the caches of most processors; on CUDA at least four times the L2 cache."""
WARMUP = 5
"""Calls before the first that counts: allocations, compilation, thresholds that settle."""
PROBE_CYCLES = 10_000_000
LEAD_SECONDS = 3e-4
"""How far the host is ahead of the device at least, when it begins to hand over a call."""


class Timing(NamedTuple):
    """Seconds of each repeat."""

    device: list[float]
    """On the device that does the work."""
    host: list[float] | None
    """Until the call came back, on an idle device; None where host and device are one."""
    extra_bytes: int | None
    """Memory that a call took for itself at its peak; None where nobody counts."""


class Case(NamedTuple):
    """What is timed."""

    call: Call
    prepare: Call = lambda: None
    """Done before each call, untimed."""


class Timer:
    """Times calls on one device."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._device = device
        self._repeats = repeats
        self.flush_bytes = FLUSH_BYTES
        if device.type == "cuda":
            cache = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
            self.flush_bytes = max(FLUSH_BYTES, 4 * cache)
            self._cycles_per_second = self._sleeping_speed()
        self._buffer = torch.empty(self.flush_bytes // 4, device=device)

    @property
    def caches(self) -> str:
        """The state of the caches, in words."""
        return f"cold caches: {self.flush_bytes >> 20} MiB are overwritten before each call"

    def __call__(self, case: Case) -> Timing:
        for _ in range(WARMUP):
            case.prepare()
            case.call()
        if self._device.type != "cuda":
            return Timing([self._seconds(case) for _ in range(self._repeats)], None, None)
        torch.cuda.synchronize(self._device)
        extra_bytes = self._extra_bytes(case)
        host = [self._host_seconds(case) for _ in range(self._repeats)]
        lead = LEAD_SECONDS + 2 * sorted(host)[len(host) // 2]
        return Timing(self._device_seconds(case, lead), host, extra_bytes)

    def _seconds(self, case: Case) -> float:
        case.prepare()
        self._buffer.fill_(0)
        start = perf_counter()
        case.call()
        return perf_counter() - start

    def _host_seconds(self, case: Case) -> float:
        case.prepare()
        self._buffer.fill_(0)
        torch.cuda.synchronize(self._device)
        start = perf_counter()
        case.call()
        seconds = perf_counter() - start
        torch.cuda.synchronize(self._device)
        return seconds

    def _device_seconds(self, case: Case, lead: float) -> list[float]:
        """The device is kept busy while the host hands over the call, so that launches are not what is measured."""
        pairs = []
        for _ in range(self._repeats):
            start, stop = _event(), _event()
            case.prepare()
            torch.cuda._sleep(int(lead * self._cycles_per_second))  # type: ignore[no-untyped-call]
            self._buffer.fill_(0)
            start.record()
            case.call()
            stop.record()
            pairs.append((start, stop))
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(stop) / 1000 for start, stop in pairs]

    def _extra_bytes(self, case: Case) -> int:
        case.prepare()
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        case.call()
        return torch.cuda.max_memory_allocated(self._device) - before

    def _sleeping_speed(self) -> float:
        """Cycles of `_sleep` in a second."""
        with torch.cuda.device(self._device):
            for _ in range(2):  # the first wakes the device up
                start, stop = _event(), _event()
                start.record()
                torch.cuda._sleep(PROBE_CYCLES)  # type: ignore[no-untyped-call]
                stop.record()
                torch.cuda.synchronize(self._device)
        return PROBE_CYCLES / (float(start.elapsed_time(stop)) / 1000)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
