"""The vocabulary: what the parts hand to one another. No logic beyond arithmetic on own fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradsieve.weights import Weights

# Positions in the flat vector. Everything is a slice, so that "all of it" costs no index tensor.
Indices: TypeAlias = Tensor | slice
ALL = slice(None)

WAYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"wire": ("float32", "bfloat16", "float8"), "scope": ("model", "bucket")}
)
"""How any method's exchange may run, as options of `sparsify`; the first is the default."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What stays the same for a whole run."""

    world: int
    numel: int
    bounds: tuple[int, ...]
    """Where each tensor begins in the flat vector, then `numel`."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a rank knows of a step before it looks at a gradient. All but `rank` is alike on every rank."""

    index: int
    rank: int
    seed: int
    target: int
    proposers: tuple[int, ...]
    setup: Setup

    @property
    def world(self) -> int:
        return self.setup.world

    @property
    def numel(self) -> int:
        return self.setup.numel

    @property
    def proposes(self) -> bool:
        """Do this rank's indices count in this step?"""
        return self.rank in self.proposers


class Span(NamedTuple):
    """A range of the flat vector, and the number of entries out of the target that it is worth."""

    start: int
    stop: int
    quota: int = 0

    def cut(self, start: int, stop: int) -> Span:
        """The part of this span that lies in `start:stop`; empty if there is none."""
        low = max(self.start, start)
        return Span(low, max(low, min(self.stop, stop)), self.quota)


class Territory(NamedTuple):
    """Where this rank looks, and the quota of every rank."""

    spans: tuple[Span, ...]
    quotas: tuple[int, ...]
    origin: int = 0
    """Where the stretch begins that this rank's indices lie in."""
    extent: int = 0
    """The length of the longest such stretch of any rank."""


@dataclass(frozen=True, slots=True)
class View:
    """What one rank sees in one step. The first three fields are there from its beginning."""

    step: Step
    acc: Tensor
    """Gradient plus residual, flat."""
    weights: Weights | None
    territory: Territory = Territory((), ())
    found: tuple[Any, ...] = ()
    """What the criterion's scans of the territory returned."""
    dense: Tensor | None = None
    """What travels whole beside the support (excluded parameters)."""
    wire: torch.dtype = torch.float32
    """What values at the support travel as."""
    overshoot: float = 0.0
    """How much more than them is applied: see [Note: overshooting] in `exchange`."""


class Candidates(NamedTuple):
    """Positions that may be proposed, ascending, and the scores that decide it."""

    indices: Tensor
    scores: Tensor
    start: int
    """Where the stretch begins that they were found in."""


class Owners(NamedTuple):
    """What ranks use again from step to step that add up entries each in a stretch of its own; 0 is a threshold that
    is not known."""

    picking: tuple[float, ...]
    """Of every rank: what an entry has to reach there to be picked."""
    keeping: float
    """What a sum over ranks has to reach to be kept."""
    borders: tuple[int, ...]
    """Where the stretch of each rank begins, then `numel`."""


class Proposal(NamedTuple):
    """What this rank wants to send."""

    indices: Indices
    counts: tuple[int, ...] | None
    """Proposed entries of every rank; None where only the rank itself knows its number."""
    thresholds: tuple[float, ...] = ()
    """What the entries had to reach: one number, or one per group of entries; none where there is no threshold."""
    room: int | None = None
    """At most so many entries of one rank travel, evenly spread over its proposal; None: all of them."""
    owners: Owners | None = None
    """As the last step left them, where ranks own stretches of the vector."""


class Agreement(NamedTuple):
    """What all ranks know once the proposals have travelled."""

    support: Indices
    """Ascending."""
    counts: tuple[int, ...]
    """Proposed entries of every rank."""
    distinct: int
    """Entries that travelled, each counted once; more than the support where that was cut."""
    thresholds: tuple[float, ...]


class Reduced(NamedTuple):
    """The outcome of an exchange.

    `sent` is a field of its own because what a rank may clear from its residual is what really travelled,
    and that is the exchange's to say.
    """

    indices: Indices
    """The support, ascending, the same on every rank."""
    mean: Tensor
    """Mean over ranks at the support, at least float32."""
    dense: Tensor
    """Mean over ranks of `View.dense`."""
    sent: Indices
    """Where this rank's residual changes: the support, or what this rank had a part in."""
    counts: tuple[int, ...]
    thresholds: tuple[float, ...]
    distinct: int
    """As in `Agreement`."""
    rest: Tensor | None = None
    """What the residual holds at `sent` from now on: what of this rank's values did not travel, and what of others'
    stays here; None: nothing. A team's has a row for each rank."""
    owners: Owners | None = None
    """For the steps to come."""

    @property
    def support(self) -> int:
        """Entries exchanged."""
        return len(self.mean)


@dataclass(frozen=True, slots=True)
class StepStats:
    """The record of one step on one rank."""

    step: int
    numel: int
    """Entries under sparsification; excluded parameters are in `dense_numel`."""
    target: int
    support: int
    density: float
    """`support / numel`: the actual density."""
    threshold: float | None
    """The threshold applied in this step: the median, where tensors have their own; this rank's, where ranks have
    (`sidco`, `dgc`); that of sums over ranks, where those are chosen (`oktopk`); None for methods without."""
    counts: tuple[int, ...]
    """Proposed entries by rank."""
    imbalance: float
    """`max(counts) * world / sum(counts) - 1`."""
    wire_bytes: int
    """Bytes this rank handed to collectives in this step, excluded parameters and flags included."""
    link_bytes: int
    """Bytes through this rank's link, each way, if collectives run in rings; where unlike numbers leave and arrive, the
    larger one."""
    num_messages: int
    """Collectives of this step."""
    dense_numel: int
    """Entries of excluded parameters, sent whole."""
    dense_bytes: int
    """The part of `wire_bytes` that excluded parameters took."""
    select_seconds: float
    """Time in accumulation and selection."""
    exchange_seconds: float
    """Time in collectives, waiting for slower ranks included."""

    @property
    def ratio_values(self) -> float:
        """Compression as papers count it: entries over entries sent, indices left out."""
        return self.numel / self.support if self.support else float("inf")

    @property
    def ratio_wire(self) -> float:
        """Compression of what this rank handed over, indices included, against float32."""
        sparse_bytes = self.wire_bytes - self.dense_bytes
        return 4 * self.numel / sparse_bytes if sparse_bytes else float("inf")
