from __future__ import annotations

import math

import pytest
import torch

from gradsieve import control
from gradsieve.bench.given import GROUP, MODELS, GivenModel, Noise, heavy_tailed, shapes_of_model, shapes_of_size
from gradsieve.checks import UsageError

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_parameters", [1, 2, 19, 20, 21, 1023, 20_000, 11_173_962])
def test_a_size_is_met_exactly(num_parameters: int) -> None:
    shapes = shapes_of_size(num_parameters)
    assert sum(map(math.prod, shapes)) == num_parameters
    assert all(math.prod(shape) for shape in shapes)
    assert any(len(shape) == 2 for shape in shapes)  # something is left to sparsify


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_shapes(name: str) -> None:
    assert sum(map(math.prod, shapes_of_model(name))) > 1000


def test_the_default_model_is_the_papers() -> None:
    assert sum(map(math.prod, shapes_of_model("resnet18"))) == 11_173_962


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown model 'resnet19'; did you mean 'resnet18'"):
        shapes_of_model("resnet19")


def test_backward_hands_over_what_was_given() -> None:
    shapes = shapes_of_size(500)
    model, noise = GivenModel(shapes, CPU), Noise(shapes, 0.01, CPU, seed=1)
    given = noise.gradients()
    model(given).backward()
    for weight, gradient in zip(model.weights, given, strict=True):
        assert weight.grad is not None
        assert torch.equal(weight.grad, gradient)


def test_gradients_are_ready_from_the_last_to_the_first() -> None:
    shapes = shapes_of_size(500)
    model, order = GivenModel(shapes, CPU), list[int]()
    for place, weight in enumerate(model.weights):
        weight.register_post_accumulate_grad_hook(lambda _, place=place: order.append(place))
    model(Noise(shapes, 0.01, CPU, seed=1).gradients()).backward()
    groups = [place // GROUP for place in order]
    assert groups == sorted(groups, reverse=True)
    assert len(set(groups)) > 1


def test_every_step_and_every_rank_has_other_gradients_of_the_same_scales() -> None:
    shapes = shapes_of_size(20_000)
    first, second = Noise(shapes, 0.01, CPU, seed=1), Noise(shapes, 0.01, CPU, seed=2)
    now, later, elsewhere = first.gradients(), first.gradients(), second.gradients()
    assert not torch.equal(now[0], later[0])
    assert not torch.equal(now[0], elsewhere[0])
    matrices = [place for place, shape in enumerate(shapes) if len(shape) == 2 and math.prod(shape) > 500]
    for place in matrices:
        assert float(now[place].std() / elsewhere[place].std()) == pytest.approx(1, rel=0.5)
    scales = [float(now[place].std()) for place in matrices]
    assert max(scales) > 3 * min(scales)


@pytest.mark.parametrize("density", [0.1, 0.01])
def test_the_first_threshold_of_the_papers_lets_the_target_pass(density: float) -> None:
    numel = 100_000
    flat = torch.cat([gradient.flatten() for gradient in Noise(shapes_of_size(numel), density, CPU, 1).gradients()])
    passing = int((flat.abs() >= control.initial_threshold(int(density * numel))).sum())
    assert passing == pytest.approx(density * numel, rel=0.2)


def test_tails_are_heavier_than_those_of_normal_numbers() -> None:
    numbers = heavy_tailed(100_000, CPU, seed=0)
    assert float((numbers**4).mean() / (numbers**2).mean() ** 2) > 4
