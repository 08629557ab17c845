"""What a step would take over another network."""

from __future__ import annotations

LATENCY = 50e-6
"""Seconds that a message takes, however short."""
GIGABIT = 1e9
"""Bits a second."""


def projected_step_seconds(
    compute_seconds: float, link_bytes: float, messages: float, bandwidth: float, latency: float = LATENCY
) -> float:
    """Seconds of a step whose exchange overlaps with nothing.

    `compute_seconds` is all but the exchange, `link_bytes` what passes through a worker's link each way, `bandwidth`
    that link's bits a second.

    >>> projected_step_seconds(0.010, link_bytes=1_250_000, messages=2, bandwidth=1e9, latency=50e-6)
    0.0201
    """
    if bandwidth <= 0:
        raise ValueError(f"bandwidth must be above 0 bits a second, not {bandwidth!r}")
    return compute_seconds + messages * latency + 8 * link_bytes / bandwidth
