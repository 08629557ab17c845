from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from gradsieve import counters
from gradsieve.checks import UsageError
from gradsieve.counters import Traffic, check_interface, parse, sent_bytes, traffic

DEV = """\
Inter-|   Receive                                     |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo:     120       2    0    0    0     0    0    0      120       2    0    0    0     0    0    0
  eth0: 5000000     700    0    0    0     0    0    0 70000000    9000    0    0    0     0    0    0
eth0.7:1 2 0 0 0 0 0 0 3 4 0 0 0 0 0 0
"""


def test_counters_by_interface() -> None:
    assert parse(DEV) == {"lo": Traffic(120, 120), "eth0": Traffic(5_000_000, 70_000_000), "eth0.7": Traffic(1, 3)}


def test_what_is_sent_is_counted() -> None:
    receiver, sender = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    with receiver, sender:
        receiver.bind(("127.0.0.1", 0))
        before = sent_bytes("lo")
        sender.sendto(bytes(10_000), receiver.getsockname())
        assert len(receiver.recv(20_000)) == 10_000
        assert sent_bytes("lo") - before >= 10_000
    assert traffic(os.getpid()).keys() == traffic().keys()


def test_an_interface_that_is_not_here_is_refused() -> None:
    check_interface(None)
    check_interface("lo")
    with pytest.raises(UsageError, match=r"there is no 'eht7' on this machine; .*valid are: .*lo"):
        check_interface("eht7")


def test_a_machine_without_counters_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(counters, "Path", lambda _: tmp_path)
    with pytest.raises(UsageError, match="which Linux has and which cannot be read here"):
        check_interface("lo")
