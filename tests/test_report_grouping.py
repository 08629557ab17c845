from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gradsieve.report.grouping import Section, Spread, sections, spread
from gradsieve.runs import Record, Run, warm_up
from synthetic_runs import PERPLEXITY, Plan, make_runs, odd_plans

SHORT = Plan(epochs=4, steps_per_epoch=5)
DENSE = replace(SHORT, label="dense", density=1.0)

Make = Callable[..., Section]


@pytest.fixture
def section_of(tmp_path: Path) -> Make:
    def make(*plans: Plan) -> Section:
        (only,) = sections(make_runs(tmp_path, plans))
        return only

    return make


def with_steps(run: Run, **columns: float | None) -> Run:
    """The run with other values in columns of its steps; `a__b` stands for `a/b`."""
    changed: Record = {name.replace("__", "/"): value for name, value in columns.items()}
    return replace(run, steps=[{**record, **changed} for record in run.steps])


def test_seeds_make_a_group_and_densities_worlds_and_variants_do_not(section_of: Make) -> None:
    section = section_of(
        *(replace(SHORT, seed=seed) for seed in (2, 0, 1)),
        replace(SHORT, density=0.001),
        replace(SHORT, world=8),
        replace(SHORT, label="micro(control='paper')"),
        replace(SHORT, extra=(("wire", "float8"), ("scope", "bucket"))),
    )
    groups = {(group.label, group.density, group.world): [run.seed for run in group.runs] for group in section.groups}
    assert groups == {
        ("micro", 0.01, 4): [0, 1, 2],
        ("micro", 0.01, 8): [0],
        ("micro", 0.001, 4): [0],
        ("micro(control='paper')", 0.01, 4): [0],
        ("micro, float8, bucket", 0.01, 4): [0],
    }


def test_tasks_models_and_measures_make_sections(tmp_path: Path) -> None:
    plans = [SHORT, replace(SHORT, task="text", measure=PERPLEXITY), replace(SHORT, model="cnn")]
    found = [(section.task, section.model, section.measure.name) for section in sections(make_runs(tmp_path, plans))]
    assert found == [("digits", "cnn", "accuracy"), ("digits", "mlp", "accuracy"), ("text", "mlp", "perplexity")]


def test_groups_stand_in_the_order_of_the_palette(section_of: Make) -> None:
    labels = ("unheard_of", "union", "micro", "topk")
    section = section_of(*(replace(SHORT, label=label) for label in labels), DENSE)
    assert [group.label for group in section.groups] == ["dense", "topk", "micro", "union", "unheard_of"]


def test_the_main_world_is_the_one_of_most_groups(section_of: Make) -> None:
    section = section_of(SHORT, DENSE, *(replace(SHORT, world=8, seed=seed) for seed in range(4)))
    assert (section.main_world, section.worlds) == (4, (4, 8))
    assert [group.label for group in section.main] == ["dense", "micro"]


def test_dense_is_found_at_its_world(section_of: Make) -> None:
    section = section_of(SHORT, replace(DENSE, world=2))
    assert section.dense(4) is None
    assert section.dense(2) is section.groups[0]


def test_spread_of_values() -> None:
    assert spread([2.0]) == Spread(2.0, 0.0, 2.0, 2.0, 1)
    assert spread([1.0, 2.0, 3.0]) == Spread(2.0, 1.0, 1.0, 3.0, 3)
    assert math.isnan(spread([1.0, math.nan]).mean)
    assert spread([]).size == 0


def test_ranges_overlap_if_they_share_a_value() -> None:
    assert spread([1, 3]).overlaps(spread([3, 4]))
    assert not spread([1, 2]).overlaps(spread([3, 4]))


@pytest.mark.parametrize(("steps", "left_out"), [(0, 0), (9, 0), (10, 1), (30, 3), (50, 5), (10_000, 5)])
def test_warm_up_is_five_steps_or_a_tenth(steps: int, left_out: int) -> None:
    assert warm_up(steps) == left_out


def test_phases_leave_the_warm_up_out(section_of: Make) -> None:
    group = section_of(SHORT).groups[0]
    (run,) = group.runs
    slow_start = [{**record, "time/select": 100.0 if place < 2 else 1.0} for place, record in enumerate(run.steps)]
    assert replace(group, runs=(replace(run, steps=slow_start),)).phases.select == 1.0


def test_computing_is_forward_and_backward_or_what_they_are_as_one(section_of: Make) -> None:
    apart, fused = section_of(SHORT, replace(SHORT, label="union", fused=True)).groups
    assert math.isnan(apart.phases.compute)
    assert math.isnan(fused.phases.forward)
    sums = [group.phases.without_exchange - group.phases.select - group.phases.rest for group in (apart, fused)]
    assert sums[0] == pytest.approx(apart.phases.forward + apart.phases.backward)
    assert sums[1] == pytest.approx(fused.phases.compute)


def test_projection_needs_times(section_of: Make) -> None:
    group = section_of(SHORT).groups[0]
    untimed = replace(group, runs=tuple(with_steps(run, time__forward=None) for run in group.runs))
    assert group.projected(1.0) > group.projected(10.0) > group.phases.without_exchange
    assert math.isnan(untimed.projected(1.0))


def test_the_error_of_the_density_is_to_what_each_step_asked(section_of: Make) -> None:
    group = section_of(SHORT).groups[0]
    half = with_steps(group.runs[0], sparsity__density_asked=0.5, sparsity__density_actual=0.25)
    untold = with_steps(group.runs[0], sparsity__density_asked=None, sparsity__density_actual=0.02)
    assert replace(group, runs=(half,)).density_error == pytest.approx(-0.5)
    assert replace(group, runs=(untold,)).density_error == pytest.approx(1.0)


def test_final_figures_are_of_finished_runs_if_there_are_any(section_of: Make) -> None:
    failed = replace(SHORT, seed=1, status="failed", stop_after=10)
    group = section_of(SHORT, failed).groups[0]
    assert (group.final.size, group.ended) == (1, True)
    alone = replace(group, runs=group.runs[1:])
    assert (alone.final.size, alone.ended) == (1, False)


def test_unfinished_methods_are_not_judged_beside_finished_ones(section_of: Make) -> None:
    unfinished = replace(SHORT, label="union", status="unfinished", stop_after=5)
    section = section_of(SHORT, unfinished)
    assert [group.label for group in section.judged] == ["micro"]
    only = replace(section, groups=section.groups[1:])
    assert [group.label for group in only.judged] == ["union"]


def test_a_run_that_diverged_has_no_final_measure(section_of: Make) -> None:
    group = section_of(replace(SHORT, nan_from=8)).groups[0]
    assert group.final.size == 1
    assert math.isnan(group.final.mean)
    assert math.isfinite(group.best)


def test_lower_is_better_for_perplexity(section_of: Make) -> None:
    section = section_of(replace(SHORT, measure=PERPLEXITY))
    values = section.runs[0].series("eval/perplexity", of="evaluations")
    assert section.groups[0].best == values.min()
    assert section.measure.better(1.0, 2.0)


def test_options_that_differ_within_a_group_are_told(section_of: Make) -> None:
    section = section_of(SHORT, replace(SHORT, seed=1, extra=(("lr", 0.2),)), DENSE)
    assert section.mixed_options() == ["lr"]


def test_odd_runs_can_be_asked_everything(section_of: Make) -> None:
    for group in section_of(*odd_plans()).groups:
        for number in (group.final.mean, group.best, group.density_error, group.wire_bytes, group.projected(1.0)):
            assert isinstance(number, float)
