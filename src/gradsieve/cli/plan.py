"""`gradsieve plan`."""

from __future__ import annotations

import json as json_format
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Optional

import torch
import typer
from rich.console import Console

from gradsieve.bench import start
from gradsieve.bench.contenders import HEADROOM, ZERO_LINE, contenders
from gradsieve.bench.figures import STANDARD_OUTPUT, as_text, check_file, result, write
from gradsieve.bench.given import Shape, shapes_of_model, shapes_of_size
from gradsieve.bench.links import direct_bytes
from gradsieve.bench.step import DEFAULT_MODEL
from gradsieve.checks import UsageError, check_number, check_whole
from gradsieve.cli.bench import Json, Model, Parameters, Scope, Wire, add_row, make_console, make_table
from gradsieve.cli.display import FAILED
from gradsieve.cli.options import split
from gradsieve.cost import advice
from gradsieve.cost.check import CLEAR, LARGEST_ERROR, Check, predict_rows
from gradsieve.cost.machine import MACHINES, Machine
from gradsieve.cost.messages import Link
from gradsieve.cost.step import Load, Prediction, predict
from gradsieve.lab.layout import parse_rate
from gradsieve.training.folder import make_writable
from gradsieve.training.place import Place, find_place
from gradsieve.training.runner import check_device
from gradsieve.types import WAYS

METHODS = "topk,cltk,micro,exdyna,union,iwp,fp16,bf16,powersgd(rank=1),powersgd(rank=4)"
LATENCY = 50.0
"""Microseconds of a round where none is given: two machines on one switch, and the software's part."""
BANDWIDTHS = tuple(10 ** (8 + place / 8) for place in range(25))
"""Of the figure: 100 Mbit/s to 100 Gbit/s."""
FIGURES = (".svg", ".png")


class Ground(NamedTuple):
    """What a plan goes by."""

    load: Load
    link: Link
    machine: Machine
    measured: bool


def plan(
    parameters: Parameters = None,
    model: Model = None,
    workers: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--workers", help="Number of workers; with --measure, those that were started."),
    ] = None,
    bandwidth: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--bandwidth", help="Of a worker's link, each way, such as 1gbit or 25gbit.", metavar="RATE"),
    ] = None,
    latency: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--latency", help=f"Microseconds from one worker to the next. Default: {LATENCY:g}."),
    ] = None,
    compute_ms: Annotated[
        float, typer.Option("--compute-ms", help="Milliseconds of forward and backward, which hide dense exchanges.")
    ] = 0.0,
    density: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--density", help="Share of the gradient to send. Default: 0.01, or more where that is free."),
    ] = None,
    methods: Annotated[
        str, typer.Option("--methods", help="What to foretell, as for bench step.", metavar="METHOD,...")
    ] = METHODS,
    wire: Wire = WAYS["wire"][0],
    scope: Scope = WAYS["scope"][0],
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--device", help="cpu or cuda: whose local work to go by. Default: cuda where there is one."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure bandwidth, latency and local work over the workers started.")
    ] = False,
    check: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--check", help="Hold the model against what gradsieve lab --json wrote.", metavar="FILE"),
    ] = None,
    figure: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--figure", help="Draw step time by workers and by bandwidth (.svg or .png).", metavar="FILE"),
    ] = None,
    json: Json = None,
) -> int:
    """Foretell the time of a step by method, from 2 to 4096 workers, and say what to take, or to stay dense.

    Goes by the bandwidth and latency that are given, or measures them: torchrun ... -m gradsieve plan --measure.
    """
    check_file(json)
    if check is not None:
        return _check(check, json)
    _check_figure(figure)
    names = _names(methods)
    load = _load(parameters, model, wire, scope, density, compute_ms)
    place = _place(measure)
    if place is None:
        ground = _given(load, workers, bandwidth, latency, device)
    else:
        ground = _surveyed(load, place, workers, bandwidth, latency, device)
    if place is not None and place.rank > 0:
        return 0
    _tell(ground, names, density, figure, json)
    return 0


def _names(methods: str) -> list[str]:
    """The rows that `bench step` would have, without the one that exchanges nothing."""
    rows = contenders(split(methods), advice.DENSITIES[-1], {})
    names = [row.name for row in rows if row.name != HEADROOM]
    for name in names:
        predict(name, Load(1, 1), Link(1.0, 0.0), MACHINES["cpu"])  # refuses what there is no model for
    return names


def _load(
    parameters: int | None, model: str | None, wire: str, scope: str, density: float | None, compute_ms: float
) -> Load:
    _positive("compute-ms", compute_ms, least=0)
    asked = advice.DENSITIES[-1] if density is None else density
    shapes = _shapes(parameters, model)
    return replace(Load.of_shapes(shapes, world=1), density=asked, wire=wire, scope=scope, compute=compute_ms / 1000)


def _shapes(parameters: int | None, model: str | None) -> list[Shape]:
    if parameters is not None and model is not None:
        raise UsageError("--parameters and --model exclude one another: a size, or the shapes of a model")
    if parameters is None:
        return shapes_of_model(model or DEFAULT_MODEL)
    try:
        check_whole("parameters", parameters, at_least=1)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return shapes_of_size(parameters)


def _positive(name: str, value: float, *, least: float) -> None:
    try:
        check_number(name, value, at_least=least)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _place(measure: bool) -> Place | None:
    """Among the workers that a launcher started; None where nothing is measured."""
    place = find_place(os.environ)
    several = place is not None and place.world > 1
    if measure and not several:
        raise UsageError(
            "--measure needs several workers: start them with torchrun --nproc-per-node N -m gradsieve plan --measure, "
            "or give --workers and --bandwidth"
        )
    if not measure and several and place is not None:
        raise UsageError(f"{place.launcher} started {place.world} workers: add --measure, or start plan without it")
    return place if measure else None


def _given(load: Load, workers: int | None, bandwidth: str | None, latency: float | None, device: str | None) -> Ground:
    if workers is None or bandwidth is None:
        missing = " and ".join(
            option for option, value in (("--workers", workers), ("--bandwidth", bandwidth)) if value is None
        )
        raise UsageError(f"{missing} must be given, such as --workers 8 --bandwidth 10gbit, or measured with --measure")
    kind = torch.device(_device_type(device)).type
    microseconds = LATENCY if latency is None else latency
    _positive("latency", microseconds, least=0)
    backend = "gloo" if kind == "cpu" else "nccl"
    link = Link(_bits(bandwidth), microseconds / 1e6, direct_bytes(backend, kind))
    return Ground(replace(load, world=workers), link, MACHINES[kind], measured=False)


def _device_type(device: str | None) -> str:
    kind = device or start.default_device()
    if kind.split(":")[0] not in MACHINES:
        raise UsageError(f"--device must be {' or '.join(MACHINES)}, not {device!r}")
    return kind.split(":")[0]


def _bits(bandwidth: str) -> float:
    bits = parse_rate(bandwidth).bits
    if bits is None:
        raise UsageError("--bandwidth none is no bandwidth to plan with: give a number, such as 100gbit, or --measure")
    return float(bits)


def _surveyed(
    load: Load, place: Place, workers: int | None, bandwidth: str | None, latency: float | None, device: str | None
) -> Ground:
    if bandwidth is not None or latency is not None:
        raise UsageError("--measure finds bandwidth and latency: leave out --bandwidth and --latency")
    check_device(device)
    crew = start.make_crew(place, workers, device)
    found = start.surveyed(load.numel, crew, place, os.environ)
    return Ground(replace(load, world=place.world), found.link, found.machine, measured=True)


def _check_figure(figure: Path | None) -> None:
    if figure is None:
        return
    if figure.suffix not in FIGURES:
        raise UsageError(f"--figure {figure}: a figure ends in {' or '.join(FIGURES)}")
    if find_spec("matplotlib") is None:
        raise UsageError("--figure needs matplotlib: pip install 'gradsieve[report]'")
    make_writable(figure.expanduser().parent)


def _tell(ground: Ground, names: Sequence[str], density: float | None, figure: Path | None, json: str | None) -> None:
    console = make_console(quiet=json == STANDARD_OUTPUT)
    load, link, machine, _ = ground
    found = [predict(name, load, link, machine) for name in names]
    limits = {name: advice.break_even(name, load, link, machine) for name in names if name != ZERO_LINE}
    curves = advice.scaling(names, load, link, machine)
    advised = advice.advise(names, load, link, machine, density=density)
    _show_plan(console, ground, found, limits)
    _show_scaling(console, curves)
    _show_advice(console, advised)
    if figure is not None:
        _draw(ground, names, limits, curves, figure.expanduser())
        console.print(str(figure), markup=False, soft_wrap=True)
    _keep(console, json, _record(ground, found, limits, curves, advised))


def _show_plan(console: Console, ground: Ground, found: Sequence[Prediction], limits: dict[str, float]) -> None:
    load, link, _, measured = ground
    told = f"{load.numel:,} parameters, {load.world} workers, density {load.density:g}, {load.wire}, by {load.scope}"
    by = f"{advice.rate_text(link.bandwidth)} and {1e6 * link.latency:.3g} us a round, as {_source(measured)}"
    columns = ("", "step", "speed-up", "own work", "messages", "bytes by link", "bytes", "density", "pays below")
    table = make_table(f"{told}; {by}; milliseconds of a step as foretold", columns)
    dense = found[0].step_seconds
    for row in found:
        times = [
            _ms(row.step_seconds),
            _ratio(dense, row.step_seconds),
            _ms(row.select_seconds),
            _ms(row.exchange_seconds),
        ]
        volumes = [f"{row.link_bytes:,.0f}", f"{row.wire_bytes:,.0f}", f"{100 * row.density:.3g} %"]
        add_row(
            table, row.name, [*times, *volumes, "-" if row.name == ZERO_LINE else advice.rate_text(limits[row.name])]
        )
    console.print(table)


def _source(measured: bool) -> str:
    return "measured" if measured else "given"


def _show_scaling(console: Console, curves: dict[str, list[Prediction]]) -> None:
    table = make_table("milliseconds of a step by the number of workers", ("", *map(str, advice.WORKERS)))
    for name, row in curves.items():
        add_row(table, name, [_ms(one.step_seconds) for one in row])
    console.print(table)


def _show_advice(console: Console, advised: advice.Advice) -> None:
    for line in (_headline(advised), *(f"- {reason}" for reason in advised.reasons)):
        console.print(line, markup=False, soft_wrap=True)


def _headline(advised: advice.Advice) -> str:
    choice = advised.choice
    if choice is None:
        return "stay dense: plain DDP is the thing to use here"
    return (
        f"use {choice.name} at density {choice.density:g}, wire {choice.wire}, scope {choice.scope}: "
        f"{advised.speed_up:.2f} times as fast as plain DDP"
    )


def _draw(
    ground: Ground,
    names: Sequence[str],
    limits: dict[str, float],
    curves: dict[str, list[Prediction]],
    path: Path,
) -> None:
    from gradsieve.report.costs import Curve, draw

    load, link, machine, _ = ground
    links = [replace(link, bandwidth=bits) for bits in BANDWIDTHS]
    drawn = {
        name: Curve(
            [1000 * one.step_seconds for one in curves[name]],
            [1000 * predict(name, load, one, machine).step_seconds for one in links],
            limits.get(name, math.inf),
        )
        for name in names
    }
    draw(drawn, advice.WORKERS, BANDWIDTHS, path)


def _record(
    ground: Ground,
    found: Sequence[Prediction],
    limits: dict[str, float],
    curves: dict[str, list[Prediction]],
    advised: advice.Advice,
) -> Any:
    load, link, machine, measured = ground
    setting = asdict(load) | {"measured": measured}
    del setting["matrices"]
    rows = [asdict(row) | {"break_even": _told_limit(limits.get(row.name))} for row in found]
    under = {"link": link.as_record(), "machine": machine.as_record()}
    by_workers = {name: [one.step_seconds for one in row] for name, row in curves.items()}
    told = None if advised.choice is None else advised.choice._asdict()
    return result("plan", torch.device("cpu"), setting, rows) | {
        **under,
        "scaling": {"workers": list(advice.WORKERS), "step_seconds": by_workers},
        "advice": {"choice": told, "speed_up": advised.speed_up, "reasons": list(advised.reasons)},
    }


def _told_limit(bits: float | None) -> float | str | None:
    """JSON has no infinity, and never and always are not the same as unknown."""
    return advice.rate_text(bits) if bits is not None and (bits == 0 or math.isinf(bits)) else bits


def _keep(console: Console, json: str | None, record: Any) -> None:
    if json == STANDARD_OUTPUT:
        typer.echo(as_text(record))
    elif json is not None:
        write(record, json)
        console.print(json, markup=False, soft_wrap=True)


def _check(file: Path, json: str | None) -> int:
    """Print every cell with what was foretold; fails where one of the two criteria is missed."""
    record = _read(file)
    checked = predict_rows(record, _shapes_of(record["setting"]))
    console = make_console(quiet=json == STANDARD_OUTPUT)
    columns = ("rate", "", "measured", "foretold", "error", "saved", "pays", "foretold to")
    table = make_table(f"{file}: milliseconds that a row adds to a step without an exchange", columns)
    for cell in checked.cells:
        numbers = [_ms(cell.measured), _ms(cell.predicted), f"{100 * cell.error:+.0f} %", f"{100 * cell.margin:+.0f} %"]
        add_row(table, cell.rate, [cell.name, *numbers, *_verdicts(cell)])
    console.print(table)
    for line in (*checked.left_out, *_outcome(checked)):
        console.print(line, markup=False, soft_wrap=True)
    cells = [cell._asdict() | {"error": cell.error, "is_right": cell.is_right} for cell in checked.cells]
    _keep(console, json, {"median_error": checked.median_error, "passed": checked.passed, "cells": cells})
    return 0 if checked.passed else FAILED


def _verdicts(cell: Any) -> list[str]:
    if cell.name == ZERO_LINE:
        return ["-", "-"]
    pays, foretold = (
        "yes" if step < dense else "no"
        for step, dense in (
            (cell.step_measured, cell.dense_measured),
            (cell.step_predicted, cell.dense_predicted),
        )
    )
    return [pays, foretold if cell.is_right else f"{foretold}: {'wrong' if cell.is_clear else 'close'}"]


def _outcome(checked: Check) -> list[str]:
    clear = [cell for cell in checked.cells if cell.is_clear]
    wrong = ", ".join(f"{cell.name} at {cell.rate}" for cell in checked.wrong)
    return [
        f"median error {100 * checked.median_error:.0f} %, allowed {100 * LARGEST_ERROR:.0f} %",
        f"right about {len(clear) - len(checked.wrong)} of {len(clear)} cells with a margin over {100 * CLEAR:.0f} %"
        + (f"; wrong: {wrong}" if wrong else ""),
    ]


def _read(file: Path) -> Any:
    try:
        record = json_format.loads(file.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--check {file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"--check {file} is no JSON: give what gradsieve lab --json wrote") from error
    if not isinstance(record, dict) or record.get("benchmark") != "lab":
        raise UsageError(f"--check {file} is no result of the lab: give what gradsieve lab --json wrote")
    return record


def _shapes_of(setting: dict[str, Any]) -> list[Shape]:
    return _shapes(None if setting["model"] else setting["parameters"], setting["model"])


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.4g}"


def _ratio(dense: float, seconds: float) -> str:
    return f"{dense / seconds:.2f}" if seconds else "-"
