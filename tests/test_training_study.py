from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import small_runs
from gradsieve.checks import UsageError
from gradsieve.cli.options import read_config
from gradsieve.digests import read_runs
from gradsieve.tasks.cifar import RECIPE
from gradsieve.training.plan import make_plan
from gradsieve.training.study import (
    FORMS,
    Form,
    Results,
    Study,
    StudyCell,
    distinct,
    form_name,
    make_study,
    study_cells,
)

STUDIES = sorted((Path(__file__).parents[1] / "studies").glob("*.toml"))
EPOCHS: dict[str, tuple[set[int], set[int]]] = {"phases": (set(), set()), "cifar10-narrow": ({4, 8}, {30})}
"""Of the short and the full form, where they are not 30 and 200."""
SMALL: dict[str, Any] = {
    "title": "Small",
    "shows": "nothing much",
    "common": {"task": "small_runs:task", "virtual": 2, "device": "cpu"},
    "short": {"epochs": 1},
    "full": {"epochs": 3},
    "grids": {
        "one": {"method": ["dense", "micro(control=paper)"], "density": 0.1},
        "two": {"method": "topk", "density": [0.1, 0.2], "full": {"epochs": 2}},
    },
}


def small(**changes: Any) -> Study:
    return make_study("small", {**SMALL, **changes}, "small.toml")


def cells(form: Form = "short", only: tuple[str, ...] = (), **given: Any) -> list[StudyCell]:
    return study_cells(small(), form, given, only)


def test_grids_are_expanded_each_with_its_own_options() -> None:
    assert [cell.name for cell in cells()] == [
        "one-dense-v2-s0",
        "one-micro-control-paper-0.1-v2-s0",
        "two-topk-0.1-v2-s0",
        "two-topk-0.2-v2-s0",
    ]
    assert {cell.config.epochs for cell in cells()} == {1}
    assert [cell.config.epochs for cell in cells("full")] == [3, 3, 2, 2]
    assert [cell.grid for cell in cells(only=("two",))] == ["two", "two"]


def test_what_is_given_goes_before_the_study() -> None:
    found = cells("full", epochs=7, seed=[0, 1], method=["union"], workers=3)
    assert {(c.config.epochs, c.config.method, c.config.workers, c.config.virtual) for c in found} == {
        (7, "union", 3, None)
    }
    assert len(found) == (1 + 2) * 2


def test_a_method_is_the_same_however_it_is_written() -> None:
    written = {**SMALL["grids"]["one"], "method": ["dense()", "micro( control = 'paper', density=0.1)"]}
    written.pop("density")
    found = study_cells(small(grids={"one": written}), "short", {})
    assert [cell.asked for cell in found] == [cell.asked for cell in cells(only=("one",))]


def test_a_global_batch_is_shared_out() -> None:
    grid = {"method": "dense", "virtual": [2, 4], "global_batch": 24}
    found = study_cells(small(grids={"all": grid}), "short", {})
    assert [(cell.config.virtual, cell.config.batch_size, cell.global_batch) for cell in found] == [
        (2, 12, 24),
        (4, 6, 24),
    ]
    with pytest.raises(UsageError, match="grid all: global_batch 24 cannot be shared out over 7 workers"):
        study_cells(small(grids={"all": {**grid, "virtual": 7}}), "short", {})
    assert [cell.config.batch_size for cell in study_cells(small(grids={"all": grid}), "short", {"batch_size": 3})] == [
        3,
        3,
    ]


def test_data_of_a_grid_lie_below_what_is_given() -> None:
    study = small(grids={"text": {"data": "some/text.txt"}, "plain": {}})
    assert [cell.config.data for cell in study_cells(study, "short", {"data": "/data"})] == [
        Path("/data/some/text.txt"),
        Path("/data"),
    ]
    assert [cell.config.data for cell in study_cells(study, "short", {})] == [None, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"titel": "x"}, "small.toml: a study has no 'titel'; did you mean 'title'"),
        ({"title": None}, "small.toml: title must be text, not None"),
        ({"grids": {}}, "small.toml: a study needs a grid"),
        ({"grids": [1]}, r"small.toml: grids must be a table of options, not \[1\]"),
        ({"grids": {"one": 1}}, "small.toml: one must be a table of options, not 1"),
        ({"grids": {"one": {"short": 1}}}, "small.toml, grid one: short must be a table of options, not 1"),
        ({"grids": {"one": {"modle": "x"}}}, "small, grid one: there is no option 'modle'; did you mean 'model'"),
        ({"grids": {"one": {"data": 1}}}, "small, grid one: data must be a path below"),
        ({"common": {"epochs": "many"}, "short": {}}, "small, grid one: epochs must be a whole number, not 'many'"),
        ({"grids": {"one": {"virtual": []}}}, "virtual is an empty list"),
    ],
)
def test_a_study_that_cannot_be_is_refused(changes: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        study_cells(small(**changes), "short", {})


def test_a_grid_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match=r"small has no grid 'three'; .*valid are: one, two"):
        cells(only=("three",))


def test_options_that_make_another_run_put_it_elsewhere() -> None:
    assert form_name("short", {"data": "x", "device": "cuda", "seed": [0], "method": ["topk"]}) == "short"
    assert form_name("full", {"steps": 3, "lr": 0.5, "threads": 1}) == "full-lr-0.5-steps-3"


def kept(tmp_path: Path) -> tuple[Results, StudyCell]:
    """The digest of a run that a study asks for."""
    cell = cells(only=("one",))[1]
    results = Results(tmp_path / "results", small(), "short")
    assert results.find(cell) is None
    small_runs.here(tmp_path / "run", method="micro(control=paper)", epochs=1)
    results.keep(cell, tmp_path / "run")
    return results, cell


def test_a_run_is_known_again_wherever_it_was_made(tmp_path: Path) -> None:
    results, cell = kept(tmp_path)
    elsewhere = replace(cell, config=replace(cell.config, device=None, threads=7, data=Path("/elsewhere")))
    digest = results.find(elsewhere)
    assert digest is not None
    assert digest.study["grid"] == "one"
    assert digest.study["asked"] == cell.asked
    assert digest.summary["eval/accuracy"] > 0
    assert [path.name for path in results.folder.iterdir()] == [f"{cell.name}.json"]


def test_a_study_takes_over_what_another_has_run(tmp_path: Path) -> None:
    first, run = kept(tmp_path)
    other = make_study("other", {**SMALL, "grids": {"own": {**SMALL["grids"]["one"], "global_batch": 24}}}, "other")
    asked = study_cells(other, "short", {"batch_size": run.config.batch_size})
    results = Results(tmp_path / "results", other, "short")
    (tmp_path / "results" / "note" / "short").mkdir(parents=True)
    (tmp_path / "results" / "note" / "short" / "stranger.json").write_text("{}")
    assert [results.find(cell) is not None for cell in asked] == [False, True]
    results.take_over(asked)
    assert [path.name for path in results.folder.iterdir()] == ["own-micro-control-paper-0.1-v2-s0.json"]
    ours, theirs = results.find(asked[1]), first.find(run)
    assert ours is not None
    assert theirs is not None
    assert (ours.study["name"], ours.study["grid"]) == ("other", "own")
    assert (ours.header, ours.summary, ours.steps, ours.evaluations) == (
        *(theirs.header, theirs.summary, theirs.steps, theirs.evaluations),
    )
    assert len(read_runs([first.folder, results.folder])) == 1


def test_a_run_counts_in_every_setting_that_asks_for_it(tmp_path: Path) -> None:
    results, run = kept(tmp_path)
    shared_out = replace(run, grid="in-all", global_batch=24)
    assert distinct([run, shared_out, cells()[0]]) == [run, cells()[0]]
    Results(tmp_path / "results", small(), "short").take_over([run, shared_out])
    assert results.path(shared_out).exists()
    assert [run.setting for run in read_runs([tmp_path / "results"])] == [
        "short form, 24 examples a step",
        "short form",
    ]


def test_a_digest_of_another_run_is_refused(tmp_path: Path) -> None:
    results, cell = kept(tmp_path)
    other = replace(cell, config=replace(cell.config, lr=0.5))
    with pytest.raises(UsageError, match=r"s0\.json is of a run with lr None, and 0\.5 is asked for"):
        results.find(other)
    results.path(cell).write_text(json.dumps({}))
    with pytest.raises(UsageError, match=r"s0\.json is no digest"):
        results.find(cell)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_studies_of_the_repository_can_be(path: Path) -> None:
    study = make_study(path.stem, read_config(path), str(path))
    for form, epochs in zip(FORMS, EPOCHS.get(path.stem, ({30}, {200})), strict=True):
        found = study_cells(study, form, {})
        asked = {cell.config.epochs for cell in found if cell.config.task != "characters" and not cell.config.steps}
        assert asked == epochs
        # the small one is the same on every machine
        precision = "float32" if path.stem == "digits" else "auto"
        assert {cell.config.precision for cell in found if "float32" not in cell.grid} == {precision}
        assert len(found) == len({cell.name for cell in found})


def test_their_learning_rate_is_the_published_one() -> None:
    task = replace(small_runs.task, train=small_runs._examples(600, seed=1), recipe=RECIPE)
    config = replace(cells()[0].config, batch_size=None, virtual=16, epochs=200)
    plan = make_plan(config, 16, task)
    assert plan.config.lr == pytest.approx(0.1 * 16 / 4)
    places = [plan.learning_rate(epoch * plan.steps_per_epoch) for epoch in (5, 149, 150)]
    assert places == pytest.approx([0.4, 0.4, 0.04])


@pytest.mark.parametrize(
    ("device", "capabilities", "precision"),
    [
        ("cpu", {}, "float32"),
        ("cpu", {"avx512_bf16": False, "avx512_f": True}, "float32"),
        ("cpu", {"avx512_bf16": True}, "bfloat16"),
        ("cpu", {"amx_bf16": True}, "bfloat16"),
        ("cuda", {}, "bfloat16"),
        ("cuda:1", {}, "bfloat16"),
    ],
)
def test_precision_goes_by_the_device(
    device: str, capabilities: dict[str, bool], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    config = replace(cells()[0].config, precision="auto", device=device)
    assert make_plan(config, 2, small_runs.task).config.precision == precision
