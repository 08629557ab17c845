"""Fills the tables of docs/reproduction.md from the digests in studies/results.

python studies/tables.py            hands runs on to the studies that ask for the same, and rewrites what stands between
                                    the marks of the page
python studies/tables.py --check    says whether the page is up to date
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from gradsieve.cli.options import read_config
from gradsieve.digests import read_runs
from gradsieve.report import texts
from gradsieve.report.curves import Array
from gradsieve.report.grouping import Group, Section, ratio, sections
from gradsieve.report.summary import final_text, section_rows
from gradsieve.report.table import Cell, Column, Table
from gradsieve.training.study import Form, Results, StudyCell, make_study, study_cells

STUDIES = Path(__file__).parent
PAGE = STUDIES.parent / "docs" / "reproduction.md"
RESULTS = STUDIES / "results"
FORMS: tuple[Form, ...] = ("full", "short")
"""The better one first."""
MOST_SEEDS = 10
NOT_RUN = "not run yet"
PHASES_STUDY = "phases"
SMALL_STUDIES = ("digits", "cifar10-narrow")
"""Those that anyone can run whole: claims of the others are judged by them, too."""
SHOWN_PHASES = ("forward", "backward", "compute", "select", "exchange", "rest", "step")

OURS = ("micro", "exdyna", "union")
PAPER_MICRO, PAPER_EXDYNA = "micro(control='paper')", "exdyna(control='paper')"


class Found(NamedTuple):
    """What the runs say of a claim."""

    obtained: str
    holds: bool


Judge: TypeAlias = Callable[[Sequence[Section]], "Found | None"]
"""None where the runs that it needs are not there."""


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, in our words, and what it takes for us to call it confirmed."""

    words: str
    source: str
    study: str
    condition: str
    judge: Judge | None = None
    """None: it cannot be tested here, and `condition` says why."""
    forms: Sequence[Form] = FORMS
    """Those it can be judged by, the best first."""
    anywhere: bool = True
    """It can be judged by another study's runs, too: models are no part of its words."""


class Case(NamedTuple):
    """A number for one group of runs."""

    value: float
    group: Group
    section: Section

    @property
    def name(self) -> str:
        workers = texts.count(self.group.world, "worker")
        return f"{self.section.model}, {self.group.label} at {self.group.density:g}, {workers}"


def cases(found: Sequence[Section], label: str, value: Callable[[Section, Group], float]) -> list[Case]:
    """A number for each group of a method, as far as it can be told; infinite where training diverged."""
    groups = [(section, group) for section in found for group in section.groups if group.label == label]
    told = [Case(value(section, group), group, section) for section, group in groups]
    return [case for case in told if not math.isnan(case.value)]


def judged(told: Sequence[Case], show: Callable[[float], str], holds: Callable[[float], bool]) -> Found | None:
    """The least and the most of the cases; a claim holds if it does in all of them."""
    if not told:
        return None
    least, most = min(told, key=lambda case: case.value), max(told, key=lambda case: case.value)
    seeds = min(len(case.group.runs) for case in told)
    ends = dict.fromkeys(f"{show(case.value)} ({case.name})" for case in (least, most))
    settings = f"{texts.count(len(told), 'setting')}, {texts.count(seeds, 'seed')}"
    return Found(f"{' to '.join(ends)}; {settings}", all(holds(case.value) for case in told))


def density_error(label: str, limit: float) -> Judge:
    def judge(found: Sequence[Section]) -> Found | None:
        told = cases(found, label, lambda _, group: group.over_runs("sparsity/density_error"))
        return judged(told, texts.percent, lambda error: error <= limit)

    return judge


def density_factor(label: str, holds: Callable[[float], bool]) -> Judge:
    def judge(found: Sequence[Section]) -> Found | None:
        return judged(cases(found, label, lambda _, group: 1 + group.density_error), texts.times, holds)

    return judge


def density_falls_at_decay(label: str, factor: float) -> Judge:
    """By the mean over a tenth of the epochs before the learning rate falls, and over one soon after."""

    def fall(_: Section, group: Group) -> float:
        if any(run.config["schedule"] != "step" for run in group.runs):
            return math.nan
        before, after = (_density_within(group, *part) for part in ((0.65, 0.75), (0.8, 0.9)))
        return before / after if after else math.nan

    return lambda found: judged(cases(found, label, fall), texts.times, lambda ratio: ratio >= factor)


def _density_within(group: Group, start: float, stop: float) -> float:
    means = []
    for run in group.runs:
        part = run.series("epoch") / float(run.config["epochs"])
        chosen = run.series("sparsity/density_actual")[(part > start) & (part <= stop)]
        means.append(float(np.mean(chosen)) if len(chosen) else math.nan)
    return float(np.mean(means))


def measure_to(label: str, other: str, least: float) -> Judge:
    """How much better a method ends than another, in points, or as a part where the measure is no percentage."""

    def difference(section: Section, group: Group) -> float:
        against = next((g for g in section.groups if g.label == other and _comparable(g, group)), None)
        return math.nan if against is None else _gain(section, group, against)

    def judge(found: Sequence[Section]) -> Found | None:
        return judged(cases(found, label, difference), _gain_text, lambda gain: gain >= least)

    return judge


def near_dense(label: str, least: Mapping[float, float]) -> Judge:
    """The same against dense training, with a bound for each density."""

    def beyond(section: Section, group: Group) -> float:
        dense = next((g for g in section.groups if g.is_dense and g.world == group.world), None)
        if dense is None or group.density not in least:
            return math.nan
        return _gain(section, group, dense) - least[group.density]

    def judge(found: Sequence[Section]) -> Found | None:
        return judged(cases(found, label, beyond), _gain_text, lambda gain: gain >= 0)

    return judge


def _comparable(other: Group, group: Group) -> bool:
    return other.world == group.world and (other.is_dense or other.density == group.density)


def _gain(section: Section, group: Group, against: Group) -> float:
    if not group.judged or not against.judged:
        return math.nan
    if not math.isfinite(group.final.mean):
        return -math.inf
    if not math.isfinite(against.final.mean):
        return math.inf
    difference = group.final.mean - against.final.mean
    sign = 1 if section.measure.higher_is_better else -1
    return 100 * sign * (difference if section.measure.percent else difference / against.final.mean)


def _gain_text(gain: float) -> str:
    return texts.signed(gain, 2) if math.isfinite(gain) else "diverged" if gain < 0 else "the other diverged"


def _final(section: Section, group: Group) -> float:
    diverged = bool(group.judged) and not math.isfinite(group.final.mean)
    return -math.inf if diverged else section.measure.shown(group.final.mean)


def range_over_worlds(label: str, most: float) -> Judge:
    """From the worst to the best number of workers, setting by setting."""

    def judge(found: Sequence[Section]) -> Found | None:
        finals = [told for section in found for told in _by_density(cases([section], label, _final))]
        ends = [
            (min(told, key=lambda case: case.value), max(told, key=lambda case: case.value))
            for told in finals
            if len(told) > 1
        ]
        if not ends:
            return None
        parts = [
            f"{low.section.title}: {low.value:.2f} ({low.group.world} workers) to {high.value:.2f} ({high.group.world})"
            for low, high in ends
        ]
        seeds = min(len(case.group.runs) for pair in ends for case in pair)
        obtained = f"{'; '.join(parts)}; {texts.count(seeds, 'seed')}"
        return Found(obtained, all(high.value - low.value <= most for low, high in ends))

    return judge


def _by_density(told: Sequence[Case]) -> list[list[Case]]:
    densities = dict.fromkeys(case.group.density for case in told)
    return [[case for case in told if case.group.density == density] for density in densities]


def growth_over_worlds(label: str, name: str, most: float) -> Judge:
    """A mean over the steps with the most workers, relative to that with the fewest."""

    def growth(section: Section, group: Group) -> float:
        alike = [g for g in section.groups if g.label == label and g.density == group.density]
        fewest = min(alike, key=lambda other: other.world)
        is_last = group.world == max(other.world for other in alike)
        return ratio(_mean(group, name), _mean(fewest, name)) if is_last and fewest is not group else math.nan

    return lambda found: judged(cases(found, label, growth), texts.times, lambda ratio: ratio <= most)


def threshold_follows_error(label: str, least: float) -> Judge:
    def correlation(_: Section, group: Group) -> float:
        return float(
            np.mean(
                [
                    _correlation(run.series("sparsity/threshold"), run.series("sparsity/error_norm"))
                    for run in group.runs
                ]
            )
        )

    return lambda found: judged(cases(found, label, correlation), lambda value: f"{value:.2f}", lambda r: r >= least)


def _correlation(one: Array, other: Array) -> float:
    both = np.isfinite(one) & np.isfinite(other)
    return float(np.corrcoef(one[both], other[both])[0, 1]) if both.sum() > 2 else math.nan


def mean_relative_to(label: str, other: str, name: str, most: float) -> Judge:
    """A mean over the steps, relative to that of another method."""

    def relative(section: Section, group: Group) -> float:
        against = next((g for g in section.groups if g.label == other and _comparable(g, group)), None)
        return math.nan if against is None else ratio(_mean(group, name), _mean(against, name))

    def judge(found: Sequence[Section]) -> Found | None:
        return judged(cases(found, label, relative), texts.times, lambda ratio: ratio <= most)

    return judge


def ahead_at_bytes(label: str, others: Sequence[str]) -> Judge:
    """How much better a method ends than each run of the others, where it was run with no more bytes than that one."""

    def lead(section: Section, other: Group) -> float:
        affordable = [g for g in section.groups if g.label == label and g.link_bytes <= other.link_bytes]
        gains = [_gain(section, group, other) for group in affordable]
        return max((gain for gain in gains if not math.isnan(gain)), default=math.nan)

    def judge(found: Sequence[Section]) -> Found | None:
        told = [case for other in others for case in cases(found, other, lead)]
        return judged(told, _gain_text, lambda gain: gain > 0)

    return judge


def share_of_step(
    labels: Sequence[str], name: str, most: float, *, virtual: bool, world: int = 1, setting: str = ""
) -> Judge:
    """The part that a phase takes of an iteration without its rest, for so many workers, virtual or processes.

    Several on one device have its time together, so it is their part of it that counts, whoever's turn it was. The rest
    is that of all of them, and has in it what a late host makes the device wait: it would flatter.
    """

    def share(section: Section, group: Group) -> float:
        meant = group.world == world and group.virtual == virtual and setting in section.setting
        without_rest = _mean(group, "time/step") - _mean(group, "time/rest")
        return ratio(_mean(group, name), without_rest) if meant else math.nan

    def judge(found: Sequence[Section]) -> Found | None:
        told = [case for label in labels for case in cases(found, label, share)]
        return judged(told, texts.percent, lambda part: part <= most)

    return judge


def _mean(group: Group, name: str) -> float:
    return group.steady(name) if name.startswith("time/") else group.over_runs(name)


MICRO, EXDYNA, IWP = "MiCRO (HiPC 2023)", "ExDyna (CCGrid 2024)", "IWP (arXiv 1901.01544)"
NO_CLUSTER = "sixteen GPUs on two machines; we have one GPU, on which the workers take turns"

CLAIMS = (
    Claim(
        "The published threshold law keeps the actual density close to the asked one.",
        *(MICRO, "micro-cifar10", "the median error over the steps is at most 10 % in every setting"),
        density_error(PAPER_MICRO, 0.1),
    ),
    Claim(
        "Our law, searched within the step, keeps it within 3 %.",
        *("gradsieve", "micro-cifar10", "the median error is at most 3 % in every setting"),
        density_error("micro", 0.03),
    ),
    Claim(
        "Top-k sends more than was asked, up to as many times as there are workers.",
        *(MICRO, "micro-cifar10", "actual density is 1.5 to 16 times the asked one in every setting"),
        density_factor("topk", lambda factor: 1.5 <= factor <= 16),
    ),
    Claim(
        "A fixed threshold, 1 / (2 √target), lets far more through than was asked.",
        *(MICRO, "micro-cifar10", "actual density is at least twice the asked one in every setting"),
        density_factor("hard_threshold", lambda factor: factor >= 2),
    ),
    Claim(
        "Its density falls at once when the learning rate does.",
        *(MICRO, "micro-cifar10", "it is at least 1.5 times as high in the epochs before as in those after"),
        density_falls_at_decay("hard_threshold", 1.5),
    ),
    Claim(
        "MiCRO ends about where dense training does.",
        *(MICRO, "micro-cifar10", "it ends at most a point below dense in every setting"),
        measure_to(PAPER_MICRO, "dense", -1.0),
    ),
    Claim(
        "Top-k converges better than CLT-k, as it sends more.",
        *(MICRO, "micro-cifar10", "it ends above CLT-k in every setting"),
        measure_to("topk", "cltk", 0.0),
    ),
    Claim(
        "Selection in a slice by a threshold costs next to nothing beside sorting.",
        *(
            MICRO,
            "phases",
            "for one worker, whose slice is the whole, and for more it takes at most a tenth of Top-k's",
        ),
        mean_relative_to(PAPER_MICRO, "topk", "time/select", 0.1),
    ),
    Claim(
        "What MiCRO's selection costs a worker does not grow with their number.",
        *(MICRO, "phases", "with the most workers it takes at most 1.1 times as long as with the fewest"),
        growth_over_worlds(PAPER_MICRO, "time/select", 1.1),
    ),
    Claim(
        "Selection by our kernels is a small part of an iteration whose passes are in float32, as published.",
        *(
            "gradsieve",
            "phases",
            "that of micro, exdyna and union takes 16 workers at most 3 % of their time without rest",
        ),
        share_of_step(OURS, "time/select", 0.03, virtual=True, world=16, setting="passes in float32"),
    ),
    Claim(
        "So it is for one worker that has a fast device to itself, whatever the arithmetic.",
        *(
            "gradsieve",
            "phases",
            "with passes launched as one graph it takes at most 3 % of it without rest in every setting",
        ),
        share_of_step(OURS, "time/select", 0.03, virtual=True),
    ),
    Claim(
        "So it is under plain DDP, where the host launches operation by operation.",
        *("gradsieve", "phases", "for one worker it takes at most 3 % of it without rest in every setting"),
        share_of_step(OURS, "time/select", 0.03, virtual=False),
    ),
    Claim("MiCRO reaches its accuracy in less time than the others.", MICRO, "micro-cifar10", NO_CLUSTER),
    Claim(
        "MiCRO converges to the same point for every number of workers.",
        *(MICRO, "micro-scalability", "the best and the worst number of workers end at most a point apart"),
        range_over_worlds(PAPER_MICRO, 1.0),
    ),
    Claim(
        "union converges to the same point for every number of workers.",
        *("gradsieve", "micro-scalability", "the best and the worst number of workers end at most a point apart"),
        range_over_worlds("union", 1.0),
    ),
    Claim("More workers shorten the training in proportion.", MICRO, "micro-scalability", NO_CLUSTER),
    Claim(
        "The threshold rises and falls with the norm of what was not sent.",
        *(MICRO, "micro-threshold", "the two are correlated by at least 0.8 over the steps in every setting"),
        threshold_follows_error(PAPER_MICRO, 0.8),
    ),
    Claim(
        "ExDyna meets the asked density whatever the model and the data.",
        *(EXDYNA, "exdyna", "the median error over the steps is at most 10 % in every setting"),
        density_error(PAPER_EXDYNA, 0.1),
    ),
    Claim(
        "Moving the partitions balances what the workers select.",
        *(EXDYNA, "exdyna", "mean imbalance is at most 0.8 times that of fixed partitions in every setting"),
        mean_relative_to(PAPER_EXDYNA, "micro", "sparsity/imbalance", 0.8),
    ),
    Claim(
        "Our split by what blocks lately yielded balances it, too.",
        *("gradsieve", "frontier", "mean imbalance is at most 0.8 times that of fixed partitions in every setting"),
        mean_relative_to("exdyna", "micro", "sparsity/imbalance", 0.8),
    ),
    Claim(
        "ExDyna's accuracy stays high.",
        *(EXDYNA, "exdyna", "it ends at most a point (or per cent of the measure) behind dense in every setting"),
        measure_to(PAPER_EXDYNA, "dense", -1.0),
    ),
    Claim("ExDyna trains faster than other sparsifiers.", EXDYNA, "exdyna", NO_CLUSTER),
    Claim(
        "64 times (AlexNet) and 58.8 times (ResNet-50) fewer values, and the accuracy is kept.",
        *(IWP, "iwp", "it ends at most a point below dense in every setting; published on ImageNet, here on CIFAR-10"),
        measure_to("iwp", "dense", -1.0),
        anywhere=False,
    ),
    Claim(
        "With indices from one worker alone 16 workers send no more than was asked.",
        *(IWP, "iwp", "actual density is at most 1.1 times the asked one"),
        density_factor("iwp", lambda factor: factor <= 1.1),
    ),
    Claim(
        "At equal density, proposals from everyone end better than one worker's for each slice.",
        *("gradsieve", "micro-cifar10", "union without looking ahead ends above micro in every setting"),
        measure_to("union(ahead=0.0)", "micro", 0.0),
    ),
    Claim(
        "None of topk, cltk, micro and exdyna ends better than union for as many bytes.",
        "gradsieve",
        "frontier",
        "a run of union with no more bytes ends above each of theirs, wherever union was run with so few; obtained is "
        "by how much",
        ahead_at_bytes("union", ("topk", "cltk", "micro", "exdyna", PAPER_MICRO, PAPER_EXDYNA)),
        ("short",),
    ),
    Claim(
        "Where ranks look ahead, sparse training ends near dense training.",
        "gradsieve",
        "micro-cifar10",
        "in the short form union ends at most 1.5 points below dense at density 0.01 and 5 at 0.001; obtained is what "
        "is left of that",
        near_dense("union", {0.01: -1.5, 0.001: -5.0}),
        ("short",),
    ),
    Claim(
        "Given time, it comes nearer still.",
        "gradsieve",
        "micro-cifar10",
        "in the full form union ends at most 0.3 points below dense at density 0.01 and 1 at 0.001; obtained is what "
        "is left of that",
        near_dense("union", {0.01: -0.3, 0.001: -1.0}),
        ("full",),
    ),
    Claim(
        "So it does at 0.01 if more is sent while the learning rate rises.",
        "gradsieve",
        "frontier",
        "in the full form union whose density falls from 0.25 to 0.01 over the first 5 of 200 epochs ends at most 0.3 "
        "points below dense; obtained is what is left of that",
        near_dense("union(warmup_steps=485)", {0.01: -0.3}),
        ("full",),
    ),
)


def results(study: str, form: Form) -> list[Section]:
    folder = RESULTS / study / form
    return sections(read_runs([folder])) if any(folder.glob("*.json")) else []


def told_by(claim: Claim) -> tuple[Form, Found | None]:
    """What the runs say of a claim, in the better of its forms that has those it needs."""
    for form in claim.forms:
        found = None if claim.judge is None else claim.judge(results(claim.study, form))
        if found is not None:
            return form, found
    return claim.forms[-1], None


def kept(study: str, form: Form, seeds: Sequence[int] = (0,)) -> tuple[Results, list[StudyCell]]:
    """The digests of a study, and the runs that it asks for."""
    path = STUDIES / f"{study}.toml"
    made = make_study(study, read_config(path), str(path))
    return Results(RESULTS, made, form), study_cells(made, form, {"seed": list(seeds)})


def state(study: str, form: Form) -> tuple[int, int]:
    """How many of the study's runs with its first seed are done, and how many there are."""
    digests, cells = kept(study, form)
    return sum(digests.path(cell).exists() for cell in cells), len(cells)


def hand_on() -> None:
    """Give every study the runs that it shares with another."""
    for study in sorted(path.stem for path in STUDIES.glob("*.toml")):
        for form in FORMS:
            digests, cells = kept(study, form, range(MOST_SEEDS))
            digests.take_over(cells)


def command(study: str, form: str) -> str:
    return f"`gradsieve compare studies/{study}.toml --{form}`"


CLAIM_TITLES = ("claim", "source", "confirmed if", "command", "obtained", "verdict")


def claims_table() -> str:
    return _markdown(CLAIM_TITLES, [_claim_row(claim) for claim in CLAIMS])


def small_claims_table(study: str) -> str:
    """The same by the runs of a small study, in each form that has those that a claim needs."""
    found = {form: results(study, form) for form in FORMS}
    rows = []
    for claim in CLAIMS:
        if claim.judge is None or not claim.anywhere or claim.study == PHASES_STUDY:
            continue
        told = {form: claim.judge(found[form]) for form in reversed(claim.forms)}
        moved = replace(claim, study=study)
        rows += [_judged_row(moved, form, outcome) for form, outcome in told.items() if outcome is not None]
    return _markdown(CLAIM_TITLES, rows)


def _claim_row(claim: Claim) -> list[str]:
    if claim.judge is None:
        return [claim.words, claim.source, f"needs {claim.condition}", texts.ABSENT, texts.ABSENT, "not testable here"]
    return _judged_row(claim, *told_by(claim))


def _judged_row(claim: Claim, form: Form, told: Found | None) -> list[str]:
    obtained = texts.ABSENT if told is None else told.obtained
    return [
        claim.words,
        claim.source,
        claim.condition,
        command(claim.study, form),
        obtained,
        _verdict(told, claim, form),
    ]


def _verdict(told: Found | None, claim: Claim, form: Form) -> str:
    if told is None:
        return NOT_RUN
    done, total = state(claim.study, form)
    so_far = "" if done == total else f" so far ({done} of {total} runs)"
    return ("confirmed" if told.holds else "not confirmed") + so_far


def _markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    columns = tuple(Column(title, title) for title in titles)
    return Table("", "", columns, tuple(tuple(Cell(text, text) for text in row) for row in rows)).markdown()


def study_tables(study: str) -> str:
    """A table for each task, model and setting, of the runs there are."""
    parts = []
    for form in FORMS:
        found = results(study, form)
        if found:
            parts.append("{} form, {} of {} runs of the first seed:\n".format(form.capitalize(), *state(study, form)))
        table = _phases_table if study == PHASES_STUDY else _section_table
        parts += [f"{section.title}:\n\n{table(section)}" for section in found]
    return "\n".join(parts) or f"Not run yet: {command(study, 'short')}\n"


def _phases_table(section: Section) -> str:
    titles = ("method", "workers", *(f"{phase} (ms)" for phase in SHOWN_PHASES), "selection, of all but rest", "seeds")
    rows = [
        [
            *(group.label, str(group.world)),
            *(texts.milliseconds(getattr(group.phases, phase)) for phase in SHOWN_PHASES),
            texts.percent(ratio(group.phases.select, group.phases.step - group.phases.rest)),
            str(len(group.runs)),
        ]
        for group in section.groups
    ]
    return _markdown(titles, rows)


def _section_table(section: Section) -> str:
    titles = (
        *("method", "workers", "density asked", "actual", "median error", "bytes through a link"),
        *(f"final {section.measure.words}", "to dense", "seeds"),
    )
    groups = {(group.series, group.world): group for group in section.groups}
    rows = []
    for row in section_rows(section):
        group = groups[row.series, row.world]
        rows.append(
            [
                *(row.method, str(row.world), f"{row.density:g}", texts.number(row.density_actual)),
                *(texts.percent(group.over_runs("sparsity/density_error")), texts.data(group.link_bytes)),
                *(final_text(row), row.measure.difference(row.difference), str(row.seeds)),
            ]
        )
    return _markdown(titles, rows)


MARK = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n)(?P<old>.*?)(<!-- end of table -->)", re.DOTALL)


def filled(page: str) -> str:
    """The page with its tables made anew."""
    return MARK.sub(lambda mark: f"{mark[1]}\n{_table(mark['name'])}\n{mark[4]}", page)


OF_CLAIMS: Mapping[str, Callable[[], str]] = {
    "claims": claims_table,
    **{f"claims-on-{study}": partial(small_claims_table, study) for study in SMALL_STUDIES},
}


def _table(name: str) -> str:
    return OF_CLAIMS[name]() if name in OF_CLAIMS else study_tables(name)


def main() -> int:
    page, checks = PAGE.read_text(encoding="utf-8"), "--check" in sys.argv[1:]
    if not checks:
        hand_on()
    new = filled(page)
    if checks:
        print("up to date" if new == page else f"{PAGE} is not up to date: run python studies/tables.py")
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
