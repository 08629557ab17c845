from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from command_line import MODULE, Done, call, complaint, finish, spawn, started, until
from gradsieve.cli import lab as command
from gradsieve.cli import lab_training
from gradsieve.lab.jobs import Ended, JobError
from gradsieve.lab.training import Cell, Reached, TrainRow, TrainSetting, levelled, reached, row_of, train_command
from gradsieve.report.labs import break_even, read_labs
from gradsieve.report.texts import ABSENT
from gradsieve.runs import Run, read_run
from gradsieve.training.recorder import write_json, write_result, write_text
from labs import Pretended, assert_gone, belongings, interfaces, processes_of

SETTING = TrainSetting(("micro(wire=bfloat16)", "ddp"), (3,), {"task": "digits", "density": 0.01, "lr": 0.5}, 0.6)
SMALL = ["lab", "--train", "--hosts", 2, "--model", "mlp(hidden=16)", "--accuracy", 0.15, "--methods", "micro,ddp"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_run(folder: Path, seconds: float, steps: int = 12) -> Run:
    """A run whose accuracy is its step's tenth; a step sends 1000 bytes by the counter."""
    folder.mkdir(parents=True, exist_ok=True)
    measure = {"name": "accuracy", "higher_is_better": True, "percent": True}
    facts = {"label": "micro", "density": 0.01, "world": 2, "task": "digits", "measure": measure, "model": {}}
    more = {"steps_per_epoch": 9, "total_steps": 12, "config": {}, "provenance": {}, "seconds_alone": seconds / 4}
    write_json(folder / "run.json", {"format": 1, **facts, **more})
    records: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        times = {"time/step": seconds, "time/rest": seconds / 4, "time/select": seconds / 8}
        sizes = {"comm/wire_bytes": 500, "comm/link_bytes": 1000, "comm/sent_bytes": 1000.0}
        place = {"step": step, "time/elapsed": step * seconds}
        records.append({**place, "train/loss": 1.0, "sparsity/density_actual": 0.01, **times, **sizes})
        if step % 3 == 0:
            records.append({**place, "eval/loss": 1.0, "eval/accuracy": step / 10})
    write_text(folder / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    write_result(folder, "finished", {})
    return read_run(folder)


def test_the_first_evaluation_that_is_good_enough(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 2.0)
    assert reached(run, 0.6) == Reached(6, 12.0, 3000, 6000)
    assert reached(run, 0.61) == Reached(9, 18.0, 4500, 9000)
    assert reached(run, 1.3) is None


def test_a_row_splits_a_step(tmp_path: Path) -> None:
    row = row_of(Cell(SETTING, "micro(wire=bfloat16)", 3), write_run(tmp_path / "run", 2.0))
    assert row.seconds is not None
    assert (row.seconds.median, row.compute_seconds, row.select_seconds, row.exchange_seconds) == (2, 1, 0.25, 0.75)
    assert (row.name, row.seed, row.steps, row.whole, row.accuracy) == ("micro(wire=bfloat16)", 3, 12, True, 1.2)
    assert (row.wire_bytes, row.counted_bytes, row.uplink_bytes, row.ratio_to_formula()) == (500, 1000, None, 1)
    assert TrainRow.from_record(json.loads(json.dumps(row.as_record(None)))) == row
    short = row_of(Cell(SETTING, "ddp", 3), write_run(tmp_path / "short", 4.0, steps=3))
    assert (short.name, short.whole, short.reached) == ("plain DDP", False, None)
    both = levelled([row, short, TrainRow("micro", "micro", 0, error="bad")])
    assert [one.compute_seconds for one in both] == [1.5, 1.5, None]
    assert [one.exchange_seconds for one in both] == [0.25, 2.0, None]


def test_what_a_host_runs(tmp_path: Path) -> None:
    cell, plain = SETTING.cells()
    words = " ".join(train_command(cell, tmp_path, 1, "7:uplink0"))
    assert words == (
        "-m gradsieve train --task digits --density 0.01 --lr 0.5 --wire bfloat16 --method micro --seed 3 "
        f"--checkpoint-every 0 --device cpu --threads 1 --output {tmp_path} --interface eth0 --passes-alone 5 "
        "--uplink 7:uplink0"
    )
    assert "density" not in plain.values()
    assert Cell(TrainSetting(("ddp",), (0,), {}, 0.9, stop=True), "ddp", 0).values()["stop_at"] == 0.9


def pretended_job(network: Pretended, script: Sequence[str], *, seconds: float) -> list[Ended]:  # noqa: ARG001
    options = dict(zip(script[3::2], script[4::2], strict=True))
    if options["--method"] == "topk":
        raise JobError("host 1 ended with exit code 1: ValueError: bad", [])
    slow = {"100mbit": 10.0, "1gbit": 1.0}[network.layout.rate.name]
    write_run(Path(options["--output"]), slow if options["--method"] == "ddp" else 1 + slow / 100)
    return []


@pytest.fixture
def _pretending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "check_tools", lambda: None)
    monkeypatch.setattr(lab_training, "Network", Pretended)
    monkeypatch.setattr(lab_training, "run_job", pretended_job)


@pytest.mark.usefixtures("_pretending")
def test_trainings_at_every_rate_and_their_page() -> None:
    order = ["lab", "--train", "--model", "mlp(hidden=16)", "--rate", "100mbit,1gbit", "--accuracy", 0.6]
    done = call(*order, "--methods", "ddp,micro(scope=bucket),topk", "--output", "out")
    assert done.code == 1
    assert "topk, seed 0: host 1 ended with exit code 1: ValueError: bad" in done.out
    found = json.loads(Path("out/lab-training.json").read_text())
    assert found["benchmark"] == "lab-training"
    assert found["setting"].items() >= {"parameters": 1482, "accuracy": 0.6, "world": 4, "task": "digits"}.items()
    rows = {(row["rate"], row["name"]): row for row in found["rows"]}
    assert rows["100mbit", "micro(scope=bucket)"]["ratio_to_dense"] == pytest.approx(0.11)
    assert rows["1gbit", "plain DDP"]["reached"]["seconds"] == 6
    assert rows["1gbit", "topk"]["error"].startswith("host 1 ended")
    assert "out is not empty" in complaint(call(*order, "--output", "out"))
    page(["out/lab-training.json"])


@pytest.mark.usefixtures("_pretending")
@pytest.mark.parametrize(("given", "density"), [((), 0.05), (("--density", 0.2), 0.2)], ids=["file", "command line"])
def test_the_density_of_a_file_counts_unless_another_is_given(given: tuple[Any, ...], density: float) -> None:
    Path("lab.toml").write_text("density = 0.05\n")
    order = ["lab", "--train", "--model", "mlp(hidden=16)", "--rate", "1gbit", "--accuracy", 0.6, "--methods", "ddp"]
    assert call(*order, "--config", "lab.toml", *given, "--output", "out").code == 0
    assert json.loads(Path("out/lab-training.json").read_text())["setting"]["density"] == density


def page(files: list[str]) -> None:
    pytest.importorskip("matplotlib")
    done = call("report", *files, "--output", "page")
    assert done.code == 0, done
    text = Path("page/index.html").read_text()
    assert "At 100 Mbit/s micro(scope=bucket) sees 60 % first, after 6.60 s; plain DDP takes 60.0 s." in text
    assert "At 1 Gbit/s plain DDP sees 60 % first" in text
    assert "topk at 1 Gbit/s: host 1 ended" in text
    assert "about 9" in Path("page/tables/1-break-even.md").read_text()
    assert Path("page/figures/1-time-to-accuracy.svg").exists()
    assert "http://" not in text.replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    ("points", "told"),
    [
        ([], ABSENT),
        ([(1e8, 1, 2), (1e9, 1, 2)], "none found: ahead at every rate, up to 1 Gbit/s"),
        ([(1e8, 2, 1)], "none: dense is faster at every rate"),
        ([(float("inf"), 2, 1), (1e9, 1, 2)], "above 1 Gbit/s: dense is faster with no limit"),
        ([(1e8, 2, 1), (1e9, 1, 2)], "not one: ahead at 1 Gbit/s"),
        ([(1e8, 1, 4), (1e9, 2, 1)], "about 464 Mbit/s"),
    ],
)
def test_break_even(points: list[tuple[float, float, float]], told: str) -> None:
    assert break_even(points) == told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--accuracy 0.5", "--accuracy are options of a training: ask for one with --train"),
        ("--train --stop-at-accuracy", "--stop-at-accuracy needs --accuracy"),
        ("--train --accuracy 95", "accuracy must lie in (0, 1], not 95.0"),
        ("--train --seed x", "--seed takes whole numbers separated by commas, not 'x'"),
        ("--train --methods micro,micro", "names micro twice"),
        ("--train --methods nope", "'nope'"),
        ("--train --model mlp(height=3)", "the model mlp has no option 'height'; valid are: inputs, hidden"),
        ("--train --json x.json", "--train takes no --parameters and no --json"),
    ],
)
def test_what_the_user_can_mend_ends_with_one_line(arguments: str, told: str) -> None:
    assert told in complaint(call("lab", *arguments.split()))


def test_what_is_no_lab_makes_no_page(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"benchmark": "step", "rows": []}')
    with pytest.raises(ValueError, match="holds no measurements of a lab"):
        read_labs([tmp_path / "other.json"])
    assert "not of both" in complaint(call("report", "other.json", "."))


@pytest.mark.root
def test_a_training_in_a_lab(tmp_path: Path) -> None:
    before = interfaces()
    racks = ["--rate", "1gbit", "--racks", 2, "--uplink", "500mbit", "--model", "mlp(hidden=300)"]
    done: Done = spawn(*MODULE, *SMALL, "--steps", 8, *racks, "--output", "out", cwd=tmp_path, seconds=110)
    assert done.code == 0, done
    found = json.loads((tmp_path / "out" / "lab-training.json").read_text())
    for row in found["rows"]:
        # two hosts in two racks: what one sends passes between the racks, and so does what the other sends
        assert row["uplink_bytes"] == pytest.approx(2 * row["counted_bytes"], rel=0.2)
        if row["name"] == "plain DDP":
            assert row["ratio_to_formula"] == pytest.approx(1, abs=0.1)
    assert interfaces() == before


@pytest.mark.root
def test_nothing_is_left_of_a_training_that_is_interrupted(tmp_path: Path) -> None:
    before = interfaces()
    with started([*MODULE, *SMALL, "--epochs", 10_000, "--rate", "100mbit", "--output", "out"], tmp_path) as process:
        until(lambda: list(tmp_path.glob("out/100mbit/*/metrics.jsonl")) != [], "the first step")
        owned = belongings(process.pid)
        os.kill(process.pid, signal.SIGINT)
        done = finish(process)
    assert done.code == 130, done
    assert_gone(owned, before)
    assert processes_of(process.pid) == frozenset()
