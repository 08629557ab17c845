"""`gradsieve bench step` and `gradsieve bench kernels`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Annotated, Any, Optional

import rich.table
import rich.text
import torch
import typer
from rich.console import Console

from gradsieve.bench import kernels, start
from gradsieve.bench.contenders import DEFAULT
from gradsieve.bench.figures import STANDARD_OUTPUT, Spread, as_text, check_file, result, write
from gradsieve.bench.kernels import KernelRow, KernelSetting
from gradsieve.bench.links import Circumstances
from gradsieve.bench.step import DEFAULT_MODEL, StepRow, StepSetting
from gradsieve.bench.timing import Timer
from gradsieve.checks import UsageError
from gradsieve.cli.display import FAILED, PLAIN_WIDTH
from gradsieve.cli.options import split
from gradsieve.counters import check_interface, passed_bytes
from gradsieve.training.place import find_place
from gradsieve.training.runner import check_device, refuse_launcher
from gradsieve.types import WAYS

bench = typer.Typer(
    name="bench",
    help="Measure gradient exchanges, and the passes that they are made of.",
    rich_markup_mode=None,
    no_args_is_help=False,
)

Density = Annotated[float, typer.Option("--density", help="Share of the gradient to send in a step.")]
Device = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--device", help="cpu, cuda or cuda:N. Default: cuda where there is one."),
]
Parameters = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--parameters", help="Parameters of the model, in matrices with biases."),
]
Model = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--model", help=f"Take the shapes of this model's parameters. Default: {DEFAULT_MODEL}."),
]
Wire = Annotated[str, typer.Option("--wire", help="How values travel: float32, bfloat16 or float8.")]
Scope = Annotated[str, typer.Option("--scope", help="One exchange for the model, or one per bucket.")]
Json = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--json", help="File to write the figures to; - prints them, and nothing else.", metavar="FILE"),
]


@bench.command()
def step(
    parameters: Parameters = None,
    model: Model = None,
    density: Density = 0.01,
    steps: Annotated[int, typer.Option("--steps", help="Steps that count.")] = 20,
    warmup: Annotated[int, typer.Option("--warmup", help="Steps before those.")] = 5,
    methods: Annotated[
        str, typer.Option("--methods", help="What to measure, separated by commas.", metavar="METHOD,...")
    ] = DEFAULT,
    wire: Wire = WAYS["wire"][0],
    scope: Scope = WAYS["scope"][0],
    workers: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--workers", help="Processes to start. Default: one per GPU; 2 on the CPU."),
    ] = None,
    threads: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--threads", help="Of each process on the CPU. Default: its share of the machine's cores."),
    ] = None,
    interface: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--interface", help="Count the bytes that leave a machine through this one, such as eth0."),
    ] = None,
    links: Annotated[
        bool, typer.Option("--links", help="Measure bandwidth, latency and local work first, for plan --check.")
    ] = False,
    uplink: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--uplink", help="Count what passes here, too: PROCESS:INTERFACE, as that process sees it."),
    ] = None,
    device: Device = None,
    json: Json = None,
) -> int:
    """Time whole steps of gradient exchange over a process group, by method.

    Uses the workers that torchrun, mpirun or srun started, or starts its own. Beside this library's methods it takes
    fp16, bf16, powersgd(rank=N) and published_micro; plain DDP and a hook that does nothing are always measured.
    """
    place = find_place(os.environ)
    place = place if place is not None and place.world > 1 else None
    setting = StepSetting(
        parameters, model, density, steps, warmup, tuple(split(methods)), wire, scope, interface, links, uplink
    )
    check_interface(interface)
    check_uplink(uplink, interface)
    check_device(device)
    check_file(json)
    crew = start.make_crew(place, workers, device, threads)
    rows: list[StepRow] = []
    under: dict[str, Any] = {}
    console, failure = make_console(quiet=json == STANDARD_OUTPUT or (place is not None and place.rank > 0)), None
    with news(console) as tell:

        def hear(heard: StepRow | Circumstances) -> None:
            if isinstance(heard, Circumstances):
                under.update(heard.as_record())
                return
            rows.append(heard)
            tell(heard.name)

        try:
            if place is not None:
                start.joined(setting, crew, place, hear, os.environ)
            else:
                start.started(setting, crew, hear)
        except start.WorkerError as error:
            failure = str(error)
    if place is None or place.rank == 0:
        told = setting.as_record() | crew._asdict()
        measured = result("step", torch.device(crew.device), told, [row.as_record(rows) for row in rows])
        measured |= {"failure": failure, **under}
        _show(console, measured, [step_table(_title(told), rows)], json)
    return FAILED if failure is not None or all(row.error is not None for row in rows) else 0


@bench.command(name="kernels")
def measure_kernels(
    numel: Annotated[
        str, typer.Option("--numel", help="Lengths of the vector, separated by commas.", metavar="NUMEL,...")
    ] = ",".join(map(str, kernels.DEFAULT_NUMELS)),
    density: Density = 0.01,
    partitions: Annotated[int, typer.Option("--partitions", help="Ranks that share the vector out.")] = 16,
    repeats: Annotated[int, typer.Option("--repeats", help="Calls that count.")] = 30,
    device: Device = None,
    json: Json = None,
) -> int:
    """Time what a rank does in a step by itself, without communication, beside the floor that memory sets."""
    refuse_launcher("bench kernels measures one process")
    setting = KernelSetting(_numbers(numel), density, partitions, repeats)
    check_device(device)
    check_file(json)
    used = start.own_device(device or start.default_device(), local_rank=0)
    console, rows, timer = make_console(quiet=json == STANDARD_OUTPUT), [], Timer(used, repeats)
    with news(console) as tell:
        for row in kernels.measure(setting, used, timer):
            rows.append(row)
            tell(f"{row.numel:,} {row.name}")
    told = setting.as_record() | {"device": str(used), "threads": torch.get_num_threads(), "caches": timer.caches}
    tables = [_kernel_table(numel, list(group)) for numel, group in groupby(rows, key=lambda row: row.numel)]
    _show(console, result("kernels", used, told, [row.as_record() for row in rows]), tables, json, timer.caches)
    return FAILED if all(row.error is not None for row in rows) else 0


def check_uplink(uplink: str | None, interface: str | None) -> None:
    if uplink is not None:
        if interface is None:
            raise UsageError("--uplink is counted beside --interface: give both")
        passed_bytes(uplink)


def _numbers(text: str) -> tuple[int, ...]:
    words = split(text)
    try:
        numbers = tuple(int(word.replace("_", "")) for word in words)
    except ValueError as error:
        raise UsageError(f"--numel takes whole numbers separated by commas, not {text!r}") from error
    if not numbers:
        raise UsageError("--numel names no length: give one, or several separated by commas")
    return numbers


def make_console(*, quiet: bool) -> Console:
    console = Console(quiet=quiet, highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


@contextmanager
def news(console: Console, beginning: str = "measuring") -> Iterator[Any]:
    """On a terminal, the last row that was measured."""
    if not console.is_terminal or console.quiet:
        yield lambda _: None
        return
    with console.status(beginning) as status:
        yield lambda name: status.update(f"measured {name}")


def _show(console: Console, measured: Any, tables: Sequence[rich.table.Table], json: str | None, *notes: str) -> None:
    for table in tables:
        console.print(table)
    errors = [f"{row['name']}: {row['error']}" for row in measured["rows"] if row["error"] is not None]
    failure = measured.get("failure")
    for line in (*errors, *([f"failed: {failure}"] if failure else []), f"measured: {measured['path']}", *notes):
        console.print(line, markup=False, soft_wrap=True)
    if json == STANDARD_OUTPUT:
        typer.echo(as_text(measured))
    elif json is not None:
        write(measured, json)
        console.print(json, markup=False, soft_wrap=True)


def _title(told: dict[str, Any]) -> str:
    ranks = "1 rank" if told["world"] == 1 else f"{told['world']} ranks"
    return (
        f"{told['parameters']:,} parameters, density {told['density']:g}, {ranks}, "
        f"{told['backend']} on {told['device']}: milliseconds of a step, slowest rank"
    )


def step_table(title: str, rows: Sequence[StepRow]) -> rich.table.Table:
    """The rows; with what was counted beside what the formula foretells where it was counted."""
    columns = ["", "median", "10 % to 90 %", "of dense", "added", "bytes", "density", "select", "exchange"]
    counted = any(row.counted_bytes is not None for row in rows)
    columns += ["by counter", "by formula", "ratio"] if counted else []
    between = any(row.uplink_bytes is not None for row in rows)
    columns += ["between racks"] if between else []
    table = make_table(title, columns)
    for row in rows:
        if row.error is not None:
            add_row(table, row.name, ["-"] * (len(columns) - 1))
            continue
        cells = [*_times(row.seconds), ratio_text(row.ratio(rows)), milliseconds(row.added(rows))]
        cells += [whole(row.wire_bytes), _percent(row.density)]
        cells += [milliseconds(row.select_seconds), milliseconds(row.exchange_seconds)]
        cells += (
            [whole(row.counted_bytes), whole(row.link_bytes), ratio_text(row.ratio_to_formula())] if counted else []
        )
        cells += [whole(row.uplink_bytes)] if between else []
        add_row(table, row.name, cells)
    return table


def _kernel_table(numel: int, rows: Sequence[KernelRow]) -> rich.table.Table:
    floor = next((row.floor_seconds for row in rows if row.floor_seconds), None)
    speed = "" if floor is None else f", copy at {kernels.FLOOR_BYTES * numel / floor / 1e9:,.0f} GB/s"
    told = "" if floor is None else f", floor {1000 * floor:.4g}"
    title = f"{numel:,} entries: milliseconds of a call{told}{speed}"
    columns = ("", "median", "10 % to 90 %", "of floor", "host", "extra memory")
    table = make_table(title, columns)
    for row in rows:
        if row.error is not None:
            add_row(table, row.name, ["-"] * (len(columns) - 1))
            continue
        host = None if row.host_seconds is None else row.host_seconds.median
        extra = "-" if row.extra_percent is None else f"{row.extra_percent:,.0f} %"
        add_row(table, row.name, [*_times(row.seconds), ratio_text(row.ratio), milliseconds(host), extra])
    return table


def make_table(title: str, columns: Sequence[str]) -> rich.table.Table:
    table = rich.table.Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def add_row(table: rich.table.Table, name: str, cells: Sequence[str]) -> None:
    table.add_row(rich.text.Text(name), *(rich.text.Text(cell) for cell in cells))


def _times(seconds: Spread | None) -> list[str]:
    assert seconds is not None
    return [milliseconds(seconds.median), f"{milliseconds(seconds.low)} to {milliseconds(seconds.high)}"]


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.4g}"


def ratio_text(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def whole(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.3g} %"
