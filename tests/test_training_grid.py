from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import small_runs
from gradsieve.checks import UsageError
from gradsieve.runs import METRICS, RESULT, RUN, Record, RunError, read_run
from gradsieve.training.grid import Cell, expand, make_grid, run_grid
from gradsieve.training.recorder import Sink
from gradsieve.training.session import Ended
from small_runs import Trouble, checkpoint, told

SMALL: dict[str, Any] = {"task": "small_runs:task", "device": "cpu", "threads": 1, "virtual": 2, "steps": 3}


def axes(values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [(c.method, c.density, c.workers, c.virtual, c.seed) for c in expand(values, "here")]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, [("union", None, None, None, 0)]),
        ({"method": "topk", "seed": 3}, [("topk", None, None, None, 3)]),
        ({"method": ["topk"], "seed": [3]}, [("topk", None, None, None, 3)]),
        ({"method": ("topk", "micro")}, [("topk", None, None, None, 0), ("micro", None, None, None, 0)]),
        (
            {"method": ["topk", "micro"], "density": [0.1, 1], "virtual": 2},
            [
                ("topk", 0.1, None, 2, 0),
                ("topk", 1.0, None, 2, 0),
                ("micro", 0.1, None, 2, 0),
                ("micro", 1.0, None, 2, 0),
            ],
        ),
        ({"workers": [1, 2], "method": "topk"}, [("topk", None, 1, None, 0), ("topk", None, 2, None, 0)]),
        (
            {"method": ["dense", "topk"], "density": [0.1, 0.2], "seed": [0, 1]},
            [
                ("dense", None, None, None, 0),
                ("dense", None, None, None, 1),
                ("topk", 0.1, None, None, 0),
                ("topk", 0.1, None, None, 1),
                ("topk", 0.2, None, None, 0),
                ("topk", 0.2, None, None, 1),
            ],
        ),
        ({"method": ["topk", "topk"], "seed": [1, 1, 1]}, [("topk", None, None, None, 1)]),
        ({"method": "dense()", "density": [0.1, 0.2]}, [("dense()", None, None, None, 0)]),
    ],
)
def test_lists_make_a_grid_with_dense_in_it_once(values: dict[str, Any], expected: list[tuple[Any, ...]]) -> None:
    assert axes(values) == expected


def test_other_options_go_to_every_run() -> None:
    found = expand({**SMALL, "method": ["topk", "dense"], "density": 0.1, "lr": 1, "schedule": "cosine"}, "here")
    assert {(c.task, c.steps, c.lr, c.schedule, c.threads) for c in found} == {("small_runs:task", 3, 1.0, "cosine", 1)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": []}, "empty list: give at least one value"),
        ({"seed": ()}, "empty list: give at least one value"),
        ({"lr": [0.1, 0.2]}, "here: lr must be a number, not \\[0.1, 0.2\\]"),
        ({"seed": ["1"]}, "here: seed must be a whole number, not '1'"),
        ({"method": [5]}, "'5' is not a method"),
        ({"method": ["micro("]}, "'micro\\(' is not a method"),
        ({"method": ["mikro"]}, "here: unknown method 'mikro'; did you mean 'micro'"),
        ({"methods": ["micro"]}, "here: there is no option 'methods'; did you mean '?method"),
        ({"workers": [1, 2], "virtual": 2}, "here: workers and virtual exclude one another"),
        ({"density": [0.1, 2]}, "here: density must lie in"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        expand(values, "here")


def grid(output: Path, **values: Any) -> list[Cell]:
    return make_grid(expand({**SMALL, **values}, "here"), output)


def test_the_cells_of_a_grid_have_names_and_titles(tmp_path: Path) -> None:
    cells = grid(tmp_path, method=["dense", "topk(density=0.1)", "micro(control=paper)"], seed=[0, 1])
    assert [cell.name for cell in cells] == [
        "small-plain-dense-v2-s0",
        "small-plain-dense-v2-s1",
        "small-plain-topk-0.1-v2-s0",
        "small-plain-topk-0.1-v2-s1",
        "small-plain-micro-control-paper-0.01-v2-s0",
        "small-plain-micro-control-paper-0.01-v2-s1",
    ]
    assert cells[0].title == "dense, 2 workers, seed 0"
    assert cells[-1].title == "micro(control='paper') 0.01, 2 workers, seed 1"
    assert {(cell.state, cell.folder.parent) for cell in cells} == {("new", tmp_path)}
    assert {cell.plan.config.checkpoint_every for cell in cells} == {0}
    assert list(tmp_path.iterdir()) == []


def test_two_ways_to_write_a_method_are_one_cell(tmp_path: Path) -> None:
    methods = ["topk", "topk()", "topk(density=0.01)", "micro(control=adaptive)", "micro"]
    assert [cell.plan.label for cell in grid(tmp_path, method=methods)] == ["topk", "micro"]


@pytest.mark.parametrize(
    "values",
    [
        {"density": [0.1234567, 0.1234568]},
        {"method": ["hard_threshold(threshold=1e16)", "hard_threshold(threshold=1e-16)"]},
    ],
)
def test_two_different_runs_are_two_cells_or_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    try:
        cells = grid(tmp_path, **values)
    except UsageError:
        return
    assert len(cells) == 2


def test_without_a_folder_a_grid_is_in_runs_under_its_tasks_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (cell,) = make_grid(expand(SMALL, "here"), None)
    assert cell.folder.parent == tmp_path.resolve() / "runs" / "compare-small"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "plane"}, "the task small has no model 'plane'"),
        ({"virtual": [2, 1000]}, "1000 workers with a batch of 12 need"),
        ({"device": "tpu"}, "device must be cpu"),
    ],
)
def test_every_cell_is_checked_before_anything_is_made(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        grid(tmp_path / "out", **values)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write to the folder"):
        grid(tmp_path / "file")


def run(cells: Sequence[Cell], *sinks: Sink) -> list[tuple[str, Ended]]:
    small_runs.warm_up()
    return [(cell.name, ended) for cell, ended in run_grid(cells, lambda cell: sinks)]  # noqa: ARG005


def files(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_runs_that_are_finished_are_not_repeated(tmp_path: Path) -> None:
    cells = grid(tmp_path, method=["dense", "topk"])
    first = run(cells)
    assert [(name, ended.status) for name, ended in first] == [(cell.name, "finished") for cell in cells]
    assert [cell.state for cell in cells] == ["finished"] * 2
    before = files(tmp_path)
    more = grid(tmp_path, method=["dense", "topk", "micro"], checkpoint_every=0, threads=2)
    assert [cell.state for cell in more] == ["finished", "finished", "new"]
    assert run(more)[:2] == first
    after = files(tmp_path)
    assert {path: after[path] for path in before} == before
    assert more[2].state == "finished"


class Interrupter:
    """Presses Ctrl-C after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def start(self, header: Mapping[str, Any], steps_done: int) -> None:
        """Nothing yet."""

    def write(self, record: Record) -> None:
        if record["step"] == self._step:
            signal.raise_signal(signal.SIGINT)

    def close(self) -> None:
        """Nothing more."""


@pytest.mark.parametrize(
    "checkpoint_every",
    [0, 100],
)
def test_an_interruption_ends_the_grid_which_then_goes_on(tmp_path: Path, checkpoint_every: int) -> None:
    """From a checkpoint where there is one, otherwise anew."""
    values = {"method": ["topk", "dense"], "steps": 60, "checkpoint_every": checkpoint_every}
    cells = grid(tmp_path, **values)
    ((name, ended),) = run(cells, Interrupter(2))
    assert (name, ended.status) == (cells[0].name, "interrupted")
    assert [cell.state for cell in cells] == ["started", "new"]
    done = len(read_run(cells[0].folder).steps)
    assert done < 60
    cells = grid(tmp_path, **values)
    assert [ended.status for _, ended in run(cells)] == ["finished"] * 2
    again = read_run(cells[0].folder)
    assert [again_["from_step"] for again_ in again.header.get("resumed", [])] == ([done] if checkpoint_every else [])
    whole = small_runs.here(tmp_path / "whole", method="topk", density=0.01, steps=60)
    assert told(again) == told(whole)


def test_a_run_that_was_killed_is_begun_anew(tmp_path: Path) -> None:
    cells = grid(tmp_path, method="topk")
    run(cells)
    folder = cells[0].folder
    (folder / RESULT).unlink()
    (folder / METRICS).write_text((folder / METRICS).read_text()[:-30])
    (folder / "leftover").write_text("")
    assert cells[0].state == "started"
    assert [ended.status for _, ended in run(cells)] == ["finished"]
    assert [record["step"] for record in read_run(folder).steps] == [1, 2, 3]
    assert not (folder / "leftover").exists()


def test_a_run_that_fails_is_marked_and_the_others_go_on(tmp_path: Path) -> None:
    """Three workers in one process come to a fifth pass in two steps, fewer do not."""
    data = Trouble("raise", at=5).write(tmp_path / "trouble.json")
    values = {"task": "small_runs:troubled", "data": str(data), "virtual": [1, 3, 2], "steps": 2}
    cells = grid(tmp_path / "out", **values)
    ended = [ended for _, ended in run(cells)]
    assert [end.status for end in ended] == ["finished", "failed", "finished"]
    assert ended[1].error == "worker 0: RuntimeError: the model broke down"
    assert [cell.state for cell in cells] == ["finished", "started", "finished"]
    assert read_run(cells[1].folder).status == "failed"
    assert (cells[1].folder / "error.txt").exists()
    Trouble().write(data)
    cells = grid(tmp_path / "out", **values)
    assert [end.status for _, end in run(cells)] == ["finished"] * 3
    assert read_run(cells[1].folder).status == "finished"
    assert not (cells[1].folder / "error.txt").exists()


def test_a_run_that_fails_before_it_begins_is_tried_again(tmp_path: Path) -> None:
    cells = grid(tmp_path, model="broken")
    for _ in range(2):
        ((_, ended),) = run(cells)
        assert (ended.status, ended.error) == ("failed", "worker 0: RuntimeError: no model today")
        assert cells[0].state == "new"


@pytest.fixture(scope="module")
def one_done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grid")
    run(grid(folder, method="topk"))
    return folder


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 4}, "steps 3, and 4 is asked for"),
        ({"lr": 0.5}, "lr 0.1, and 0.5 is asked for"),
        ({"eval_every": 2}, "eval_every 1.0, and 2.0 is asked for"),
        ({"precision": "bfloat16"}, "precision 'float32', and 'bfloat16' is asked for"),
    ],
)
def test_a_folder_with_another_run_is_refused(one_done: Path, values: dict[str, Any], message: str) -> None:
    folder = one_done / "small-plain-topk-0.01-v2-s0"
    with pytest.raises(UsageError, match=f"{folder} holds a run with {message}: give another --output, or remove that"):
        grid(one_done, method=["micro", "topk"], **values)
    assert [path.name for path in one_done.iterdir()] == [folder.name]


def test_a_folder_with_a_damaged_run_is_refused(one_done: Path, tmp_path: Path) -> None:
    shutil.copytree(one_done, tmp_path / "copy")
    (tmp_path / "copy" / "small-plain-topk-0.01-v2-s0" / RUN).write_text("{")
    with pytest.raises(RunError, match=r"run\.json cannot be read as JSON"):
        grid(tmp_path / "copy", method="topk")


def test_processes_make_a_grid_as_well(tmp_path: Path) -> None:
    values = {"virtual": None, "workers": [1, 2], "method": "topk", "steps": 2, "checkpoint_every": 1}
    cells = grid(tmp_path, **values)
    assert [cell.name for cell in cells] == ["small-plain-topk-0.01-w1-s0", "small-plain-topk-0.01-w2-s0"]
    assert [ended.status for _, ended in run(cells)] == ["finished"] * 2
    assert [len(checkpoint(cell.folder)) > 0 for cell in cells] == [True] * 2
    assert [json.loads((cell.folder / RUN).read_text())["world"] for cell in cells] == [1, 2]
