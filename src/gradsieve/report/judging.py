"""What it takes for a claim about methods to hold: judges of the sections of a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from gradsieve.report import texts
from gradsieve.report.curves import Array
from gradsieve.report.grouping import Group, Section, ratio, spread
from gradsieve.runs import Run


class Found(NamedTuple):
    """What the runs say of a claim."""

    obtained: str
    holds: bool

    @property
    def verdict(self) -> str:
        return "confirmed" if self.holds else "not confirmed"


Judge: TypeAlias = Callable[[Sequence[Section]], "Found | None"]
"""None where the runs that it needs are not there."""


class Estimate(NamedTuple):
    """A mean over seeds, and its standard deviation; the parts of a sum or a ratio vary on their own."""

    mean: float
    deviation: float = 0.0

    def minus(self, other: Estimate) -> Estimate:
        return Estimate(self.mean - other.mean, math.hypot(self.deviation, other.deviation))

    def times(self, factor: float) -> Estimate:
        return Estimate(factor * self.mean, abs(factor) * self.deviation)

    def over(self, other: Estimate) -> Estimate:
        if not other.mean:
            return UNKNOWN
        part = self.mean / other.mean
        return Estimate(part, math.hypot(self.deviation, part * other.deviation) / abs(other.mean))

    def text(self, unit: Unit) -> str:
        """The deviation to the same place as the mean."""
        mean = unit.number(unit.factor * self.mean)
        places = len(mean.partition(".")[2])
        spread = f" ± {unit.factor * self.deviation:.{places}f}" if self.deviation > 0 else ""
        return f"{mean}{spread}{unit.name}"


UNKNOWN = Estimate(math.nan)


class Unit(NamedTuple):
    """What a number is shown in."""

    number: Callable[[float], str]
    name: str = ""
    factor: float = 1.0


def _gain_text(gain: float) -> str:
    return texts.signed(gain, 2) if math.isfinite(gain) else "diverged" if gain < 0 else "the other diverged"


PERCENT = Unit(lambda value: texts.number(value, 2), " %", 100)
TIMES = Unit(texts.number, texts.TIMES)
GAIN = Unit(_gain_text)
HUNDREDTHS = Unit(lambda value: f"{value:.2f}".replace("-", texts.MINUS))


def over_runs(group: Group, value: Callable[[Run], float]) -> Estimate:
    """Over those of a group of which it can be told."""
    told = spread([number for number in map(value, group.runs) if math.isfinite(number)])
    return Estimate(told.mean, told.deviation)


def mean_of(group: Group, name: str) -> Estimate:
    """Of a column of steps, of times without those of the warm-up."""
    return over_runs(group, lambda run: run.steady(name) if name.startswith("time/") else run.mean(name))


class Case(NamedTuple):
    """A number for one group of runs."""

    estimate: Estimate
    group: Group
    section: Section

    @property
    def value(self) -> float:
        return self.estimate.mean

    @property
    def name(self) -> str:
        workers = texts.count(self.group.world, "worker")
        return f"{self.section.model}, {self.group.label} at {self.group.density:g}, {workers}"


def cases(found: Sequence[Section], label: str, value: Callable[[Section, Group], Estimate]) -> list[Case]:
    """A number for each group of a method, as far as it can be told; infinite where training diverged."""
    groups = [(section, group) for section in found for group in section.groups if group.label == label]
    told = [Case(value(section, group), group, section) for section, group in groups]
    return [case for case in told if not math.isnan(case.value)]


def judged(told: Sequence[Case], unit: Unit, holds: Callable[[float], bool]) -> Found | None:
    """The least and the most of the cases; a claim holds if it does in all of them."""
    if not told:
        return None
    least, most = min(told, key=lambda case: case.value), max(told, key=lambda case: case.value)
    seeds = min(len(case.group.runs) for case in told)
    ends = dict.fromkeys(f"{case.estimate.text(unit)} ({case.name})" for case in (least, most))
    settings = f"{texts.count(len(told), 'setting')}, {texts.count(seeds, 'seed')}"
    return Found(f"{' to '.join(ends)}; {settings}", all(holds(case.value) for case in told))


def density_error(label: str, limit: float) -> Judge:
    def judge(found: Sequence[Section]) -> Found | None:
        told = cases(found, label, lambda _, group: over_runs(group, lambda run: run.median_density_error))
        return judged(told, PERCENT, lambda error: error <= limit)

    return judge


def density_factor(label: str, holds: Callable[[float], bool]) -> Judge:
    """How many times the asked density is sent."""

    def factor(_: Section, group: Group) -> Estimate:
        return over_runs(
            group, lambda run: ratio(run.mean("sparsity/density_actual"), run.mean("sparsity/density_asked"))
        )

    return lambda found: judged(cases(found, label, factor), TIMES, holds)


def density_falls_at_decay(label: str, factor: float) -> Judge:
    """By the mean over a tenth of the epochs before the learning rate falls, and over one soon after."""

    def fall(_: Section, group: Group) -> Estimate:
        if any(run.config["schedule"] != "step" for run in group.runs):
            return UNKNOWN
        return over_runs(group, lambda run: ratio(density_within(run, 0.65, 0.75), density_within(run, 0.8, 0.9)))

    return lambda found: judged(cases(found, label, fall), TIMES, lambda ratio: ratio >= factor)


def density_within(run: Run, start: float, stop: float) -> float:
    """The mean over a part of the epochs."""
    place = run.series("epoch") / float(run.config["epochs"])
    chosen = run.series("sparsity/density_actual")[(place > start) & (place <= stop)]
    return float(np.mean(chosen)) if len(chosen) else math.nan


def measure_to(label: str, other: str, least: float) -> Judge:
    """How much better a method ends than another, in points, or as a part where the measure is no percentage."""

    def difference(section: Section, group: Group) -> Estimate:
        against = _same_setting(section, group, other)
        return UNKNOWN if against is None else _gain(section, group, against)

    return lambda found: judged(cases(found, label, difference), GAIN, lambda gain: gain >= least)


def near_dense(label: str, least: Mapping[float, float]) -> Judge:
    """The same against dense training, with a bound for each density."""

    def beyond(section: Section, group: Group) -> Estimate:
        dense = section.dense(group.world)
        if dense is None or group.density not in least:
            return UNKNOWN
        return _gain(section, group, dense).minus(Estimate(least[group.density]))

    return lambda found: judged(cases(found, label, beyond), GAIN, lambda gain: gain >= 0)


def _same_setting(section: Section, group: Group, label: str) -> Group | None:
    """The group of another method with as many workers and, unless it is dense, the same density."""
    alike = (other for other in section.groups if other.label == label and other.world == group.world)
    return next((other for other in alike if other.is_dense or other.density == group.density), None)


def _gain(section: Section, group: Group, against: Group) -> Estimate:
    if not group.judged or not against.judged:
        return UNKNOWN
    if not math.isfinite(group.final.mean):
        return Estimate(-math.inf)
    if not math.isfinite(against.final.mean):
        return Estimate(math.inf)
    difference = _final(group).minus(_final(against))
    sign = 1 if section.measure.higher_is_better else -1
    return difference.times(100 * sign / (1 if section.measure.percent else against.final.mean))


def _final(group: Group) -> Estimate:
    return Estimate(group.final.mean, group.final.deviation)


def range_over_worlds(label: str, most: float) -> Judge:
    """From the worst to the best number of workers, setting by setting."""

    def shown(section: Section, group: Group) -> Estimate:
        diverged = bool(group.judged) and not math.isfinite(group.final.mean)
        return Estimate(-math.inf) if diverged else _final(group).times(section.measure.shown(1))

    def judge(found: Sequence[Section]) -> Found | None:
        told = [alike for section in found for alike in _by_density(cases([section], label, shown)) if len(alike) > 1]
        if not told:
            return None
        ends = [(min(alike, key=_value), max(alike, key=_value)) for alike in told]
        seeds = min(len(case.group.runs) for pair in ends for case in pair)
        obtained = f"{'; '.join(_ends_text(*pair) for pair in ends)}; {texts.count(seeds, 'seed')}"
        return Found(obtained, all(high.value - low.value <= most for low, high in ends))

    return judge


def _value(case: Case) -> float:
    return case.value


def _by_density(told: Sequence[Case]) -> list[list[Case]]:
    densities = dict.fromkeys(case.group.density for case in told)
    return [[case for case in told if case.group.density == density] for density in densities]


def _ends_text(low: Case, high: Case) -> str:
    worst, best = (case.estimate.text(HUNDREDTHS) for case in (low, high))
    return f"{low.section.title}: {worst} ({low.group.world} workers) to {best} ({high.group.world})"


def growth_over_worlds(label: str, name: str, most: float) -> Judge:
    """A mean over the steps with the most workers, relative to that with the fewest."""

    def growth(section: Section, group: Group) -> Estimate:
        alike = [g for g in section.groups if g.label == label and g.density == group.density]
        fewest = min(alike, key=lambda other: other.world)
        is_last = group.world == max(other.world for other in alike)
        return mean_of(group, name).over(mean_of(fewest, name)) if is_last and fewest is not group else UNKNOWN

    return lambda found: judged(cases(found, label, growth), TIMES, lambda ratio: ratio <= most)


def threshold_follows_error(label: str, least: float) -> Judge:
    """The correlation of the two over the steps."""

    def followed(run: Run) -> float:
        return _correlation(run.series("sparsity/threshold"), run.series("sparsity/error_norm"))

    def judge(found: Sequence[Section]) -> Found | None:
        told = cases(found, label, lambda _, group: over_runs(group, followed))
        return judged(told, HUNDREDTHS, lambda correlation: correlation >= least)

    return judge


def _correlation(one: Array, other: Array) -> float:
    both = np.isfinite(one) & np.isfinite(other)
    return float(np.corrcoef(one[both], other[both])[0, 1]) if both.sum() > 2 else math.nan


def mean_relative_to(label: str, other: str, name: str, most: float) -> Judge:
    """A mean over the steps, relative to that of another method."""

    def relative(section: Section, group: Group) -> Estimate:
        against = _same_setting(section, group, other)
        return UNKNOWN if against is None else mean_of(group, name).over(mean_of(against, name))

    return lambda found: judged(cases(found, label, relative), TIMES, lambda ratio: ratio <= most)


def ahead_at_bytes(label: str, others: Sequence[str]) -> Judge:
    """How much better a method ends than each run of the others, where as many workers of it took no more bytes."""

    def lead(section: Section, other: Group) -> Estimate:
        rivals = [group for group in section.groups if group.label == label and group.world == other.world]
        affordable = [group for group in rivals if group.link_bytes <= other.link_bytes]
        gains = [_gain(section, group, other) for group in affordable]
        return max((gain for gain in gains if not math.isnan(gain.mean)), default=UNKNOWN)

    def judge(found: Sequence[Section]) -> Found | None:
        told = [case for other in others for case in cases(found, other, lead)]
        return judged(told, GAIN, lambda gain: gain > 0)

    return judge


def share_of_step(
    labels: Sequence[str], name: str, most: float, *, virtual: bool, world: int = 1, setting: str = ""
) -> Judge:
    """The part that a phase takes of an iteration without its rest, for so many workers, virtual or processes.

    Several on one device have its time together, so it is their part of it that counts, whoever's turn it was. The rest
    is that of all of them, and has in it what a late host makes the device wait: it would flatter.
    """

    def share(section: Section, group: Group) -> Estimate:
        if group.world != world or group.virtual != virtual or setting not in section.setting:
            return UNKNOWN
        return over_runs(group, lambda run: ratio(run.steady(name), run.steady("time/step") - run.steady("time/rest")))

    def judge(found: Sequence[Section]) -> Found | None:
        told = [case for label in labels for case in cases(found, label, share)]
        return judged(told, PERCENT, lambda part: part <= most)

    return judge
