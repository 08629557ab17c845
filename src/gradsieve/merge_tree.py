"""The largest sums over ranks by a tree of merges (gTop-k).

[Note: who drops takes over]
In each round half of the ranks that are still in it hand all they have to a neighbour, which adds it to its own, keeps
the largest sums and drops the others. What is dropped is a sum over several ranks, of which another branch may still
bring the rest up to the root: whether an index is in the support says nothing about whether a rank's value got there.
So the node that drops a sum takes it into its own residual, where it stands for all ranks that had a part in it, and
every rank clears all that it picked. Nothing is lost, without a message more. Likewise who rounds a value that travels
keeps what that leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve import kernels
from gradsieve.collectives import Collectives, Letter
from gradsieve.exchange import Exchange, averaged_beside
from gradsieve.parcel import Entries, entries_of, letter_of, num_bytes, settled, summed, travelling, unpacked, wire_of
from gradsieve.types import Proposal, Reduced, View
from gradsieve.wire import Shape

ROOT = 0


@dataclass(frozen=True)
class MergeTree(Exchange):
    """Every rank proposes as many entries, and as many sums are the support: see [Note: who drops takes over]."""

    @property
    def knows_teams(self) -> bool:
        return False

    async def reduce(self, view: View, proposal: Proposal, collectives: Collectives) -> Reduced:
        assert isinstance(proposal.indices, Tensor)
        assert proposal.counts is not None
        climb = _Climb(view, proposal.indices, collectives)
        if max(proposal.counts) > 0:
            for stride in strides(view.step.world):
                await climb.merge(stride)
        total = await climb.told()
        sent, rest = settled(view.acc, proposal.indices, climb.stayed)
        return Reduced(
            indices=total.indices,
            mean=total.values,
            dense=await averaged_beside(view, collectives),
            sent=sent,
            counts=proposal.counts,
            thresholds=proposal.thresholds,
            # how many entries there were before the first merge nobody knows
            distinct=len(total.indices),
            rest=rest,
        )


def strides(world: int) -> Iterator[int]:
    """How far apart the neighbours of each round are.

    >>> [list(strides(world)) for world in (1, 2, 5, 8)]
    [[], [1], [1, 2, 4], [1, 2, 4]]
    """
    stride = 1
    while stride < world:
        yield stride
        stride *= 2


class _Climb:
    """One rank's way through the tree. Of all nodes each has as many entries, so that no size has to be told."""

    def __init__(self, view: View, picked: Tensor, collectives: Collectives) -> None:
        self._view = view
        self._collectives = collectives
        self._sums = entries_of(view.acc, picked)
        self._dtype = self._sums.values.dtype
        self._wire = wire_of(self._sums, view.wire)
        self._shape = Shape.of(view.step.target, view.step.numel)
        self._num_bytes = num_bytes(self._shape, self._wire)
        self.stayed: list[Entries] = []
        """What this rank takes into its residual."""

    async def merge(self, stride: int) -> None:
        """A round: of neighbours `stride` apart the right one hands over, the left one merges. All ranks take part,
        even those with nothing to do, so that collectives come in the same order on all."""
        rank, world = self._view.step.rank, self._view.step.world
        letters: list[Letter[Entries] | None] = [None] * world
        lengths = [0] * world
        if rank % (2 * stride) == stride:
            letters[rank - stride] = self._letter()
        elif rank % (2 * stride) == 0 and rank + stride < world:
            lengths[rank + stride] = self._num_bytes
        arrived = await self._collectives.swap_letters(
            letters, lengths, lambda _, message: self._read(message), "merged entries"
        )
        for entries in arrived:
            self._take(entries)

    async def told(self) -> Entries:
        """The means over ranks, which the root tells all."""
        if not len(self._sums.indices):
            return self._sums
        letter = self._letter() if self._view.step.rank == ROOT else self._addressed(self._sums)
        total = await self._collectives.broadcast_letter(letter, ROOT, self._read, "merged entries")
        return await self._collectives.alike(
            lambda: total._replace(values=total.values.to(self._dtype) / self._view.step.world)
        )

    def _letter(self) -> Letter[Entries]:
        entries, rest = travelling(self._sums, self._view.wire)
        self.stayed.append(rest)
        return self._addressed(entries)

    def _addressed(self, entries: Entries) -> Letter[Entries]:
        return letter_of(entries, 0, self._shape, self._wire)

    def _read(self, message: Tensor) -> Entries:
        return unpacked(message, self._shape, self._wire, stop=self._view.step.numel)

    def _take(self, arrived: Entries) -> None:
        together = summed([self._sums, arrived], self._dtype)
        is_kept = torch.zeros(len(together.indices), dtype=torch.bool, device=arrived.indices.device)
        is_kept[kernels.largest(together.values.abs(), self._view.step.target)] = True
        self._sums = together.at(is_kept)
        self.stayed.append(together.at(~is_kept))
