"""What a measurement is told as: median and spread, with where it was made."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gradsieve import kernels
from gradsieve.checks import UsageError
from gradsieve.training.folder import make_writable
from gradsieve.training.provenance import provenance

STANDARD_OUTPUT = "-"


class Spread(NamedTuple):
    """Seconds of several repeats."""

    median: float
    low: float
    """The 10th percentile."""
    high: float
    """The 90th percentile."""
    repeats: int

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Spread:
        return cls(record["median"], record["percentile_10"], record["percentile_90"], record["repeats"])

    def as_record(self) -> dict[str, Any]:
        return {"median": self.median, "percentile_10": self.low, "percentile_90": self.high, "repeats": self.repeats}


def spread(seconds: Sequence[float]) -> Spread:
    """Median, 10th and 90th percentile.

    >>> spread([3.0, 1.0, 2.0])
    Spread(median=2.0, low=1.2, high=2.8, repeats=3)
    """
    tenths = statistics.quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else [*seconds] * 9
    return Spread(statistics.median(seconds), tenths[0], tenths[-1], len(seconds))


def result(kind: str, device: torch.device, setting: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Any:
    """A measurement as JSON holds it."""
    return {
        "benchmark": kind,
        "path": kernels.path(device),
        "setting": dict(setting),
        "provenance": provenance(device),
        "rows": [dict(row) for row in rows],
    }


def check_file(file: str | None) -> None:
    """See that a result can be written, before anything is measured."""
    if file is None or file == STANDARD_OUTPUT:
        return
    path = Path(file).expanduser()
    if path.is_dir():
        raise UsageError(f"--json {file} is a folder: give the name of a file in it, or - to print")
    make_writable(path.parent)


def as_text(measured: Any) -> str:
    """The result as strict JSON."""
    return json.dumps(_finite(measured), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    """What is not a finite number is nothing."""
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(measured: Any, file: str) -> None:
    Path(file).expanduser().write_text(as_text(measured) + "\n", encoding="utf-8")
