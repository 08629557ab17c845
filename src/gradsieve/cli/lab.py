"""`gradsieve lab`."""

from __future__ import annotations

import json as json_format
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, Optional

import torch
import typer
from rich.console import Console

from gradsieve.bench.figures import STANDARD_OUTPUT, as_text, check_file, result, write
from gradsieve.bench.step import StepRow, StepSetting
from gradsieve.checks import UsageError, check_number
from gradsieve.cli.bench import Json, Model, Parameters, Scope, Wire, make_console, news, step_table
from gradsieve.cli.display import FAILED
from gradsieve.cli.lab_training import DENSITY, OPTIONS, Lesson, check, folder_for, train_in_lab
from gradsieve.cli.lab_training import METHODS as TRAIN_METHODS
from gradsieve.cli.options import read_config, split
from gradsieve.counters import Traffic
from gradsieve.lab import names
from gradsieve.lab.jobs import JobError, run_job
from gradsieve.lab.layout import INTERFACE, MOST_RACKS, Layout, parse_rate
from gradsieve.lab.network import Network, check_tools
from gradsieve.lab.training import TrainSetting
from gradsieve.training.runner import refuse_launcher
from gradsieve.types import WAYS

METHODS = (
    "dense,micro,micro(wire=bfloat16),micro(scope=bucket),union,union(wire=bfloat16),union(scope=bucket),exdyna,"
    "topk,cltk,fp16,powersgd(rank=1),powersgd(rank=4)"
)
STEPS = 10
RATES = "100mbit,1gbit,10gbit,none"
SECONDS = 3600.0
"""That all methods together may take at one rate, or one training."""


class Measured(NamedTuple):
    """What came of one rate."""

    layout: Layout
    rows: list[StepRow]
    traffic: list[Traffic]
    """Of each host, over the whole job."""
    uplink: Traffic | None
    failure: str | None
    under: Mapping[str, Any] = MappingProxyType({})
    """Link and machine as the job found them, for `gradsieve plan --check`."""

    def as_record(self) -> dict[str, Any]:
        return {
            "rate": self.layout.rate.name,
            "hosts": [traffic._asdict() for traffic in self.traffic],
            "uplink": None if self.uplink is None else self.uplink._asdict(),
            "failure": self.failure,
            **self.under,
        }


def lab(
    hosts: Annotated[int, typer.Option("--hosts", help="Network namespaces, with one process in each.")] = 4,
    rate: Annotated[
        str, typer.Option("--rate", help="Of every host's link, each way; none: no limit.", metavar="RATE,...")
    ] = RATES,
    racks: Annotated[int, typer.Option("--racks", help="1, or 2 with a link between them.")] = 1,
    uplink: Annotated[str, typer.Option("--uplink", help="Rate of the link between two racks.")] = "none",
    methods: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--methods", help=f"What to measure, as for bench step. Default: {METHODS}.", metavar="METHOD,..."
        ),
    ] = None,
    model: Model = None,
    parameters: Parameters = None,
    density: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--density", help=f"Share of the gradient to send in a step. Default: that of --config, or {DENSITY}."
        ),
    ] = None,
    steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--steps", help=f"Steps that count. Default: {STEPS}; with --train all that the epochs have."),
    ] = None,
    warmup: Annotated[int, typer.Option("--warmup", help="Steps before those.")] = 3,
    wire: Wire = WAYS["wire"][0],
    scope: Scope = WAYS["scope"][0],
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that one job may take.")] = SECONDS,
    json: Json = None,
    train: Annotated[
        bool, typer.Option("--train", help="Train a task with each method, in place of exchanging given gradients.")
    ] = False,
    config: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--config", help="With --train: TOML or YAML file with options of gradsieve train."),
    ] = None,
    task: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--task", help="With --train: as for gradsieve train. Default: digits."),
    ] = None,
    epochs: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--epochs", help="With --train: the learning rate follows them. Default: the task's."),
    ] = None,
    seed: Annotated[str, typer.Option("--seed", help="With --train: a run for each.", metavar="SEED,...")] = "0",
    accuracy: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--accuracy", help="With --train: time until it is seen, such as 0.95."),
    ] = None,
    stop_at_accuracy: Annotated[
        bool, typer.Option("--stop-at-accuracy", help="With --train: a run ends when it has seen --accuracy.")
    ] = False,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--output", help="With --train: folder of the runs and the figures. Default: runs/lab-TASK."),
    ] = None,
    clean: Annotated[bool, typer.Option("--clean", help="End what labs left whose command has died.")] = False,
) -> int:
    """Time gradient exchanges, or trainings, over real TCP between hosts, by method and bandwidth.

    The hosts are network namespaces of this machine with links of the given rates; each rate is one job of torchrun
    over all of them. Needs Linux and iproute2; root, or user namespaces. Nothing is left behind, however it ends.
    """
    if clean:
        return _clean()
    refuse_launcher("lab starts its own workers, one on each host")
    layouts = [Layout(hosts, parse_rate(word), racks, parse_rate(uplink)) for word in _rates(rate)]
    _check_timeout(timeout)
    only_training = {
        "--config": config,
        "--task": task,
        "--epochs": epochs,
        "--accuracy": accuracy,
        "--output": output,
        "--stop-at-accuracy": stop_at_accuracy or None,
    }
    if train:
        given = {
            "task": task,
            "model": model,
            "epochs": epochs,
            "steps": steps,
            "density": density,
            "wire": wire,
            "scope": scope,
        }
        options = OPTIONS | read_config(config) | _asked(given)
        if parameters is not None or json is not None:
            raise UsageError("--train takes no --parameters and no --json: give --model, and --output for the figures")
        asked = TrainSetting(
            tuple(split(methods or TRAIN_METHODS)), _seeds(seed), options, accuracy=accuracy, stop=stop_at_accuracy
        )
        return _trained(layouts, asked, timeout, output)
    unused = [name for name, value in only_training.items() if value is not None]
    if unused:
        raise UsageError(f"{', '.join(unused)} are options of a training: ask for one with --train")
    names_asked = tuple(split(methods or METHODS))
    setting = StepSetting(
        parameters,
        model,
        DENSITY if density is None else density,
        STEPS if steps is None else steps,
        warmup,
        names_asked,
        wire,
        scope,
        INTERFACE,
    )
    check_file(json)
    check_tools()
    told = setting.as_record() | {"world": hosts, "threads": _threads(hosts), "racks": racks, "uplink": uplink}
    console, measured = make_console(quiet=json == STANDARD_OUTPUT), []
    for layout in layouts:
        with news(console, f"measuring at {layout.rate.name}"):
            measured.append(_measured(layout, setting, timeout))
        _show(console, told, measured[-1])
        if json not in (None, STANDARD_OUTPUT):
            write(_record(told, measured), str(json))  # what there is outlives a later rate's end
    if json == STANDARD_OUTPUT:
        typer.echo(as_text(_record(told, measured)))
    elif json is not None:
        console.print(json, markup=False, soft_wrap=True)
    return FAILED if any(outcome.failure is not None for outcome in measured) else 0


def _asked(given: dict[str, Any]) -> dict[str, Any]:
    """What is not as it is where the user says nothing."""
    defaults = {way: known[0] for way, known in WAYS.items()}
    return {name: value for name, value in given.items() if value is not None and value != defaults.get(name)}


def _seeds(text: str) -> tuple[int, ...]:
    words = split(text)
    if not words or not all(word.isdecimal() for word in words):
        raise UsageError(f"--seed takes whole numbers separated by commas, not {text!r}")
    return tuple(map(int, words))


def _trained(layouts: Sequence[Layout], setting: TrainSetting, timeout: float, output: Path | None) -> int:
    first = layouts[0]
    num_parameters = check(setting, first.hosts)
    check_tools()
    threads = _threads(first.hosts)
    network = {"world": first.hosts, "racks": first.racks, "uplink": first.uplink.name, "threads": threads}
    told = setting.as_record() | network | {"parameters": num_parameters, "interface": INTERFACE}
    folder = folder_for(output, str(setting.options["task"]))
    return train_in_lab(Lesson(layouts, setting, threads, timeout, folder), told, make_console(quiet=False))


def _clean() -> int:
    check_tools()
    removed, left = names.clean(), names.strays()
    for name in removed:
        typer.echo(f"removed what lab {name} left")
    if left:
        raise UsageError(f"these processes of dead labs cannot be ended: {', '.join(map(str, sorted(left)))}")
    if not removed:
        typer.echo("no lab has left anything")
    return 0


def _rates(text: str) -> list[str]:
    words = split(text)
    if not words:
        raise UsageError("--rate names no rate: give one, or several separated by commas")
    repeated = sorted({word for word in words if words.count(word) > 1})
    if repeated:
        raise UsageError(f"--rate names {', '.join(repeated)} twice: once is enough")
    return words


def _check_timeout(seconds: float) -> None:
    try:
        check_number("timeout", seconds, above=0)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _threads(hosts: int) -> int:
    """Of a host's process: its share of the cores."""
    return max(1, (os.cpu_count() or 1) // hosts)


def _measured(layout: Layout, setting: StepSetting, seconds: float) -> Measured:
    rows: list[StepRow] = []
    failure, under = None, {}
    with Network(layout) as network:
        try:
            asked = replace(setting, uplink=network.uplink_place())
            ended = run_job(network, bench_command(asked, _threads(layout.hosts)), seconds=seconds)
            told = json_format.loads(ended[0].output)
            rows = [StepRow.from_record(row) for row in told["rows"]]
            under = {key: told[key] for key in ("link", "machine") if key in told}
        except JobError as error:
            failure = str(error)
        return Measured(layout, rows, network.host_traffic(), network.uplink_traffic(), failure, under)


def bench_command(setting: StepSetting, threads: int) -> list[str]:
    """What a host's worker runs; the first one prints the figures."""
    size = ["--parameters", str(setting.parameters)] if setting.parameters is not None else []
    shapes = ["--model", setting.model] if setting.model is not None else []
    uplink = ["--uplink", setting.uplink] if setting.uplink is not None else []
    return [
        *("-m", "gradsieve", "bench", "step", "--device", "cpu", "--json", STANDARD_OUTPUT),
        *(*size, *shapes, "--density", repr(setting.density)),
        *("--steps", str(setting.steps), "--warmup", str(setting.warmup), "--methods", ",".join(setting.methods)),
        *("--wire", setting.wire, "--scope", setting.scope),
        *("--threads", str(threads), "--interface", INTERFACE, *uplink, "--links"),
    ]


def _record(told: dict[str, Any], measured: Sequence[Measured]) -> Any:
    """As JSON holds it: a row has its rate, and what is of a rate as a whole stands apart."""
    rows = [
        {"rate": outcome.layout.rate.name, **row.as_record(outcome.rows)}
        for outcome in measured
        for row in outcome.rows
    ]
    return result("lab", torch.device("cpu"), told, rows) | {"networks": [outcome.as_record() for outcome in measured]}


def _show(console: Console, told: dict[str, Any], outcome: Measured) -> None:
    if outcome.rows:
        console.print(step_table(_title(told, outcome.layout), outcome.rows))
    for line in _notes(outcome):
        console.print(line, markup=False, soft_wrap=True)


def _title(told: dict[str, Any], layout: Layout) -> str:
    link = "no limit" if layout.rate.bits is None else f"{layout.rate.name} each way"
    racks = f" in {layout.racks} racks, {layout.uplink.name} between them" if layout.racks == MOST_RACKS else ""
    return (
        f"{link}: {layout.hosts} hosts{racks}, {told['parameters']:,} parameters, density {told['density']:g}: "
        "milliseconds of a step, slowest host; bytes of a step"
    )


def _notes(outcome: Measured) -> list[str]:
    rate = outcome.layout.rate.name
    errors = [f"{row.name}: {row.error}" for row in outcome.rows if row.error is not None]
    sent = f"{rate}: {sum(traffic.sent for traffic in outcome.traffic):,} bytes sent by all hosts in the whole job"
    between = "" if outcome.uplink is None else f", {sum(outcome.uplink):,} between the racks"
    failure = [f"{rate}: failed: {outcome.failure}"] if outcome.failure is not None else []
    return [*errors, sent + between, *failure]
