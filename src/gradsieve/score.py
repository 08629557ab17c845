"""How a criterion measures entries, and the entries that reach a threshold by that measure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from gradsieve import kernels
from gradsieve.types import Candidates, Span, View

CHUNK = 1 << 20
"""Scores are made for so many entries at a time: they stay in the cache, and no second model's worth of memory is
taken."""


class Score(Protocol):
    """The size of the entries `start:stop` in a criterion's eyes: at least float32, never negative."""

    @property
    def needs_weights(self) -> bool: ...

    def __call__(self, view: View, start: int, stop: int) -> Tensor: ...


@dataclass(frozen=True)
class Magnitude:
    """`|acc|`."""

    needs_weights: bool = False

    def __call__(self, view: View, start: int, stop: int) -> Tensor:
        return view.acc[start:stop].float().abs()


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
        scores = view.acc[start:stop].float().abs()
        for tensor, (low, high) in enumerate(pairwise(view.step.setup.bounds)):
            part = Span(low, high).cut(start, stop)
            if part.stop > part.start:
                own = view.weights.flat[part.start : part.stop].float().abs()
                size = own + self.eps * view.weights.scales[tensor]
                scores[part.start - start : part.stop - start] /= size.clamp_min_(torch.finfo(size.dtype).tiny)
        if self.stochastic:
            key = hash((view.step.seed, view.step.index, view.step.rank))
            scores /= kernels.uniform(start, stop, key, scores.device)
        return scores


def chunks(spans: Sequence[Span]) -> Iterator[Span]:
    """The spans in pieces of at most `CHUNK` entries; empty ones left out."""
    for span in spans:
        for start in range(span.start, span.stop, CHUNK):
            yield span.cut(start, start + CHUNK)


def collect(score: Score, view: View, spans: Sequence[Span], threshold: float) -> Candidates:
    """All entries of the spans whose score reaches the threshold."""
    found = []
    for start, stop, _ in chunks(spans):
        scores = score(view, start, stop)
        positions = kernels.at_least(scores, threshold)
        found.append(Candidates(positions + start, scores[positions], start))
    return joined(found, view.acc.device)


def joined(found: Sequence[Candidates], device: torch.device) -> Candidates:
    """The candidates of several stretches, which backward may finish in any order."""
    if not found:
        return Candidates(torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, device=device), 0)
    stretches = sorted(found, key=lambda part: part.start)
    indices = torch.cat([part.indices for part in stretches])
    scores = torch.cat([part.scores for part in stretches])
    return Candidates(indices, scores, stretches[0].start)
