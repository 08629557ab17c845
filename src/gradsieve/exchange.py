"""How what the ranks propose becomes a support, and how its values travel: the fourth axis of a method."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve import kernels
from gradsieve.collectives import Collectives
from gradsieve.types import Indices, Proposal, Reduced, Step, View


class Exchange:
    """A rule for reaching a common support; the values at it are all-reduced."""

    async def reduce(self, view: View, proposal: Proposal, collectives: Collectives) -> Reduced:
        counts = proposal.counts or await self._exchanged_counts(proposal, collectives)
        support = await self.support(view.step, proposal.indices, counts, collectives)
        values = view.acc[support]
        mean, dense = await averaged(values, values[:0] if view.dense is None else view.dense, collectives)
        return Reduced(support, mean, dense, support, counts, proposal.thresholds)

    async def support(
        self, step: Step, proposed: Indices, counts: tuple[int, ...], collectives: Collectives
    ) -> Indices:
        """The indices at which values are exchanged, ascending, the same on every rank."""
        raise NotImplementedError

    @staticmethod
    async def _exchanged_counts(proposal: Proposal, collectives: Collectives) -> tuple[int, ...]:
        assert isinstance(proposal.indices, Tensor)
        rows = await collectives.gather_numbers([len(proposal.indices)])
        return tuple(row[0] for row in rows)


async def averaged(values: Tensor, dense: Tensor, collectives: Collectives) -> tuple[Tensor, Tensor]:
    """The means over ranks of two vectors, in one message, at least in float32."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    message = torch.cat([values.to(dtype), dense.to(dtype)])
    mean = await collectives.all_reduce(message) / collectives.world
    return mean[: len(values)], mean[len(values) :]


@dataclass(frozen=True)
class Agreed(Exchange):
    """Every rank proposes the same without a word: no index travels."""

    async def support(
        self, step: Step, proposed: Indices, counts: tuple[int, ...], collectives: Collectives
    ) -> Indices:
        return proposed


@dataclass(frozen=True)
class Disjoint(Exchange):
    """No two ranks propose the same entry: the support is the proposals side by side."""

    in_rotation: bool = True
    """Ranks own contiguous partitions in rotation, so that ordering the ranks orders the support."""

    async def support(
        self, step: Step, proposed: Indices, counts: tuple[int, ...], collectives: Collectives
    ) -> Indices:
        pieces = await gathered(step, proposed, counts, collectives)
        if not self.in_rotation:
            return torch.cat(pieces).sort().values
        return torch.cat([pieces[(partition - step.index) % step.world] for partition in range(step.world)])


@dataclass(frozen=True)
class Union(Exchange):
    """Ranks may propose the same entry: the support is the union of the proposals."""

    ceiling: float | None = None
    """The support is thinned to this many times the target; what is left out stays in the residual."""

    async def support(
        self, step: Step, proposed: Indices, counts: tuple[int, ...], collectives: Collectives
    ) -> Indices:
        pieces = await gathered(step, proposed, counts, collectives)
        support = kernels.merged(torch.cat(pieces))
        return support if self.ceiling is None else kernels.thinned(support, int(self.ceiling * step.target))


async def gathered(step: Step, proposed: Indices, counts: tuple[int, ...], collectives: Collectives) -> list[Tensor]:
    """The proposals of all proposers, by rank.

    Where all ranks propose, an all-gather, padded to the largest count; where few do, a broadcast from each.
    """
    assert isinstance(proposed, Tensor)
    own = proposed.to(torch.int32 if step.numel <= torch.iinfo(torch.int32).max else torch.int64)
    if len(step.proposers) == step.world:
        padded = own.new_zeros(max(counts))
        padded[: len(own)] = own
        rows = await collectives.all_gather(padded)
        return [row[:count].long() for row, count in zip(rows, counts, strict=True)]
    pieces = []
    for rank in step.proposers:
        message = own if rank == step.rank else own.new_empty(counts[rank])
        pieces.append((await collectives.broadcast(message, rank)).long())
    return pieces
