"""The folder of a run: what was asked, what happened step by step, how it ended.

    run.json        the resolved configuration, its provenance, what the model and the method are
    metrics.jsonl   one flat record a step and one an evaluation, in order
    result.json     how it ended, and the summary; absent while the run is under way
    error.txt       the traceback, of a run that failed
    checkpoint/     the state of every worker, to go on from

Records have flat names, the same in every sink. A record of a step has `step` (steps done), `epoch` (a fraction) and

    train/loss, train/lr
    sparsity/density_asked, sparsity/density_actual, sparsity/support, sparsity/threshold (none for methods without),
    sparsity/imbalance, sparsity/error_norm (of the residual, mean over workers)
    comm/wire_bytes (handed over by a worker), comm/link_bytes (through its link, by ring algorithms), comm/messages,
        comm/sent_bytes (with --interface: by a machine since the step before, as the kernel counted),
        comm/uplink_bytes (with --uplink)
    time/forward, time/backward, time/select, time/exchange, time/rest, time/step: seconds of the slowest worker;
        time/compute takes the place of the first two where they run as one
    time/elapsed: seconds of training up to here, the sum of time/step: without evaluation and logging, and for
        virtual workers as if each had a device of its own
    time/wall: seconds that this step really took here

A record of an evaluation has `step`, `epoch`, `time/elapsed`, `eval/loss` and `eval/<measure>`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from gradsieve.checks import UsageError

FORMAT = 1
Record = Mapping[str, float | int | None]
Status = Literal["finished", "interrupted", "failed", "unfinished"]

RUN, METRICS, RESULT, ERROR = "run.json", "metrics.jsonl", "result.json", "error.txt"


WARM_UP_STEPS = 5
WARM_UP_FRACTION = 0.1
"""What is left out of means of times: so many steps, or this part of them, whichever is less."""

USUAL_WAYS = ("wire", "float32"), ("scope", "model")
"""How methods travel unless they are asked to otherwise."""

HEADER = ("label", "density", "world", "task", "measure", "model", "steps_per_epoch", "config", "provenance")
"""What `run.json` must say."""


class RunError(UsageError):
    """A folder that holds no readable run."""


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it."""

    folder: Path
    header: Mapping[str, Any]
    status: Status
    error: str | None
    summary: Mapping[str, float]
    steps: Sequence[Record]
    evaluations: Sequence[Record]

    @property
    def config(self) -> Mapping[str, Any]:
        config: Mapping[str, Any] = self.header["config"]
        return config

    @property
    def provenance(self) -> Mapping[str, Any]:
        provenance: Mapping[str, Any] = self.header["provenance"]
        return provenance

    @property
    def method(self) -> str:
        """The method's name, with the options and ways that are not the defaults: `micro(control='paper'), float8`."""
        ways = [str(self.config[way]) for way, usual in USUAL_WAYS if self.config.get(way, usual) != usual]
        return ", ".join([str(self.header["label"]), *ways])

    @property
    def density(self) -> float:
        """The density asked for; 1 for dense."""
        return float(self.header["density"])

    @property
    def world(self) -> int:
        return int(self.header["world"])

    @property
    def virtual(self) -> bool:
        """Did the workers share one process, so that times are those of a simulation?"""
        return self.config.get("virtual") is not None

    @property
    def at_a_time(self) -> int:
        """How many runs its command made at a time: their times are those of runs that wait for one another."""
        asked = re.search(r"--jobs[ =](\d+)", str(self.header.get("provenance", {}).get("command", "")))
        return int(asked[1]) if asked else 1

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def measure(self) -> str:
        """The name of the task's measure; its figures are under `eval/<measure>`."""
        return str(self.header["measure"]["name"])

    @property
    def setting(self) -> str:
        """What sets it apart from other runs of its task and model, if anything does."""
        return ""

    def series(self, name: str, *, of: Literal["steps", "evaluations"] = "steps") -> npt.NDArray[np.float64]:
        """A column of the records; NaN where a record has none."""
        records = self.steps if of == "steps" else self.evaluations
        return np.array([_number(record.get(name)) for record in records], dtype=np.float64)

    @property
    def num_steps(self) -> int:
        """That were done; a digest keeps fewer records than that."""
        return len(self.steps)

    @property
    def median_density_error(self) -> float:
        """The median distance of the actual density from the asked one, relative to that; NaN if neither was told."""
        return _density_error(self.steps)

    def mean(self, name: str) -> float:
        """Of a column of steps."""
        return finite_mean(self.series(name))

    def steady(self, name: str) -> float:
        """The mean of a column of steps, without the warm-up."""
        return finite_mean(self.series(name)[warm_up(len(self.steps)) :])


def warm_up(num_steps: int) -> int:
    """Steps left out of means of times."""
    return min(WARM_UP_STEPS, int(WARM_UP_FRACTION * num_steps))


def finite_mean(values: Iterable[float]) -> float:
    """The mean of the finite ones; NaN if there is none.

    >>> finite_mean([1.0, float("nan"), 3.0])
    2.0
    """
    array = np.fromiter(values, dtype=np.float64)
    finite = array[np.isfinite(array)]
    return float(finite.mean()) if len(finite) else math.nan


def _number(value: float | int | None) -> float:
    return math.nan if value is None else float(value)


def summarise(steps: Sequence[Record], evaluations: Sequence[Record], steps_per_epoch: int) -> dict[str, float]:
    """The figures that a run comes to: the last evaluation, and means over the steps.

    `sparsity/density_error` is `Run.median_density_error`.
    """
    summary: dict[str, float] = {"steps": len(steps)}
    for name in sorted({name for record in steps for name in record if "/" in name} - {"time/elapsed", "train/lr"}):
        values = [float(record[name] or 0) for record in steps if record.get(name) is not None]
        if values:
            summary[name] = sum(values) / len(values)
    error = _density_error(steps)
    if not math.isnan(error):
        summary["sparsity/density_error"] = error
    if steps:
        summary["train/loss"] = _number(steps[-1]["train/loss"])
        summary["time/elapsed"] = _number(steps[-1]["time/elapsed"])
        summary["time/epoch"] = summary["time/wall"] * steps_per_epoch
    for name in evaluations[-1] if evaluations else ():
        if name.startswith("eval/"):
            summary[name] = _number(evaluations[-1][name])
    return summary


def _density_error(steps: Sequence[Record]) -> float:
    ratios = [ratio for ratio in map(_density_ratio, steps) if ratio is not None]
    return float(np.median(np.abs(np.array(ratios) - 1))) if ratios else math.nan


def _density_ratio(record: Record) -> float | None:
    asked, actual = record.get("sparsity/density_asked"), record.get("sparsity/density_actual")
    return actual / asked if asked and actual is not None else None


def is_run(folder: Path) -> bool:
    return (folder / RUN).is_file()


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run folders among the paths and below them, each once, in order of name."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise RunError(f"there is no folder {path}: give folders that gradsieve train or compare wrote")
        below = [path] if is_run(path) else sorted(file.parent for file in path.rglob(RUN))
        if not below:
            raise RunError(f"{path} holds no run (no {RUN} in it or below): give what gradsieve train or compare wrote")
        found.update(dict.fromkeys(folder.resolve() for folder in below))
    return list(found)


def read_run(folder: Path) -> Run:
    """Read a run. One that was killed is read as far as it got."""
    header = read_json(folder / RUN)
    if header.get("format") != FORMAT:
        raise RunError(
            f"{folder / RUN} has the format {header.get('format')!r}, not {FORMAT}: it is of another version"
        )
    missing = [name for name in HEADER if name not in header]
    if missing:
        raise RunError(f"{folder / RUN} lacks {', '.join(missing)}: it is damaged")
    result: dict[str, Any] = read_json(folder / RESULT) if (folder / RESULT).exists() else {"status": "unfinished"}
    if result.get("status") not in get_args(Status):
        raise RunError(
            f"{folder / RESULT} has the status {result.get('status')!r}: it is damaged, or of another version"
        )
    records = list(read_records(folder / METRICS))
    return Run(
        folder=folder,
        header=header,
        status=result["status"],
        error=result.get("error"),
        summary=result.get("summary", {}),
        steps=[record for record in records if "train/loss" in record],
        evaluations=[record for record in records if "eval/loss" in record],
    )


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RunError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise RunError(f"{path} holds a {type(value).__name__}, not an object: it is not a gradsieve run")
    return value


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file; a last line that was cut off by a kill is left out."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                return
            raise RunError(f"{path}, line {number}, is not a record: {error}") from error
        if not isinstance(record, dict) or "step" not in record:
            raise RunError(f"{path}, line {number}, is not a record: it lacks a step")
        yield record
