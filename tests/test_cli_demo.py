from __future__ import annotations

import sys
from pathlib import Path

import pytest

from command_line import MODULE, Done, call, complaint, spawn
from gradsieve.cli import demo
from gradsieve.runs import find_runs, read_run

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def assert_shown(done: Done, methods: list[str]) -> Path:
    """A row for each method in both tables, and a page whose path comes last; returns it."""
    assert (done.code, done.err) == (0, "")
    results, times = done.out.split("Times of a step")
    for table in (results, times):
        named = [line.strip("│").split("│")[0].strip() for line in table.splitlines() if line.startswith("│")]
        assert sorted(named) == sorted(methods)
    page = Path(done.last)
    assert page.name == "index.html"
    assert all(method in page.read_text() for method in methods)
    return page


def test_the_demo_compares_methods_over_processes_and_writes_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "METHODS", ["dense", "micro"])
    done = call("demo", "--epochs", 1, "--workers", 2, "--density", 0.05, "--output", "shown")
    page = assert_shown(done, ["dense", "micro"])
    assert page == tmp_path / "shown" / "report" / "index.html"
    runs = [read_run(folder) for folder in find_runs([tmp_path / "shown"])]
    assert {(run.method, run.density, run.world, run.status) for run in runs} == {
        ("dense", 1.0, 2, "finished"),
        ("micro", 0.05, 2, "finished"),
    }
    assert {(run.header["task"], run.config["epochs"], run.config["device"]) for run in runs} == {("digits", 1, "cpu")}


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path) -> None:
    done = spawn(*MODULE, "demo", "--epochs", 1, "--workers", 2, cwd=tmp_path, seconds=110)
    page = assert_shown(done, demo.METHODS)
    assert page.parent.parent.parent == tmp_path / "runs"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--density 0", "density must lie in (0, 1], not 0.0"),
        ("--density nan", "density must lie in (0, 1], not nan"),
        ("--workers 2000", "2000 workers with a batch of"),
        ("--output file/below", "cannot write to the folder"),
    ],
)
def test_a_demo_that_cannot_be_ends_with_one_line(arguments: str, named: str) -> None:
    Path("file").touch()
    assert named in complaint(call("demo", *arguments.split()))


@pytest.mark.parametrize("package", ["sklearn", "matplotlib", "jinja2"])
def test_a_missing_package_is_named_before_anything_is_trained(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    if package == "sklearn":
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.setattr(demo, "METHODS", ["dense"])
    line = complaint(call("demo", "--epochs", 1, "--workers", 1, "--output", "shown"))
    assert "pip install 'gradsieve[" in line
    assert not (tmp_path / "shown").exists()
