"""Messages of a step, the bytes that they send through a link, and their time there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["all_reduce", "all_gather", "all_to_all", "broadcast"]


@dataclass(frozen=True)
class Link:
    """A rank's way to the others."""

    bandwidth: float
    """Bits a second, each way, that collectives reach."""
    latency: float
    """Seconds from one rank to the next, the software's included: of one round of a collective."""
    direct_bytes: int = 0
    """Up to so many bytes, over all that it is for, this library sends a message directly and not in a ring."""

    def as_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Link:
        return cls(**record)


class Message(NamedTuple):
    """One collective."""

    kind: Kind
    num_bytes: float
    """That a rank hands over; in a broadcast, its source."""
    ours: bool = True
    """Sent by this library, which may send it directly. PyTorch's own hooks leave it to the process group."""


def link_bytes(message: Message, world: int) -> float:
    """Bytes through a rank's link, each way. Directly or in a ring, they are the same.

    >>> [link_bytes(Message(kind, 100), world=4) for kind in ("all_reduce", "all_gather", "all_to_all", "broadcast")]
    [150.0, 300.0, 75.0, 100.0]
    >>> link_bytes(Message("all_gather", 100), world=1)
    0.0
    """
    times = {
        "all_reduce": 2 * (world - 1) / world,
        "all_gather": world - 1,
        "all_to_all": (world - 1) / world,
        "broadcast": min(1, world - 1),
    }
    return float(message.num_bytes * times[message.kind])


def goes_directly(message: Message, world: int, link: Link) -> bool:
    """Does every rank send it to every other at once, in place of handing it on around a ring?"""
    fan_out = world if message.kind == "all_gather" else 1
    return message.ours and message.kind != "broadcast" and fan_out * message.num_bytes <= link.direct_bytes


def rounds(message: Message, world: int, *, direct: bool) -> int:
    """How often some rank waits for another one's part, one after the other.

    A ring hands on N - 1 times, and twice that often if it sums up first; a broadcast goes along a tree.

    >>> [rounds(Message("all_reduce", 100), world=16, direct=direct) for direct in (False, True)]
    [30, 2]
    >>> [rounds(Message(kind, 100), world=16, direct=False) for kind in ("all_gather", "all_to_all", "broadcast")]
    [15, 1, 4]
    """
    if world == 1:
        return 0
    by_kind = {
        "all_reduce": 2 if direct else 2 * (world - 1),
        "all_gather": 1 if direct else world - 1,
        "all_to_all": 1,
        "broadcast": math.ceil(math.log2(world)),
    }
    return by_kind[message.kind]


def seconds(message: Message, world: int, link: Link) -> float:
    """Latency of its rounds, then its bytes at the link's bandwidth.

    >>> seconds(Message("all_reduce", 50_000_000), world=2, link=Link(bandwidth=1e9, latency=1e-4))
    0.4002
    """
    waiting = rounds(message, world, direct=goes_directly(message, world, link)) * link.latency
    return waiting + 8 * link_bytes(message, world) / link.bandwidth


def total_seconds(messages: Iterable[Message], world: int, link: Link) -> float:
    """Of messages one after the other."""
    return sum(seconds(message, world, link) for message in messages)


def total_link_bytes(messages: Iterable[Message], world: int) -> float:
    return sum(link_bytes(message, world) for message in messages)
