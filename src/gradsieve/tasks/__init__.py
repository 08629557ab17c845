"""The training problems: those of this package by name, a user's own as `package.module:object`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from gradsieve import expressions
from gradsieve.checks import nearest
from gradsieve.expressions import ExpressionError
from gradsieve.tasks import cifar, digits, ratings, text
from gradsieve.tasks.files import existing
from gradsieve.tasks.task import DataError, Examples, Measure, Noise, Recipe, Task, accuracy

__all__ = [
    "TASKS",
    "DataError",
    "Examples",
    "Measure",
    "Noise",
    "Recipe",
    "Task",
    "accuracy",
    "base_model",
    "build_model",
    "load_task",
]

TASKS: Mapping[str, Callable[[Path | None], Task]] = MappingProxyType(
    {
        "digits": digits.load,
        "cifar10": cifar.load_cifar10,
        "cifar100": cifar.load_cifar100,
        "characters": text.load_characters,
        "words": text.load_words,
        "ratings": ratings.load,
    }
)
"""Every task's loader, by name."""


def load_task(name: str, data: Path | None) -> Task:
    """A task by name, or a user's own: a `Task`, or a function that makes one from `data`."""
    if name in TASKS:
        return TASKS[name](data)
    if ":" not in name:
        raise DataError(f"unknown task {name!r}; {nearest(name, TASKS)}, or your own as package.module:object")
    own = _named_object(name)
    if isinstance(own, Task):
        if data is not None:
            raise DataError(f"{name} is a Task as it stands and reads no file: leave out --data {data}")
        return own
    if not callable(own):
        raise DataError(f"{name} is a {type(own).__name__}: a Task is needed, or a function that makes one from `data`")
    made = _called(name, own, None if data is None else existing(data))
    if not isinstance(made, Task):
        raise DataError(f"{name} returned a {type(made).__name__}, not a Task")
    return made


def build_model(task: Task, name: str | None) -> nn.Module:
    """A model of the task's, by default its first, or a user's own: a function that makes one."""
    if name is None:
        name = next(iter(task.models), "")
    if ":" not in name:
        return _models_own(task, name)
    own = _named_object(name)
    if not callable(own) or isinstance(own, nn.Module):
        raise DataError(f"{name} is a {type(own).__name__}: a function without arguments that makes a model is needed")
    made = _called(name, own)
    if not isinstance(made, nn.Module):
        raise DataError(f"{name} returned a {type(made).__name__}, not a torch.nn.Module")
    return made


def base_model(name: str) -> str:
    """
    >>> base_model("mlp(hidden=512)")
    'mlp'
    """
    return name.partition("(")[0]


def _models_own(task: Task, text: str) -> nn.Module:
    """A model of the task's, perhaps with options."""
    try:
        name, options = expressions.parse(text)
    except ExpressionError:
        name, options = text, {}
    if name not in task.models:
        valid = f"{nearest(name, task.models)}, or your own as package.module:callable"
        raise DataError(f"the task {task.name} has no model {name!r}; {valid}")
    make = task.models[name]
    valid_options = inspect.signature(make).parameters if options else {}
    for option in options:
        if option not in valid_options:
            raise DataError(f"the model {name} has no option {option!r}; {nearest(option, valid_options)}")
    return _called(text, partial(make, **options)) if options else make()


def _named_object(name: str) -> Any:
    """What `package.module:object` names."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute.isidentifier():
        raise DataError(f"{name!r} is not of the form package.module:object")
    module = _imported(module_name)
    if not hasattr(module, attribute):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise DataError(f"the module {module_name} has no {attribute!r}; {nearest(attribute, public)}")
    return getattr(module, attribute)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise DataError(
                f"there is no module {error.name!r}: it must be installed, in the current folder or on PYTHONPATH"
            ) from error
        raise DataError(f"importing {name} raised {_told(error)}") from error


def _called(name: str, make: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return make(*arguments)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{name} raised {_told(error)}") from error


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
