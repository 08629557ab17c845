"""How what the ranks propose becomes a support, and how its values travel: the fourth axis of a method.

[Note: overshooting]
An entry whose gradients have a sign in common waits until enough has come together, so the parameters lag behind, by
half of what is sent at a time on the average. With an overshoot they go further than what waited, by a share of it, and
the residual keeps the debt, with the other sign: then they are ahead about as long as they were behind. It is rounding
to the nearest in place of rounding down. Nothing is lost: what was applied and what is left still add up to all
gradients. The nearer the share is to 1, the sooner noise alone sends an entry back to where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradsieve import kernels, wire
from gradsieve.collectives import Collectives, TeamCollectives
from gradsieve.rounding import rounded_sum
from gradsieve.types import Agreement, Indices, Proposal, Reduced, Step, View


class Exchange:
    """A rule for reaching a common support; the values at it are averaged.

    Here everyone gives its values at the support. Where only those do that picked an entry, `reduce` is another.
    """

    @property
    def knows_teams(self) -> bool:
        """Can it serve all ranks of a process at once?"""
        return True

    async def reduce(self, view: View, proposal: Proposal, collectives: Collectives) -> Reduced:
        agreement = await self.agree(view, proposal, collectives)
        support = agreement.support
        # a third of the time that indexing takes
        values = view.acc.index_select(-1, support) if isinstance(support, Tensor) else view.acc[..., support]
        dense, rest = values[..., :0] if view.dense is None else view.dense, None
        if view.wire == torch.float32:
            mean, dense = await averaged(values, dense, collectives)
        else:
            mean, dense, rest = await averaged_by_wire(values, dense, view.wire, collectives)
        if view.overshoot and view.step.target < view.step.numel:
            mean, rest = mean * (1 + view.overshoot), owed(values, rest, view.overshoot)
        return Reduced(
            indices=agreement.support,
            mean=mean,
            dense=dense,
            sent=agreement.support,
            counts=agreement.counts,
            thresholds=agreement.thresholds,
            distinct=agreement.distinct,
            rest=rest,
        )

    async def agree(self, view: View, proposal: Proposal, collectives: Collectives) -> Agreement:
        """Reach the support, the same on every rank."""
        raise NotImplementedError


def owed(values: Tensor, rest: Tensor | None, overshoot: float) -> Tensor:
    """What the residual holds where `values` were sent, but for the `rest` that did not travel, once more than that
    was applied. See [Note: overshooting]."""
    travelled = values.to(torch.promote_types(values.dtype, torch.float32))
    debt = travelled * -overshoot if rest is None else rest - (travelled - rest) * overshoot
    return debt.nan_to_num_(0.0, 0.0, 0.0)  # of what is not finite, nothing is kept


async def averaged(values: Tensor, dense: Tensor, collectives: Collectives) -> tuple[Tensor, Tensor]:
    """The means over ranks of two vectors, in one message, at least in float32."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    message = torch.cat([values.to(dtype), dense.to(dtype)], dim=-1)
    total = await collectives.all_reduce(message, "values")
    mean = await collectives.alike(lambda: total / collectives.world)
    num_values = values.shape[-1]
    return mean[:num_values], mean[num_values:]


async def averaged_beside(view: View, collectives: Collectives) -> Tensor:
    """The mean over ranks of what travels whole, in a message of its own."""
    nothing = view.acc[:0]
    _, dense = await averaged(nothing, nothing if view.dense is None else view.dense, collectives)
    return dense


async def averaged_by_wire(
    values: Tensor, dense: Tensor, wire: torch.dtype, collectives: Collectives
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, but the first vector travels as `wire`; and what of this rank's part in it did not travel."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    total, rest = await rounded_sum(values.to(dtype), wire, collectives)
    dense_total = await collectives.all_reduce(dense.to(dtype, copy=True), "dense gradients")
    mean, dense_mean = await collectives.alike(
        lambda: (total.to(dtype) / collectives.world, dense_total / collectives.world)
    )
    return mean, dense_mean, rest


@dataclass(frozen=True)
class Agreed(Exchange):
    """Every rank proposes the same without a word: no index travels."""

    async def agree(self, view: View, proposal: Proposal, collectives: Collectives) -> Agreement:
        assert proposal.counts is not None
        return Agreement(proposal.indices, proposal.counts, proposal.counts[0], proposal.thresholds)


@dataclass(frozen=True)
class Disjoint(Exchange):
    """No two ranks propose the same entry: the support is the proposals side by side."""

    in_rotation: bool = True
    """Ranks own contiguous partitions in rotation, so that ordering the ranks orders the support."""

    async def agree(self, view: View, proposal: Proposal, collectives: Collectives) -> Agreement:
        counts = await known_counts(proposal, collectives)
        pieces = await gathered(view, proposal, counts, collectives)
        support = await collectives.alike(lambda: self._ordered(pieces, view.step))
        return Agreement(support, counts, len(support), proposal.thresholds)

    def _ordered(self, pieces: Sequence[Tensor], step: Step) -> Tensor:
        if self.in_rotation:
            pieces = [pieces[(partition - step.index) % step.world] for partition in range(step.world)]
            return torch.cat(pieces)
        return torch.cat(list(pieces)).sort().values


@dataclass(frozen=True)
class Union(Exchange):
    """Ranks may propose the same entry: the support is the union of the proposals."""

    async def agree(self, view: View, proposal: Proposal, collectives: Collectives) -> Agreement:
        counts = await known_counts(proposal, collectives)
        pieces = await gathered(view, proposal, counts, collectives)
        support = await collectives.alike(lambda: kernels.merged(torch.cat(list(pieces))))
        return Agreement(support, counts, len(support), proposal.thresholds)


@dataclass(frozen=True)
class SteeredUnion(Union):
    """A union of about the target's size.

    How far proposals overlap is known only once they are there. Where they overlap less than they did lately the union
    is too large: it is cut, and what is left out stays in the residual. Where more, it falls short, and the next steps
    propose more.
    """

    ceiling: float
    tolerance_percent: int = 5
    """How far above the target the union may be without a cut."""

    async def agree(self, view: View, proposal: Proposal, collectives: Collectives) -> Agreement:
        agreement = await super().agree(view, proposal, collectives)
        support = await collectives.alike(partial(self._cut, agreement.support, view.step))
        return agreement._replace(support=support)

    @property
    def percent(self) -> int:
        """The largest union that is not cut, in per cent of the target."""
        return min(100 + self.tolerance_percent, int(100 * self.ceiling))

    def _cut(self, support: Indices, step: Step) -> Tensor:
        assert isinstance(support, Tensor)
        if 100 * len(support) <= self.percent * step.target:
            return support
        return kernels.thinned(support, step.target)


async def known_counts(proposal: Proposal, collectives: Collectives) -> tuple[int, ...]:
    """The counts of all ranks, exchanged if they are not known yet."""
    if proposal.counts is not None:
        return proposal.counts
    assert isinstance(proposal.indices, Tensor)
    rows = await collectives.gather_numbers([len(proposal.indices)], "counts")
    return tuple(row[0] for row in rows)


async def gathered(view: View, proposal: Proposal, counts: Sequence[int], collectives: Collectives) -> Sequence[Tensor]:
    """The proposals of all proposers, by rank, once they have travelled (`wire`)."""
    step, territory = view.step, view.territory
    own, room = proposal.indices, proposal.room
    assert isinstance(own, Tensor)
    if room is not None and max(counts) > room:
        pieces = torch.split(own, list(counts)) if isinstance(collectives, TeamCollectives) else [own]
        own = torch.cat([kernels.thinned(piece, room) for piece in pieces])
        counts = [min(count, room) for count in counts]
    most = max(counts[rank] for rank in step.proposers)
    if most == 0:
        return [own[:0] for _ in step.proposers]
    # of one size, which all ranks know without a word
    shape = wire.Shape.of(most, territory.extent)
    if isinstance(collectives, TeamCollectives):
        # what would travel is there already; only its bytes are to be counted
        unwritten = torch.empty(shape.num_bytes, dtype=torch.uint8, device=own.device).expand(step.world, -1)
        await collectives.gather_pieces(unwritten, step.proposers, "indices")
        pieces = torch.split(own, list(counts))
        return [pieces[rank] for rank in step.proposers]
    if step.proposes:
        message = wire.encode(own, territory.origin, shape)
    else:
        message = torch.empty(shape.num_bytes, dtype=torch.uint8, device=own.device)
    messages = await collectives.gather_pieces(message, step.proposers, "indices")
    return await collectives.alike(lambda: [wire.decode(each, shape, stop=step.numel).indices for each in messages])
