from __future__ import annotations

import sys
from pathlib import Path

import pytest

from command_line import MODULE, SMALL, call, complaint, spawn
from synthetic_runs import Plan, write_run

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def assert_report(folder: Path, *methods: str) -> str:
    """The page, and files of the figures and tables beside it."""
    assert list((folder / "figures").glob("*.svg"))
    assert list((folder / "figures").glob("*.png"))
    assert list((folder / "tables").glob("*.csv"))
    summary = (folder / "tables" / "summary.md").read_text()
    page = (folder / "index.html").read_text()
    for method in methods:
        assert method in summary
        assert method in page
    return page


def test_a_report_lies_in_the_first_folder_and_its_path_comes_last(tmp_path: Path) -> None:
    for method in ("dense", "micro"):
        density = [] if method == "dense" else SMALL[4:6]
        options = ["--virtual", 2, "--steps", 4, "--threads", 1, "--output", tmp_path / "runs" / method]
        assert call("train", "--task", "small_runs:task", "--method", method, *density, *options).code == 0
    done = call("report", "runs")
    assert (done.code, done.err) == (0, "")
    assert done.last == str(tmp_path / "runs" / "report" / "index.html")
    assert_report(tmp_path / "runs" / "report", "dense", "micro")


def test_several_folders_another_place_and_another_title(tmp_path: Path) -> None:
    write_run(tmp_path / "one", Plan("dense", 1.0))
    write_run(tmp_path / "two" / "below", Plan("topk"))
    output = tmp_path / "else" / "where"
    done = call("report", "one", "two", "two/below", "--output", "else/where", "--title", "Mine & <yours>")
    assert (done.code, done.out, done.err) == (0, f"{output / 'index.html'}\n", "")
    page = assert_report(output, "dense", "topk")
    assert "Mine &amp; &lt;yours&gt;" in page
    assert not (tmp_path / "one" / "report").exists()


@pytest.mark.slow
def test_the_module_reports(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Plan("dense", 1.0))
    done = spawn(*MODULE, "report", "run", cwd=tmp_path)
    assert (done.code, done.out, done.err) == (0, f"{tmp_path / 'run' / 'report' / 'index.html'}\n", "")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("nowhere", "there is no folder nowhere"),
        ("empty", "empty holds no run (no run.json in it or below)"),
        ("good empty", "empty holds no run"),
        ("file", "file holds no run"),
        ("damaged", "run.json cannot be read as JSON"),
        ("older", "has the format 0, not 1"),
        ("listed", "not an object"),
        ("cut", "metrics.jsonl, line 1, is not a record"),
        ("ended", "has the status 'odd'"),
        ("good --output file/below", "cannot write to the folder"),
    ],
)
def test_what_cannot_be_reported_ends_with_one_line(arguments: str, named: str, tmp_path: Path) -> None:
    Path("empty").mkdir()
    Path("file").touch()
    write_run(tmp_path / "good", Plan("dense", 1.0))
    for folder, name, text in (
        ("damaged", "run.json", "{"),
        ("older", "run.json", '{"format": 0}'),
        ("listed", "run.json", "[]"),
        ("cut", "metrics.jsonl", "{\n{}\n"),
        ("ended", "result.json", '{"status": "odd"}'),
    ):
        write_run(tmp_path / folder, Plan("dense", 1.0, stop_after=1))
        (tmp_path / folder / name).write_text(text)
    assert named in complaint(call("report", *arguments.split()))


@pytest.mark.parametrize("content", ['{"format": 1}', '{"format": 1, "config": {}, "provenance": {}}'])
def test_a_run_of_which_parts_are_missing_ends_with_one_line(content: str) -> None:
    Path("run").mkdir()
    Path("run/run.json").write_text(content)
    complaint(call("report", "run"))


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_package_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run", Plan("dense", 1.0))
    monkeypatch.setitem(sys.modules, package, None)
    line = complaint(call("report", "run"))
    assert f"reports need {package}: pip install 'gradsieve[report]'" in line
    assert not (tmp_path / "run" / "report").exists()
