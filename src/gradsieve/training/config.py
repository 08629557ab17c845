"""What a run is asked to do: one dataclass, whose fields are the options of the command line and of config files."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from gradsieve import expressions
from gradsieve.baselines import BASELINES, Baseline, baseline
from gradsieve.checks import UsageError, check_choice, check_fraction, check_number, check_whole, nearest, shown
from gradsieve.expressions import Expression, ExpressionError, written
from gradsieve.hook import Scope
from gradsieve.methods import DEFAULT_DENSITY, METHODS, Method, dense, method

Check: TypeAlias = Callable[[str, Any], None]


def _option(default: Any, text: str, check: Check | None = None, *, metavar: str | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, "check": check, "metavar": metavar})


def _one_of(kind: Any) -> Check:
    return partial(check_choice, valid=get_args(kind))


_FINITE = partial(check_number)
_POSITIVE = partial(check_number, above=0)
_NOT_NEGATIVE = partial(check_number, at_least=0)
# longer ones overflow the clocks of process groups
_SECONDS = partial(check_number, above=0, below=1e9)
# in steps it is a whole number
_EPOCHS = partial(check_number, at_least=0, below=1e15)
_COUNT = partial(check_whole, at_least=1)
_COUNT_OR_NONE = partial(check_whole, at_least=0)

Precision = Literal["float32", "bfloat16", "auto"]
Wire = Literal["float32", "bfloat16", "float8"]
Schedule = Literal["step", "cosine", "constant"]
Optimizer = Literal["sgd", "adamw"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of `gradsieve train`. None stands for the task's own choice, or for nothing."""

    task: str = _option("digits", "Task by name, or package.module:object for your own.")
    model: str | None = _option(
        None, "Model of the task, with options if need be: 'mlp(hidden=512)'; or package.module:callable."
    )
    data: Path | None = _option(None, "File or folder of the task's data; digits are built in.")
    method: str = _option(
        "union", "Method, with options if need be: micro, 'micro(control=paper)'; or ddp, fp16, bf16, powersgd(rank=N)."
    )
    density: float | None = _option(
        None, f"Share of the gradient to send in a step. Default: {DEFAULT_DENSITY}.", check_fraction
    )
    workers: int | None = _option(None, "Processes to start on this machine. Default: one, or one per GPU.", _COUNT)
    virtual: int | None = _option(None, "Workers that share this process and device, in place of processes.", _COUNT)
    device: str | None = _option(None, "cpu, cuda or cuda:N. Default: cuda if there is one.")
    backend: str | None = _option(None, "Process group: gloo or nccl. Default: by device.")
    timeout: float = _option(1800.0, "Seconds that a worker waits for the others before the run fails.", _SECONDS)
    seed: int = _option(0, "Seed of weights, order, augmentation and random methods.", _COUNT_OR_NONE)
    batch_size: int | None = _option(None, "Examples per worker and step.", _COUNT)
    epochs: int | None = _option(None, "Epochs; the learning rate follows them.", _COUNT)
    steps: int | None = _option(None, "Stop after so many steps; the learning rate does not follow them.", _COUNT)
    stop_at: float | None = _option(None, "Stop when an evaluation's measure is this good, such as 0.95.", _FINITE)
    lr: float | None = _option(
        None, "Peak learning rate. Default: the task's, in proportion to the global batch.", _POSITIVE
    )
    warmup_epochs: float | None = _option(None, "Epochs over which the learning rate rises from 0.", _NOT_NEGATIVE)
    schedule: Schedule | None = _option(
        None, "After the warm-up: step (a tenth from 3/4 on), cosine or constant.", _one_of(Schedule)
    )
    optimizer: Optimizer | None = _option(None, "sgd or adamw.", _one_of(Optimizer))
    momentum: float | None = _option(
        None, "Of sgd; 0 where the method has its own.", partial(check_number, at_least=0, below=1)
    )
    weight_decay: float | None = _option(None, "Of the optimizer.", _NOT_NEGATIVE)
    clip: float | None = _option(None, "Largest norm of the averaged gradient.", _POSITIVE)
    precision: Precision = _option(
        "float32",
        "Of forward and backward: float32, bfloat16, or auto: bfloat16 where the device multiplies it, else float32.",
        _one_of(Precision),
    )
    scope: Scope = _option(
        "model", "What is exchanged as one: the model, or each bucket while backward goes on.", _one_of(Scope)
    )
    wire: Wire = _option("float32", "What sparsified values travel as: float32, bfloat16 or float8.", _one_of(Wire))
    eval_every: float = _option(1.0, "Epochs between evaluations; 0: at the end only.", _EPOCHS)
    eval_examples: int | None = _option(None, "Judge on the first so many of the test examples. Default: all.", _COUNT)
    checkpoint_every: int | None = _option(
        None, "Steps between checkpoints; 0: none at all. Default: an epoch's.", _COUNT_OR_NONE
    )
    output: Path | None = _option(None, "Folder of the run. Default: a new one in runs/.")
    tensorboard: bool = _option(False, "Write TensorBoard events into the run's folder.")
    wandb: str | None = _option(None, "Log to this Weights & Biases project.", metavar="PROJECT")
    threads: int | None = _option(None, "CPU threads per process. Default: the cores, shared out.", _COUNT)
    interface: str | None = _option(None, "Count the bytes that leave a machine through this one, such as eth0.")
    uplink: str | None = _option(
        None, "Count what passes through this one, too, both ways: PROCESS:INTERFACE, as that process sees it."
    )
    passes_alone: int = _option(
        0, "Passes to time before the first step, without any exchange; their median is kept.", _COUNT_OR_NONE
    )

    def __post_init__(self) -> None:
        for field in fields(self):
            check, value = field.metadata["check"], getattr(self, field.name)
            if check is not None and value is not None:
                check(field.name, value)
        if self.workers is not None and self.virtual is not None:
            raise UsageError("workers and virtual exclude one another: processes, or workers in one process")
        if self.virtual is not None and self.scope == "bucket":
            raise UsageError("virtual workers have no buckets: leave scope=bucket out, or use processes (workers)")
        if self.virtual is not None and (self.interface or self.uplink or self.passes_alone):
            raise UsageError(
                "virtual workers use no network: leave interface, uplink and passes_alone out, or use processes"
            )
        self._check_baseline() if self.baseline is not None else self.make_method()

    def make_method(self) -> Method:
        """What is asked for; a baseline averages as `dense` does, but not through this library."""
        return dense() if self.baseline is not None else make_method(self.method, self.density)

    @property
    def baseline(self) -> Baseline | None:
        """What averages in place of this library, if that was asked for."""
        name, options = parse_method(self.method)
        return baseline(name, options) if name in BASELINES else None

    def _check_baseline(self) -> None:
        """PyTorch's own hooks have no options of ours, and no state that could be saved."""
        valid = {"density": (None,), "virtual": (None,), "checkpoint_every": (None, 0), "wire": ("float32",)}
        for name, allowed in (valid | {"scope": ("model",)}).items():
            if getattr(self, name) not in allowed:
                raise UsageError(
                    f"{self.method} is PyTorch's own and takes no {name} {getattr(self, name)!r}: it trains over "
                    "processes, whole, without checkpoints; leave that out, or choose a method of this library"
                )


def make_method(expression: str, density: float | None) -> Method:
    """A method from an expression such as `micro` or `micro(control=paper)`, at a density."""
    name, options = parse_method(expression)
    if density is not None:
        if name == "dense":
            raise UsageError("dense sends everything and takes no density: leave --density out")
        if "density" in options:
            raise UsageError(f"the density is given twice, in {expression!r} and as {density}: leave one out")
        options["density"] = density
    return method(name, **options)


def parse_method(expression: str) -> Expression:
    """Name and options of a method expression; bare words are strings."""
    try:
        return expressions.parse(expression)
    except ExpressionError as error:
        valid = f"a name ({', '.join(METHODS)}) or name(option=value, ...)"
        raise UsageError(f"{shown(expression)} is not a method: write {valid}") from error


def method_label(made: Method) -> str:
    """The method's name, with the options that are not the defaults; the density stands beside it."""
    defaults = METHODS[made.name]().options
    differing = {key: value for key, value in made.options.items() if key != "density" and value != defaults[key]}
    return written(made.name, differing)


def option_types(config: type[Any]) -> dict[str, Any]:
    """The type of each option of a config class."""
    hints = get_type_hints(config)
    return {field.name: hints[field.name] for field in fields(config)}


def from_mapping(config: type[TrainConfig], values: Mapping[str, Any], source: str) -> TrainConfig:
    """A config from plain values, each checked for its name and type; `source` is named in errors."""
    known = option_types(config)
    for key in values:
        if key not in known:
            raise UsageError(f"{source}: there is no option {shown(key)}; {nearest(key, known)}")
    converted = {key: convert(key, value, known[key], source) for key, value in values.items()}
    try:
        return config(**converted)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{source}: {error}") from error


def convert(name: str, value: Any, wanted: Any, source: str) -> Any:
    """A plain value, as files hold it, in the type of an option."""
    if value is None and type(None) in get_args(wanted):
        return None
    for kind in _alternatives(wanted):
        if get_origin(kind) is Literal:
            if value in get_args(kind):
                return value
        elif kind is Path and isinstance(value, (str, Path)):
            return Path(value)
        elif kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            # one that no float can be is left to the option's own check
            return float(value) if abs(value) <= sys.float_info.max else value
        elif kind in (bool, int, str) and type(value) is kind:
            return value
    raise UsageError(f"{source}: {name} must be {_described(wanted)}, not {shown(value)}")


def _alternatives(wanted: Any) -> list[Any]:
    if get_origin(wanted) in (typing.Union, types.UnionType):
        return [kind for kind in get_args(wanted) if kind is not type(None)]
    return [wanted]


def _described(wanted: Any) -> str:
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}
    return " or ".join(
        " or ".join(map(repr, get_args(kind))) if get_origin(kind) is Literal else words[kind]
        for kind in _alternatives(wanted)
    )


def to_mapping(config: TrainConfig) -> dict[str, Any]:
    """The config as plain values that JSON, TOML and YAML can hold."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
