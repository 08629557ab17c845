"""The time and the bytes of a step by any method: what a rank does, what it sends, and what of it backward hides.

A scheme is a row of `gradsieve bench step`, by the same name. The names of the methods are this library's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from gradsieve import control, wire
from gradsieve.checks import UsageError, check_choice, check_fraction, check_number, check_whole, nearest
from gradsieve.cost.machine import Machine
from gradsieve.cost.messages import Link, Message, total_link_bytes, total_seconds
from gradsieve.rounding import num_bytes, wire_dtype
from gradsieve.types import WAYS

ZERO_LINE, HEADROOM, HALVES = "plain DDP", "no-op hook", ("fp16 hook", "bf16 hook")
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20
"""Bytes of DDP's buckets: of the first to be ready, which is small, and of all others."""
BACKWARD_SHARE = 2 / 3
"""Of the time that a step computes: a backward pass does twice a forward pass's work."""
FLOAT, HALF, COUNT = 4, 2, 8
"""Bytes of a value, of one in half the bits, and of a count."""
COMPRESSION = 2
"""PowerSGD leaves a matrix alone that it would not make smaller by this factor (its `min_compression_rate`)."""

Matrix: TypeAlias = tuple[int, int]
Work: TypeAlias = Literal["scan", "sort", "weigh"]


@dataclass(frozen=True)
class Load:
    """What a step has to do, whichever way."""

    numel: int
    """Parameters of the model."""
    world: int
    density: float = 0.01
    wire: str = "float32"
    scope: str = "model"
    compute: float = 0.0
    """Seconds of forward and backward."""
    backward_share: float = BACKWARD_SHARE
    """Of those seconds."""
    excluded: int = 0
    """Parameters of fewer than two dimensions, which always travel whole."""
    num_tensors: int = 1
    matrices: tuple[Matrix, ...] = ()
    """Rows and columns of the other parameters, as PowerSGD sees them."""

    def __post_init__(self) -> None:
        try:
            check_whole("parameters", self.numel, at_least=1)
            check_whole("workers", self.world, at_least=1)
            check_fraction("density", self.density)
            check_choice("wire", self.wire, WAYS["wire"])
            check_choice("scope", self.scope, WAYS["scope"])
            check_number("compute", self.compute, at_least=0)
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from error

    @classmethod
    def of_shapes(cls, shapes: Sequence[tuple[int, ...]], world: int) -> Load:
        """Of a model with parameters of these shapes.

        >>> Load.of_shapes([(8, 4, 3, 3), (8,)], world=2).matrices
        ((8, 36),)
        """
        sizes = [math.prod(shape) for shape in shapes]
        flat = [size for shape, size in zip(shapes, sizes, strict=True) if len(shape) < 2]
        matrices = tuple(
            (shape[0], size // shape[0]) for shape, size in zip(shapes, sizes, strict=True) if len(shape) > 1 and size
        )
        return cls(sum(sizes), world, excluded=sum(flat), num_tensors=len(shapes), matrices=matrices)

    @property
    def sparse(self) -> int:
        """Entries that a method chooses from."""
        return self.numel - self.excluded

    @property
    def target(self) -> int:
        return min(self.sparse, max(1, int(self.density * self.sparse)))


@dataclass(frozen=True)
class Prediction:
    """A step of one scheme, as foretold."""

    name: str
    select_seconds: float
    """Of the rank's own work for it."""
    exchange_seconds: float
    """Of its messages."""
    step_seconds: float
    """Of the whole step, forward and backward included: less than the sum where backward hides messages."""
    link_bytes: float
    """Through a rank's link, each way."""
    wire_bytes: float
    """That a rank hands to collectives; of a broadcast its share."""
    density: float
    """Share of the entries whose values travel."""


def buckets(numel: int) -> list[int]:
    """Entries in each of DDP's buckets, in the order in which backward has them ready.

    >>> buckets(11_173_962)
    [262144, 6553600, 4358218]
    """
    sizes, left, room = [], numel, FIRST_BUCKET // FLOAT
    while left > 0:
        sizes.append(min(left, room))
        left, room = left - sizes[-1], BUCKET // FLOAT
    return sizes


def finished(ready: Sequence[float], durations: Sequence[float]) -> float:
    """When the last of several exchanges ends that go one after the other, none before it is ready.

    >>> finished([1.0, 2.0, 3.0], [0.5, 2.0, 1.0])
    5.0
    """
    end = 0.0
    for moment, duration in zip(ready, durations, strict=True):
        end = max(end, moment) + duration
    return end


def predict(name: str, load: Load, link: Link, machine: Machine) -> Prediction:
    """A step of the scheme of that name.

    >>> from gradsieve.cost.machine import CPU
    >>> link = Link(bandwidth=1e9, latency=5e-5)
    >>> dense, micro = (predict(name, Load(11_173_962, world=4), link, CPU) for name in ("plain DDP", "micro"))
    >>> round(dense.step_seconds, 3), round(micro.step_seconds, 3)
    (0.537, 0.021)
    """
    if name == HEADROOM:
        return Prediction(name, 0.0, 0.0, load.compute, 0.0, 0.0, 0.0)
    return scheme(name)(name, load, link, machine)


Scheme: TypeAlias = Callable[[str, Load, Link, Machine], Prediction]


def scheme(name: str) -> Scheme:
    """What foretells the row of that name."""
    found = re.fullmatch(r"PowerSGD rank ([1-9]\d*)", name)
    if found:
        return lambda *given: _power_sgd(int(found[1]), *given)
    known: dict[str, Scheme] = {
        ZERO_LINE: _by_bucket,
        "fp16 hook": _by_bucket,
        "bf16 hook": _by_bucket,
        "dense": _whole,
    }
    known |= dict.fromkeys(SPARSE, _sparse)
    if name not in known:
        raise UsageError(f"there is no cost model for {name!r}; {nearest(name, [*known, 'PowerSGD rank N'])}")
    return known[name]


def messages(name: str, load: Load) -> list[Message]:
    """The collectives of a step, in their order, as if nothing were split into buckets but what DDP splits itself."""
    found = re.fullmatch(r"PowerSGD rank ([1-9]\d*)", name)
    if found:
        return _factors(int(found[1]), load)
    if name in SPARSE:
        return _sparse_messages(SPARSE[name], load)
    if name == "dense":
        return [Message("all_reduce", FLOAT * (load.numel + load.world))]
    width = FLOAT if name == ZERO_LINE else HALF
    return [Message("all_reduce", width * size, ours=False) for size in buckets(load.numel)]


# PyTorch's own ----------------------------------------------------------------------------------------------------


def _by_bucket(name: str, load: Load, link: Link, machine: Machine) -> Prediction:
    """All-reduces of buckets, each as soon as backward has its gradients: what backward hides costs nothing."""
    local = load.numel * (machine.sweep if name == ZERO_LINE else machine.cast)
    sent = messages(name, load)
    durations = [total_seconds([message], load.world, link) for message in sent]
    end = finished(_ready(load, buckets(load.numel), local), durations)
    return _prediction(name, local, sum(durations), end, sent, load, 1.0)


def _ready(load: Load, sizes: Sequence[int], local: float) -> list[float]:
    """When the gradients of each bucket are there, and what a rank does with them is done."""
    forward, backward = load.compute * (1 - load.backward_share), load.compute * load.backward_share
    return [forward + (backward + local) * done / max(1, sum(sizes)) for done in accumulate(sizes)]


def _power_sgd(rank: int, name: str, load: Load, link: Link, machine: Machine) -> Prediction:
    """Two all-reduces of factors once all of backward is done: over gloo it needs one bucket."""
    entries = sum(rows * columns for rows, columns in _compressed(rank, load))
    per_entry = machine.low_rank + (rank - 1) * machine.low_rank_more
    local = entries * per_entry + rank * len(_compressed(rank, load)) * machine.column + machine.step
    sent = _factors(rank, load)
    exchange = total_seconds(sent, load.world, link)
    share = sum(message.num_bytes for message in sent) / FLOAT / load.numel
    return _prediction(name, local, exchange, load.compute + local + exchange, sent, load, share)


def _compressed(rank: int, load: Load) -> list[Matrix]:
    """The matrices that are worth it; of a model that is known by its size alone, as many as one is made of."""
    return [
        (rows, columns) for rows, columns in load.matrices if COMPRESSION * (rows + columns) * rank < rows * columns
    ]


def _factors(rank: int, load: Load) -> list[Message]:
    chosen = _compressed(rank, load)
    whole = load.numel - sum(rows * columns for rows, columns in chosen)
    sizes = [whole, rank * sum(rows for rows, _ in chosen), rank * sum(columns for _, columns in chosen)]
    return [Message("all_reduce", FLOAT * size, ours=False) for size in sizes if size]


# This library's ---------------------------------------------------------------------------------------------------


class Sparse(NamedTuple):
    """What the time of a method hangs on."""

    work: Work
    """How entries are chosen."""
    counts: bool = False
    """A message of counts settles the threshold."""
    exclusive: bool = False
    """Every rank looks at its own share of the entries only."""
    imbalance: float = 0.0
    """By how much the longest list exceeds the mean one, more with each doubling of the ranks: what all are padded to.
    Seen on the gradients of `gradsieve bench`, whose layers differ in scale, with 2 to 32 ranks."""
    alone: bool = False
    """One rank chooses for all, and the others wait for it."""
    builds_up: bool = False
    """The support is the union of as many entries of each rank: it grows with the number of ranks."""


SPARSE: Mapping[str, Sparse] = MappingProxyType(
    {
        "topk": Sparse("sort", builds_up=True),
        "cltk": Sparse("sort", alone=True),
        "micro": Sparse("scan", counts=True, exclusive=True, imbalance=0.8),
        "exdyna": Sparse("scan", counts=True, exclusive=True, imbalance=0.1),
        "union": Sparse("scan", counts=True, imbalance=0.07),
        "iwp": Sparse("weigh", counts=True, alone=True),
    }
)


LIVELY = 0.3
"""Share of the entries that have a chance to be chosen, as layers differ in scale. With it the union of what ranks
choose is within a tenth of what `simulate` finds on the gradients of `gradsieve bench` with 2 to 32 ranks."""


def support(method: Sparse, load: Load) -> float:
    """Entries whose values travel: the target, or what it builds up to where each rank adds its own.

    Of the lively entries, a rank chooses as if at random.

    >>> [round(support(SPARSE["topk"], Load(1_000_000, world)) / 10_000, 1) for world in (2, 4, 16, 64, 4096)]
    [2.0, 3.8, 12.6, 26.6, 30.0]
    """
    return _union(load.target, load) if method.builds_up else float(load.target)


def _union(each: float, load: Load) -> float:
    """Entries that some rank chooses, if each chooses so many."""
    lively = max(LIVELY * load.sparse, each)
    return lively * (1 - (1 - each / lively) ** load.world) if lively else 0.0


def _each(together: float, load: Load) -> float:
    """Entries that each rank chooses, if they are so many together: the inverse of `_union`."""
    lively = max(LIVELY * load.sparse, together)
    return float(lively * (1 - (1 - together / lively) ** (1 / load.world))) if lively else 0.0


def proposed(method: Sparse, load: Load) -> int:
    """The longest list of indices of any rank, which all others are padded to.

    >>> [proposed(SPARSE[name], Load(1_000_000, world=4)) for name in ("topk", "micro", "exdyna", "union")]
    [10000, 6500, 3000, 2887]
    """
    longest = _own(method, load) * (1 + method.imbalance * math.log2(load.world))
    return min(load.target, math.ceil(longest))


def _own(method: Sparse, load: Load) -> float:
    """The list of a rank that proposes, in the mean."""
    if method.builds_up or method.alone:
        return load.target
    return load.target / load.world if method.exclusive else _each(load.target, load)


def _sparse_messages(method: Sparse, load: Load) -> list[Message]:
    """Counts, indices, values: those of excluded parameters among them, and a code for each rank."""
    counts = [Message("all_gather", COUNT * control.NUM_RUNGS)] if method.counts else []
    extent = -(-load.sparse // load.world) if method.exclusive else load.sparse
    packed = wire.Shape.of(proposed(method, load), extent).num_bytes
    indices = Message("broadcast" if method.alone else "all_gather", packed)
    return [*counts, indices, *_value_messages(round(support(method, load)), load.excluded + load.world, load)]


def _value_messages(num_values: int, num_whole: int, load: Load) -> list[Message]:
    if load.wire == "float32":
        return [Message("all_reduce", FLOAT * (num_values + num_whole))]
    shard = num_bytes(-(-num_values // load.world), wire_dtype(load.wire))
    rounded = [Message("all_to_all", shard * load.world), Message("all_gather", shard)]
    return [*rounded, Message("all_reduce", FLOAT * num_whole)]


def _local(method: Sparse, load: Load, machine: Machine) -> float:
    """A rank's own work: of the slowest, or of the one that the others wait for."""
    looked_at = load.sparse / load.world if method.exclusive else load.sparse
    choosing = looked_at * getattr(machine, method.work) / (machine.crowding if method.alone else 1)
    arriving = _own(method, load) * (1 if method.alone else load.world)
    # padding travels, but nobody unpacks it; and where no two ranks propose the same there is nothing to merge
    unpacking = arriving * (machine.index + (0 if method.exclusive else machine.merge))
    taking_in = load.sparse * (machine.add + machine.sweep) + load.num_tensors * machine.tensor
    return float(taking_in + choosing + unpacking + support(method, load) * machine.value)


def _sparse(name: str, load: Load, link: Link, machine: Machine) -> Prediction:
    method = SPARSE[name]
    density = support(method, load) / max(1, load.sparse)
    if load.scope == "model":
        local = _local(method, load, machine) + machine.step
        sent = messages(name, load)
        exchange = total_seconds(sent, load.world, link)
        return _prediction(name, local, exchange, load.compute + local + exchange, sent, load, density)
    parts = [_part(load, size) for size in buckets(load.numel)]
    works = [_local(method, part, machine) + machine.step for part in parts]
    lists = [_sparse_messages(method, part) for part in parts]
    durations = [total_seconds(sent, load.world, link) for sent in lists]
    # the host takes in and chooses while backward goes on, which takes that much longer; only messages are hidden
    end = finished(_ready(load, buckets(load.numel), sum(works)), durations)
    return _prediction(name, sum(works), sum(durations), end, [one for sent in lists for one in sent], load, density)


def _part(load: Load, size: int) -> Load:
    """The load of one bucket."""
    share = size / load.numel
    return replace(
        load,
        numel=size,
        excluded=int(load.excluded * share),
        num_tensors=max(1, round(load.num_tensors * share)),
        matrices=(),
    )


def _whole(name: str, load: Load, link: Link, machine: Machine) -> Prediction:
    """Everything through this library: one all-reduce after backward, through the residual and back."""
    # the message and the mean are copies, the residual is cleared and the gradient written
    per_entry = machine.add + 2 * machine.copy + 2 * machine.sweep
    local = load.numel * per_entry + load.num_tensors * machine.tensor + machine.step
    sent = messages(name, load)
    exchange = total_seconds(sent, load.world, link)
    return _prediction(name, local, exchange, load.compute + local + exchange, sent, load, 1.0)


def _prediction(
    name: str, local: float, exchange: float, step: float, sent: Sequence[Message], load: Load, density: float
) -> Prediction:
    handed = sum(message.num_bytes / (load.world if message.kind == "broadcast" else 1) for message in sent)
    return Prediction(name, local, exchange, step, total_link_bytes(sent, load.world), handed, density)
