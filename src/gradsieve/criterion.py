"""What a rank takes out of its territory: the second axis of a method.

Like a region, a criterion is a frozen rule with a state apart. A step calls `scan` on each stretch of the vector as
soon as it is complete, while backward still runs, and `pick` once all of it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradsieve import control, kernels
from gradsieve.collectives import Collectives, TeamCollectives
from gradsieve.region import NoState, even_borders, stretched
from gradsieve.score import Magnitude, collect, collect_for_team, joined
from gradsieve.types import ALL, Candidates, Owners, Proposal, Reduced, Setup, Span, Step, View


class Criterion:
    """A rule for what to take."""

    @property
    def needs_weights(self) -> bool:
        """Does it look at the parameters, too?"""
        return False

    def start(self, setup: Setup) -> Any:
        return NoState()

    def scan(self, state: Any, view: View, spans: Sequence[Span]) -> Any:
        """Look at parts of the territory that are complete; None if nothing can be done before all of it is."""
        return None

    async def pick(self, state: Any, view: View, collectives: Collectives) -> Proposal:
        """This rank's proposal, out of its territory. `view.found` holds what `scan` returned for all of it."""
        raise NotImplementedError

    @property
    def knows_teams(self) -> bool:
        """Can it pick for all ranks of a process at once?"""
        return False

    async def pick_for_team(self, state: Any, views: Sequence[View], team: TeamCollectives) -> Proposal:
        """`scan` and `pick` for all ranks at once: their proposals one after the other, and the counts of each."""
        raise NotImplementedError

    def observe(self, state: Any, step: Step, reduced: Reduced) -> Any:
        """The state after a step."""
        return state

    def check(self, state: Any, setup: Setup) -> None:
        """Refuse a state that this rule never has. Its fields are of the right types."""

    def resized(self, state: Any, old_world: int, new_world: int) -> Any:
        """The state for another number of ranks."""
        return state


@dataclass(frozen=True)
class Everything(Criterion):
    """The whole vector."""

    async def pick(self, state: Any, view: View, collectives: Collectives) -> Proposal:
        return Proposal(ALL, (view.step.numel,) * view.step.world)


@dataclass(frozen=True)
class SharedRandom(Criterion):
    """Random entries, the same on every rank."""

    async def pick(self, state: Any, view: View, collectives: Collectives) -> Proposal:
        step = view.step
        indices = shared_draw(step.numel, step.target, (step.seed, step.index))
        return Proposal(torch.tensor(indices, device=view.acc.device), (step.target,) * step.world)


@lru_cache(maxsize=1)  # of a step, for all ranks that one process simulates
def shared_draw(numel: int, target: int, seed: tuple[int, int]) -> npt.NDArray[np.int64]:
    """So many entries, in ascending order."""
    return np.sort(np.random.default_rng(seed).choice(numel, target, replace=False, shuffle=False))


@dataclass(frozen=True)
class Largest(Criterion):
    """The quota of each span, largest magnitudes first."""

    async def pick(self, state: Any, view: View, collectives: Collectives) -> Proposal:
        score = Magnitude()
        spans = view.territory.spans if view.step.proposes else ()
        picked = [
            kernels.largest(score(view, start, stop), quota) + start for start, stop, quota in spans if stop > start
        ]
        empty = torch.empty(0, dtype=torch.int64, device=view.acc.device)
        return Proposal(torch.cat([empty, *picked]), view.territory.quotas)

    @property
    def knows_teams(self) -> bool:
        return True

    async def pick_for_team(self, state: Any, views: Sequence[View], team: TeamCollectives) -> Proposal:
        picked = [await self.pick(state, view, team) for view in views]
        return Proposal(torch.cat([own.indices for own in picked if isinstance(own.indices, Tensor)]), picked[0].counts)


class Rule:
    """Where a threshold comes from that is not agreed on within the step."""

    @property
    def knows_teams(self) -> bool:
        """Is the threshold known early, and the same for all ranks?"""
        return type(self).early is not Rule.early

    def start(self, setup: Setup) -> Any:
        return NoState()

    def early(self, state: Any, step: Step) -> float | None:
        """The threshold, if it is known before the gradient is."""
        return None

    def late(self, state: Any, step: Step, scores: Tensor) -> float:
        """The threshold from this rank's scores; asked only if `early` has none."""
        raise NotImplementedError

    def owners(self, state: Any) -> Owners | None:
        """What the exchange is told, where ranks own stretches of the vector."""
        return None

    def observe(self, state: Any, step: Step, reduced: Reduced) -> Any:
        return state

    def check(self, state: Any, setup: Setup) -> None:
        """Refuse a state that this rule never has. Its fields are of the right types."""

    def resized(self, state: Any, old_world: int, new_world: int) -> Any:
        """The state for another number of ranks."""
        return state


@dataclass(frozen=True)
class Fixed(Rule):
    """One value for ever; by default the one that the target suggests."""

    value: float | None = None

    def early(self, state: Any, step: Step) -> float:
        return control.initial_threshold(step.target) if self.value is None else self.value


class Stepping(NamedTuple):
    threshold: float
    """0 before the first step."""


@dataclass(frozen=True)
class Stepped(Rule):
    """A small step up or down from the last threshold, by the last support (MiCRO's law)."""

    def start(self, setup: Setup) -> Stepping:
        return Stepping(0.0)

    def early(self, state: Stepping, step: Step) -> float:
        return state.threshold or control.initial_threshold(step.target)

    def observe(self, state: Stepping, step: Step, reduced: Reduced) -> Stepping:
        # where ranks that find nothing propose one entry each, that may be more than the target for ever
        threshold = control.stepped_threshold(self.early(state, step), reduced.support, step.target)
        return Stepping(min(control.HUGE, threshold))

    def check(self, state: Stepping, setup: Setup) -> None:
        if state.threshold > control.HUGE:
            raise ValueError(f"threshold must be at most {control.HUGE:.3g}, not {state.threshold}")


class Stages(NamedTuple):
    stages: int
    proposed: float
    """Entries proposed per rank since the number of stages was last looked at, over the target."""


@dataclass(frozen=True)
class ExponentialFit(Rule):
    """A threshold from a distribution fitted to this rank's scores, in stages that adapt (SIDCo)."""

    def start(self, setup: Setup) -> Stages:
        return Stages(1, 0.0)

    def late(self, state: Stages, step: Step, scores: Tensor) -> float:
        return kernels.exponential_threshold(scores, step.target, state.stages)

    def observe(self, state: Stages, step: Step, reduced: Reduced) -> Stages:
        proposed = state.proposed + sum(reduced.counts) / step.world / step.target
        if (step.index + 1) % control.STAGE_PERIOD:
            return Stages(state.stages, proposed)
        density = step.target / step.numel
        return Stages(control.next_stages(state.stages, proposed / control.STAGE_PERIOD, density), 0.0)

    def check(self, state: Stages, setup: Setup) -> None:
        most = control.most_stages(1 / max(setup.numel, 1))
        if not 1 <= state.stages <= most:
            raise ValueError(f"stages must lie in 1 to {most}, not {state.stages}")
        if state.proposed > control.STAGE_PERIOD * setup.numel:
            raise ValueError(f"proposed must be at most {control.STAGE_PERIOD * setup.numel}, not {state.proposed}")


@dataclass(frozen=True)
class Sampled(Rule):
    """A threshold from an evenly spaced sample of this rank's scores (DGC)."""

    fraction: float = 0.01

    def late(self, state: Any, step: Step, scores: Tensor) -> float:
        return kernels.sampled_threshold(scores, step.target, self.fraction, offset=step.seed + step.index)


@dataclass(frozen=True)
class Remeasured(Rule):
    """Each rank's own: the size of its entry number `target`, the largest first, measured now and then (Ok-Topk).

    All ranks remember those of all, so that what is learned is alike on every rank.
    """

    period: int = control.MEASURE_PERIOD
    """Steps from one measurement to the next."""

    @property
    def knows_teams(self) -> bool:
        return False

    def start(self, setup: Setup) -> Owners:
        return Owners((0.0,) * setup.world, 0.0, tuple(even_borders(setup.numel, setup.world)))

    def early(self, state: Owners, step: Step) -> float | None:
        is_due = step.index % self.period == 0
        return None if is_due else state.picking[step.rank] or None

    def late(self, state: Owners, step: Step, scores: Tensor) -> float:
        return min(control.HUGE, kernels.kth_largest(scores, step.target))

    def owners(self, state: Owners) -> Owners:
        return state

    def observe(self, state: Owners, step: Step, reduced: Reduced) -> Owners:
        assert reduced.owners is not None
        return reduced.owners

    def check(self, state: Owners, setup: Setup) -> None:
        if len(state.picking) != setup.world:
            raise ValueError(f"picking must be {setup.world} numbers, not {len(state.picking)}")
        for threshold in (*state.picking, state.keeping):
            if threshold != 0 and not control.TINY < threshold < control.HUGE:
                raise ValueError(
                    f"thresholds must be 0 or lie between {control.TINY:.3g} and {control.HUGE:.3g}, not {threshold}"
                )
        borders = state.borders
        ends = borders[:1] == (0,) and borders[-1:] == (setup.numel,)
        if len(borders) != setup.world + 1 or not ends or sorted(borders) != list(borders):
            raise ValueError(
                f"borders must be {setup.world + 1} ascending numbers from 0 to {setup.numel}, not {borders}"
            )

    def resized(self, state: Owners, old_world: int, new_world: int) -> Owners:
        # what an entry of a rank, and a sum over ranks, has to reach depends on how many ranks there are
        return Owners((0.0,) * new_world, 0.0, tuple(stretched(state.borders, new_world)))


@dataclass(frozen=True)
class Above(Criterion):
    """Every entry whose magnitude reaches a threshold that the rank knows by itself."""

    rule: Rule
    at_least_one: bool = False
    """A rank that finds nothing proposes one entry, a different one each step."""
    at_most: float | None = None
    """A rank that finds more than so many times the target keeps the largest."""

    def start(self, setup: Setup) -> Any:
        return self.rule.start(setup)

    def observe(self, state: Any, step: Step, reduced: Reduced) -> Any:
        return self.rule.observe(state, step, reduced)

    def check(self, state: Any, setup: Setup) -> None:
        self.rule.check(state, setup)

    def resized(self, state: Any, old_world: int, new_world: int) -> Any:
        return self.rule.resized(state, old_world, new_world)

    def scan(self, state: Any, view: View, spans: Sequence[Span]) -> Candidates | None:
        threshold = self._early(state, view.step)
        return None if threshold is None else collect(Magnitude(), view, spans, threshold)

    async def pick(self, state: Any, view: View, collectives: Collectives) -> Proposal:
        threshold = self._early(state, view.step)
        found = view.found
        if threshold is None:
            scores = torch.cat([Magnitude()(view, start, stop) for start, stop, _ in view.territory.spans])
            threshold = max(control.TINY, self.rule.late(state, view.step, scores))
            found = (collect(Magnitude(), view, view.territory.spans, threshold),)
        candidates = joined(found, view.acc.device)
        return Proposal(self._bounded(candidates, view), None, (threshold,), owners=self.rule.owners(state))

    @property
    def knows_teams(self) -> bool:
        return self.rule.knows_teams

    async def pick_for_team(self, state: Any, views: Sequence[View], team: TeamCollectives) -> Proposal:
        step = views[0].step
        threshold = self._early(state, step)
        assert threshold is not None
        indices, scores, _ = collect_for_team(Magnitude(), [(view, view.territory.spans) for view in views], threshold)
        counts = [row[0] for row in await team.gather_numbers(_count_ranks(indices, step).unsqueeze(1), "counts")]
        positions = indices % max(step.numel, 1)
        if self.at_least_one or self.at_most is not None:
            found = zip(torch.split(positions, counts), torch.split(scores, counts), views, strict=True)
            pieces = [self._bounded(Candidates(own, its_scores, 0), view) for own, its_scores, view in found]
            positions, counts = torch.cat(pieces), [len(piece) for piece in pieces]
        return Proposal(positions, tuple(counts), (threshold,))

    def _early(self, state: Any, step: Step) -> float | None:
        # whoever asks for everything gets everything, whatever the rule
        return 0.0 if step.target >= step.numel else self.rule.early(state, step)

    def _bounded(self, candidates: Candidates, view: View) -> Tensor:
        step, indices = view.step, candidates.indices
        most = len(indices) if self.at_most is None else control.most_entries(step.target, self.at_most)
        if len(indices) > most:
            return indices[kernels.largest(candidates.scores, most)]
        start, stop, _ = view.territory.spans[0]
        if self.at_least_one and len(indices) == 0 and stop > start:
            return indices.new_tensor([start + step.index % (stop - start)])
        return indices


def _count_ranks(indices: Tensor, step: Step) -> Tensor:
    """How many of the indices, as `collect_for_team` has them, are each rank's."""
    edges = torch.arange(step.world + 1, device=indices.device) * step.numel
    return torch.searchsorted(indices, edges).diff()
