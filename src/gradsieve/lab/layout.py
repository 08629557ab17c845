"""What a lab's network looks like, and the commands that make it; nothing here runs any."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from gradsieve.checks import UsageError, check_whole

INTERFACE = "eth0"
"""Of every host."""
MOST_HOSTS = 250
"""That the subnet has addresses for."""
MOST_RACKS = 2
BURST_SECONDS = 0.001
"""Of its rate that a link may send at once after a rest: short beside the messages whose time is to be measured, and
long beside the kernel's timers."""
LEAST_BURST = 16_384
"""Bytes: a slow link must let some packets pass at once, or the kernel's timers are too coarse for it."""
MOST_SEGMENT = 65_536
"""Bytes that TCP hands over at once where nobody limits it."""
SEGMENT_SHARE = 15 / 16
"""Of a burst that TCP may hand over at once; the rest is for the headers of its packets. A longer segment is cut by the
queue, packet by packet, and the link then falls short of its rate: two flows over 500 Mbit/s got 360 each."""
QUEUE_SECONDS = 0.1
"""That a packet may wait at a link before packets are dropped."""
_UNITS = {"kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}


class Rate(NamedTuple):
    """Bandwidth of a link, each way."""

    name: str
    bits: int | None
    """In a second; None: as much as the machine can do."""

    @property
    def burst(self) -> int:
        """Bytes that may pass at once."""
        return max(LEAST_BURST, round((self.bits or 0) * BURST_SECONDS / 8))


UNLIMITED = Rate("none", None)


def parse_rate(text: str) -> Rate:
    """As `tc` writes it.

    >>> parse_rate("2.5gbit")
    Rate(name='2.5gbit', bits=2500000000)
    >>> parse_rate("none")
    Rate(name='none', bits=None)
    """
    if text == UNLIMITED.name:
        return UNLIMITED
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", text)
    bits = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if bits < _UNITS["kbit"]:
        raise UsageError(
            f"a rate is a number with kbit, mbit or gbit, such as 100mbit or 2.5gbit, or none; not {text!r}"
        )
    return Rate(text, bits)


@dataclass(frozen=True)
class Layout:
    """Hosts behind links of one rate, on one switch or in two racks with a link between them."""

    hosts: int
    rate: Rate = UNLIMITED
    racks: int = 1
    uplink: Rate = UNLIMITED

    def __post_init__(self) -> None:
        try:
            check_whole("hosts", self.hosts, at_least=1)
            check_whole("racks", self.racks, at_least=1)
        except ValueError as error:
            raise UsageError(str(error)) from error
        if self.hosts > MOST_HOSTS:
            raise UsageError(
                f"hosts must be at most {MOST_HOSTS}, not {self.hosts}: that is what the subnet has room for"
            )
        if self.racks > MOST_RACKS:
            raise UsageError(f"racks must be 1 or {MOST_RACKS}, not {self.racks}: an uplink joins two")
        if self.racks > self.hosts:
            raise UsageError(f"{self.racks} racks need at least {self.racks} hosts, not {self.hosts}")
        if self.racks == 1 and self.uplink != UNLIMITED:
            raise UsageError(f"an uplink of {self.uplink.name} joins two racks: ask for them with --racks {MOST_RACKS}")

    @property
    def segment(self) -> int:
        """Bytes that TCP may hand over at once, so that they pass every link whole."""
        bursts = [rate.burst for rate in (self.rate, self.uplink) if rate.bits is not None]
        return min([MOST_SEGMENT, *(int(SEGMENT_SHARE * burst) for burst in bursts)])

    def rack(self, host: int) -> int:
        """The first hosts are in the first rack."""
        return host * self.racks // self.hosts


def address(host: int) -> str:
    """Of a host. Every lab may have the same ones, as nobody outside sees them."""
    return f"10.77.0.{host + 1}"


def host_name(host: int) -> str:
    """Of a host's network namespace."""
    return f"host{host}"


def port_name(host: int) -> str:
    """Of the switch's end of a host's link."""
    return f"port{host}"


def uplink_name(rack: int) -> str:
    """Of a rack's end of the link between racks."""
    return f"uplink{rack}"


def plan(layout: Layout) -> list[list[str]]:
    """The commands that make the network, in a network namespace that is to be the switch."""
    racks = [command for rack in range(layout.racks) for command in _rack(rack)]
    hosts = [command for host in range(layout.hosts) for command in _host(layout, host)]
    return [*racks, *(_uplink(layout.uplink) if layout.racks > 1 else []), *hosts]


def _rack(rack: int) -> list[list[str]]:
    return [_ip(f"link add rack{rack} type bridge"), _ip(f"link set rack{rack} up")]


def _uplink(rate: Rate) -> list[list[str]]:
    first, second = uplink_name(0), uplink_name(1)
    joined = [_ip(f"link set {name} master rack{rack} up") for rack, name in enumerate((first, second))]
    return [
        _ip(f"link add {first} type veth peer name {second}"),
        *joined,
        *_shaped(first, rate),
        *_shaped(second, rate),
    ]


def _host(layout: Layout, host: int) -> list[list[str]]:
    name, port = host_name(host), port_name(host)
    return [
        _ip(f"netns add {name}"),
        _ip(f"link add {port} type veth peer name {INTERFACE} netns {name}"),
        _ip(f"link set {port} master rack{layout.rack(host)} up"),
        _ip(f"-n {name} link set lo up"),
        # what IPv6 says by itself when an interface comes up would be counted, too
        _ip(f"-n {name} link set {INTERFACE} addrgenmode none gso_max_size {layout.segment} up"),
        _ip(f"-n {name} address add {address(host)}/24 dev {INTERFACE}"),
        # a queue shapes what leaves through an interface: what the host sends at its own end, the rest at the switch's
        *_shaped(INTERFACE, layout.rate, within=name),
        *_shaped(port, layout.rate),
    ]


def _shaped(interface: str, rate: Rate, within: str | None = None) -> list[list[str]]:
    if rate.bits is None:
        return []
    place = [] if within is None else ["-n", within]
    queue = f"root tbf rate {rate.bits}bit burst {rate.burst}b latency {round(1000 * QUEUE_SECONDS)}ms"
    return [["tc", *place, "qdisc", "add", "dev", interface, *queue.split()]]


def _ip(words: str) -> list[str]:
    return ["ip", *words.split()]
