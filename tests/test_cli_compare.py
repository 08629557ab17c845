from __future__ import annotations

import os
import re
import shutil
import signal
import statistics
from pathlib import Path

import pytest
import yaml

from command_line import MODULE, Done, call, complaint, finish, marked, result_bytes, started, steps_logged, until
from gradsieve.runs import RESULT, Run, read_run
from small_runs import told

SMALL = ["--task", "small_runs:task", "--virtual", 2, "--steps", 6, "--threads", 1]
GUIDED = ["--task", "command_line:guided", "--virtual", 2, "--threads", 1]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rows(done: Done) -> dict[tuple[str, str], list[str]]:
    """The table of results: cells by method and density, without these."""
    table = done.out.split("Times of a step")[0]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in table.splitlines() if line[:1] == "│"]
    found = {(method, density): rest for method, density, *rest in cells}
    assert len(found) == len(cells)
    return found


def runs_in(folder: Path) -> dict[str, Run]:
    return {path.parent.name: read_run(path.parent) for path in sorted(folder.glob("*/run.json"))}


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """Dense and two methods at two densities, with two seeds."""
    folder = tmp_path_factory.mktemp("compare") / "grid"
    axes = ["--method", "dense, micro, micro(control=paper)", "--density", "0.1,0.2", "--seed", "0,1"]
    return folder, call("compare", *SMALL, *axes, "--output", folder)


def test_every_combination_is_run_and_dense_only_once(grid: tuple[Path, Done]) -> None:
    folder, done = grid
    assert (done.code, done.err) == (0, "")
    runs = runs_in(folder)
    asked = {(run.method, run.config["density"], run.seed) for run in runs.values()}
    methods = ("micro", "micro(control='paper')")
    expected = {(method, density, seed) for method in methods for density in (0.1, 0.2) for seed in (0, 1)}
    assert asked == expected | {("dense", None, seed) for seed in (0, 1)}
    assert len(runs) == 10
    assert all(run.status == "finished" for run in runs.values())
    assert f"10 runs, 0 of them finished before; in {folder}" in done.out


def test_the_summary_shows_mean_and_spread_over_seeds(grid: tuple[Path, Done]) -> None:
    folder, done = grid
    found = rows(done)
    methods = [("micro", "0.1"), ("micro", "0.2"), ("micro(control='paper')", "0.1"), ("micro(control='paper')", "0.2")]
    assert sorted(found) == sorted([("dense", "1"), *methods])
    runs = runs_in(folder).values()
    for (method, density), cells in found.items():
        figures = [
            100 * run.summary["eval/accuracy"]
            for run in runs
            if run.method == method and (run.config["density"] is None or f"{run.config['density']:g}" == density)
        ]
        assert len(figures) == 2
        assert f"{statistics.mean(figures):.2f} ± {statistics.stdev(figures):.2f} %" in cells
        assert cells[0] == "2"
        assert cells[-1] == "2"
    assert "Times of a step, slowest worker" in done.out


def test_a_run_of_a_grid_is_the_run_that_train_makes(grid: tuple[Path, Done], tmp_path: Path) -> None:
    folder, _ = grid
    run = next(run for run in runs_in(folder).values() if (run.method, run.density, run.seed) == ("micro", 0.2, 1))
    options = ["--method", "micro", "--density", 0.2, "--seed", 1, "--output", tmp_path / "run"]
    assert call("train", *SMALL, *options).code == 0
    assert told(read_run(tmp_path / "run")) == told(run)


def test_finished_runs_are_not_repeated(grid: tuple[Path, Done]) -> None:
    folder, first = grid
    before = {path: result_bytes(path) for path in folder.iterdir()}
    axes = ["--method", "dense,micro,micro(control='paper')", "--density", "0.1,0.2", "--seed", "0,1"]
    again = call("compare", *SMALL, *axes, "--output", folder)
    assert again.code == 0
    assert "10 runs, 10 of them finished before" in again.out
    assert rows(again) == rows(first)
    assert {path: result_bytes(path) for path in folder.iterdir()} == before


def test_a_grid_may_grow(grid: tuple[Path, Done], tmp_path: Path) -> None:
    shutil.copytree(grid[0], tmp_path / "grid")
    before = {path.name: result_bytes(path) for path in (tmp_path / "grid").iterdir()}
    done = call("compare", *SMALL, "--method", "micro,topk", "--density", 0.1, "--seed", "0,1", "--output", "grid")
    assert done.code == 0
    assert "4 runs, 2 of them finished before" in done.out
    after = {path.name: result_bytes(path) for path in (tmp_path / "grid").iterdir()}
    assert {name: after[name] for name in before} == before
    assert len(after) == len(before) + 2


def test_another_run_in_the_folder_is_refused(grid: tuple[Path, Done]) -> None:
    folder, _ = grid
    line = complaint(call("compare", *SMALL, "--steps", 7, "--method", "micro", "--density", 0.1, "--output", folder))
    assert "holds a run with steps 6, and 7 is asked for: give another --output" in line


def test_a_grid_comes_from_a_file_alike(grid: tuple[Path, Done], tmp_path: Path) -> None:
    shutil.copytree(grid[0], tmp_path / "grid")
    names = [option.removeprefix("--") for option in map(str, SMALL[::2])]
    values = {
        **dict(zip(names, SMALL[1::2], strict=True)),
        "method": ["dense", "micro", "micro(control=paper)"],
        "density": [0.1, 0.2],
        "seed": [0, 1],
        "output": "grid",
    }
    Path("grid.yaml").write_text(yaml.safe_dump(values))
    assert "10 runs, 10 of them finished before" in call("compare", "--config", "grid.yaml").out
    # the command line goes before it
    assert "1 runs, 1 of them" in call("compare", "--config", "grid.yaml", "--method", "dense", "--seed", "1").out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--method ,", "empty list"),
        ("--method=", "empty list"),
        ("--seed ,", "empty list"),
        ("--config empty.yaml", "empty list"),
        ("--config keys.yaml", "there is no option 'methods'"),
        ("--config mapping.yaml", "method"),
        ("--config steps.yaml", "steps must be a whole number, not [1, 2]"),
        ("--method micro,nope", "unknown method 'nope'"),
        ("--method micro,dense(density=0.1)", "dense() has no option 'density'"),
        ("--method micro --density 0.1,0", "density must lie in (0, 1], not 0.0"),
        ("--density 0.1,x", "--density takes numbers separated by commas, not 'x'"),
        ("--seed 1,1.5", "--seed takes whole numbers separated by commas, not '1.5'"),
        ("--workers two", "--workers takes whole numbers separated by commas, not 'two'"),
        ("--workers 1,0", "workers must be at least 1, not 0"),
        ("--workers 1 --virtual 2", "workers and virtual exclude one another"),
        ("--task nope", "unknown task 'nope'"),
        ("--task cifar10", "the task cifar10 needs --data"),
        ("--model nope", "has no model 'nope'"),
        ("--virtual 1,500 --batch-size 8", "500 workers with a batch of 8 need 4000 training examples"),
        ("--output file/below", "cannot write to the folder"),
        ("--device tpu", "device must be cpu, cuda or cuda:N"),
    ],
)
def test_a_grid_that_cannot_be_is_refused_as_a_whole(arguments: str, named: str, tmp_path: Path) -> None:
    Path("file").touch()
    Path("empty.yaml").write_text("method: []")
    Path("keys.yaml").write_text("methods: [micro]")
    Path("mapping.yaml").write_text("method: {micro: 1}")
    Path("steps.yaml").write_text("steps: [1, 2]")
    assert named in complaint(call("compare", *arguments.split()))
    assert not (tmp_path / "runs").exists()


def test_by_default_a_grid_lies_in_a_folder_of_its_task(tmp_path: Path) -> None:
    done = call("compare", *SMALL, "--method", "dense", "--steps", 1)
    assert done.code == 0
    assert list(runs_in(tmp_path / "runs" / "compare-small")) == ["small-plain-dense-v2-s0"]


def test_several_worlds_are_compared(tmp_path: Path) -> None:
    arguments = ["--task", "small_runs:task", "--threads", 1, "--steps", 2, "--method", "micro", "--output", "grid"]
    done = call("compare", *arguments, "--workers", "1,2")
    assert done.code == 0
    assert sorted(run.world for run in runs_in(tmp_path / "grid").values()) == [1, 2]
    assert {run.config["virtual"] for run in runs_in(tmp_path / "grid").values()} == {None}


def test_a_terminal_sees_a_bar_for_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    done = call("compare", *SMALL, "--method", "dense,micro", "--steps", 1, "--output", tmp_path / "grid")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.out)
    assert done.code == 0
    assert re.search(r"all runs +━+ 2/2", shown)
    for name, run in zip(("dense", "micro 0.01"), runs_in(tmp_path / "grid").values(), strict=True):
        accuracy = f"accuracy {100 * run.summary['eval/accuracy']:.2f} %"
        assert re.search(rf"{name}, 2 workers, seed 0 +━+ 1/1 .*{accuracy}", shown)


def test_a_run_that_fails_is_marked_and_only_it_is_tried_again(tmp_path: Path) -> None:
    command = ["compare", *GUIDED, "--data", tmp_path, "--steps", 4, "--method", "dense,micro", "--output", "grid"]
    (tmp_path / "fails").touch()
    first = call(*command, "--seed", "0,1,2")
    failed = ["small-guided-dense-v2-s1", "small-guided-micro-0.01-v2-s1"]
    assert (first.code, first.err) == (1, "")
    runs = runs_in(tmp_path / "grid")
    assert len(runs) == 6
    assert [name for name, run in runs.items() if run.status == "failed"] == failed
    assert all(run.status == "finished" for name, run in runs.items() if name not in failed)
    for name in failed:
        reason = f"{name} failed: worker 0: RuntimeError: born under a bad star (more in "
        assert sum(line.startswith(reason) for line in first.out.splitlines()) == 1
        assert "Traceback" in (tmp_path / "grid" / name / "error.txt").read_text()
    assert [cells[-1] for cells in rows(first).values()] == ["2 of 3", "2 of 3"]
    before = {name: result_bytes(tmp_path / "grid" / name) for name in runs}
    (tmp_path / "fails").unlink()
    second = call(*command, "--seed", "0,1,2")
    assert (second.code, second.err) == (0, "")
    assert "6 runs, 4 of them finished before" in second.out
    assert [cells[-1] for cells in rows(second).values()] == ["3", "3"]
    after = {name: result_bytes(tmp_path / "grid" / name) for name in runs}
    assert [name for name in runs if after[name] != before[name]] == failed
    assert not (tmp_path / "grid" / failed[0] / "error.txt").exists()


def test_a_grid_of_which_nothing_could_be_built_says_so(tmp_path: Path) -> None:
    done = call("compare", *SMALL, "--model", "broken", "--method", "dense", "--output", tmp_path / "grid")
    assert done.code == 1
    assert "small-broken-dense-v2-s0 failed: worker 0: RuntimeError: no model today" in done.out


def test_a_run_that_was_cut_off_without_a_checkpoint_begins_anew(grid: tuple[Path, Done], tmp_path: Path) -> None:
    shutil.copytree(grid[0], tmp_path / "grid")
    run = next(run for run in runs_in(tmp_path / "grid").values() if run.method == "dense")
    (run.folder / RESULT).unlink()
    done = call("compare", *SMALL, "--method", "dense", "--seed", run.seed, "--output", "grid")
    assert done.code == 0
    assert "1 runs, 0 of them finished before" in done.out
    again = read_run(run.folder)
    assert "resumed" not in again.header
    assert told(again) == told(run)


def gone(mark: str) -> None:
    until(lambda: not marked(mark), "all processes end", seconds=30)


STEPS = 12
CUT = [*GUIDED, "--method", "dense,micro", "--seed", "0,1", "--steps", STEPS, "--checkpoint-every", 4]
ORDER = [f"small-guided-{method}-v2-s{seed}" for method in ("dense", "micro-0.01") for seed in (0, 1)]


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, marks=pytest.mark.faults), pytest.param(signal.SIGINT, marks=pytest.mark.slow)],
)
def test_a_grid_that_was_cut_off_goes_on_where_it_was(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    command = ["compare", *CUT, "--data", tmp_path, "--output", "grid"]
    first, second = (tmp_path / "grid" / name for name in ORDER[:2])
    with started([*MODULE, *command], tmp_path, mark=str(tmp_path)) as process:
        until(lambda: (first / RESULT).exists() and steps_logged(second) >= 5, "a run is done, and another begun")
        os.killpg(process.pid, number)
        done = finish(process)
        gone(str(tmp_path))
    if number == signal.SIGINT:
        assert (done.code, done.err) == (130, "")
        assert "interrupted: start the same command again to go on" in done.out
        assert sorted(path.name for path in (tmp_path / "grid").iterdir()) == sorted(ORDER[:2])
    before = result_bytes(first)
    statuses = [read_run(folder).status for folder in (first, second)]
    assert statuses == ["finished", "interrupted" if number == signal.SIGINT else "unfinished"]
    (tmp_path / "slow").unlink()
    again = call(*command)
    assert again.code == 0, again
    assert "4 runs, 1 of them finished before" in again.out
    assert result_bytes(first) == before
    runs = [read_run(tmp_path / "grid" / name) for name in ORDER]
    assert [run.status for run in runs] == ["finished"] * 4
    assert [len(run.steps) for run in runs] == [STEPS] * 4
    assert runs[1].header["resumed"][0]["from_step"] >= 4
    assert ["resumed" in run.header for run in runs] == [False, True, False, False]
    whole = ["train", *GUIDED, "--data", tmp_path, "--method", "dense", "--seed", 1, "--steps", STEPS]
    assert call(*whole, "--output", tmp_path / "whole").code == 0
    assert told(runs[1]) == told(read_run(tmp_path / "whole"))
