from __future__ import annotations

import pytest

from gradsieve.projection import LATENCY, projected_step_seconds


def test_bytes_messages_and_computing_add_up() -> None:
    seconds = projected_step_seconds(0.01, link_bytes=125_000, messages=4, bandwidth=1e9, latency=0.001)
    assert seconds == pytest.approx(0.01 + 0.001 + 0.004)


def test_without_an_exchange_only_the_computing_is_left() -> None:
    assert projected_step_seconds(0.01, 0, 0, 1e8) == 0.01


def test_ten_times_the_bandwidth_takes_a_tenth_of_the_transfer() -> None:
    slow, fast = (projected_step_seconds(0, 1e6, 0, bandwidth) for bandwidth in (1e9, 1e10))
    assert slow == pytest.approx(10 * fast)


def test_a_message_takes_its_latency_by_default() -> None:
    assert projected_step_seconds(0, 0, 3, 1e9) == pytest.approx(3 * LATENCY)


@pytest.mark.parametrize("bandwidth", [0, -1.0])
def test_no_bandwidth_is_refused(bandwidth: float) -> None:
    with pytest.raises(ValueError, match="bandwidth must be above 0"):
        projected_step_seconds(0.01, 1, 1, bandwidth)
