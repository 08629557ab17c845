"""Command-line options from config classes, and config files with the same names."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, get_args, get_origin

import typer

from gradsieve.checks import UsageError
from gradsieve.training.config import TrainConfig, convert, option_types

CONFIG_HELP = "TOML or YAML file with options by the same names; the command line goes before it."


def takes_train_options(command: Callable[..., Any], *, several: Collection[str] = ()) -> Callable[..., Any]:
    """Give a command the options of TrainConfig, gathered in its argument `given`: those that were used.

    Those in `several` take more than one value, separated by commas.
    """
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]
    names = [field.name for field in fields(TrainConfig)]

    def wrapped(**arguments: Any) -> Any:
        options = {name: arguments.pop(name) for name in names}
        given = {name: value for name, value in options.items() if value is not None}
        for name in several:
            if name in given:
                given[name] = [_read(name, word) for word in split(given[name])]
        return command(given={name: _plain(value) for name, value in given.items()}, **arguments)

    parameters = [*own, *(_parameter(name, several=name in several) for name in names)]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    return wrapped


def _parameter(name: str, *, several: bool) -> inspect.Parameter:
    """An option of the command line for a field of the config; None where it was not used."""
    field = next(field for field in fields(TrainConfig) if field.name == name)
    kind = str if several else _kind(option_types(TrainConfig)[name])
    text = field.metadata["help"] + (" Several: separated by commas." if several else "")
    if field.default not in (None, False):
        text += f" Default: {field.default}."
    metavar = field.metadata["metavar"] or (f"{name.upper()},..." if several else None)
    flag = f"--{name.replace('_', '-')}"
    option = typer.Option(f"{flag}/--no-{flag[2:]}" if kind is bool else flag, help=text, metavar=metavar)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Optional[kind], option],  # noqa: UP045 - typer evaluates it
    )


def _kind(wanted: Any) -> Any:
    kinds = [kind for kind in get_args(wanted) if kind is not type(None)] if get_origin(wanted) is not Literal else []
    kind = kinds[0] if kinds else wanted
    return str if get_origin(kind) is Literal else kind


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _read(name: str, word: str) -> Any:
    """One of several values, from text."""
    kind = _kind(option_types(TrainConfig)[name])
    if kind is str:
        return word
    try:
        return convert(name, kind(word), kind, "the command line")
    except ValueError as error:
        wanted = "whole numbers" if kind is int else "numbers"
        raise UsageError(f"--{name} takes {wanted} separated by commas, not {word!r}") from error


def split(text: str) -> list[str]:
    """Cut at commas outside of parentheses.

    >>> split("micro, iwp(eps=0.1, per_layer=True)")
    ['micro', 'iwp(eps=0.1, per_layer=True)']
    """
    words, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    return [word.strip() for word in words if word.strip()]


def read_config(path: Path | None) -> dict[str, Any]:
    """The options in a config file."""
    if path is None:
        return {}
    readers: Mapping[str, Callable[[str], Any]] = {".toml": _toml, ".yaml": _yaml, ".yml": _yaml}
    if path.suffix not in readers:
        raise UsageError(f"{path}: a config file ends in .toml, .yaml or .yml")
    try:
        values = readers[path.suffix](path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"the config file {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # of TOML or of UTF-8
        raise UsageError(f"the config file {path} is damaged: {_one_line(error)}") from error
    if not isinstance(values, dict):
        raise UsageError(f"the config file {path} must hold options by name, not a {type(values).__name__}")
    return {str(name).replace("-", "_"): value for name, value in values.items()}


def merged(file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a file with those of the command line, which go before; processes or virtual workers, not both."""
    kept = dict(file)
    for name, other in (("workers", "virtual"), ("virtual", "workers")):
        if name in given:
            kept.pop(other, None)
    return kept | dict(given)


def _toml(text: str) -> Any:
    # tomli is what became tomllib in Python 3.11
    reader = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return reader.loads(text)


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise UsageError("config files in YAML need PyYAML: pip install 'gradsieve[cli]'") from error
    try:
        values = yaml.safe_load(text)
        return {} if values is None else values
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
