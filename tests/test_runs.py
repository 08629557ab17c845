from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradsieve.checks import UsageError
from gradsieve.runs import METRICS, RESULT, RUN, RunError, find_runs, is_run, read_records, read_run, summarise
from synthetic_runs import Plan, make_runs, write_run

RECORDS: list[dict[str, Any]] = [
    {"step": 1, "train/loss": 2.0, "sparsity/threshold": None, "time/elapsed": 0.5, "time/wall": 0.1, "train/lr": 0.1},
    {"step": 2, "train/loss": 1.0, "sparsity/threshold": 0.25, "time/elapsed": 1.0, "time/wall": 0.3, "train/lr": 0.2},
    {"step": 2, "eval/loss": 1.5, "eval/accuracy": 0.5, "time/elapsed": 1.0},
    {"step": 3, "train/loss": 0.5, "sparsity/threshold": 0.75, "time/elapsed": 2.0, "time/wall": 0.2, "train/lr": 0.3},
    {"step": 3, "eval/loss": 1.25, "eval/accuracy": 0.75, "time/elapsed": 2.0},
]
HEADER = {
    "format": 1,
    "label": "micro",
    "density": 0.1,
    "world": 2,
    "measure": {"name": "accuracy"},
    "config": {"seed": 3, "virtual": 2},
    "provenance": {"torch": "2.13"},
    "task": "digits",
    "model": {"name": "mlp"},
    "steps_per_epoch": 9,
}


def written(folder: Path, **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN).write_text(json.dumps(HEADER | more))
    (folder / METRICS).write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return folder


def test_a_run_is_read_as_its_folder_tells_it(tmp_path: Path) -> None:
    folder = written(tmp_path)
    (folder / RESULT).write_text(json.dumps({"status": "failed", "error": "no", "summary": {"steps": 3}}))
    run = read_run(folder)
    assert (run.folder, run.status, run.error, run.summary) == (folder, "failed", "no", {"steps": 3})
    assert (run.method, run.density, run.world, run.virtual, run.seed, run.measure) == (
        "micro",
        0.1,
        2,
        True,
        3,
        "accuracy",
    )
    assert (run.config, run.provenance) == (HEADER["config"], HEADER["provenance"])
    assert [record["step"] for record in run.steps] == [1, 2, 3]
    assert [record["step"] for record in run.evaluations] == [2, 3]
    assert run.series("train/loss").tolist() == [2.0, 1.0, 0.5]
    assert run.series("eval/accuracy", of="evaluations").tolist() == [0.5, 0.75]


def test_a_series_has_nan_where_a_record_has_nothing(tmp_path: Path) -> None:
    series = read_run(written(tmp_path)).series("sparsity/threshold")
    assert series.dtype == np.float64
    np.testing.assert_array_equal(series, [math.nan, 0.25, 0.75])
    assert np.isnan(read_run(tmp_path).series("no/such")).all()


def test_a_run_of_processes_is_not_virtual(tmp_path: Path) -> None:
    assert not read_run(written(tmp_path / "a", config={"seed": 0, "virtual": None})).virtual
    assert not read_run(written(tmp_path / "b", config={"seed": 0})).virtual


@pytest.mark.parametrize(
    ("command", "expected"), [("gradsieve train", 1), ("gradsieve compare --jobs 3 --seed 1", 3), ("x --jobs=12", 12)]
)
def test_a_run_knows_how_many_were_made_at_a_time(tmp_path: Path, command: str, expected: int) -> None:
    (run,) = make_runs(tmp_path, [Plan("micro")])
    provenance = {**run.header["provenance"], "command": command}
    assert replace(run, header={**run.header, "provenance": provenance}).at_a_time == expected


def test_a_run_without_a_result_or_records_is_unfinished(tmp_path: Path) -> None:
    folder = written(tmp_path)
    assert read_run(folder).status == "unfinished"
    (folder / METRICS).unlink()
    run = read_run(folder)
    assert (run.status, run.error, run.summary, run.steps, run.evaluations) == ("unfinished", None, {}, [], [])


@pytest.mark.parametrize("cut", range(1, 40, 7))
def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path) / METRICS
    path.write_bytes(path.read_bytes()[:-cut])
    kept = RECORDS if cut == 1 else RECORDS[:-1]  # the end of the line alone takes nothing away
    assert list(read_records(path)) == kept


def test_a_last_line_of_broken_characters_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path) / METRICS
    path.write_bytes(path.read_bytes() + b'{"step": 4, "\xff\xfe')
    assert list(read_records(path)) == RECORDS


@pytest.mark.parametrize("line", ["{", "", "nonsense", '{"step": 2', "[1, 2]", "5", "null", '{"train/loss": 1}'])
def test_a_damaged_line_in_the_middle_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    path = written(tmp_path) / METRICS
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, *lines[2:]]) + "\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2, is not a record"):
        read_run(tmp_path)


def test_no_file_holds_no_records(tmp_path: Path) -> None:
    assert list(read_records(tmp_path / METRICS)) == []


@pytest.mark.parametrize("name", [RUN, RESULT])
@pytest.mark.parametrize("text", ["", "{", "not json", "[]", "5", "null", "\udcff"])
def test_a_file_that_is_no_json_object_is_refused_by_name(tmp_path: Path, name: str, text: str) -> None:
    (written(tmp_path) / name).write_bytes(text.encode("utf-8", errors="surrogateescape"))
    with pytest.raises(RunError, match=name):
        read_run(tmp_path)


@pytest.mark.parametrize("result", [{}, {"summary": {}}, {"status": None}, {"status": "done"}, {"status": []}])
def test_a_result_without_a_known_status_is_refused(tmp_path: Path, result: dict[str, Any]) -> None:
    (written(tmp_path) / RESULT).write_text(json.dumps(result))
    with pytest.raises(RunError, match=RESULT):
        read_run(tmp_path)


@pytest.mark.parametrize("version", [None, 0, 2, "1"])
def test_another_format_is_refused(tmp_path: Path, version: Any) -> None:
    with pytest.raises(RunError, match=f"has the format {version!r}, not 1: it is of another version"):
        read_run(written(tmp_path, format=version))


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be read"):
        read_run(tmp_path)


def test_an_error_of_a_run_is_one_of_usage() -> None:
    assert issubclass(RunError, UsageError)


def test_the_summary_has_the_last_figures_and_means_of_the_others() -> None:
    steps = [record for record in RECORDS if "train/loss" in record]
    evaluations = [record for record in RECORDS if "eval/loss" in record]
    summary = summarise(steps, evaluations, steps_per_epoch=10)
    assert summary == pytest.approx(
        {
            "steps": 3,
            "train/loss": 0.5,
            "sparsity/threshold": 0.5,
            "time/elapsed": 2.0,
            "time/wall": 0.2,
            "time/epoch": 2.0,
            "eval/loss": 1.25,
            "eval/accuracy": 0.75,
        }
    )


def test_the_summary_of_nothing_counts_no_steps() -> None:
    assert summarise([], [], 10) == {"steps": 0}


def test_the_summary_leaves_out_what_no_step_had_and_shows_what_is_lost() -> None:
    steps = [{**RECORDS[0], "train/loss": None, "sparsity/error_norm": None}]
    evaluations = [{"step": 1, "eval/loss": None, "eval/accuracy": 0.1}]
    summary = summarise(steps, evaluations, 1)
    assert "sparsity/threshold" not in summary
    assert "sparsity/error_norm" not in summary
    assert math.isnan(summary["train/loss"])
    assert math.isnan(summary["eval/loss"])
    assert summary["eval/accuracy"] == 0.1


def test_runs_are_found_below_folders_in_order_and_each_once(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, Plan(stop_after=1)) for name in ("b/two", "b/one", "a", "c/deep/er")]
    two, one, a, deep = (folder.resolve() for folder in folders)
    assert find_runs([tmp_path]) == [a, one, two, deep]
    assert find_runs([tmp_path / "b", tmp_path / "a", two, tmp_path / "b" / ".." / "a"]) == [one, two, a]
    assert all(is_run(folder) for folder in folders)
    assert not is_run(tmp_path)


@pytest.mark.parametrize("name", ["missing", "empty", "file"])
def test_a_path_without_runs_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    write_run(tmp_path / "run", Plan(stop_after=1))
    with pytest.raises(RunError, match=rf"{name}.*: give (folders that|what) gradsieve train or compare wrote"):
        find_runs([tmp_path / "run", tmp_path / name])
