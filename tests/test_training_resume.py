"""A run that goes on from its checkpoint is the run that was never stopped, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import small_runs
from gradsieve import METHODS
from gradsieve.runs import METRICS, RESULT, Run, read_run
from gradsieve.training import runner
from small_runs import WORLD, Trouble, assert_same_state, checkpoint, told

STEPS, FIRST = 17, 6
VARIANTS: dict[str, dict[str, Any]] = {name: {"method": name} for name in METHODS} | {
    "dropout": {"model": "dropout"},
    "adamw": {"optimizer": "adamw", "lr": 0.01},
    "clip": {"clip": 0.1},
    "no momentum": {"momentum": 0.0},
    "bfloat16": {"precision": "bfloat16"},
    "values as bfloat16": {"wire": "bfloat16"},
    "dgc with all": {"method": "dgc(clip=1.0, warmup_steps=10)"},
    "iwp with momentum": {"method": "iwp(momentum=0.9, stochastic=True, num_broadcasters=2)", "model": "dropout"},
    "iwp per layer": {"method": "iwp(per_layer=True)"},
    "micro as published": {"method": "micro(control=paper)"},
    "exdyna as published": {"method": "exdyna(control=paper)"},
    "three workers": {"virtual": 3, "method": "exdyna"},
    "seed": {"seed": 123_456, "method": "randomk"},
}


def assert_same_run(found: Run, expected: Run, first: int) -> None:
    """But for the evaluation at the end of the first part, and for times."""
    also_judged = [record for record in told(found) if record not in told(expected)]
    assert {(record["step"], "eval/loss" in record) for record in also_judged} <= {(first, True)}
    assert [record for record in told(found) if record not in also_judged] == told(expected)
    assert_same_state(checkpoint(found.folder), checkpoint(expected.folder))


@pytest.mark.parametrize("variant", VARIANTS)
def test_virtual_workers_go_on_as_if_never_stopped(tmp_path: Path, variant: str) -> None:
    options = VARIANTS[variant]
    whole = small_runs.here(tmp_path / "whole", steps=STEPS, **options)
    small_runs.here(tmp_path / "parts", steps=FIRST, **options)
    parts = small_runs.resumed_here(tmp_path / "parts", {"steps": STEPS})
    assert_same_run(parts, whole, FIRST)
    assert len(parts.steps) == STEPS
    losses = whole.series("train/loss")
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "options",
    [
        {"method": "micro", "model": "dropout"},
        pytest.param({"method": "dgc"}, marks=pytest.mark.slow),
        pytest.param({"method": "iwp", "optimizer": "adamw", "lr": 0.01}, marks=pytest.mark.slow),
        # the model is small enough for one bucket
        {"method": "union", "scope": "bucket"},
    ],
    ids=lambda options: options["method"],
)
def test_processes_go_on_as_if_never_stopped(tmp_path: Path, options: dict[str, Any]) -> None:
    whole = small_runs.started(tmp_path / "whole", steps=STEPS, workers=WORLD, **options)
    small_runs.started(tmp_path / "parts", steps=FIRST, workers=WORLD, **options)
    parts = small_runs.resumed(tmp_path / "parts", {"steps": STEPS})
    assert_same_run(parts, whole, FIRST)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_so_do_processes_with_every_method(tmp_path: Path, method: str) -> None:
    test_processes_go_on_as_if_never_stopped(tmp_path, {"method": method})


@pytest.mark.parametrize("options", [pytest.param({}, id="virtual"), pytest.param({"workers": WORLD}, id="processes")])
def test_a_run_that_was_killed_goes_on_from_its_checkpoint(tmp_path: Path, options: dict[str, Any]) -> None:
    """What was recorded after the checkpoint is made again, alike."""
    passes = 1 if "workers" in options else WORLD
    trouble = Trouble("kill", at=9 * passes).write(tmp_path / "trouble.json")
    options = {"task": "small_runs:troubled", "checkpoint_every": 5, "steps": STEPS, "data": trouble, **options}
    ended = small_runs.trained(tmp_path / "killed", **options)
    assert ended.status == "failed"
    killed = read_run(tmp_path / "killed")
    assert [record["step"] for record in killed.steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    # killed with SIGKILL, the whole of it leaves no result, and a line by half
    (tmp_path / "killed" / RESULT).unlink()
    with (tmp_path / "killed" / METRICS).open("a") as file:
        file.write('{"step": 9, "ep')
    assert read_run(tmp_path / "killed").status == "unfinished"
    Trouble().write(trouble)
    again = small_runs.resumed(tmp_path / "killed", {})
    whole = small_runs.started(tmp_path / "whole", **options)
    assert_same_run(again, whole, STEPS)
    assert told(killed) == told(whole)[:8]
    assert again.header["resumed"][0]["from_step"] == 5


def test_a_run_may_be_resumed_several_times(tmp_path: Path) -> None:
    whole = small_runs.here(tmp_path / "whole", steps=9, eval_every=0)
    small_runs.here(tmp_path / "parts", steps=3, eval_every=0)
    for steps in (4, 4, 9):
        parts = small_runs.resumed_here(tmp_path / "parts", {"steps": steps})
    assert [record for record in told(parts) if "train/loss" in record] == told(whole)[:-1]
    assert_same_state(checkpoint(parts.folder), checkpoint(whole.folder))
    assert [time["from_step"] for time in parts.header["resumed"]] == [3, 4, 4]
    assert parts.status == "finished"


def test_a_resumed_run_remembers_where_it_came_from(tmp_path: Path) -> None:
    first = small_runs.here(tmp_path, steps=2)
    again = small_runs.resumed_here(tmp_path, {"steps": 3})
    assert again.provenance == first.provenance
    assert "resumed" not in first.header
    (resumed,) = again.header["resumed"]
    assert resumed.keys() == {"from_step", *first.provenance}
    assert again.config == {**first.config, "steps": 3}
    assert again.header["total_steps"] == 3


def test_the_clock_goes_on_too(tmp_path: Path) -> None:
    small_runs.here(tmp_path, steps=2)
    run = small_runs.resumed_here(tmp_path, {"steps": 4})
    elapsed = run.series("time/elapsed")
    assert elapsed.tolist() == pytest.approx(run.series("time/step").cumsum().tolist())


def test_more_epochs_give_the_rest_of_the_run_another_learning_rate(tmp_path: Path) -> None:
    small_runs.here(tmp_path, steps=3)
    run = small_runs.resumed_here(tmp_path, {"epochs": 5, "steps": 20})
    longer = small_runs.plan(epochs=5)
    rates = [small_runs.plan().learning_rate(step) for step in range(3)]
    assert run.series("train/lr").tolist() == rates + [longer.learning_rate(step) for step in range(3, 20)]


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    first = small_runs.here(tmp_path, steps=3)
    state = checkpoint(tmp_path)
    again = small_runs.resumed_here(tmp_path, {})
    assert (told(again), again.status) == (told(first), "finished")
    assert again.summary == first.summary
    assert_same_state(checkpoint(tmp_path), state)


def test_a_damaged_checkpoint_fails_the_resumed_run_and_keeps_its_records(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    small_runs.here(folder, steps=3)
    before = (folder / METRICS).read_bytes()
    (folder / "checkpoint" / "rank-1.pt").write_bytes(b"nonsense")
    small_runs.warm_up()
    ended = runner.resume(folder, {"steps": 5})
    assert ended.status == "failed"
    assert ended.error is not None
    assert ended.error.startswith(f"worker 0: {folder}/checkpoint/rank-1.pt cannot be loaded: ")
    assert (folder / METRICS).read_bytes() == before


def test_the_checkpoint_of_another_method_is_refused(tmp_path: Path) -> None:
    small_runs.started(tmp_path / "run", steps=2, workers=1)
    header = json.loads((tmp_path / "run" / "run.json").read_text())
    header["config"]["method"] = "topk"
    (tmp_path / "run" / "run.json").write_text(json.dumps(header))
    ended = runner.resume(tmp_path / "run", {"steps": 4})
    assert ended.status == "failed"
    assert "this state was saved with method" in str(ended.error)


def test_nan_in_the_loss_is_recorded_as_nothing_and_survives_a_resume(tmp_path: Path) -> None:
    trouble = Trouble("nan", at=3).write(tmp_path / "trouble.json")
    options = {"task": "small_runs:troubled", "data": trouble}
    first = small_runs.here(tmp_path / "run", steps=4, virtual=1, method="dense", **options)
    assert [record["train/loss"] is None for record in first.steps] == [False, False, True, True]
    assert first.summary["train/loss"] is None
    again = small_runs.resumed_here(tmp_path / "run", {"steps": 6})
    assert again.status == "finished"
    assert told(again)[:4] == told(first)[:4]
