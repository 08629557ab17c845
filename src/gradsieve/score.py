"""How a criterion measures entries, and the entries that reach a threshold by that measure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from gradsieve import kernels
from gradsieve.types import Candidates, Span, View

CHUNK = 1 << 20
"""On the CPU scores are made for so many entries at a time: they stay in the cache, and no second model's worth of
memory is taken."""
CUDA_CHUNK = 1 << 28
"""On CUDA each launch costs more than a million entries do."""


Look: TypeAlias = "tuple[View, Sequence[Span]]"
"""What a rank looks at: parts of what it sees."""


class Score(Protocol):
    """The size of the entries `start:stop` in a criterion's eyes: at least float32, never negative."""

    @property
    def needs_weights(self) -> bool: ...

    def __call__(self, view: View, start: int, stop: int) -> Tensor: ...

    def at_least(self, view: View, start: int, stop: int, threshold: float) -> tuple[Tensor, Tensor]:
        """Positions behind `start` whose score reaches the threshold, and those scores."""
        ...


@dataclass(frozen=True)
class Magnitude:
    """`|acc|`."""

    needs_weights: bool = False

    def __call__(self, view: View, start: int, stop: int) -> Tensor:
        return view.acc[start:stop].float().abs()

    def at_least(self, view: View, start: int, stop: int, threshold: float) -> tuple[Tensor, Tensor]:
        return kernels.magnitudes_at_least(view.acc[start:stop], threshold)


@dataclass(frozen=True)
class Importance:
    """`|acc| / (|w| + eps * rms(w's tensor))`: how much of its own size a parameter is asked to move."""

    eps: float = 0.1
    stochastic: bool = False
    """Divide by a random number in (0, 1): an entry under a threshold then passes with probability
    score / threshold, one above it always."""
    needs_weights: bool = True

    def __call__(self, view: View, start: int, stop: int) -> Tensor:
        assert view.weights is not None
        sizes = view.weights.flat[start:stop].float().abs()
        sizes += view.weights.scale_of_entries(start, stop).mul_(self.eps)
        scores = view.acc[start:stop].float().abs().div_(sizes.clamp_min_(torch.finfo(sizes.dtype).tiny))
        if self.stochastic:
            key = hash((view.step.seed, view.step.index, view.step.rank))
            scores /= kernels.uniform(start, stop, key, scores.device)
        return scores

    def at_least(self, view: View, start: int, stop: int, threshold: float) -> tuple[Tensor, Tensor]:
        scores = self(view, start, stop)
        positions = kernels.at_least(scores, threshold)
        return positions, scores[positions]


def chunks(spans: Sequence[Span], device: torch.device) -> Iterator[Span]:
    """The spans in pieces of a size that suits the device; empty ones left out."""
    size = CHUNK if device.type == "cpu" else CUDA_CHUNK
    for span in spans:
        for start in range(span.start, span.stop, size):
            yield span.cut(start, start + size)


def collect(score: Score, view: View, spans: Sequence[Span], threshold: float) -> Candidates:
    """All entries of the spans whose score reaches the threshold."""
    found = []
    for start, stop, _ in chunks(spans, view.acc.device):
        positions, scores = score.at_least(view, start, stop, threshold)
        found.append(Candidates(positions.add_(start), scores, start))
    return joined(found, view.acc.device)


def collect_for_team(score: Score, looks: Sequence[Look], threshold: float) -> Candidates:
    """`collect` for several ranks in one sweep: on CUDA launches and waits cost more than bytes.

    The entry at `position` of rank `rank` has the index `rank * numel + position`.
    """
    pieces = [(view, span) for view, spans in looks for span in spans if span.stop > span.start]
    if not pieces:
        return joined([], looks[0][0].acc.device)
    scores = torch.cat([score(view, span.start, span.stop) for view, span in pieces])
    places = kernels.at_least(scores, threshold)
    edges = places.new_tensor(list(accumulate(span.stop - span.start for _, span in pieces)))
    starts = places.new_tensor([view.step.rank * view.step.numel + span.start for view, span in pieces])
    shifts = starts - torch.cat([edges.new_zeros(1), edges[:-1]])
    return Candidates(places + shifts[torch.searchsorted(edges, places, right=True)], scores[places], 0)


def joined(found: Sequence[Candidates], device: torch.device) -> Candidates:
    """The candidates of several stretches, which backward may finish in any order."""
    if len(found) == 1:
        return found[0]
    if not found:
        return Candidates(torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, device=device), 0)
    stretches = sorted(found, key=lambda part: part.start)
    indices = torch.cat([part.indices for part in stretches])
    scores = torch.cat([part.scores for part in stretches])
    return Candidates(indices, scores, stretches[0].start)
