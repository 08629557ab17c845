from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import Done, call, complaint
from gradsieve.bench import start
from gradsieve.bench.links import Circumstances
from gradsieve.cost.machine import CPU
from gradsieve.cost.messages import Link
from test_cost import lab_record

SLOW = ["plan", "--workers", 4, "--bandwidth", "1gbit", "--device", "cpu"]
FAST = ["plan", "--workers", 4, "--bandwidth", "400gbit", "--compute-ms", 100, "--device", "cuda"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def printed(done: Done) -> Any:
    assert done.code == 0, done
    assert done.err == ""
    return json.loads(done.out)


def test_a_slow_link() -> None:
    done = call(*SLOW, "--compute-ms", 50, "--latency", 80)
    assert done.code == 0, done
    for told in ("11,173,962 parameters, 4 workers, density 0.01", "1gbit and 80 us a round, as given", "pays below"):
        assert told in " ".join(done.out.split())
    for told in ("plain DDP", "PowerSGD rank 4", "4096", "use ", "it pays below"):
        assert told in done.out


def test_a_fast_link_is_to_stay_dense() -> None:
    assert "stay dense" in call(*FAST).out
    found = printed(call(*FAST, "--json", "-"))
    assert found["advice"]["choice"] is None


def test_json() -> None:
    done = call(
        *SLOW, "--parameters", 1_000_000, "--density", 0.001, "--methods", "micro,topk,fp16", "--json", "plan.json"
    )
    assert done.last == "plan.json"
    found = json.loads(Path("plan.json").read_text())
    assert found["benchmark"] == "plan"
    assert [row["name"] for row in found["rows"]] == ["plain DDP", "micro", "topk", "fp16 hook"]
    assert found["setting"].items() >= {"numel": 1_000_000, "world": 4, "density": 0.001, "measured": False}.items()
    assert found["rows"][0]["break_even"] is None
    assert found["rows"][1]["break_even"] > 1e9
    assert found["scaling"]["workers"] == [2**power for power in range(1, 13)]
    assert found["scaling"]["step_seconds"].keys() == {"plain DDP", "micro", "topk", "fp16 hook"}
    assert found["advice"]["choice"]["density"] == 0.001
    assert Link.from_record(found["link"]).bandwidth == 1e9
    assert printed(call(*SLOW, "--methods", "dense", "--json", "-"))["rows"][1]["break_even"] == "never"


@pytest.mark.parametrize("name", ["plan.svg", "plan.png"])
def test_a_figure(name: str) -> None:
    pytest.importorskip("matplotlib")
    done = call(*SLOW, "--methods", "micro,topk", "--figure", name)
    assert done.code == 0, done
    assert done.last == name
    content = Path(name).read_bytes()
    assert content.startswith(b"\x89PNG") if name.endswith("png") else b"By bandwidth" in content


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("plan", "--workers and --bandwidth must be given"),
        ("plan --workers 4", "--bandwidth must be given, such as --workers 8 --bandwidth 10gbit"),
        ("plan --workers 0 --bandwidth 1gbit", "workers must be at least 1"),
        ("plan --workers 4 --bandwidth fast", "such as 100mbit or 2.5gbit"),
        ("plan --workers 4 --bandwidth none", "no bandwidth to plan with"),
        ("plan --workers 4 --bandwidth 1gbit --latency -1", "latency must be at least 0"),
        ("plan --workers 4 --bandwidth 1gbit --compute-ms -1", "compute-ms must be at least 0"),
        ("plan --workers 4 --bandwidth 1gbit --density 2", "density must lie in (0, 1]"),
        ("plan --workers 4 --bandwidth 1gbit --device tpu", "--device must be cpu or cuda, not 'tpu'"),
        ("plan --workers 4 --bandwidth 1gbit --methods sidco", "no cost model for 'sidco'"),
        ("plan --workers 4 --bandwidth 1gbit --methods mikro", "unknown 'mikro'; did you mean 'micro'"),
        ("plan --workers 4 --bandwidth 1gbit --parameters 9 --model cnn", "exclude one another"),
        ("plan --workers 4 --bandwidth 1gbit --figure plan.pdf", "a figure ends in .svg or .png"),
        ("plan --measure", "--measure needs several workers: start them with torchrun"),
        ("plan --check nowhere.json", "cannot be read"),
    ],
)
def test_what_cannot_be_is_refused(arguments: str, told: str) -> None:
    assert told in complaint(call(*arguments.split()))


def as_worker(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torchrun had started this process, with a group that needs no others."""
    for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(start, "surveyed", lambda *_: Circumstances(Link(123e6, 1e-4), CPU))


def test_what_is_measured_is_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    as_worker(0, monkeypatch)
    done = call("plan", "--measure", "--device", "cpu")
    assert done.code == 0, done
    assert "123mbit and 100 us a round, as measured" in " ".join(done.out.split())
    assert "2 workers" in done.out
    assert "leave out --bandwidth" in complaint(call("plan", "--measure", "--bandwidth", "1gbit"))
    assert "add --measure" in complaint(call(*SLOW))


def test_only_the_first_worker_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    as_worker(1, monkeypatch)
    assert call("plan", "--measure", "--device", "cpu") == Done(0, "", "")


def test_a_check_that_holds() -> None:
    Path("lab.json").write_text(json.dumps(lab_record()))
    done = call("plan", "--check", "lab.json")
    assert done.code == 0, done
    assert "median error 0 %, allowed 25 %" in done.out
    assert "right about 2 of 2 cells" in done.out
    assert printed(call("plan", "--check", "lab.json", "--json", "-"))["passed"] is True


def test_a_check_that_fails() -> None:
    Path("lab.json").write_text(json.dumps(lab_record(factor=60.0)))
    done = call("plan", "--check", "lab.json")
    assert done.code == 1
    assert "wrong: micro at 1gbit" in done.out


@pytest.mark.parametrize(("text", "told"), [("{", "is no JSON"), ('{"benchmark": "step"}', "is no result of the lab")])
def test_a_file_that_is_not_the_labs(text: str, told: str) -> None:
    Path("lab.json").write_text(text)
    assert told in complaint(call("plan", "--check", "lab.json"))
