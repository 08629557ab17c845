"""What is trained: the vocabulary of tasks, for those of this package and for a user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradsieve import kernels
from gradsieve.checks import UsageError


class DataError(UsageError):
    """Data that is missing, damaged or of another kind; its message says what came and what to do."""


@dataclass(frozen=True)
class Examples:
    """Inputs and targets, row by row. They are moved to the device whole, once."""

    inputs: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> Examples:
        return Examples(self.inputs.to(device), self.targets.to(device))

    def rows(self, indices: Tensor) -> Examples:
        return Examples(self.inputs[indices], self.targets[indices])

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Noise:
    """Random numbers for a stretch of the epoch's examples, a function of key and place alone.

    So an example gets the same augmentation whichever worker draws it, on any device, also after a resume.
    """

    start: int
    """The place in the epoch of the first example."""
    count: int
    key: int
    device: torch.device

    def uniform(self, width: int) -> Tensor:
        """`[count, width]` numbers in (0, 1)."""
        stop = (self.start + self.count) * width
        return kernels.uniform(self.start * width, stop, self.key, self.device).view(self.count, width)


Prepare: TypeAlias = Callable[[Examples, Noise | None], Examples]
"""Makes a batch ready for the model, on the device: scaling, augmentation, sampling. No noise: for evaluation."""


def as_they_are(batch: Examples, noise: Noise | None) -> Examples:  # noqa: ARG001 - a `Prepare`
    return batch


@dataclass(frozen=True)
class Measure:
    """How a trained model is judged on the test examples."""

    name: str
    score: Callable[[Tensor, Tensor], Tensor]
    """From outputs and targets, one number for each example (or token)."""
    finish: Callable[[float], float] = float
    """From the mean score to the figure that is reported."""
    higher_is_better: bool = True
    percent: bool = False
    """Shown as a percentage."""


def _hits(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(-1) == targets).float()


accuracy = Measure("accuracy", _hits, percent=True)


@dataclass(frozen=True)
class Recipe:
    """How a task is trained where the user says nothing."""

    batch_size: int = 32
    """Per worker."""
    epochs: int = 30
    lr: float = 0.1
    """The peak, for four workers; it grows with the global batch."""
    warmup_epochs: float = 5
    """The learning rate rises from 0 over so many epochs."""
    schedule: Literal["step", "cosine", "constant"] = "step"
    """After the warm-up: a tenth from three quarters of the epochs on, a cosine down to 0, or neither."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    momentum: float = 0.9
    weight_decay: float = 1e-4
    clip: float | None = None
    """Largest norm of the averaged gradient."""


@dataclass(frozen=True)
class Task:
    """A training problem: data, the models that fit it, what is minimised and how it is judged."""

    name: str
    train: Examples
    test: Examples
    models: Mapping[str, Callable[..., nn.Module]]
    """By name; the first is the default. Their arguments, which have defaults, are options of the model."""
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy
    """Of outputs and targets: the mean over the batch."""
    measure: Measure = accuracy
    prepare: Prepare = as_they_are
    recipe: Recipe = Recipe()
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    """Of models that want another one, by name."""
