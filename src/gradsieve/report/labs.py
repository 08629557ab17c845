"""What `gradsieve lab` measured, read from its JSON files: rows by rate, break-even bandwidths, tables."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gradsieve.baselines import PLAIN
from gradsieve.checks import UsageError
from gradsieve.lab.layout import parse_rate
from gradsieve.report import texts
from gradsieve.report.colours import Series, base_name, palette_place
from gradsieve.report.table import Cell, Column, Table

Kind = Literal["lab", "lab-training"]
KINDS: tuple[Kind, ...] = ("lab", "lab-training")
DENSE = "ddp"
"""The label of plain DDP."""
IDLE = "no-op"
_NAMES = {PLAIN: DENSE, "no-op hook": IDLE, "fp16 hook": "fp16", "bf16 hook": "bf16"}


@dataclass(frozen=True)
class LabRow:
    """A method at a rate; the mean over seeds where there were several."""

    label: str
    density: float
    rate: str
    seconds: float
    """Of a step."""
    compute: float = math.nan
    select: float = math.nan
    exchange: float = math.nan
    wire_bytes: float = math.nan
    counted_bytes: float = math.nan
    uplink_bytes: float = math.nan
    reached_steps: float = math.nan
    reached_seconds: float = math.nan
    reached_bytes: float = math.nan
    accuracy: float = math.nan
    """The final one, of runs of full length."""
    seeds: int = 1

    @property
    def series(self) -> Series:
        return self.label, self.density

    @property
    def bits(self) -> float:
        return bits_of(self.rate)


@dataclass(frozen=True)
class Lab:
    """The measurements of one kind on one network."""

    kind: Kind
    racks: int
    uplink: str
    settings: tuple[Mapping[str, Any], ...]
    provenances: tuple[Mapping[str, Any], ...]
    rows: tuple[LabRow, ...]
    errors: tuple[str, ...]

    @property
    def rates(self) -> list[str]:
        """Slowest first."""
        return sorted({row.rate for row in self.rows}, key=bits_of)

    @property
    def title(self) -> str:
        what = "Training" if self.kind == "lab-training" else "Exchange of given gradients"
        return what + (f", two racks with {rate_text(self.uplink)} between them" if self.racks > 1 else "")

    @property
    def accuracy(self) -> float | None:
        return next((s["accuracy"] for s in self.settings if s.get("accuracy") is not None), None)

    def at(self, rate: str) -> list[LabRow]:
        """In the order of legends."""
        rows = [row for row in self.rows if row.rate == rate]
        return sorted(rows, key=lambda row: (row.label != DENSE, palette_place(base_name(row.label)), row.label))

    def dense_at(self, rate: str) -> LabRow | None:
        return next((row for row in self.rows if row.rate == rate and row.label == DENSE), None)


def bits_of(rate: str) -> float:
    bits = parse_rate(rate).bits
    return math.inf if bits is None else float(bits)


def rate_text(rate: str | float) -> str:
    """
    >>> rate_text("100mbit"), rate_text(2.5e9), rate_text("none")
    ('100 Mbit/s', '2.5 Gbit/s', 'no limit')
    """
    bits = bits_of(rate) if isinstance(rate, str) else rate
    if math.isinf(bits):
        return "no limit"
    bits = float(f"{bits:.3g}")  # first, as rounding may lead to the next unit
    unit, name = next(pair for pair in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")) if bits >= pair[0])
    return f"{bits / unit:g} {name}"


def read_labs(paths: Iterable[Path]) -> list[Lab]:
    """The files' measurements, those of one kind and network together."""
    found: dict[tuple[Kind, int, str], list[dict[str, Any]]] = {}
    for path in paths:
        measured = _read(path)
        setting = measured["setting"]
        key = (measured["benchmark"], int(setting.get("racks", 1)), str(setting.get("uplink", "none")))
        found.setdefault(key, []).append(measured)
    ordered = sorted(found.items(), key=lambda item: (item[0][1], KINDS.index(item[0][0]), item[0][2]))
    return [_lab(*key, files) for key, files in ordered]


def _read(path: Path) -> dict[str, Any]:
    try:
        measured = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from error
    kind = measured.get("benchmark") if isinstance(measured, dict) else None
    if kind not in KINDS or not all(isinstance(measured.get(part), kind_of) for part, kind_of in _PARTS.items()):
        raise UsageError(f"{path} holds no measurements of a lab: give files that gradsieve lab wrote")
    assert isinstance(measured, dict)
    return measured


_PARTS: Mapping[str, type] = {"setting": dict, "provenance": dict, "rows": list}


def _lab(kind: Kind, racks: int, uplink: str, files: Sequence[Mapping[str, Any]]) -> Lab:
    records = [record | {"asked": file["setting"].get("density")} for file in files for record in file["rows"]]
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        if record["error"] is None:
            groups.setdefault((record["rate"], record["name"]), []).append(record)
    errors = [
        f"{record['name']} at {rate_text(record['rate'])}: {record['error']}" for record in records if record["error"]
    ]
    return Lab(
        kind,
        racks,
        uplink,
        tuple(file["setting"] for file in files),
        tuple(file["provenance"] for file in files),
        tuple(_row(rate, group) for (rate, _), group in groups.items()),
        tuple(dict.fromkeys(errors)),
    )


def label_of(name: str) -> str:
    """A row's name as users write it, so that colours go by the method.

    >>> label_of("PowerSGD rank 4")
    'powersgd(rank=4)'
    """
    return _NAMES.get(name, re.sub(r"^PowerSGD rank (\d+)$", r"powersgd(rank=\1)", name))


def _row(rate: str, records: Sequence[Mapping[str, Any]]) -> LabRow:
    label = label_of(str(records[0]["name"]))
    sparse = palette_place(base_name(label)) < palette_place("") and base_name(label) != "dense"
    seen = [record.get("reached") or {} for record in records]
    whole = [record for record in records if record.get("whole")]

    def mean_of(name: str, among: Sequence[Mapping[str, Any]] = records) -> float:
        return _mean(record.get(name) for record in among)

    return LabRow(
        label=label,
        density=float(records[0]["asked"] or 1) if sparse else 1.0,
        rate=rate,
        seconds=_mean(record["seconds"]["median"] for record in records),
        compute=mean_of("compute_seconds"),
        select=mean_of("select_seconds"),
        exchange=mean_of("exchange_seconds"),
        wire_bytes=mean_of("wire_bytes"),
        counted_bytes=mean_of("counted_bytes"),
        uplink_bytes=mean_of("uplink_bytes"),
        reached_steps=mean_of("steps", seen),
        reached_seconds=mean_of("seconds", seen),
        reached_bytes=mean_of("counted_bytes", seen),
        accuracy=mean_of("accuracy", whole),
        seeds=len({record.get("seed", 0) for record in records}),
    )


def _mean(values: Iterable[Any]) -> float:
    known = [float(value) for value in values if value is not None]
    return math.fsum(known) / len(known) if known else math.nan


def break_even(points: Sequence[tuple[float, float, float]]) -> str:
    """Up to which bandwidth a method is ahead of dense: from bits a second, its seconds and those of dense.

    Between two rates the logarithm of the ratio is taken as a straight line over the logarithm of the rate.

    >>> break_even([(1e8, 1.0, 10.0), (1e10, 10.0, 1.0)])
    'about 1 Gbit/s'
    """
    points = sorted(points)
    ahead = [own < dense for _, own, dense in points]
    if not points:
        return texts.ABSENT
    if all(ahead):
        return f"none found: ahead at every rate, up to {rate_text(points[-1][0])}"
    if not any(ahead):
        return "none: dense is faster at every rate"
    if ahead != sorted(ahead, reverse=True):
        faster = [rate_text(bits) for (bits, _, _), one in zip(points, ahead, strict=True) if one]
        return f"not one: ahead at {texts.listed(faster)}"
    below, above = points[sum(ahead) - 1], points[sum(ahead)]
    if math.isinf(above[0]):
        return f"above {rate_text(below[0])}: dense is faster with no limit"
    low, high = (math.log(own / dense) for _, own, dense in (below, above))
    part = low / (low - high)
    return f"about {rate_text(below[0] * (above[0] / below[0]) ** part)}"


def break_even_table(lab: Lab) -> Table:
    """Where each method stops being ahead of plain DDP."""
    labels = list(dict.fromkeys(row.label for rate in lab.rates for row in lab.at(rate)))
    rows, series = [], []
    timed = lab.kind == "lab-training" and lab.accuracy is not None
    for label in labels:
        if label in (DENSE, IDLE):
            continue
        own = [row for row in lab.rows if row.label == label]
        cells = [Cell(label, label), _break_even(lab, own, "seconds")]
        rows.append((*cells, _break_even(lab, own, "reached_seconds")) if timed else tuple(cells))
        series.append(own[0].series)
    columns = [Column("method", "method"), Column("step", "of a step", long=True)]
    columns += [Column("reached", f"of the time to {100 * (lab.accuracy or 0):g} %", long=True)] if timed else []
    return Table("break-even", "Break-even bandwidth", tuple(columns), tuple(rows), tuple(series))


def _break_even(lab: Lab, rows: Sequence[LabRow], name: str) -> Cell:
    points = []
    for row in rows:
        dense = lab.dense_at(row.rate)
        times = (getattr(row, name), math.nan if dense is None else getattr(dense, name))
        if all(map(math.isfinite, times)):
            points.append((row.bits, *times))
    text = break_even(points)
    return Cell(text, text)


def rows_table(lab: Lab) -> Table:
    """Everything, by rate and method; times in milliseconds."""
    columns = (
        Column("method", "method"),
        Column("rate", "rate"),
        Column("step_ms", "step (ms)", numeric=True),
        Column("of_dense", "of dense", numeric=True),
        Column("compute_ms", "compute (ms)", numeric=True),
        Column("select_ms", "selection (ms)", numeric=True),
        Column("exchange_ms", "exchange (ms)", numeric=True),
        Column("wire_bytes", "bytes handed over", numeric=True),
        Column("counted_bytes", "bytes by counter", numeric=True),
        Column("uplink_bytes", "bytes between racks", numeric=True),
        Column("reached_steps", "steps to accuracy", numeric=True),
        Column("reached_seconds", "seconds to accuracy", numeric=True),
        Column("reached_bytes", "bytes to accuracy", numeric=True),
        Column("accuracy", "final accuracy", numeric=True),
        Column("seeds", "seeds", numeric=True),
    )
    ordered = [row for rate in lab.rates for row in lab.at(rate)]
    rows = tuple(_cells(row, lab.dense_at(row.rate)) for row in ordered)
    return Table("rows", lab.title, columns, rows, tuple(row.series for row in ordered))


def _cells(row: LabRow, dense: LabRow | None) -> tuple[Cell, ...]:
    ratio = math.nan if dense is None else row.seconds / dense.seconds
    parts = (row.compute, row.select, row.exchange)
    sizes = (row.wire_bytes, row.counted_bytes, row.uplink_bytes)
    return (
        Cell(row.label, row.label),
        Cell(row.rate, rate_text(row.rate)),
        _cell(1000 * row.seconds, texts.number),
        _cell(ratio, lambda value: f"{value:.2f}"),
        *(_cell(1000 * part, texts.number) for part in parts),
        *(_cell(size, texts.data) for size in sizes),
        _cell(row.reached_steps, texts.number),
        _cell(row.reached_seconds, texts.number),
        _cell(row.reached_bytes, texts.data),
        _cell(row.accuracy, lambda value: f"{100 * value:.2f} %"),
        Cell(row.seeds, str(row.seeds)),
    )


def _cell(value: float, text: Any) -> Cell:
    return Cell(value, text(value) if math.isfinite(value) else texts.ABSENT)


def findings(lab: Lab) -> list[str]:
    """Who is fastest at each rate, and where dense is."""
    return [sentence for rate in lab.rates if (sentence := _finding(lab, rate)) is not None]


def _finding(lab: Lab, rate: str) -> str | None:
    name = "reached_seconds" if lab.kind == "lab-training" and lab.accuracy is not None else "seconds"
    rows = [row for row in lab.at(rate) if row.label != IDLE and math.isfinite(getattr(row, name))]
    dense = lab.dense_at(rate)
    if not rows or dense is None or not math.isfinite(getattr(dense, name)):
        return None
    best = min(rows, key=lambda row: float(getattr(row, name)))
    unit = _seconds if name == "reached_seconds" else texts.milliseconds
    what = (
        f"sees {100 * (lab.accuracy or 0):g} % first, after" if name == "reached_seconds" else "has the shortest step,"
    )
    place = "with no limit" if rate == "none" else f"at {rate_text(rate)}"
    own, others = (unit(float(getattr(row, name))) for row in (best, dense))
    if best is dense:
        return f"{place[:1].upper()}{place[1:]} plain DDP {what} {own}: nothing is gained there."
    return f"{place[:1].upper()}{place[1:]} {best.label} {what} {own}; plain DDP takes {others}."


def _seconds(seconds: float) -> str:
    return f"{texts.number(seconds)} s"
