from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from command_line import MODULE, Done, call, complaint, finish, marked, started, steps_logged, until
from gradsieve.digests import find_runs, read_run
from gradsieve.training.study import Results, StudyCell
from small_runs import told

STUDY = """
title = "Small"
shows = "nothing much"
[common]
task = "small_runs:task"
virtual = 2
threads = 1
device = "cpu"
[short]
epochs = 1
[grids.one]
method = ["dense", "micro"]
density = 0.1
[grids.two]
method = "topk"
density = [0.1, 0.2]
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A study that was carried out, two runs at a time."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "small.toml").write_text(STUDY)
    return folder, call("compare", folder / "small.toml", "--jobs", 2, "--output", folder / "runs")


def digests(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "results" / "small" / "short").glob("*.json"))


NAMES = ["one-dense-v2-s0", "one-micro-0.1-v2-s0", "two-topk-0.1-v2-s0", "two-topk-0.2-v2-s0"]


def test_a_study_is_run_and_leaves_digests(whole: tuple[Path, Done]) -> None:
    folder, done = whole
    assert (done.code, done.err) == (0, "")
    assert "Small: nothing much" in done.out
    assert "4 runs of the form short, 0 of them done" in done.out
    assert digests(folder) == [f"{name}.json" for name in NAMES]
    assert sorted(path.name for path in (folder / "runs").iterdir()) == NAMES
    assert "gradsieve report" in done.last


def test_runs_at_a_time_are_the_runs_one_by_one(whole: tuple[Path, Done], tmp_path: Path) -> None:
    options = ["--task", "small_runs:task", "--virtual", 2, "--epochs", 1, "--density", 0.2, "--threads", 1]
    done = call("train", *options, "--device", "cpu", "--method", "topk", "--output", tmp_path / "run")
    assert done.code == 0
    assert told(read_run(tmp_path / "run")) == told(read_run(whole[0] / "runs" / NAMES[-1]))


def test_what_has_a_digest_is_not_run_again_anywhere(whole: tuple[Path, Done], tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(STUDY)
    shutil.copytree(whole[0] / "results", tmp_path / "results")
    (tmp_path / "results" / "small" / "short" / f"{NAMES[1]}.json").unlink()
    listed = call("compare", "small.toml", "--list")
    assert [line for line in listed.out.splitlines() if line[:4] in ("done", "open")] == [
        *(f"done  {NAMES[0]}", f"open  {NAMES[1]}", f"done  {NAMES[2]}", f"done  {NAMES[3]}")
    ]
    done = call("compare", "small.toml")
    assert done.code == 0
    assert "4 runs of the form short, 3 of them done" in done.out
    assert [path.name for path in (tmp_path / "runs" / "small" / "short").iterdir()] == [NAMES[1]]
    again = call("compare", "small.toml")
    assert again.code == 0
    assert "4 of them done" in again.out
    assert all(method in again.out for method in ("dense", "micro", "topk"))


def test_a_run_that_only_lacks_its_digest_gets_one(whole: tuple[Path, Done], tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(STUDY)
    done = call("compare", "small.toml", "--output", whole[0] / "runs", "--results", "kept", "--only", "two")
    assert done.code == 0
    kept = tmp_path / "kept" / "small" / "short" / f"{NAMES[2]}.json"
    assert kept.read_bytes() == (whole[0] / "results" / "small" / "short" / f"{NAMES[2]}.json").read_bytes()


def test_options_change_the_runs_and_their_place(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(STUDY)
    options = ["--full", "--only", "one", "--method", "micro", "--seeds", 2, "--steps", 2, "--epochs", 2]
    assert call("compare", "small.toml", *options).code == 0
    folder = tmp_path / "results" / "small" / "full-epochs-2-steps-2"
    runs = [read_run(path) for path in find_runs([folder])]
    assert [(run.seed, run.num_steps, run.config["epochs"]) for run in runs] == [(0, 2, 2), (1, 2, 2)]


def test_a_page_is_drawn_from_digests(whole: tuple[Path, Done], tmp_path: Path) -> None:
    done = call("report", whole[0] / "results", "--output", tmp_path / "report")
    assert done.code == 0
    assert "topk" in (tmp_path / "report" / "tables" / "frontier.md").read_text()
    (tmp_path / "other.json").write_text("{}")
    shutil.copytree(whole[0] / "results", tmp_path / "with" / "results")
    shutil.copy("other.json", tmp_path / "with" / "results")
    assert "other.json is no digest of a run" in complaint(call("report", tmp_path / "with"))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("small.toml --only three", "small.toml has no grid 'three'; valid are: one, two"),
        ("small.toml --config small.toml", "a study holds its options itself: leave out --config"),
        ("small.toml --seeds 2 --seed 1", "--seed and --seeds exclude one another"),
        ("small.toml --method mikro", "unknown method 'mikro'"),
        ("small.toml --task cifar10", "the task cifar10 needs --data"),
        ("small.toml --results small.toml/x --steps 1", "cannot write to the folder"),
        ("nothing.toml", "nothing.toml cannot be read"),
        ("small.json", "a config file ends in .toml, .yaml or .yml"),
        ("text.toml", "text.toml: the grid a needs text.txt in the folder of --data"),
        ("--full", "--short/--full is for a study"),
        ("--list", "--list is for a study"),
        ("--only one", "--only is for a study"),
        ("--results x", "--results is for a study"),
    ],
)
def test_what_cannot_be_is_refused(arguments: str, named: str, tmp_path: Path) -> None:
    Path("small.toml").write_text(STUDY)
    Path("text.toml").write_text(f'{STUDY}\n[grids.a]\ntask = "characters"\ndata = "text.txt"')
    assert named in complaint(call("compare", *arguments.split()))
    assert not (tmp_path / "results").exists()


def test_a_failure_leaves_the_others_and_no_digest(tmp_path: Path) -> None:
    guided = STUDY.replace("small_runs:task", "command_line:guided")
    (tmp_path / "small.toml").write_text(guided)
    (tmp_path / "fails").touch()
    done = call("compare", "small.toml", "--data", tmp_path, "--only", "one", "--seeds", 2, "--jobs", 2)
    assert done.code == 1
    assert digests(tmp_path) == ["one-dense-v2-s0.json", "one-micro-0.1-v2-s0.json"]
    assert done.out.count("born under a bad star") == 2


@pytest.mark.faults
def test_ctrl_c_stops_all_runs_and_keeps_what_is_finished(tmp_path: Path) -> None:
    long = STUDY.replace("small_runs:task", "command_line:guided").replace("epochs = 1", "epochs = 5")
    (tmp_path / "small.toml").write_text(long)
    assert call("compare", "small.toml", "--data", tmp_path, "--method", "dense", "--only", "one").code == 0
    (tmp_path / "slow").touch()
    runs = [tmp_path / "runs" / "small" / "short" / name for name in NAMES[1:]]
    command = [*MODULE, "compare", "small.toml", "--data", tmp_path, "--jobs", 2]
    with started(command, tmp_path, mark=str(tmp_path)) as process:
        until(lambda: min(map(steps_logged, runs[:2])) >= 2, "two runs are under way")
        os.killpg(process.pid, signal.SIGINT)
        done = finish(process)
        until(lambda: not marked(str(tmp_path)), "all processes end", seconds=30)
    assert (done.code, done.err) == (130, "")
    assert "interrupted: start the same command again to go on" in done.out
    assert [read_run(run).status for run in runs[:2]] == ["interrupted"] * 2
    assert not runs[2].exists()
    assert digests(tmp_path) == [f"{NAMES[0]}.json"]


def test_ctrl_c_between_two_runs_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.toml").write_text(STUDY)
    keep = Results.keep

    def interrupted(results: Results, cell: StudyCell, folder: Path) -> None:
        keep(results, cell, folder)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Results, "keep", interrupted)
    done = call("compare", "small.toml")
    assert done.code == 130
    assert digests(tmp_path) == [f"{NAMES[0]}.json"]
    assert "interrupted: start the same command again to go on" in done.out
