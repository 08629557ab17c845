from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsieve.runs import METRICS, RESULT, RUN, Record, RunError, read_records, read_run
from gradsieve.training.recorder import Recorder, TensorBoard, WeightsAndBiases, finite, write_json, write_text

HEADER: dict[str, Any] = {
    "label": "micro",
    "density": 0.01,
    "world": 2,
    "task": "digits",
    "measure": {"name": "accuracy"},
    "model": {"name": "mlp"},
    "steps_per_epoch": 9,
    "config": {"seed": 0},
    "provenance": {},
}


class Listener:
    """A sink that keeps all it is told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def start(self, header: Mapping[str, Any], steps_done: int) -> None:
        self.heard.append(("start", header, steps_done))

    def write(self, record: Record) -> None:
        self.heard.append(record)

    def close(self) -> None:
        self.heard.append("close")


def record(step: int) -> dict[str, Any]:
    return {"step": step, "train/loss": 1 / step}


def test_a_run_is_written_as_it_goes_on_and_told_to_all(tmp_path: Path) -> None:
    listeners = [Listener(), Listener()]
    recorder = Recorder(tmp_path, listeners)
    recorder.start(HEADER, 0)
    assert json.loads((tmp_path / RUN).read_text()) == {"format": 1, **HEADER}
    for step in (1, 2):
        recorder.write(record(step))
        assert list(read_records(tmp_path / METRICS)) == [record(done) for done in range(1, step + 1)]
        assert read_run(tmp_path).status == "unfinished"
    recorder.end("interrupted", {"steps": 2}, "because")
    run = read_run(tmp_path)
    assert (run.status, run.error, run.summary) == ("interrupted", "because", {"steps": 2})
    for listener in listeners:
        assert listener.heard == [("start", HEADER, 0), record(1), record(2), "close"]


def test_nothing_but_the_files_of_a_run_is_left(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.start(HEADER, 0)
    recorder.write(record(1))
    recorder.end("finished", {})
    assert sorted(file.name for file in tmp_path.iterdir()) == [METRICS, RESULT, RUN]


def test_what_is_not_finite_becomes_null_in_valid_json(tmp_path: Path) -> None:
    listener = Listener()
    recorder = Recorder(tmp_path, [listener])
    recorder.start(HEADER, 0)
    recorder.write({"step": 1, "train/loss": math.nan, "a/b": math.inf, "c/d": -math.inf, "e/f": None, "g/h": 2})
    recorder.end("finished", {"train/loss": math.nan, "steps": 1})
    expected = {"step": 1, "train/loss": None, "a/b": None, "c/d": None, "e/f": None, "g/h": 2}
    assert list(read_records(tmp_path / METRICS)) == [expected]
    assert listener.heard[1] == expected
    for name in (METRICS, RESULT):
        assert "NaN" not in (tmp_path / name).read_text()
        assert "Infinity" not in (tmp_path / name).read_text()
    assert read_run(tmp_path).summary == {"train/loss": None, "steps": 1}


@given(st.dictionaries(st.text(), st.one_of(st.floats(), st.integers(), st.none())))
def test_a_record_comes_back_from_json_but_for_what_is_not_finite(values: dict[str, Any]) -> None:
    back = json.loads(json.dumps(finite(values), allow_nan=False))
    assert back.keys() == values.keys()
    for name, value in values.items():
        assert back[name] == (value if value is not None and math.isfinite(value) else None)


@pytest.mark.parametrize("steps_done", [1, 3, 5, 9])
@pytest.mark.parametrize("tail", ["", '{"step": 6, "tra'])
def test_a_resumed_run_forgets_what_was_recorded_later(tmp_path: Path, steps_done: int, tail: str) -> None:
    first = Recorder(tmp_path)
    first.start(HEADER, 0)
    for step in range(1, 6):
        first.write(record(step))
    first.write({"step": 5, "eval/loss": 1.0})
    first.end("interrupted", {})
    with (tmp_path / METRICS).open("a") as file:
        file.write(tail)
    listener = Listener()
    again = Recorder(tmp_path, [listener])
    again.start(HEADER | {"resumed": [1]}, steps_done)
    assert not (tmp_path / RESULT).exists()
    again.write(record(steps_done + 1))
    again.end("finished", {})
    steps = [found["step"] for found in read_records(tmp_path / METRICS)]
    assert steps == [step for step in [1, 2, 3, 4, 5, 5] if step <= steps_done] + [steps_done + 1]
    assert listener.heard[0] == ("start", HEADER | {"resumed": [1]}, steps_done)


@pytest.mark.parametrize("steps_done", [0, 1])
def test_a_run_that_is_taken_up_again_forgets_its_error(tmp_path: Path, steps_done: int) -> None:
    (tmp_path / "error.txt").write_text("it failed")
    recorder = Recorder(tmp_path)
    recorder.start(HEADER, steps_done)
    recorder.end("finished", {})
    assert not (tmp_path / "error.txt").exists()


def test_a_run_that_begins_anew_forgets_all(tmp_path: Path) -> None:
    for _ in range(2):
        recorder = Recorder(tmp_path)
        recorder.start(HEADER, 0)
        recorder.write(record(1))
        recorder.end("failed", {})
    assert list(read_records(tmp_path / METRICS)) == [record(1)]


def test_records_that_are_damaged_are_not_overwritten_by_a_resume(tmp_path: Path) -> None:
    text = '{"step": 1}\nnonsense\n{"step": 2}\n'
    (tmp_path / METRICS).write_text(text)
    with pytest.raises(RunError, match="line 2"):
        Recorder(tmp_path).start(HEADER, 2)
    assert (tmp_path / METRICS).read_text() == text


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"
    write_json(path, {"a": 1})
    assert path.read_text() == '{\n  "a": 1\n}\n'

    def killed(self: Path, target: Path) -> Path:
        assert self.read_text() == "new"
        assert target == path
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert json.loads(path.read_text()) == {"a": 1}


def test_tensorboard_gets_every_number_under_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scalars: list[Any] = []
    closed: list[bool] = []
    writer = SimpleNamespace(add_scalar=lambda *told: scalars.append(told), close=lambda: closed.append(True))
    fake = SimpleNamespace(SummaryWriter=lambda folder: writer if folder == str(tmp_path) else None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    sink = TensorBoard(tmp_path)
    sink.start(HEADER, 0)
    sink.write({"step": 3, "epoch": 0.5, "train/loss": 2.0, "sparsity/threshold": None})
    sink.close()
    assert scalars == [("epoch", 0.5, 3), ("train/loss", 2.0, 3)]
    assert closed == [True]


def test_weights_and_biases_gets_the_header_and_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    run = SimpleNamespace(
        config=SimpleNamespace(update=told.append),
        log=lambda values, step: told.append((values, step)),
        finish=lambda: told.append("finish"),
    )

    def init(**options: Any) -> Any:
        told.append(options)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    sink = WeightsAndBiases("project", tmp_path)
    sink.start(HEADER, 0)
    sink.write({"step": 3, "train/loss": 2.0, "sparsity/threshold": None})
    sink.close()
    opened = {"project": "project", "name": tmp_path.name, "dir": str(tmp_path)}
    assert told == [opened, HEADER, ({"step": 3, "train/loss": 2.0}, 3), "finish"]
