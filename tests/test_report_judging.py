"""What it takes for a claim to hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gradsieve.digests import digest_text, find_runs, read_run
from gradsieve.report import judging
from gradsieve.report.grouping import Section, sections
from gradsieve.report.judging import Estimate
from gradsieve.report.texts import signed, times
from synthetic_runs import Plan, make_runs

Made = Callable[..., list[Section]]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Sections of digests of made-up runs."""

    def make(*plans: Plan) -> list[Section]:
        for run in make_runs(tmp_path / "runs", plans):
            (tmp_path / f"{run.folder.name}.json").write_text(digest_text(run))
        return sections([read_run(path) for path in find_runs(sorted(tmp_path.glob("*.json")))])

    return make


def told(judge: judging.Judge, found: Sequence[Section]) -> judging.Found:
    outcome = judge(found)
    assert outcome is not None
    return outcome


def test_estimates_vary_with_all_that_goes_in() -> None:
    one, other = Estimate(10.0, 0.3), Estimate(4.0, 0.4)
    assert tuple(one.minus(other)) == pytest.approx((6.0, 0.5))
    assert tuple(one.times(-2)) == pytest.approx((-20.0, 0.6))
    assert tuple(one.over(other)) == pytest.approx((2.5, 2.5 * math.hypot(0.03, 0.1)))
    assert math.isnan(one.over(Estimate(0.0)).mean)


@pytest.mark.parametrize(
    ("estimate", "unit", "text"),
    [
        (Estimate(0.0049, 0.00006), judging.PERCENT, "0.49 ± 0.01 %"),
        (Estimate(8.89, 0.95), judging.PERCENT, "889 ± 95 %"),
        (Estimate(14.52, 0.053), judging.TIMES, "14.5 ± 0.1\N{MULTIPLICATION SIGN}"),
        (Estimate(-2.6), judging.GAIN, "\N{MINUS SIGN}2.60"),
        (Estimate(15.6, 0.86), judging.GAIN, "+15.60 ± 0.86"),
        (Estimate(-math.inf), judging.GAIN, "diverged"),
        (Estimate(-0.731, 0.052), judging.HUNDREDTHS, "\N{MINUS SIGN}0.73 ± 0.05"),
    ],
)
def test_deviations_are_shown_to_the_place_of_their_mean(estimate: Estimate, unit: judging.Unit, text: str) -> None:
    assert estimate.text(unit) == text


def test_seeds_give_a_deviation(made: Made) -> None:
    ((group,),) = ([*section.groups] for section in made(*(Plan("micro", seed=seed) for seed in range(3))))
    errors = [run.median_density_error for run in group.runs]
    estimate = judging.over_runs(group, lambda run: run.median_density_error)
    assert len(set(errors)) == 3
    assert estimate.mean == pytest.approx(sum(errors) / 3)
    assert min(errors) <= estimate.mean - estimate.deviation / 2 < estimate.mean + estimate.deviation / 2 <= max(errors)


def test_shares_of_a_step_are_of_all_but_its_rest(made: Made) -> None:
    found = made(Plan("micro", world=1), Plan("topk", world=1))
    (group,) = [group for group in found[0].groups if group.label == "micro"]
    share = group.phases.select / (group.phases.step - group.phases.rest)
    assert told(judging.share_of_step(["micro"], "time/select", share * 1.01, virtual=False), found).holds
    assert not told(judging.share_of_step(["micro", "topk"], "time/select", share * 0.99, virtual=False), found).holds
    assert judging.share_of_step(["micro"], "time/select", 1.0, virtual=True)(found) is None
    assert judging.share_of_step(["micro"], "time/select", 1.0, virtual=False, world=16)(found) is None
    assert judging.share_of_step(["micro"], "time/select", 1.0, virtual=False, setting="float32")(found) is None


def test_densities_are_judged(made: Made) -> None:
    found = made(Plan("topk", world=16), Plan("micro", world=16))
    assert told(judging.density_error("micro", 0.1), found).holds
    assert not told(judging.density_error("topk", 0.1), found).holds
    assert told(judging.density_factor("topk", lambda factor: factor > 10), found).holds
    assert judging.density_error("union", 0.1)(found) is None


def test_measures_are_judged_against_another_method(made: Made) -> None:
    found = made(Plan("dense", 1.0), Plan("topk"), Plan("iwp"))
    ahead, behind = judging.measure_to("topk", "iwp", 0.0), judging.measure_to("iwp", "topk", 0.0)
    assert (told(ahead, found).holds, told(behind, found).holds) == (True, False)
    assert told(judging.measure_to("iwp", "dense", -50.0), found).holds
    assert judging.measure_to("iwp", "cltk", 0.0)(found) is None


def test_growth_is_from_the_fewest_workers_to_the_most(made: Made) -> None:
    (section,) = found = made(*(Plan("micro", world=world) for world in (2, 4, 8)))
    seconds = {group.world: group.steady("time/select") for group in section.groups}
    growth = seconds[8] / seconds[2]
    outcome = told(judging.growth_over_worlds("micro", "time/select", growth * 1.01), found)
    assert outcome.holds
    assert "8 workers); 1 setting" in outcome.obtained
    assert not told(judging.growth_over_worlds("micro", "time/select", growth * 0.99), found).holds
    assert judging.growth_over_worlds("topk", "time/select", 1.0)(found) is None


def test_a_lead_counts_at_no_more_bytes(made: Made) -> None:
    (section,) = found = made(Plan("union"), Plan("topk"), Plan("iwp"))
    by_label = {group.label: group for group in section.groups}
    assert by_label["union"].link_bytes <= by_label["topk"].link_bytes
    gain = 100 * (by_label["union"].final.mean - by_label["topk"].final.mean)
    outcome = told(judging.ahead_at_bytes("union", ["topk"]), found)
    assert outcome.holds == (gain > 0)
    assert outcome.obtained.startswith(signed(gain, 2))
    assert "1 setting" in outcome.obtained
    assert judging.ahead_at_bytes("topk", ["union"])(found) is None


def test_a_lead_counts_with_as_many_workers(made: Made) -> None:
    found = made(Plan("union", world=4), Plan("topk", world=8))
    assert judging.ahead_at_bytes("union", ["topk"])(found) is None


def test_what_diverged_is_not_confirmed(made: Made) -> None:
    found = made(Plan("dense", 1.0), Plan("micro", nan_from=40))
    outcome = told(judging.measure_to("micro", "dense", -100.0), found)
    assert not outcome.holds
    assert outcome.obtained.startswith("diverged (mlp, micro at 0.01, 4 workers)")
    assert told(judging.measure_to("dense", "micro", 0.0), [relabelled(found[0])]).holds


def relabelled(section: Section) -> Section:
    """With dense at the density of the other."""
    return replace(section, groups=tuple(replace(group, density=0.01) for group in section.groups))


def test_worlds_are_judged_by_their_range(made: Made) -> None:
    found = made(*(Plan("micro", world=world) for world in (2, 4, 8)))
    assert told(judging.range_over_worlds("micro", 5.0), found).holds
    narrow = told(judging.range_over_worlds("micro", 0.001), found)
    assert not narrow.holds
    assert narrow.obtained.startswith("digits · mlp: ")
    assert judging.range_over_worlds("topk", 1.0)(found) is None


def test_densities_are_no_numbers_of_workers(made: Made) -> None:
    found = made(*(Plan("micro", density=density) for density in (0.1, 0.001)))
    assert judging.range_over_worlds("micro", 1.0)(found) is None


def test_threshold_imbalance_and_times_are_judged(made: Made) -> None:
    found = made(Plan("micro"), Plan("exdyna"), Plan("topk"))
    assert told(judging.threshold_follows_error("micro", 0.5), found).holds
    assert told(judging.mean_relative_to("exdyna", "micro", "sparsity/imbalance", 0.8), found).holds
    assert told(judging.mean_relative_to("micro", "topk", "time/select", 0.1), found).holds
    assert not told(judging.mean_relative_to("topk", "micro", "time/select", 0.1), found).holds


def test_a_fall_of_density_is_seen(made: Made) -> None:
    (section,) = made(Plan("hard_threshold"))
    (group,) = section.groups
    (run,) = group.runs
    steps = [
        {**record, "sparsity/density_actual": 0.04 if float(record["epoch"] or 0) <= 9 else 0.01}
        for record in run.steps
    ]
    fallen = replace(section, groups=(replace(group, runs=(replace(run, steps=steps),)),))
    judge = judging.density_falls_at_decay("hard_threshold", 1.5)
    assert told(judge, [fallen]).obtained.startswith(times(4))
    assert not told(judge, [section]).holds
    assert math.isclose(judging.density_within(fallen.groups[0].runs[0], 0.65, 0.75), 0.04)


def test_where_the_learning_rate_does_not_fall_at_once_the_density_need_not(made: Made) -> None:
    found = made(Plan("hard_threshold", extra=(("schedule", "cosine"),)))
    assert judging.density_falls_at_decay("hard_threshold", 1.5)(found) is None
