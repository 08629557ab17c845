"""The cost model held against what the lab measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from gradsieve.checks import UsageError
from gradsieve.cost.machine import Machine
from gradsieve.cost.messages import Link
from gradsieve.cost.step import HEADROOM, ZERO_LINE, Load, predict
from gradsieve.types import WAYS

LARGEST_ERROR = 0.25
"""Of the median cell, in part of what was measured."""
CLEAR = 0.2
"""A cell's margin, in part of plain DDP's time, above which the model must say rightly whether the method pays."""


class Cell(NamedTuple):
    """One row at one rate: what it adds to a step without an exchange."""

    rate: str
    name: str
    measured: float
    predicted: float
    dense_measured: float
    """The step of plain DDP."""
    step_measured: float
    step_predicted: float
    dense_predicted: float

    @property
    def error(self) -> float:
        """In part of what was measured, with its sign."""
        return self.predicted / self.measured - 1

    @property
    def margin(self) -> float:
        """What it saved of plain DDP's step; below 0 where it took longer."""
        return 1 - self.step_measured / self.dense_measured

    @property
    def is_clear(self) -> bool:
        return abs(self.margin) > CLEAR and self.name != ZERO_LINE

    @property
    def is_right(self) -> bool:
        """Does the model say as was measured whether it pays?"""
        return (self.step_predicted < self.dense_predicted) == (self.step_measured < self.dense_measured)


class Check(NamedTuple):
    cells: list[Cell]
    left_out: list[str]
    """What there is no model for, or nothing to hold it against."""

    @property
    def median_error(self) -> float:
        return statistics.median(abs(cell.error) for cell in self.cells)

    @property
    def wrong(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.is_clear and not cell.is_right]

    @property
    def passed(self) -> bool:
        return self.median_error <= LARGEST_ERROR and not self.wrong


def predict_rows(
    record: Mapping[str, Any],
    shapes: Sequence[tuple[int, ...]],
    links: Mapping[str, Link] | None = None,
    machines: Mapping[str, Machine] | None = None,
) -> Check:
    """Every cell of a result of `gradsieve lab`; link and machine are those of its networks unless others are given."""
    setting, cells, left_out = record["setting"], [], []
    networks = {network["rate"]: network for network in record["networks"]}
    for rate, network in networks.items():
        rows = {row["name"]: row for row in record["rows"] if row["rate"] == rate and row["error"] is None}
        link = links[rate] if links else _given(network, "link", Link)
        machine = machines[rate] if machines else _given(network, "machine", Machine)
        if not {ZERO_LINE, HEADROOM} <= rows.keys():
            left_out.append(f"{rate}: {ZERO_LINE} or {HEADROOM} is missing")
            continue
        idle, dense = (rows[name]["seconds"]["median"] for name in (HEADROOM, ZERO_LINE))
        # all that the lab's steps compute is a backward pass that hands over what is given
        load = replace(
            Load.of_shapes(shapes, setting["world"]),
            **{key: setting[key] for key in ("density", "wire", "scope")},
            compute=idle,
            backward_share=1.0,
        )
        dense_predicted = predict(ZERO_LINE, load, link, machine).step_seconds
        for name, row in rows.items():
            if name == HEADROOM:
                continue
            try:
                step = predict(*_in_its_way(name, load), link, machine).step_seconds
            except UsageError:
                left_out.append(f"{rate}: no cost model for {name}")
                continue
            took = row["seconds"]["median"]
            if took <= idle:
                left_out.append(f"{rate}: {name} took no longer than {HEADROOM}")
                continue
            cells.append(Cell(rate, name, took - idle, step - idle, dense, took, step, dense_predicted))
    if not cells:
        raise UsageError("the file holds no cell to check: " + ("; ".join(left_out) or "it has no rows"))
    return Check(cells, left_out)


def _in_its_way(name: str, load: Load) -> tuple[str, Load]:
    """A row such as `micro, bfloat16, bucket` has a wire and a scope of its own."""
    method, *words = name.split(", ")
    ways: dict[str, Any] = {way: word for way, known in WAYS.items() for word in words if word in known}
    return method, replace(load, **ways)


def _given(network: Mapping[str, Any], key: str, kind: Any) -> Any:
    if key not in network:
        raise UsageError(
            f"the file tells no {key} for the rate {network['rate']}: measure again with this version of gradsieve lab"
        )
    return kind.from_record(network[key])
