"""The largest sums over ranks by owners: each rank adds up one stretch of the vector (Ok-Topk).

Every rank sends what it picked to the owners of the stretches that it lies in. They add it up, and what of the sums
reaches a threshold goes to everyone. Only ranks that picked an entry have a part in its sum, so a rank clears from its
residual what it picked and what was kept: of an entry that it did not pick it keeps its value, and of one whose sum was
not kept, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradsieve import control, kernels
from gradsieve.collectives import Collectives
from gradsieve.exchange import Exchange, averaged_beside
from gradsieve.parcel import Entries, entries_of, letter_of, num_bytes, settled, summed, travelling, unpacked, wire_of
from gradsieve.types import Owners, Proposal, Reduced, Step, View
from gradsieve.wire import Shape


class _Parcels(NamedTuple):
    """What ranks tell one another before the entries travel."""

    leaving: list[int]
    """Entries of this rank, by owner."""
    arriving: list[int]
    """Entries for this rank, by the rank that picked them."""
    counts: tuple[int, ...]
    picking: tuple[float, ...]


class _Kept(NamedTuple):
    """What all ranks come to know."""

    total: Entries
    rest: Entries
    """What this rank, as an owner, left out in rounding its sums."""
    distinct: int


@dataclass(frozen=True)
class OwnerSums(Exchange):
    """The support are the sums that reach a threshold, measured now and then as the size of sum number `target`."""

    ceiling: float
    """The support never exceeds this many times the target."""
    period: int = control.MEASURE_PERIOD
    """Steps from one measurement of the threshold to the next."""
    border_period: int = control.BALANCE_PERIOD
    """Steps after which the borders are balanced anew; they are in the first step, too, whatever its number."""

    @property
    def knows_teams(self) -> bool:
        return False

    async def reduce(self, view: View, proposal: Proposal, collectives: Collectives) -> Reduced:
        picked, owners = proposal.indices, proposal.owners
        assert isinstance(picked, Tensor)
        assert owners is not None
        borders = await self._borders(picked, owners, view.step, collectives)
        entries, rest = travelling(entries_of(view.acc, picked), view.wire)
        parcels = await _announced(picked, borders, proposal.thresholds[0], collectives)
        sums = await _added_up(entries, borders, parcels, view, collectives)
        keeping = await self._threshold(sums, owners, view.step, collectives)
        kept = await self._kept(sums, keeping, borders, view, collectives)
        taken = torch.isin(picked, kept.total.indices, assume_unique=True)
        stayed = [rest.at(taken), kept.rest] if len(rest.indices) else [kept.rest]
        sent, left = settled(view.acc, picked[taken], stayed)
        return Reduced(
            indices=kept.total.indices,
            mean=kept.total.values,
            dense=await averaged_beside(view, collectives),
            sent=sent,
            counts=parcels.counts,
            thresholds=(keeping,),
            distinct=kept.distinct,
            rest=left,
            owners=Owners(tuple(map(_worth_keeping, parcels.picking)), _worth_keeping(keeping), borders),
        )

    async def _borders(self, picked: Tensor, owners: Owners, step: Step, collectives: Collectives) -> tuple[int, ...]:
        """Those of the step before, or, when it is time, the means over ranks of borders that would give each owner as
        many of the rank's entries."""
        is_due = step.index % self.border_period == 0 or not owners.keeping
        if not is_due or step.world == 1:
            return owners.borders
        own = torch.tensor(owners.borders[1:-1], device=picked.device)
        if len(picked):
            own = picked[torch.arange(1, step.world, device=picked.device) * len(picked) // step.world]
        total = await collectives.sum_numbers(own.clone(), "borders")
        return 0, *(int(border) // step.world for border in total), step.numel

    async def _threshold(self, sums: Entries, owners: Owners, step: Step, collectives: Collectives) -> float:
        """What a sum has to reach, alike on all ranks."""
        if step.target >= step.numel:
            return 0.0  # whoever asks for everything gets everything
        if owners.keeping and step.index % self.period:
            return owners.keeping
        rows = await collectives.gather_numbers([len(sums.indices)], "numbers of sums")
        numbers = [min(step.target, row[0]) for row in rows]
        sizes = _sizes(sums)
        largest = sizes.new_zeros(max(numbers))
        largest[: numbers[step.rank]] = sizes[kernels.largest(sizes, step.target)]
        gathered = await collectives.all_gather(largest, "largest sums")
        place = min(step.target, sum(numbers))
        measured = await collectives.alike(lambda: kernels.kth_largest(gathered.flatten(), place) if place else 0.0)
        return max(control.TINY, min(control.HUGE, measured))

    async def _kept(
        self, sums: Entries, keeping: float, borders: tuple[int, ...], view: View, collectives: Collectives
    ) -> _Kept:
        """The sums that reach the threshold, of all owners; where they are too many, the largest of each."""
        step, sizes = view.step, _sizes(sums)
        reaching = kernels.at_least(sizes, keeping)
        rows = await collectives.gather_numbers([len(sizes), len(reaching)], "numbers of sums")
        quotas = self._quotas([row[1] for row in rows], step)
        own = sums.at(reaching[kernels.largest(sizes[reaching], quotas[step.rank])])
        entries, rest = travelling(own, view.wire)
        total = await _shared(entries, quotas, borders, view, collectives)
        mean = await collectives.alike(lambda: total.values.to(sums.values.dtype) / step.world)
        return _Kept(total._replace(values=mean), rest, sum(row[0] for row in rows))

    def _quotas(self, counts: list[int], step: Step) -> tuple[int, ...]:
        """How many sums of each owner are kept, of so many that reach the threshold."""
        limit = control.most_entries(step.target, self.ceiling)
        return control.shares(counts, limit) if sum(counts) > limit else tuple(counts)


async def _announced(picked: Tensor, borders: tuple[int, ...], threshold: float, collectives: Collectives) -> _Parcels:
    """In one message: how many entries come, how many there are, and what they had to reach."""
    edges = torch.tensor(borders, device=picked.device)
    leaving = torch.searchsorted(picked, edges).diff()
    same_for_all = torch.tensor([len(picked), control.to_bits(threshold)], device=picked.device)
    rows = torch.cat([leaving.unsqueeze(1), same_for_all.expand(len(leaving), -1)], dim=1)
    told, heard = await collectives.swap_numbers(rows, "counts")
    bits = np.array([row[2] for row in heard], dtype=np.int64)
    return _Parcels(
        leaving=[row[0] for row in told],
        arriving=[row[0] for row in heard],
        counts=tuple(row[1] for row in heard),
        picking=tuple(control.from_bits(bits).tolist()),
    )


async def _added_up(
    entries: Entries, borders: tuple[int, ...], parcels: _Parcels, view: View, collectives: Collectives
) -> Entries:
    """What all ranks picked in this rank's stretch, added up in the order of ranks."""
    dtype = wire_of(entries, view.wire)
    parts = map(Entries, *(torch.split(each, parcels.leaving) for each in entries))
    letters = [
        letter_of(part, start, Shape.of(len(part.indices), stop - start), dtype) if len(part.indices) else None
        for part, (start, stop) in zip(parts, pairwise(borders), strict=True)
    ]
    start, stop = borders[view.step.rank : view.step.rank + 2]
    shapes = [Shape.of(count, stop - start) for count in parcels.arriving]
    lengths = [num_bytes(shape, dtype) if shape.most else 0 for shape in shapes]
    found = await collectives.swap_letters(
        letters,
        lengths,
        lambda rank, message: unpacked(message, shapes[rank], dtype, start=start, stop=stop),
        "picked entries",
    )
    sum_dtype = torch.promote_types(view.acc.dtype, torch.float32)
    empty = Entries(entries.indices[:0], entries.values[:0])
    return summed([empty, *found], sum_dtype)


async def _shared(
    own: Entries, quotas: tuple[int, ...], borders: tuple[int, ...], view: View, collectives: Collectives
) -> Entries:
    """The kept sums of all owners, ascending, as they stand side by side."""
    if max(quotas) == 0:
        return own
    stretches, dtype = list(pairwise(borders)), wire_of(own, view.wire)
    shape = Shape.of(max(quotas), max(stop - start for start, stop in stretches))

    def read(rank: int, message: Tensor) -> Entries:
        start, stop = stretches[rank]
        return unpacked(message, shape, dtype, start=start, stop=stop)

    letter = letter_of(own, borders[view.step.rank], shape, dtype)
    parts = await collectives.gather_letters(letter, read, "kept sums")
    return await collectives.alike(lambda: Entries(*(torch.cat(kind) for kind in zip(*parts, strict=True))))


def _sizes(sums: Entries) -> Tensor:
    """In float32, as thresholds are."""
    return sums.values.abs().float()


def _worth_keeping(threshold: float) -> float:
    """A threshold that all but zeros reach, or nothing finite, says nothing about the steps to come: the next one
    measures again."""
    return threshold if control.TINY < threshold < control.HUGE else 0.0
