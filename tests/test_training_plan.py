from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import small_runs
from gradsieve.checks import UsageError
from gradsieve.tasks import Recipe
from gradsieve.training.config import TrainConfig, from_mapping, to_mapping
from gradsieve.training.folder import run_name
from gradsieve.training.plan import Plan, make_plan
from small_runs import BATCH, STEPS_PER_EPOCH, TRAIN, WORLD, plan

TASK = small_runs.task
schedules = st.sampled_from(["step", "cosine", "constant"])


def made(recipe: Recipe, world: int = WORLD, **options: Any) -> Plan:
    """A plan of the small task under another recipe."""
    asked: dict[str, Any] = {"method": "micro", "virtual": world, "device": "cpu", **options}
    return make_plan(TrainConfig(**asked), world, replace(TASK, recipe=recipe))


@given(schedule=schedules, epochs=st.integers(1, 20), warmup=st.floats(0, 10), lr=st.floats(1e-4, 10))
def test_the_learning_rate_rises_evenly_to_its_peak(schedule: Any, epochs: int, warmup: float, lr: float) -> None:
    found = plan(schedule=schedule, epochs=epochs, warmup_epochs=warmup, lr=lr)
    steps = math.ceil(warmup * STEPS_PER_EPOCH)
    rates = [found.learning_rate(step) for step in range(steps)]
    assert all(0 < rate <= lr for rate in rates)
    for step, rate in enumerate(rates):
        assert rate == pytest.approx(lr * min(1, (step + 1) / (warmup * STEPS_PER_EPOCH)))


@given(schedule=schedules, epochs=st.integers(1, 20), warmup=st.floats(0, 10))
def test_after_the_warm_up_the_learning_rate_never_rises_nor_goes_below_0(
    schedule: Any, epochs: int, warmup: float
) -> None:
    found = plan(schedule=schedule, epochs=epochs, warmup_epochs=warmup, lr=0.5)
    first = math.ceil(warmup * STEPS_PER_EPOCH)
    rates = [found.learning_rate(step) for step in range(first, epochs * STEPS_PER_EPOCH + 20)]
    assert all(later <= earlier for earlier, later in pairwise(rates))
    assert all(0 <= rate <= 0.5 for rate in rates)


def test_the_learning_rate_is_tenfold_smaller_from_three_quarters_on() -> None:
    found = plan(schedule="step", epochs=8, warmup_epochs=1, lr=0.5)
    rates = [found.learning_rate(step) for step in range(8 * STEPS_PER_EPOCH)]
    assert rates[10:60] == [0.5] * 50
    assert rates[60:] == [pytest.approx(0.05)] * 20


def test_a_cosine_goes_from_the_peak_to_0() -> None:
    found = plan(schedule="cosine", epochs=5, warmup_epochs=1, lr=0.5)
    rates = [found.learning_rate(step) for step in range(10, 51)]
    assert rates[0] == 0.5
    assert rates[20] == pytest.approx(0.25)
    assert rates[10] == pytest.approx(0.25 * (1 + math.sqrt(0.5)))
    assert rates[40] == pytest.approx(0, abs=1e-12)
    assert found.learning_rate(500) == pytest.approx(0, abs=1e-12)


def test_a_constant_rate_stays_at_the_peak() -> None:
    found = plan(schedule="constant", epochs=2, warmup_epochs=0, lr=0.5)
    assert {found.learning_rate(step) for step in range(40)} == {0.5}


@given(schedule=schedules, steps=st.integers(1, 200), step=st.integers(0, 100))
def test_the_learning_rate_does_not_follow_the_steps_asked_for(schedule: Any, steps: int, step: int) -> None:
    whole, part = (plan(schedule=schedule, epochs=4, steps=asked) for asked in (None, steps))
    assert part.learning_rate(step) == whole.learning_rate(step)
    assert part.total_steps == steps
    assert whole.total_steps == 4 * STEPS_PER_EPOCH


@pytest.mark.parametrize(
    ("world", "batch_size", "scale"), [(4, None, 1.0), (1, None, 0.25), (8, None, 2.0), (2, 24, 1.0), (2, 6, 0.25)]
)
def test_the_recipes_learning_rate_is_for_four_workers_and_grows_with_the_global_batch(
    world: int, batch_size: int | None, scale: float
) -> None:
    options = {} if batch_size is None else {"batch_size": batch_size}
    assert made(Recipe(batch_size=12, lr=0.2), world, **options).config.lr == pytest.approx(0.2 * scale)


def test_the_learning_rate_of_adamw_and_one_that_is_given_do_not_grow() -> None:
    assert made(Recipe(batch_size=12, lr=0.2, optimizer="adamw"), 8).config.lr == 0.2
    assert made(Recipe(batch_size=12, lr=0.2), 8, lr=0.3).config.lr == 0.3


@pytest.mark.parametrize(
    ("method", "momentum"),
    [
        ("micro", 0.9),
        ("dense", 0.9),
        ("dgc", 0.0),
        ("dgc(momentum=0.0)", 0.9),
        ("iwp", 0.9),
        ("iwp(momentum=0.5)", 0.0),
    ],
)
def test_a_method_with_momentum_of_its_own_leaves_none_to_the_optimizer(method: str, momentum: float) -> None:
    assert made(Recipe(batch_size=12), method=method).config.momentum == momentum
    assert made(Recipe(batch_size=12), method=method, momentum=0.7).config.momentum == 0.7


def test_what_is_left_open_is_the_tasks_and_what_is_given_stays() -> None:
    recipe = Recipe(6, 9, 0.3, 2.5, "cosine", "adamw", 0.8, 0.02, 0.5)
    found = made(recipe).config
    assert (found.batch_size, found.epochs, found.lr, found.warmup_epochs) == (6, 9, 0.3, 2.5)
    assert (found.schedule, found.optimizer, found.momentum) == ("cosine", "adamw", 0.8)
    assert (found.weight_decay, found.clip, found.model) == (0.02, 0.5, "plain")
    assert found.checkpoint_every == TRAIN // (6 * WORLD)
    asked: dict[str, Any] = {
        "model": "dropout",
        "batch_size": 4,
        "epochs": 1,
        "lr": 1.0,
        "warmup_epochs": 0.0,
        "schedule": "step",
        "optimizer": "sgd",
        "momentum": 0.0,
        "weight_decay": 0.0,
        "clip": 7.0,
        "checkpoint_every": 0,
    }
    config = made(recipe, **asked).config
    assert {name: getattr(config, name) for name in asked} == asked


@pytest.mark.parametrize(
    ("method", "density", "label", "filled"),
    [
        ("micro", None, "micro", 0.01),
        ("micro( control = paper )", 0.2, "micro(control='paper')", 0.2),
        ("micro(density=0.3)", None, "micro", 0.3),
        ("dense", None, "dense", None),
    ],
)
def test_the_config_of_a_plan_says_the_method_in_one_way(
    method: str, density: float | None, label: str, filled: float | None
) -> None:
    found = made(Recipe(batch_size=12), method=method, density=density)
    assert (found.config.method, found.config.density, found.label) == (label, filled, label)
    assert found.config.make_method() == found.method


def test_a_plan_of_a_plans_config_is_that_plan() -> None:
    first = plan(method="dgc(clip=1.0)", output=Path("some/where"))
    config = from_mapping(TrainConfig, to_mapping(first.config), "here")
    assert make_plan(config, WORLD).config == first.config


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found = make_plan(TrainConfig(data=Path("here"), output=Path("~/there")), 2, TASK)
    assert found.config.data == tmp_path.resolve() / "here"
    assert found.config.output == tmp_path.resolve() / "home" / "there"


@given(world=st.integers(1, 12), batch_size=st.integers(1, 20))
def test_an_epoch_has_as_many_steps_as_there_are_whole_global_batches(world: int, batch_size: int) -> None:
    found = made(Recipe(epochs=3), world, batch_size=batch_size)
    used = found.steps_per_epoch * world * batch_size
    assert used <= TRAIN < used + world * batch_size
    assert found.epoch(found.total_steps) == 3


@pytest.mark.parametrize(("world", "batch_size"), [(2, 121), (3, 81), (1, 241), (1000, 1)])
def test_a_global_batch_larger_than_the_data_is_refused(world: int, batch_size: int) -> None:
    message = f"{world} workers with a batch of {batch_size} need {world * batch_size} training .*small has 240: give"
    with pytest.raises(UsageError, match=message):
        made(Recipe(), world, batch_size=batch_size)


def judged(found: Plan) -> list[int]:
    return [step for step in range(1, found.total_steps + 1) if found.evaluates_after(step)]


@pytest.mark.parametrize(
    ("eval_every", "steps", "expected"),
    [
        (1, None, [10, 20, 30]),
        (2, None, [20, 30]),
        (0.5, 15, [5, 10, 15]),
        (0, None, [30]),
        (100, None, [30]),
        (1, 12, [10, 12]),
        (0.1, 3, [1, 2, 3]),
        (0.25, 10, [2, 4, 6, 8, 10]),
        (0.01, 3, [1, 2, 3]),
    ],
)
def test_the_model_is_judged_every_so_many_epochs_and_at_the_end(
    eval_every: float, steps: int | None, expected: list[int]
) -> None:
    assert judged(plan(eval_every=eval_every, steps=steps)) == expected


@pytest.mark.parametrize(
    ("checkpoint_every", "steps", "expected"),
    [(None, None, [10, 20, 30]), (7, 20, [7, 14, 20]), (0, None, []), (100, 15, [15]), (1, 3, [1, 2, 3])],
)
def test_checkpoints_are_written_every_so_many_steps_and_at_the_end(
    checkpoint_every: int | None, steps: int | None, expected: list[int]
) -> None:
    found = plan(checkpoint_every=checkpoint_every, steps=steps)
    assert [step for step in range(1, found.total_steps + 1) if found.saves_after(step)] == expected


@pytest.mark.parametrize(("steps_per_epoch", "shift"), [(10, 0), (20, -8), (5, 15), (7, 6)])
def test_a_plan_goes_on_at_the_same_place_in_the_epochs(steps_per_epoch: int, shift: int) -> None:
    """After 15 steps of epochs that had so many."""
    found = plan().going_on(15, 15, steps_per_epoch)
    assert (found.shift, found.place(15)) == (shift, 15 + shift)
    assert found.epoch(15) <= 15 / steps_per_epoch < found.epoch(16)
    assert found.total_steps == 30 - shift
    assert found.epoch(found.total_steps) == 3
    assert found.learning_rate(16) == plan().learning_rate(16 + shift)
    judged = [step for step in range(15, found.total_steps + 1) if found.evaluates_after(step)]
    assert judged == [step - shift for step in (10, 20, 30) if step - shift >= 15]


def test_a_plan_that_has_gone_on_goes_on_again() -> None:
    once = plan().going_on(15, 15, 20)
    assert once.going_on(20, once.place(20), once.steps_per_epoch) == once
    assert once.going_on(20, 12, 10).place(20) == 12


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "small-plain-micro-0.1-v2-s0"),
        ({"method": "dense", "seed": 3}, "small-plain-dense-v2-s3"),
        ({"workers": 3, "model": "dropout"}, "small-dropout-micro-0.1-w3-s0"),
        ({"method": "micro(control=paper)", "density": 0.001}, "small-plain-micro-control-paper-0.001-v2-s0"),
    ],
)
def test_a_run_is_named_after_what_it_is(options: dict[str, Any], name: str) -> None:
    assert run_name(plan(**options)) == name


def test_small_runs_are_what_the_tests_think() -> None:
    found = plan()
    assert (found.steps_per_epoch, found.batch_size, found.world, found.epochs) == (STEPS_PER_EPOCH, BATCH, WORLD, 3)


def test_only_sgd_can_look_ahead() -> None:
    with pytest.raises(
        UsageError, match=r"micro\(ahead=1.0\) looks ahead by the learning rate of sgd, and the optimizer is"
    ):
        plan(method="micro(ahead=1.0)", optimizer="adamw")
    assert plan(method="union", optimizer="adamw").method.feedback.ahead is None
