"""A threshold that the ranks find together, within the step, so that the target is met in every step.

Each round every rank counts its entries at some forty thresholds, the counts are gathered in one small message, and
all ranks narrow the search alike (`control.narrow`). Around the last threshold one round nearly always does; from
nothing, at any scale, it takes three or four. The counts of the last round are the sizes of the proposals, so the
message replaces the exchange of counts that a fixed threshold needs too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradsieve import control, kernels
from gradsieve.collectives import Collectives, TeamCollectives
from gradsieve.criterion import Criterion
from gradsieve.score import Look, Magnitude, Score, chunks, collect, collect_for_team, joined
from gradsieve.types import Candidates, Proposal, Reduced, Setup, Span, Step, View


class SearchState(NamedTuple):
    thresholds: tuple[float, ...]
    """Of the last step, one per group; 0 where there was none yet."""
    overlap: float
    """Support over proposed entries in the last step: below 1 where several ranks proposed the same entry."""


@dataclass(frozen=True)
class Searched(Criterion):
    """Every entry whose score reaches a threshold that lets the target through, over all ranks."""

    score: Score = Magnitude()
    ceiling: float = 2.0
    """The support never exceeds this many times the target."""
    overlapping: bool = False
    """Ranks look at the same entries: steer the union of the proposals, not their sum."""
    per_layer: bool = False
    """A threshold for each tensor, in place of one for the model."""

    @property
    def needs_weights(self) -> bool:
        return self.score.needs_weights

    def start(self, setup: Setup) -> SearchState:
        return SearchState((0.0,) * len(self._groups(setup)), 1.0)

    def scan(self, state: SearchState, view: View, spans: Sequence[Span]) -> dict[int, Candidates]:
        """Candidates by group, for the groups whose threshold is known from an earlier step."""
        if not view.step.proposes:
            return {}
        return {
            group: collect(self.score, view, _inside(whole, spans), control.lowest_rung(last))
            for group, (whole, last) in enumerate(zip(self._groups(view.step.setup), state.thresholds, strict=True))
            if last and _inside(whole, spans)
        }

    async def pick(self, state: SearchState, view: View, collectives: Collectives) -> Proposal:
        spans = view.territory.spans if view.step.proposes else ()
        searches = [
            _Search(self.score, view, _inside(whole, spans), self._goal(state, whole, view.step), last)
            for whole, last in zip(self._groups(view.step.setup), state.thresholds, strict=True)
        ]
        for group, (search, last) in enumerate(zip(searches, state.thresholds, strict=True)):
            if last:
                search.take([part[group] for part in view.found if group in part], control.lowest_rung(last))
        return await self._proposal(searches, collectives)

    @property
    def knows_teams(self) -> bool:
        return not self.per_layer

    async def pick_for_team(self, state: SearchState, views: Sequence[View], team: TeamCollectives) -> Proposal:
        step, (last,) = views[0].step, state.thresholds
        looks = [(view, view.territory.spans if view.step.proposes else ()) for view in views]
        search = _TeamSearch(self.score, looks, self._goal(state, Span(0, step.numel), step), last)
        return await self._proposal([search], team)

    async def _proposal(self, searches: Sequence[_Search], collectives: Collectives) -> Proposal:
        """Run the searches to their end, all groups in one message a round."""
        while unsettled := [search for search in searches if not search.settled]:
            rows = await collectives.gather_numbers(torch.cat([search.counts() for search in unsettled], dim=-1))
            rulings = await collectives.alike(partial(_rulings, unsettled, rows))
            for search, ruling in zip(unsettled, rulings, strict=True):
                search.accept(ruling)

        async def more(entries: int) -> Proposal:
            factor = 1 + entries / max(1, sum(search.entries for search in searches))
            for search in searches:
                search.widen(factor)
            return await self._proposal(searches, collectives)

        return Proposal(
            indices=torch.cat([search.picked() for search in searches]),
            counts=tuple(map(sum, zip(*(search.quotas for search in searches), strict=True))),
            thresholds=tuple(search.threshold for search in searches),
            more=more if self.overlapping else None,
        )

    def observe(self, state: SearchState, step: Step, reduced: Reduced) -> SearchState:
        # a group that had no goal in this step keeps the threshold it had
        thresholds = tuple(new or old for new, old in zip(reduced.thresholds, state.thresholds, strict=True))
        proposed = sum(reduced.counts)
        overlap = reduced.distinct / proposed if self.overlapping and proposed else state.overlap
        return SearchState(thresholds, overlap)

    def _groups(self, setup: Setup) -> list[Span]:
        if self.per_layer and len(setup.bounds) > 1:
            return [Span(*pair) for pair in pairwise(setup.bounds)]
        return [Span(0, setup.numel)]

    def _goal(self, state: SearchState, group: Span, step: Step) -> _Goal:
        size, num_lookers = group.stop - group.start, len(step.proposers) if self.overlapping else 1
        target = step.target
        if self.per_layer and size:
            target = control.dithered_share(step.target, step.numel, group.start, group.stop, step.index)
        if target >= size:
            return _Goal(size * num_lookers, size * num_lookers, everything=True)
        entries = min(round(target / state.overlap), size * num_lookers)
        return _Goal(entries, int(self.ceiling * entries))


class _Goal(NamedTuple):
    """How many entries, over all ranks, shall pass and how many may."""

    entries: int
    limit: int
    everything: bool = False

    def scaled(self, factor: float) -> _Goal:
        return self._replace(entries=math.ceil(self.entries * factor), limit=math.ceil(self.limit * factor))


class _Search:
    """The search for the threshold of one group, as one rank takes part in it."""

    def __init__(self, score: Score, view: View, spans: Sequence[Span], goal: _Goal, last: float) -> None:
        self._score = score
        self._view = view
        self._spans = spans
        self._goal = goal
        self._candidates = joined([], view.acc.device)
        self._floor = math.inf
        """The candidates are all entries that reach this."""
        self._proposed = torch.empty(0, dtype=torch.int64, device=view.acc.device)
        self._reaching = 0
        """This rank's entries that reach the threshold."""
        self._passing = (0,) * view.step.world
        self.ladder = control.everything() if goal.everything else control.first_ladder(last)
        self.settled = goal.entries == 0
        self.threshold = 0.0
        self.quotas = (0,) * view.step.world
        """What each rank is to propose, beyond what it did before in this step."""

    @property
    def entries(self) -> int:
        """Over all ranks, how many are let through."""
        return sum(self._passing)

    def take(self, found: Sequence[Candidates], floor: float) -> None:
        """Candidates that scans during backward have found already: all that reach `floor`."""
        self._candidates, self._floor = joined(found, self._view.acc.device), floor

    def widen(self, factor: float) -> None:
        """Go on searching: let more entries through."""
        self.quotas = (0,) * len(self.quotas)
        if self._goal.entries and not self._goal.everything:
            self._goal = self._goal.scaled(factor)
            self.ladder = control.first_ladder(self.threshold, self._floor)
            self.settled = False

    def counts(self) -> Tensor:
        """This rank's entries at or above each rung."""
        rungs = _on_device(self.ladder.tobytes(), self._view.acc.device)
        if self._covers(self._lowest):
            return kernels.count_at_least(self._candidates.scores, rungs)
        return self.counted(rungs)

    def counted(self, rungs: Tensor) -> Tensor:
        """The same by looking at all entries of the spans."""
        counted = torch.zeros(len(rungs), dtype=torch.int64, device=rungs.device)
        for start, stop, _ in chunks(self._spans, rungs.device):
            counted += kernels.count_at_least(self._score(self._view, start, stop), rungs)
        return counted

    def judge(self, rows: Sequence[Sequence[int]]) -> _Ruling:
        """A rung, or the next ladder, from the counts of all ranks."""
        totals = [sum(column) for column in zip(*rows, strict=True)]
        verdict = control.Verdict(0)
        if not self._goal.everything:
            verdict = control.narrow(self.ladder, totals, self._goal.entries, self._goal.limit)
        reaching = tuple(row[verdict.rung] for row in rows)
        if not verdict.tied:
            return _Ruling(verdict, reaching, reaching)
        above = [row[verdict.rung + 1] if verdict.rung + 1 < len(row) else 0 for row in rows]
        return _Ruling(verdict, reaching, control.tied_quotas(reaching, above, self._goal.entries))

    def accept(self, ruling: _Ruling) -> None:
        """Settle on the rung, or go on with the next ladder."""
        verdict, reaching, passing = ruling
        if verdict.ladder is not None:
            self.ladder = verdict.ladder
            if verdict.affordable:
                self._collect(self._lowest)
            return
        self.settled = True
        self._reaching = self._own(reaching)
        self.threshold = float(control.from_bits(self.ladder)[verdict.rung])
        self.quotas = tuple(max(0, new - old) for new, old in zip(passing, self._passing, strict=True))
        self._passing = tuple(old + more for old, more in zip(self._passing, self.quotas, strict=True))

    def picked(self) -> Tensor:
        """This rank's new proposals in the group, ascending."""
        # also without a quota: how far down the candidates reach is to be the same on all ranks
        self._collect(self.threshold)
        quota = self._own(self.quotas)
        if quota == 0:
            return self._proposed[:0]
        indices, scores, _ = self._candidates
        passed = kernels.at_least(scores, self.threshold, self._reaching)
        if len(self._proposed):
            passed = passed[~torch.isin(indices[passed], self._proposed)]
        if len(passed) > quota:
            passed = self._trimmed(passed)
        self._proposed = torch.cat([self._proposed, indices[passed]])
        return indices[passed]

    def _own(self, by_rank: Sequence[int]) -> int:
        return by_rank[self._view.step.rank]

    def _trimmed(self, passed: Tensor) -> Tensor:
        """The quota, largest scores first."""
        return passed[kernels.largest(self._candidates.scores[passed], self._own(self.quotas))]

    @property
    def _lowest(self) -> float:
        return float(control.from_bits(self.ladder)[0])

    def _covers(self, threshold: float) -> bool:
        """Do the candidates include all entries that reach the threshold?"""
        return threshold >= self._floor

    def _collect(self, threshold: float) -> None:
        if not self._covers(threshold):
            self._candidates = collect(self._score, self._view, self._spans, threshold)
            self._floor = threshold


class _TeamSearch(_Search):
    """The same for all ranks of a process at once. Indices are those of `collect_for_team`."""

    def __init__(self, score: Score, looks: Sequence[Look], goal: _Goal, last: float) -> None:
        super().__init__(score, looks[0][0], (), goal, last)
        self._looks = looks
        if last and not self.settled:
            self._collect(control.lowest_rung(last))

    def counts(self) -> Tensor:
        """`[world, rungs]`."""
        rungs = _on_device(self.ladder.tobytes(), self._view.acc.device)
        if self._covers(self._lowest):
            ranks = self._candidates.indices // self._view.step.numel
            return kernels.count_by_rank(self._candidates.scores, rungs, ranks, len(self._looks))
        members = [_Search(self._score, view, spans, self._goal, 0.0) for view, spans in self._looks]
        return torch.stack([member.counted(rungs) for member in members])

    def picked(self) -> Tensor:
        """The new proposals of all ranks, one rank's after the other's."""
        return super().picked() % max(self._view.step.numel, 1)

    def _own(self, by_rank: Sequence[int]) -> int:
        return sum(by_rank)

    def _trimmed(self, passed: Tensor) -> Tensor:
        ranks = self._candidates.indices[passed] // self._view.step.numel
        borders = torch.searchsorted(ranks, torch.arange(len(self._looks) + 1, device=ranks.device)).tolist()
        kept = [
            own[kernels.largest(self._candidates.scores[own], quota)]
            for own, quota in zip((passed[low:high] for low, high in pairwise(borders)), self.quotas, strict=True)
        ]
        return torch.cat(kept)

    def _collect(self, threshold: float) -> None:
        if not self._covers(threshold):
            self._candidates = collect_for_team(self._score, self._looks, threshold)
            self._floor = threshold


def _inside(group: Span, spans: Sequence[Span]) -> list[Span]:
    """The parts of the spans that lie in the group; empty ones left out."""
    parts = [span.cut(group.start, group.stop) for span in spans]
    return [part for part in parts if part.stop > part.start]


class _Ruling(NamedTuple):
    """What a round says in one search, the same on all ranks."""

    verdict: control.Verdict
    reaching: tuple[int, ...]
    """Entries of every rank that reach the rung."""
    passing: tuple[int, ...]
    """Those that it may propose: fewer, where more than the goal are tied."""


def _rulings(searches: Sequence[_Search], rows: Sequence[Sequence[int]]) -> list[_Ruling]:
    """What the counts of all ranks, side by side, say in each search."""
    tables = _split(rows, [len(search.ladder) for search in searches])
    return [search.judge(table) for search, table in zip(searches, tables, strict=True)]


@lru_cache(maxsize=64)
def _on_device(ladder: bytes, device: torch.device) -> Tensor:
    """The rungs of a ladder; ranks that share a device share them."""
    return torch.from_numpy(control.from_bits(np.frombuffer(ladder, dtype=np.int64))).to(device)


def _split(rows: Sequence[Sequence[int]], widths: Sequence[int]) -> list[list[Sequence[int]]]:
    """Cut every row into pieces of the given widths; one table per width."""
    tables, start = [], 0
    for width in widths:
        tables.append([row[start : start + width] for row in rows])
        start += width
    return tables
