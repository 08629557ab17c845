"""Runs in groups: sections of one task and model, in them groups that differ by the seed alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np

from gradsieve.projection import GIGABIT, LATENCY, projected_step_seconds
from gradsieve.report import texts
from gradsieve.report.colours import Series, base_name, palette_place
from gradsieve.runs import Run
from gradsieve.runs import finite_mean as mean

T = TypeVar("T")

DENSE = "dense"


class Spread(NamedTuple):
    """A number over the seeds. Not finite if one of them is not."""

    mean: float
    deviation: float
    """The sample's standard deviation; 0 for one seed."""
    low: float
    high: float
    size: int

    def overlaps(self, other: Spread) -> bool:
        """Do the two ranges have a value in common?"""
        return self.low <= other.high and other.low <= self.high


def spread(values: Sequence[float]) -> Spread:
    """
    >>> spread([1.0, 3.0])
    Spread(mean=2.0, deviation=1.4142135623730951, low=1.0, high=3.0, size=2)
    """
    if not values or not all(map(math.isfinite, values)):
        return Spread(math.nan, math.nan, math.nan, math.nan, len(values))
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return Spread(float(np.mean(values)), deviation, min(values), max(values), len(values))


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


@dataclass(frozen=True)
class Measure:
    """How the task judges a model."""

    name: str
    higher_is_better: bool
    percent: bool

    @property
    def words(self) -> str:
        return texts.words(texts.printable(self.name))

    @property
    def unit(self) -> str:
        return " %" if self.percent else ""

    @property
    def axis(self) -> str:
        return f"{self.words} (%)" if self.percent else self.words

    def shown(self, value: float) -> float:
        return 100 * value if self.percent else value

    def text(self, value: float) -> str:
        if not math.isfinite(value):
            return texts.ABSENT
        return f"{self.shown(value):.2f}{self.unit}" if self.percent else texts.number(value, 4)

    def difference(self, value: float) -> str:
        """A signed difference of two measures, in points where they are percentages."""
        return texts.signed(self.shown(value), 2 if self.percent else 3)

    def best(self, values: Iterable[float]) -> float:
        finite = [value for value in values if math.isfinite(value)]
        return (max if self.higher_is_better else min)(finite, default=math.nan)

    def better(self, one: float, other: float) -> bool:
        return one > other if self.higher_is_better else one < other


def measure_of(run: Run) -> Measure:
    about = run.header["measure"]
    return Measure(str(about["name"]), bool(about["higher_is_better"]), bool(about.get("percent", False)))


class Phases(NamedTuple):
    """Seconds of a step of the slowest worker by phase, after the warm-up; NaN where not measured."""

    forward: float
    backward: float
    compute: float
    """Forward and backward where they run as one."""
    select: float
    exchange: float
    rest: float
    step: float

    @property
    def without_exchange(self) -> float:
        """NaN unless the computing was measured."""
        computed = self.compute if math.isfinite(self.compute) else self.forward + self.backward
        return computed + sum(part for part in (self.select, self.rest) if math.isfinite(part))


@dataclass(frozen=True)
class Group:
    """Runs that differ by the seed alone."""

    label: str
    density: float
    world: int
    runs: tuple[Run, ...]

    @property
    def series(self) -> Series:
        """What it is called in legends, whatever its world."""
        return self.label, self.density

    @property
    def base(self) -> str:
        return base_name(self.label)

    @property
    def is_dense(self) -> bool:
        return self.label == DENSE

    @cached_property
    def judged(self) -> tuple[Run, ...]:
        """The runs whose last evaluation counts: those that finished, or all if none did."""
        evaluated = [run for run in self.runs if run.evaluations]
        return tuple(run for run in evaluated if run.status == "finished") or tuple(evaluated)

    @property
    def ended(self) -> bool:
        """Did a run finish, so that its last evaluation is the final one?"""
        return any(run.status == "finished" for run in self.judged)

    @cached_property
    def final(self) -> Spread:
        return spread([float(run.series(f"eval/{run.measure}", of="evaluations")[-1]) for run in self.judged])

    @cached_property
    def best(self) -> float:
        return mean(
            measure_of(run).best(run.series(f"eval/{run.measure}", of="evaluations").tolist()) for run in self.runs
        )

    @cached_property
    def phases(self) -> Phases:
        return Phases(*(self.steady(f"time/{phase}") for phase in Phases._fields))

    @cached_property
    def density_actual(self) -> float:
        return self.over_runs("sparsity/density_actual")

    @cached_property
    def density_error(self) -> float:
        """How far the actual density lies from the one asked for in each step, which a warm-up may change."""
        asked = self.over_runs("sparsity/density_asked")
        return ratio(self.density_actual, asked if math.isfinite(asked) else self.density) - 1

    @cached_property
    def wire_bytes(self) -> float:
        return self.over_runs("comm/wire_bytes")

    @cached_property
    def link_bytes(self) -> float:
        return self.over_runs("comm/link_bytes")

    @cached_property
    def messages(self) -> float:
        return self.over_runs("comm/messages")

    @property
    def virtual(self) -> bool:
        return any(run.virtual for run in self.runs)

    @property
    def at_a_time(self) -> int:
        return max(run.at_a_time for run in self.runs)

    def projected(self, gigabits: float) -> float:
        """Seconds of a step over links of so many Gbit/s; NaN if it was not measured."""
        bandwidth = gigabits * GIGABIT
        return projected_step_seconds(self.phases.without_exchange, self.link_bytes, self.messages, bandwidth, LATENCY)

    def steady(self, name: str) -> float:
        return mean(run.steady(name) for run in self.runs)

    def over_runs(self, name: str) -> float:
        """The mean over the steps of a run, then over the runs."""
        return mean(run.mean(name) for run in self.runs)

    def has(self, name: str) -> bool:
        return any(bool(np.isfinite(run.series(name)).any()) for run in self.runs)


@dataclass(frozen=True)
class Section:
    """The runs of one task and model, in one setting."""

    task: str
    model: str
    parameters: int
    measure: Measure
    groups: tuple[Group, ...]
    setting: str = ""

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for group in self.groups for run in group.runs)

    @cached_property
    def worlds(self) -> tuple[int, ...]:
        return tuple(sorted({group.world for group in self.groups}))

    @cached_property
    def main_world(self) -> int:
        """The world most groups have: figures that show one world show this."""
        num_groups = Counter(group.world for group in self.groups)
        num_runs = Counter(run.world for run in self.runs)
        return max(self.worlds, key=lambda world: (num_groups[world], num_runs[world], world))

    @cached_property
    def main(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.world == self.main_world)

    @cached_property
    def judged(self) -> tuple[Group, ...]:
        """The groups with a final measure: of runs that finished, or, while none has, of all."""
        evaluated = [group for group in self.groups if math.isfinite(group.final.mean)]
        return tuple(group for group in evaluated if group.ended) or tuple(evaluated)

    @cached_property
    def main_judged(self) -> tuple[Group, ...]:
        return tuple(group for group in self.judged if group.world == self.main_world)

    @property
    def title(self) -> str:
        return texts.printable(" · ".join(filter(None, (self.task, self.model, self.setting))))

    def dense(self, world: int) -> Group | None:
        return next((group for group in self.groups if group.is_dense and group.world == world), None)

    def mixed_options(self) -> list[str]:
        """Options, beside the seed, in which runs of one group differ: their spread is not over seeds alone."""
        return sorted({option for group in self.groups for option in differing([run.config for run in group.runs])})


UNTOLD = frozenset({"seed", "output", "name", "run", "folder", "resume"})
"""Options that make no other experiment."""


def differing(configs: Sequence[Mapping[str, Any]]) -> set[str]:
    """The options in which configurations differ, the seed and the place of the output aside."""
    options = {option for config in configs for option in config} - UNTOLD
    return {option for option in options if any(config.get(option) != configs[0].get(option) for config in configs)}


def sections(runs: Sequence[Run]) -> list[Section]:
    """The runs by task, model and measure; groups in the palette's order."""
    return [_section(list(members)) for _, members in _by(runs, _subject)]


def _section(runs: Sequence[Run]) -> Section:
    header = runs[0].header
    groups = [
        Group(label, density, world, tuple(sorted(members, key=lambda run: (run.seed, str(run.folder)))))
        for (_, label, _, world, density), members in _by(runs, _group_key)
    ]
    return Section(
        task=str(header["task"]),
        model=str(header["model"]["name"]),
        parameters=int(header["model"]["parameters"]),
        measure=measure_of(runs[0]),
        groups=tuple(groups),
        setting=runs[0].setting,
    )


def _subject(run: Run) -> tuple[str, str, int, str, str]:
    model = run.header["model"]
    return str(run.header["task"]), str(model["name"]), int(model["parameters"]), run.measure, run.setting


def _group_key(run: Run) -> tuple[int, str, float, int, float]:
    return palette_place(base_name(run.method)), run.method, -run.density, run.world, run.density


def _by(values: Iterable[T], key: Callable[[T], Any]) -> Iterable[tuple[Any, Iterable[T]]]:
    return groupby(sorted(values, key=key), key=key)
