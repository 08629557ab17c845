"""Writes a run's folder, and hands every record on to whoever listens: TensorBoard, Weights & Biases, a display."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from gradsieve.runs import ERROR, FORMAT, METRICS, RESULT, RUN, Record, Status, read_records


class Sink(Protocol):
    """Someone who is told of a run as it goes on."""

    def start(self, header: Mapping[str, Any], steps_done: int) -> None: ...

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Recorder:
    """The folder of a run being written."""

    def __init__(self, folder: Path, sinks: Sequence[Sink] = ()) -> None:
        self._folder = folder
        self._sinks = sinks
        self._metrics: IO[str] | None = None

    def start(self, header: Mapping[str, Any], steps_done: int) -> None:
        """Begin a run, or go on with it after `steps_done`: what was logged later is forgotten."""
        path = self._folder / METRICS
        kept = [record for record in read_records(path) if record["step"] <= steps_done] if steps_done else []
        for name in (RESULT, ERROR):
            (self._folder / name).unlink(missing_ok=True)
        write_json(self._folder / RUN, {"format": FORMAT, **header})
        write_text(path, "".join(_line(record) for record in kept))
        self._metrics = path.open("a", encoding="utf-8")
        for sink in self._sinks:
            sink.start(header, steps_done)

    def write(self, record: Record) -> None:
        assert self._metrics is not None
        record = finite(record)
        self._metrics.write(_line(record))
        self._metrics.flush()
        for sink in self._sinks:
            sink.write(record)

    def end(self, status: Status, summary: Record, error: str | None = None) -> None:
        if self._metrics is not None:
            self._metrics.close()
        for sink in self._sinks:
            sink.close()
        write_result(self._folder, status, summary, error)


def write_result(folder: Path, status: Status, summary: Record, error: str | None = None) -> None:
    write_json(folder / RESULT, {"status": status, "error": error, "summary": finite(summary)})


def finite(record: Record) -> dict[str, float | int | None]:
    """JSON has no word for what is not a number."""
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in record.items()}


def _line(record: Record) -> str:
    return json.dumps(record) + "\n"


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """All of it or nothing, whenever the process is killed."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class TensorBoard:
    """Events for TensorBoard, in the run's folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def start(self, header: Mapping[str, Any], steps_done: int) -> None:
        """The folder tells the rest."""

    def write(self, record: Record) -> None:
        for name, value in record.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run in a Weights & Biases project."""

    def __init__(self, project: str, folder: Path) -> None:
        import wandb

        self._run = wandb.init(project=project, name=folder.name, dir=str(folder))

    def start(self, header: Mapping[str, Any], steps_done: int) -> None:  # noqa: ARG002 - a `Sink`
        self._run.config.update(header)

    def write(self, record: Record) -> None:
        self._run.log({name: value for name, value in record.items() if value is not None}, step=record["step"])

    def close(self) -> None:
        self._run.finish()
