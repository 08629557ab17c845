from __future__ import annotations

import re

import pytest

from gradsieve.checks import UsageError
from gradsieve.lab.layout import LEAST_BURST, UNLIMITED, Layout, Rate, address, parse_rate, plan

FAST = parse_rate("1gbit")


@pytest.mark.parametrize(
    ("text", "bits"),
    [("100mbit", 100_000_000), ("1gbit", 10**9), ("10gbit", 10**10), ("2.5gbit", 2_500_000_000), ("64kbit", 64_000)],
)
def test_rates(text: str, bits: int) -> None:
    assert parse_rate(text) == Rate(text, bits)


@pytest.mark.parametrize("text", ["", "1", "fast", "1 gbit", "-1gbit", "1gbps", "0mbit", "1e3mbit", "0.1kbit", "None"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"such as 100mbit or 2.5gbit, or none; not {re.escape(repr(text))}"):
        parse_rate(text)


def test_a_burst_is_a_moment_of_the_rate() -> None:
    assert FAST.burst == 125_000
    assert parse_rate("10gbit").burst == 1_250_000
    assert parse_rate("100mbit").burst == LEAST_BURST


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        ({"hosts": 0}, "hosts must be at least 1, not 0"),
        ({"hosts": 251}, "hosts must be at most 250, not 251"),
        ({"hosts": 4, "racks": 0}, "racks must be at least 1, not 0"),
        ({"hosts": 4, "racks": 3}, "racks must be 1 or 2, not 3"),
        ({"hosts": 1, "racks": 2}, "2 racks need at least 2 hosts, not 1"),
        ({"hosts": 4, "uplink": FAST}, "an uplink of 1gbit joins two racks: ask for them with --racks 2"),
    ],
)
def test_layouts_that_cannot_be(layout: dict[str, int], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Layout(**layout)  # type: ignore[arg-type]


@pytest.mark.parametrize(("hosts", "racks"), [(2, [0, 1]), (4, [0, 0, 1, 1]), (5, [0, 0, 0, 1, 1])])
def test_the_first_hosts_are_in_the_first_rack(hosts: int, racks: list[int]) -> None:
    assert [Layout(hosts, racks=2).rack(host) for host in range(hosts)] == racks


def test_addresses_differ() -> None:
    assert len({address(host) for host in range(250)}) == 250
    assert address(0) == "10.77.0.1"


def lines(layout: Layout) -> list[str]:
    return [" ".join(command) for command in plan(layout)]


def test_the_commands_of_one_host() -> None:
    queue = "root tbf rate 1000000000bit burst 125000b latency 100ms"
    assert lines(Layout(1, FAST)) == [
        "ip link add rack0 type bridge",
        "ip link set rack0 up",
        "ip netns add host0",
        "ip link add port0 type veth peer name eth0 netns host0",
        "ip link set port0 master rack0 up",
        "ip -n host0 link set lo up",
        "ip -n host0 link set eth0 addrgenmode none gso_max_size 65536 up",
        "ip -n host0 address add 10.77.0.1/24 dev eth0",
        f"tc -n host0 qdisc add dev eth0 {queue}",
        f"tc qdisc add dev port0 {queue}",
    ]


def test_a_link_without_a_limit_is_not_shaped() -> None:
    assert not any(line.startswith("tc ") for line in lines(Layout(3, UNLIMITED)))


def test_two_racks_are_joined_by_a_shaped_link() -> None:
    found = lines(Layout(4, FAST, racks=2, uplink=parse_rate("500mbit")))
    assert "ip link add uplink0 type veth peer name uplink1" in found
    for rack in (0, 1):
        assert f"ip link set uplink{rack} master rack{rack} up" in found
        assert f"tc qdisc add dev uplink{rack} root tbf rate 500000000bit burst 62500b latency 100ms" in found
    assert [line for line in found if "master rack1" in line and "port" in line] == [
        f"ip link set port{host} master rack1 up" for host in (2, 3)
    ]
