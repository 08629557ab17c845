"""Time by phase, without a host synchronisation on CUDA."""

from __future__ import annotations

from time import perf_counter
from typing import Any, Protocol

import torch


class Instant(Protocol):
    """A point in time, on the host or in a CUDA stream."""

    def seconds_until(self, later: Any) -> float: ...


class _HostInstant:
    def __init__(self) -> None:
        self._time = perf_counter()

    def seconds_until(self, later: _HostInstant) -> float:
        return later._time - self._time


class _CudaInstant:
    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def seconds_until(self, later: _CudaInstant) -> float:
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event)) / 1000


class Stopwatch:
    """Adds up the time spent in named phases; one phase runs at a time.

    On CUDA a switch records an event on the current stream, and only `seconds` waits for the last of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase: str | None = None
        self._since = self._now()
        self._laps: list[tuple[str, Instant, Instant]] = []

    def switch(self, phase: str | None) -> str | None:
        """End the running phase, start `phase` (None: nothing is timed) and return the one that ended."""
        ended, now = self._phase, self._now()
        if ended is not None:
            self._laps.append((ended, self._since, now))
        self._phase, self._since = phase, now
        return ended

    def seconds(self) -> dict[str, float]:
        totals: dict[str, float] = {}
        for phase, start, stop in self._laps:
            totals[phase] = totals.get(phase, 0.0) + start.seconds_until(stop)
        return totals

    def _now(self) -> Instant:
        return _CudaInstant(self._device) if self._device.type == "cuda" else _HostInstant()
