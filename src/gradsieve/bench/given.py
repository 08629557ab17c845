"""A model whose gradients are given: its backward costs next to nothing, and what is left is the exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gradsieve import control, models
from gradsieve.checks import UsageError, nearest

Shape: TypeAlias = tuple[int, ...]

LAYERS = 20
"""Of a model that is known by its number of parameters alone."""
GROUP = 16
"""Parameters whose gradients are ready at the same time."""
SLACK = 1 << 16
"""By how much noise can be shifted from step to step."""
TAIL = 0.5
"""Standard deviation of the logarithm of an entry's scale: tails about as heavy as those of real gradients."""

# language models and recommenders with the sizes of the data that papers train them on
MODELS: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        **{
            name: getattr(models, name)
            for name in ("resnet18", "resnet50", "resnet152", "googlenet", "senet18", "alexnet", "vgg16", "cnn", "mlp")
        },
        "lstm": partial(models.lstm, 33_278),
        "gpt": partial(models.gpt, 50_257),
        "ncf": partial(models.ncf, 6_040, 3_706),
    }
)
"""The models whose shapes can be asked for."""


def shapes_of_model(name: str) -> list[Shape]:
    """The shapes of a model's parameters; no memory is taken for it."""
    if name not in MODELS:
        raise UsageError(f"unknown model {name!r}; {nearest(name, MODELS)}")
    with torch.device("meta"):
        return [tuple(parameter.shape) for parameter in MODELS[name]().parameters()]


def shapes_of_size(num_parameters: int) -> list[Shape]:
    """Equal square matrices with a bias each, and what is left: so many parameters exactly.

    >>> shapes_of_size(20 * 6 + 3)
    [(2, 2), (2,), (2, 2), (2,), (2, 2), (2,), (2, 2), (2,), (2, 2), (2,), (2, 2), (2,), (2, 2), (2,), (2, 2), (2,), \
(2, 2), (2,), (2, 2), (2,), (2, 2), (2,), (2, 2), (2,), (2, 2), (2,), (2, 2), (2,), (2, 2), (2,), (2, 2), (2,), \
(2, 2), (2,), (2, 2), (2,), (2, 2), (2,), (2, 2), (2,), (1, 2), (1,)]
    """
    width = max(1, math.isqrt(num_parameters // LAYERS))
    num_layers, left = divmod(num_parameters, width * width + width)
    rows, rest = divmod(left, width)
    shapes: list[Shape] = [shape for _ in range(num_layers) for shape in ((width, width), (width,))]
    return [*shapes, *([(rows, width)] if rows else []), *([(rest,)] if rest else [])]


class _Given(torch.autograd.Function):
    """Passes a number on; its backward hands some parameters the gradients that were given."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], passed: Tensor, *parameters: Tensor) -> Tensor:  # noqa: ARG004
        ctx.gradients = gradients
        return passed.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        return None, outputs[0], *ctx.gradients


class GivenModel(nn.Module):
    """Parameters of the given shapes in a chain of groups, whose gradients are ready from the last to the first.

    Groups, as a node of the graph in Python takes the host longer than many a gradient takes a GPU.
    """

    def __init__(self, shapes: Sequence[Shape], device: torch.device) -> None:
        super().__init__()
        draw = torch.Generator(device).manual_seed(0)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape, device=device, generator=draw) / math.sqrt(shape[-1])) for shape in shapes
        )

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        passed, weights = gradients[0].new_zeros((), requires_grad=True), list(self.weights)
        for start in range(0, len(weights), GROUP):
            stretch = slice(start, start + GROUP)
            passed = _Given.apply(gradients[stretch], passed, *weights[stretch])  # type: ignore[no-untyped-call]
        return passed


class Noise:
    """Random gradients: heavy tails, a scale for each tensor that all ranks share, fresh in every step.

    A thousand draws would take longer than what is measured, so each tensor gets another stretch of one draw.
    All is scaled so that MiCRO's first threshold, a constant, lets about the target pass: no other scale would suit
    the published law better.
    """

    def __init__(self, shapes: Sequence[Shape], density: float, device: torch.device, seed: int) -> None:
        self._shapes = shapes
        self._draw = torch.Generator().manual_seed(seed)
        longest = max(math.prod(shape) for shape in shapes)
        self._base = heavy_tailed(longest + SLACK, device, seed)
        shared = torch.Generator().manual_seed(0)
        scales = torch.exp(torch.randn(len(shapes), generator=shared))
        self._scales = (scales * self._factor(scales, density)).tolist()

    def gradients(self) -> list[Tensor]:
        offsets = torch.randint(SLACK, (len(self._shapes),), generator=self._draw).tolist()
        return [
            (self._base[offset : offset + math.prod(shape)] * scale).view(shape)
            for shape, scale, offset in zip(self._shapes, self._scales, offsets, strict=True)
        ]

    def _factor(self, scales: Tensor, density: float) -> float:
        """From a sample of all tensors, each by its size."""
        numel = sum(math.prod(shape) for shape in self._shapes)
        sample = [
            self._base[: max(1, math.prod(shape) * SLACK // numel)].cpu() * scale
            for shape, scale in zip(self._shapes, scales.tolist(), strict=True)
        ]
        return fitting_factor(torch.cat(sample), density, numel)


def fitting_factor(sample: Tensor, density: float, numel: int) -> float:
    """What to scale a vector of `numel` entries with so that MiCRO's first threshold lets the target pass."""
    threshold = torch.quantile(sample.abs(), 1 - density).item()
    return control.initial_threshold(max(1, int(density * numel))) / max(threshold, control.TINY)


def heavy_tailed(count: int, device: torch.device, seed: int) -> Tensor:
    """Normal numbers whose scale is log-normal."""
    draw = torch.Generator(device).manual_seed(seed)
    numbers = torch.randn(count, device=device, generator=draw).mul_(TAIL).exp_()
    return numbers.mul_(torch.randn(count, device=device, generator=draw))
