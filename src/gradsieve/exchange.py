"""How what the ranks propose becomes a support, and how its values travel: the fourth axis of a method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradsieve import kernels
from gradsieve.collectives import Collectives
from gradsieve.types import Agreement, Indices, Proposal, Reduced, Step, View


class Exchange:
    """A rule for reaching a common support; the values at it are all-reduced."""

    async def reduce(self, view: View, proposal: Proposal, collectives: Collectives) -> Reduced:
        agreement = await self.agree(view.step, proposal, collectives)
        values = view.acc[..., agreement.support]
        mean, dense = await averaged(values, values[..., :0] if view.dense is None else view.dense, collectives)
        return Reduced(
            indices=agreement.support,
            mean=mean,
            dense=dense,
            sent=agreement.support,
            counts=agreement.counts,
            thresholds=agreement.thresholds,
            distinct=agreement.distinct,
        )

    async def agree(self, step: Step, proposal: Proposal, collectives: Collectives) -> Agreement:
        """Reach the support, the same on every rank."""
        raise NotImplementedError


async def averaged(values: Tensor, dense: Tensor, collectives: Collectives) -> tuple[Tensor, Tensor]:
    """The means over ranks of two vectors, in one message, at least in float32."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    message = torch.cat([values.to(dtype), dense.to(dtype)], dim=-1)
    total = await collectives.all_reduce(message)
    mean = await collectives.alike(lambda: total / collectives.world)
    num_values = values.shape[-1]
    return mean[:num_values], mean[num_values:]


@dataclass(frozen=True)
class Agreed(Exchange):
    """Every rank proposes the same without a word: no index travels."""

    async def agree(self, step: Step, proposal: Proposal, collectives: Collectives) -> Agreement:
        assert proposal.counts is not None
        return Agreement(proposal.indices, proposal.counts, proposal.counts[0], proposal.thresholds)


@dataclass(frozen=True)
class Disjoint(Exchange):
    """No two ranks propose the same entry: the support is the proposals side by side."""

    in_rotation: bool = True
    """Ranks own contiguous partitions in rotation, so that ordering the ranks orders the support."""

    async def agree(self, step: Step, proposal: Proposal, collectives: Collectives) -> Agreement:
        counts = await known_counts(proposal, collectives)
        pieces = await gathered(step, proposal.indices, counts, collectives)
        support = await collectives.alike(lambda: self._ordered(pieces, step))
        return Agreement(support, counts, len(support), proposal.thresholds)

    def _ordered(self, pieces: Sequence[Tensor], step: Step) -> Tensor:
        if self.in_rotation:
            pieces = [pieces[(partition - step.index) % step.world] for partition in range(step.world)]
            return torch.cat(pieces).long()
        return torch.cat(list(pieces)).long().sort().values


@dataclass(frozen=True)
class Union(Exchange):
    """Ranks may propose the same entry: the support is the union of the proposals."""

    async def agree(self, step: Step, proposal: Proposal, collectives: Collectives) -> Agreement:
        counts = await known_counts(proposal, collectives)
        pieces = await gathered(step, proposal.indices, counts, collectives)
        support = await collectives.alike(lambda: kernels.merged(torch.cat(list(pieces))).long())
        return Agreement(support, counts, len(support), proposal.thresholds)


@dataclass(frozen=True)
class SteeredUnion(Union):
    """A union of the target's size.

    How far proposals overlap is known only once they are there. Where they overlap more than in the step before the
    union falls short, and the ranks propose more; where less, it is cut, and what is left out stays in the residual.
    """

    ceiling: float
    tolerance: float = 0.05
    """How far from the target, relatively, the union may be without either."""

    async def agree(self, step: Step, proposal: Proposal, collectives: Collectives) -> Agreement:
        agreement = await super().agree(step, proposal, collectives)
        # new entries per proposal
        gain = agreement.distinct / sum(agreement.counts) if agreement.distinct else 1.0
        while proposal.more is not None and agreement.distinct < (1 - self.tolerance) * step.target:
            proposal = await proposal.more(math.ceil((step.target - agreement.distinct) / gain))
            more = await super().agree(step, proposal, collectives)
            if not sum(more.counts):
                break  # nothing is left but zeros
            support = await collectives.alike(partial(_joint, agreement.support, more.support))
            extended = _extended(agreement, more, support)
            # at the least, every proposer proposes the same
            new = extended.distinct - agreement.distinct
            gain = max(new / sum(more.counts), 1 / len(step.proposers))
            agreement = extended
        support = await collectives.alike(partial(self._cut, agreement.support, step))
        return agreement._replace(support=support)

    def _cut(self, support: Indices, step: Step) -> Tensor:
        assert isinstance(support, Tensor)
        if len(support) <= min(1 + self.tolerance, self.ceiling) * step.target:
            return support
        return kernels.thinned(support, step.target)


def _joint(first: Indices, second: Indices) -> Tensor:
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    return kernels.merged(torch.cat([first, second]))


def _extended(first: Agreement, second: Agreement, support: Tensor) -> Agreement:
    counts = tuple(a + b for a, b in zip(first.counts, second.counts, strict=True))
    return Agreement(support, counts, len(support), second.thresholds)


async def known_counts(proposal: Proposal, collectives: Collectives) -> tuple[int, ...]:
    """The counts of all ranks, exchanged if they are not known yet."""
    if proposal.counts is not None:
        return proposal.counts
    assert isinstance(proposal.indices, Tensor)
    rows = await collectives.gather_numbers([len(proposal.indices)])
    return tuple(row[0] for row in rows)


async def gathered(
    step: Step, proposed: Indices, counts: tuple[int, ...], collectives: Collectives
) -> Sequence[Tensor]:
    """The proposals of all proposers, by rank, as they travel."""
    assert isinstance(proposed, Tensor)
    own = proposed.to(torch.int32 if step.numel <= torch.iinfo(torch.int32).max else torch.int64)
    return await collectives.gather_pieces(own, counts, step.proposers)
