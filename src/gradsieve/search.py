"""A threshold that the ranks find together, within the step, so that the target is met in every step.

Every rank counts its entries at 64 thresholds, the counts are gathered in one small message, and all ranks settle alike
on one of them (`control.settle`). Around the last step's threshold one round does; from nothing, at any scale, it takes
up to four. The counts of the last round are the sizes of the proposals, so the message replaces the exchange of counts
that a fixed threshold needs too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gradsieve import control, kernels
from gradsieve.collectives import Collectives, TeamCollectives
from gradsieve.criterion import Criterion
from gradsieve.score import Look, Magnitude, Score, chunks, collect, collect_for_team, joined
from gradsieve.types import Candidates, Proposal, Reduced, Setup, Span, Step, View

Counts: TypeAlias = Sequence[Sequence[int]]
"""Of each rank, how many entries reach each rung."""

FIRST_ROOM, FIRST_ROOM_LEAST = 2, 64
"""In the first steps, of which nothing is known, one rank may send so many times the target, and so many more."""


class SearchState(NamedTuple):
    thresholds: tuple[float, ...]
    """Where to look around, one per group; 0 where there was none yet."""
    travelled: int = 1
    """Entries that lately travelled, over all ranks, for so many `distinct` ones: see `control.next_overlap`."""
    distinct: int = 1
    """The same, each counted once: fewer where several ranks proposed the same entry."""
    recent: tuple[int, ...] = ()
    """The largest proposal of any rank in each of the last steps, newest last."""


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
        return SearchState((0.0,) * len(self._groups(setup)))

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
        groups = zip(self._groups(view.step.setup), self._goals(state, view.step), state.thresholds, strict=True)
        searches = []
        for group, (whole, goal, last) in enumerate(groups):
            search = _Search(self.score, view, _inside(whole, spans), goal, last)
            search.take([part[group] for part in view.found if group in part])
            searches.append(search)
        return await self._proposal(self.room(state, view.step), searches, collectives)

    @property
    def knows_teams(self) -> bool:
        return not self.per_layer

    async def pick_for_team(self, state: SearchState, views: Sequence[View], team: TeamCollectives) -> Proposal:
        looks = [(view, view.territory.spans if view.step.proposes else ()) for view in views]
        (goal,), (last,) = self._goals(state, views[0].step), state.thresholds
        room = self.room(state, views[0].step)
        return await self._proposal(room, [_TeamSearch(self.score, looks, goal, last)], team)

    async def _proposal(self, room: int, searches: Sequence[_Search], collectives: Collectives) -> Proposal:
        """Run the searches to their end, all groups in one message a round."""
        while unsettled := [search for search in searches if not search.settled]:
            counts = torch.cat([search.counts() for search in unsettled], dim=-1)
            rows = await collectives.gather_numbers(counts, "counts")
            rulings = await collectives.alike(partial(_rulings, unsettled, rows))
            for search, ruling in zip(unsettled, rulings, strict=True):
                search.accept(ruling)
        return Proposal(
            indices=torch.cat([search.picked() for search in searches]),
            counts=tuple(map(sum, zip(*(search.quotas for search in searches), strict=True))),
            thresholds=tuple(search.threshold for search in searches),
            room=room,
        )

    def observe(self, state: SearchState, step: Step, reduced: Reduced) -> SearchState:
        counts, goal = reduced.counts, sum(goal.entries for goal in self._goals(state, step))
        thresholds = tuple(
            # a group that had no goal in this step keeps the threshold it had
            control.next_threshold(applied, sum(counts), goal) if applied else last
            for applied, last in zip(reduced.thresholds, state.thresholds, strict=True)
        )
        room = self.room(state, step)
        overlap = state.travelled, state.distinct
        travelled = sum(min(count, room) for count in counts)
        if self.overlapping and travelled and reduced.distinct:
            overlap = control.next_overlap(*overlap, travelled, reduced.distinct)
        return SearchState(thresholds, *overlap, (*state.recent, max(counts))[-control.RECENT :])

    def check(self, state: SearchState, setup: Setup) -> None:
        if len(state.thresholds) != len(self._groups(setup)):
            raise ValueError(f"thresholds must be {len(self._groups(setup))} numbers, not {len(state.thresholds)}")
        if not all(threshold == 0 or control.TINY <= threshold <= control.HUGE for threshold in state.thresholds):
            raise ValueError(
                f"thresholds must be 0 or lie in {control.TINY:.3g} to {control.HUGE:.3g}, not {state.thresholds}"
            )
        most = max(control.OVERLAP_UNIT, setup.numel)
        if not 1 <= state.distinct <= min(most, state.travelled) or state.travelled > state.distinct * setup.world:
            raise ValueError(
                f"distinct must lie between 1 and {most}, and travelled between it and {setup.world} times as many, "
                f"not {state.distinct} and {state.travelled}"
            )
        if len(state.recent) > control.RECENT or max(state.recent, default=0) > setup.numel:
            raise ValueError(f"recent must be at most {control.RECENT} numbers up to {setup.numel}, not {state.recent}")

    def resized(self, state: SearchState, old_world: int, new_world: int) -> SearchState:
        # how many entries a rank proposes, and how many of them others propose too, depends on how many ranks there are
        return SearchState(state.thresholds)

    def room(self, state: SearchState, step: Step) -> int:
        """How many entries of one rank may travel in this step."""
        room = control.room(state.recent, -(-step.target // len(step.proposers)))
        return FIRST_ROOM * step.target + FIRST_ROOM_LEAST if room is None else room

    def _groups(self, setup: Setup) -> list[Span]:
        if self.per_layer and len(setup.bounds) > 1:
            return [Span(*pair) for pair in pairwise(setup.bounds)]
        return [Span(0, setup.numel)]

    def _goals(self, state: SearchState, step: Step) -> list[Goal]:
        return [self._goal(state, group, step) for group in self._groups(step.setup)]

    def _goal(self, state: SearchState, group: Span, step: Step) -> Goal:
        size, num_lookers = group.stop - group.start, len(step.proposers) if self.overlapping else 1
        target = step.target
        if self.per_layer and size:
            target = control.dithered_share(step.target, step.numel, group.start, group.stop, step.index)
        if target >= size:
            return Goal(size * num_lookers, size * num_lookers, everything=True)
        travelled, distinct = state.travelled, state.distinct
        entries = min((target * travelled + distinct // 2) // distinct, size * num_lookers)
        # a rank's room is for all of its groups together: where there are several, none of them knows its own
        room = None if self.per_layer else self.room(state, step)
        return Goal(entries, control.most_entries(entries, self.ceiling), room)


class Goal(NamedTuple):
    """How many entries, over all ranks, shall travel and how many may."""

    entries: int
    limit: int
    room: int | None = None
    """How many of one rank may, where there is a bound."""
    everything: bool = False

    def travelling(self, rows: Counts) -> Counts:
        """Of the entries of each rank those that there is room for, so that other ranks' make up for the rest.

        All of them where that is not enough: room is made by what ranks would have proposed.
        """
        if self.room is None or all(row[0] <= self.room for row in rows):
            return rows
        within = [[min(count, self.room) for count in row] for row in rows]
        return within if sum(row[0] for row in within) >= self.entries else rows

    def proposed(self, reaching: Sequence[int]) -> tuple[int, ...]:
        """What ranks propose of the entries that reach the threshold."""
        if self.room is None:
            return tuple(reaching)
        return tuple(min(count, control.ROOM_GROWTH * self.room) for count in reaching)


class _Ruling(NamedTuple):
    """What a round says in one search, the same on all ranks: how it ends or, if there is one, the next ladder."""

    threshold: float = 0.0
    reaching: tuple[int, ...] = ()
    """Entries of every rank that reach the threshold."""
    quotas: tuple[int, ...] = ()
    """Those of them that it is to propose."""
    ladder: control.Bits | None = None


class _Search:
    """The search for the threshold of one group, as one rank takes part in it."""

    def __init__(self, score: Score, view: View, spans: Sequence[Span], goal: Goal, last: float) -> None:
        self._score = score
        self._view = view
        self._spans = spans
        self._goal = goal
        self._is_warm = bool(last) and not goal.everything
        self._candidates: Candidates | None = None
        """All entries that reach the lowest rung; None where they are too many to collect."""
        self._reaching = (0,) * view.step.world
        self._rounds_left = 1
        if goal.everything:
            self.ladder = control.everything()
        elif last:
            self.ladder = control.warm_ladder(control.to_bits(last))
        else:
            self._rounds_left, self.ladder = control.COLD_ROUNDS, control.cold_ladder()
        self.settled = goal.entries == 0
        self.threshold = 0.0
        self.quotas = self._reaching
        """What each rank is to propose."""

    def take(self, found: Sequence[Candidates]) -> None:
        """Candidates that scans during backward have found already."""
        if self._is_warm:
            self._candidates = joined(found, self._view.acc.device)

    def counts(self) -> Tensor:
        """This rank's entries at or above each rung."""
        rungs = self._rungs()
        if self._candidates is not None:
            return kernels.count_at_least(self._candidates.scores, rungs)
        return counted(self._score, (self._view, self._spans), rungs)

    def judge(self, rows: Counts) -> _Ruling:
        """A rung, or the next ladder, from the counts of all ranks."""
        travelling = self._goal.travelling(rows)
        totals = [sum(column) for column in zip(*travelling, strict=True)]
        entries, limit = self._goal.entries, self._goal.limit
        if self._rounds_left > 1:
            ladder = control.next_ladder(self.ladder, totals, entries, limit)
            if ladder is not None:
                return _Ruling(ladder=ladder)
        rung, thinned = control.settle(totals, entries, limit)
        reaching = tuple(row[rung] for row in rows)
        threshold = float(control.from_bits(self.ladder)[rung])
        if thinned:
            return _Ruling(threshold, reaching, control.shares([row[rung] for row in travelling], entries))
        return _Ruling(threshold, reaching, self._goal.proposed(reaching))

    def accept(self, ruling: _Ruling) -> None:
        if ruling.ladder is not None:
            self.ladder = ruling.ladder
            self._rounds_left -= 1
            return
        self.threshold, self._reaching, self.quotas, _ = ruling
        self.settled = True

    def picked(self) -> Tensor:
        """This rank's proposals in the group, ascending."""
        rank = self._view.step.rank
        return self._passing(self._reaching[rank : rank + 1], self.quotas[rank : rank + 1])

    def _passing(self, reaching: Sequence[int], quotas: Sequence[int]) -> Tensor:
        """Of the entries that reach the threshold, so many of one rank after the other, the quota of each."""
        if not any(quotas):
            return torch.empty(0, dtype=torch.int64, device=self._view.acc.device)
        indices, scores, _ = self._collected(self.threshold) if self._candidates is None else self._candidates
        passing = indices[kernels.at_least(scores, self.threshold, sum(reaching))]
        if reaching == quotas:
            return passing
        pieces = zip(torch.split(passing, list(reaching)), quotas, strict=True)
        return torch.cat([kernels.thinned(piece, quota) for piece, quota in pieces])

    def _collected(self, threshold: float) -> Candidates:
        return collect(self._score, self._view, self._spans, threshold)

    def _rungs(self) -> Tensor:
        return _on_device(self.ladder.tobytes(), self._view.acc.device)


class _TeamSearch(_Search):
    """The same for all ranks of a process at once. Indices are those of `collect_for_team`."""

    def __init__(self, score: Score, looks: Sequence[Look], goal: Goal, last: float) -> None:
        super().__init__(score, looks[0][0], (), goal, last)
        self._looks = looks
        if self._is_warm:
            self._candidates = self._collected(control.lowest_rung(last))

    def counts(self) -> Tensor:
        """`[world, rungs]`."""
        rungs = self._rungs()
        if self._candidates is not None:
            ranks = self._candidates.indices // self._view.step.numel
            return kernels.count_by_rank(self._candidates.scores, rungs, ranks, len(self._looks))
        return torch.stack([counted(self._score, look, rungs) for look in self._looks])

    def picked(self) -> Tensor:
        """The proposals of all ranks, one rank's after the other's."""
        return self._passing(self._reaching, self.quotas) % max(self._view.step.numel, 1)

    def _collected(self, threshold: float) -> Candidates:
        return collect_for_team(self._score, self._looks, threshold)


def counted(score: Score, look: Look, rungs: Tensor) -> Tensor:
    """How many of the entries that a rank looks at reach each rung."""
    view, spans = look
    total = torch.zeros(len(rungs), dtype=torch.int64, device=rungs.device)
    for start, stop, _ in chunks(spans, rungs.device):
        total += kernels.count_at_least(score(view, start, stop), rungs)
    return total


def _inside(group: Span, spans: Sequence[Span]) -> list[Span]:
    """The parts of the spans that lie in the group; empty ones left out."""
    parts = [span.cut(group.start, group.stop) for span in spans]
    return [part for part in parts if part.stop > part.start]


def _rulings(searches: Sequence[_Search], rows: Counts) -> list[_Ruling]:
    """What the counts of all ranks, the searches side by side, say in each search."""
    starts = range(0, len(searches) * control.NUM_RUNGS, control.NUM_RUNGS)
    tables = ([row[start : start + control.NUM_RUNGS] for row in rows] for start in starts)
    return [search.judge(table) for search, table in zip(searches, tables, strict=True)]


@lru_cache(maxsize=64)
def _on_device(ladder: bytes, device: torch.device) -> Tensor:
    """The rungs of a ladder; ranks that share a device share them."""
    return torch.from_numpy(control.from_bits(np.frombuffer(ladder, dtype=np.int64))).to(device)
