from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from command_line import TESTS, started, until
from gradsieve.counters import Traffic
from gradsieve.lab import names
from gradsieve.lab.layout import Layout, address, parse_rate
from gradsieve.lab.network import LabError, Network, check_tools
from labs import assert_gone, belongings, interfaces, processes_of, put_tools

NUM_BYTES = 2_000_000
RECEIVE = f"""
import socket
server = socket.create_server(("", 5000))
print("ready", flush=True)
connection, _ = server.accept()
count = 0
while part := connection.recv(1 << 20):
    count += len(part)
assert count == {NUM_BYTES}, count
"""
SEND = f"""
import socket
with socket.create_connection(("{address(0)}", 5000), timeout=30) as connection:
    connection.sendall(bytes({NUM_BYTES}))
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for stand-ins, which go before the real ones."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), os.environ["PATH"]]))
    return folder


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool, path: None if tool in ("ip", "tc") else tool)  # noqa: ARG005
    with pytest.raises(LabError, match=r"a lab needs ip, tc: install them \(apt-get install iproute2\)"):
        check_tools()


def test_other_systems_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LabError, match="a lab is made of Linux namespaces, and this is darwin"):
        Network(Layout(2))


def test_missing_rights_are_named(tools: Path) -> None:
    put_tools(tools, unshare="echo 'unshare: unshare failed: Operation not permitted' >&2; exit 1")
    with (
        pytest.raises(
            LabError, match=r"the right to make namespaces \(unshare: unshare failed: Operation not permitted\)"
        ),
        Network(Layout(2)),
    ):
        pass


def test_a_command_that_fails_is_named_and_nothing_is_left(tools: Path) -> None:
    put_tools(
        tools,
        unshare="echo ready; read _",
        nsenter='case "$*" in *tbf*) echo "Error: Specified qdisc kind is unknown." >&2; exit 2;; esac',
    )
    lab = Network(Layout(1, parse_rate("1gbit")))
    with (
        pytest.raises(LabError, match=r"cannot be made: tc .* says 'Error: Specified qdisc kind is unknown.'; the"),
        lab,
    ):
        pass
    assert lab.name not in names.processes().values()


def test_a_lab_that_is_not_there_has_no_process(tools: Path) -> None:
    put_tools(tools)
    lab = Network(Layout(1))
    with pytest.raises(RuntimeError, match="use `with Network"):
        lab.inside(["true"])
    lab.close()


def test_a_user_enters_the_lab_as_the_user_who_made_it(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_tools(tools, unshare='echo "$@" >&2; echo ready; read _')
    for user, words in ((0, []), (1000, ["--user", "--preserve-credentials"])):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        with Network(Layout(1)) as lab:
            spaces = ["--mount", "--net", f"--pid=/proc/{lab.process}/ns/pid_for_children"]
            enter = ["nsenter", f"--target={lab.process}", *words, *spaces]
            assert lab.inside(["true"]) == [*enter, "true"]
            assert lab.inside(["true"], host=3) == [*enter, "nsenter", "--net=/run/netns/host3", "true"]


def run(lab: Network, command: Sequence[str], host: int | None = None) -> str:
    done = subprocess.run(lab.inside(command, host), capture_output=True, text=True, timeout=30, check=True)
    return done.stdout


def send(lab: Network, sender: int) -> None:
    """From a host to host 0."""
    receiver = subprocess.Popen(lab.inside([sys.executable, "-c", RECEIVE], 0), stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    with receiver:
        assert receiver.stdout.readline() == b"ready\n"
        run(lab, [sys.executable, "-c", SEND], sender)
        assert receiver.wait(timeout=30) == 0


def grown(before: list[Traffic], after: list[Traffic]) -> list[Traffic]:
    return [Traffic(b.received - a.received, b.sent - a.sent) for a, b in zip(before, after, strict=True)]


@pytest.mark.root
@pytest.mark.parametrize("user", [0, 1000], ids=["root", "user namespace"])
def test_hosts_reach_one_another_and_bytes_are_counted(user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if user:
        monkeypatch.setattr(os, "geteuid", lambda: user)
    with Network(Layout(3, parse_rate("1gbit"))) as lab:
        before = lab.host_traffic()
        send(lab, sender=2)
        found = grown(before, lab.host_traffic())
        assert found[2].sent == pytest.approx(NUM_BYTES, rel=0.1)
        assert found[0].received == pytest.approx(NUM_BYTES, rel=0.1)
        assert max(found[1]) < 0.1 * NUM_BYTES
        assert lab.uplink_traffic() is None


@pytest.mark.root
def test_racks_meet_on_their_uplink_only() -> None:
    with Network(Layout(4, parse_rate("1gbit"), racks=2, uplink=parse_rate("500mbit"))) as lab:
        send(lab, sender=1)
        within = lab.uplink_traffic()
        send(lab, sender=3)
        between = lab.uplink_traffic()
    assert within is not None
    assert between is not None
    assert within.received < 0.1 * NUM_BYTES
    assert between.received - within.received == pytest.approx(NUM_BYTES, rel=0.1)


@pytest.mark.root
def test_links_have_their_rates_at_both_ends() -> None:
    with Network(Layout(2, parse_rate("100mbit"))) as lab:
        for queues in (run(lab, ["tc", "qdisc", "show", "dev", "port1"]), run(lab, ["tc", "qdisc"], host=1)):
            assert "tbf" in queues
            assert "rate 100Mbit" in queues
    with Network(Layout(2)) as lab:
        assert "tbf" not in run(lab, ["tc", "qdisc"]) + run(lab, ["tc", "qdisc"], host=1)


@pytest.mark.root
def test_two_labs_at_the_same_time() -> None:
    before = interfaces()
    with Network(Layout(2)) as first, Network(Layout(2)) as second:
        assert first.name != second.name
        send(first, sender=1)
        assert second.host_traffic()[1].sent < 0.1 * NUM_BYTES
        send(second, sender=1)
        assert interfaces() == before


@pytest.mark.root
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_after_the_context(error: type[BaseException] | None) -> None:
    before = interfaces()
    raised = contextlib.nullcontext() if error is None else contextlib.suppress(error)
    with raised, Network(Layout(2, parse_rate("1gbit"))) as lab:
        asleep = subprocess.Popen(lab.inside(["sleep", "600"], 1), env=lab.environment(), start_new_session=True)
        until(lambda: len(processes_of(os.getpid())) >= 4, "a process on a host")
        owned = belongings(os.getpid())
        if error is not None:
            raise error
    assert_gone(owned, before)
    assert asleep.wait(timeout=30) == -signal.SIGKILL


@pytest.mark.root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_lab_whose_process_ends(number: signal.Signals, tmp_path: Path) -> None:
    before = interfaces()
    with started([sys.executable, str(TESTS / "lab_owner.py")], tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        until(lambda: len(processes_of(process.pid)) >= 6, "processes on both hosts")
        owned = belongings(process.pid)
        assert len(owned.networks) == 3
        # to the process alone: what hangs on it must find out by itself
        os.kill(process.pid, number)
        assert_gone(owned, before)
        assert process.wait(timeout=30) != 0
