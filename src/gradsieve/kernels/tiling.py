"""What the kernels of a step hand to one another. No kernel, no logic; importable everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradsieve.control import NUM_RUNGS

TILE = 4096
"""Entries per tile: see [Note: tiles] in `sieve`."""


@dataclass(frozen=True)
class Tiles:
    """The tiles of a vector."""

    starts: Tensor
    """int64 `[num + 1]`: where each begins, then the end of the vector."""
    slots: Tensor
    """int32 `[num]`: the parameter that each belongs to."""

    @property
    def num(self) -> int:
        return len(self.slots)


@dataclass(frozen=True)
class Run:
    """Tiles one after the other, and where they lie in a bucket."""

    first: int
    num: int
    sources: Tensor | None
    """int64 `[num]`: where in the bucket each begins; None where bucket and vector are laid out alike."""
    aligned: bool
    """Do all begin at multiples of 8, so that wide loads are allowed?"""


@dataclass
class Sight:
    """Where each row looks in this step, and by which measure."""

    looks: Tensor
    """int64 `[rows, 4]`: the stretch of the vector, and the numbers of the tiles that it touches."""
    ladder: Tensor
    """int32 `[NUM_RUNGS]`: bits of the thresholds of this step, ascending; what reaches the first is collected."""
    last: Tensor
    """int64: bits of the threshold that the ladder lies around."""
    table: Tensor
    """int32: `control.rung_table`."""
    levels: Tensor
    """int64: `control.LEVELS`."""
    weights: Tensor
    """The flat parameters, if entries are measured by importance."""
    margins: Tensor
    """float32 by slot: what is added to the size of a parameter."""
    by_importance: bool = False
    group: tuple[int, int] = (4, 64)
    """Tiles, and entries of each, that a program looks at side by side."""
    many: bool = False
    """Are many entries of a tile collected, by the measure of [Note: few or many] in `sieve`?"""


@dataclass
class Found:
    """What was collected, by tile."""

    tile_counts: Tensor
    """int32 `[rows, tiles]`: entries collected."""
    tile_places: Tensor
    """int64 `[rows, tiles]`: the address of what a tile collected, ascending; see [Note: tiles]."""
    faults: Tensor
    """int32 `[rows]`: 1 + the number of a parameter whose gradient was not finite."""
    narrow: bool = False
    """Are there only places, without rungs?"""

    @classmethod
    def empty(cls, rows: int, num_tiles: int, device: torch.device) -> Found:
        counts = torch.zeros((rows, num_tiles), dtype=torch.int32, device=device)
        faults = torch.zeros(rows, dtype=torch.int32, device=device)
        return cls(counts, torch.zeros_like(counts, dtype=torch.int64), faults)


class Sent(NamedTuple):
    """What was sent in the step before and is still in the residual."""

    support: Tensor
    borders: Tensor
    """int64 `[tiles + 1]`: where in the support the entries of each tile begin."""
    rest: Tensor | None
    """`[rows, any]`: what did not travel and stays; None where all did."""


@dataclass
class Decision:
    """Counts, and what they led to: the same on every rank but for `counts` and `chunk_counts`."""

    world: int
    counts: Tensor
    """int64 `[rows, NUM_RUNGS]`: entries at or above each rung."""
    chunk_counts: Tensor
    """int32 `[rows, NUM_RUNGS, chunks]`: the same by chunk, a stretch of tiles."""
    record: Tensor
    """int64: see `Record`."""
    applied: Tensor
    """int32 `[NUM_RUNGS]`: the threshold, as a ladder of equal rungs."""
    learned: Tensor
    """int64 `[3]`: the bits of the threshold that the step begins with, `travelled` and `distinct`."""
    following: Tensor
    """The same for the next step: it counts once this one is finished."""

    @classmethod
    def empty(cls, rows: int, world: int, num_chunks: int, device: torch.device) -> Decision:
        def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            world=world,
            counts=numbers(rows, NUM_RUNGS, dtype=torch.int64),
            chunk_counts=numbers(rows, NUM_RUNGS, num_chunks),
            record=numbers(Record.size(world), dtype=torch.int64),
            applied=numbers(NUM_RUNGS),
            learned=torch.ones(3, dtype=torch.int64, device=device),
            following=torch.ones(3, dtype=torch.int64, device=device),
        )

    @property
    def num_chunks(self) -> int:
        return self.chunk_counts.shape[2]


MOST_CHUNKS = 1024
"""Chunks that a row's tiles, or marks, are dealt out to: so many that one program can add up the counts of all."""
HEAD = 9
"""Single numbers of a record, before those by rank."""
BY_RANK = 5
"""Numbers of a record that there are for each rank."""


class Record(NamedTuple):
    """The numbers of a step, in the order in which the device keeps them."""

    threshold_bits: int
    rung: int
    goal: int
    proposed: int
    settled: int
    travelled: int
    distinct: int
    support: int
    last_bits: int
    """Of the threshold that the step began with."""
    reaching: tuple[int, ...]
    quotas: tuple[int, ...]
    lengths: tuple[int, ...]
    """What travels of each rank: its quota, or the room if that is less."""
    found: tuple[int, ...]
    """The checksum of what came from each rank; 0 where none of its indices travelled."""
    stated: tuple[int, ...]
    """The one that came with it."""

    @staticmethod
    def size(world: int) -> int:
        return HEAD + BY_RANK * world

    @classmethod
    def of(cls, numbers: list[int], world: int) -> Record:
        by_rank = (tuple(numbers[HEAD + k * world : HEAD + (k + 1) * world]) for k in range(BY_RANK))
        return cls(*numbers[:HEAD], *by_rank)  # type: ignore[arg-type]
