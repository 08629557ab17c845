"""The networks: their published sizes, and what the training harness asks of each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple, Protocol

import pytest
import torch
from torch import Tensor, nn

from gradsieve import models

META = torch.device("meta")


def images(count: int) -> Tensor:
    return torch.randn(count, 3, 32, 32)


def digits(count: int) -> Tensor:
    return torch.rand(count, 64)


def tokens(count: int) -> Tensor:
    return torch.randint(50, (count, 12))


def pairs(count: int) -> Tensor:
    return torch.randint(30, (count, 5, 2))


class Case(NamedTuple):
    """A network, small where its size does not matter, and inputs for it."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]


class Classifier(Protocol):
    def __call__(self, num_classes: int = ...) -> nn.Module: ...


IMAGE_MODELS: dict[str, Classifier] = {
    "resnet18": models.resnet18,
    "resnet50": models.resnet50,
    "googlenet": models.googlenet,
    "senet18": models.senet18,
    "alexnet": models.alexnet,
    "vgg16": models.vgg16,
}

CASES = {
    **{name: Case(make, images) for name, make in IMAGE_MODELS.items()},
    "mlp": Case(models.mlp, digits),
    "cnn": Case(models.cnn, digits),
    "lstm": Case(lambda: models.lstm(50, width=16), tokens),
    "gpt": Case(lambda: models.gpt(50, context=16, width=24, layers=2, heads=3), tokens),
    "ncf": Case(lambda: models.ncf(30, 30, factors=8), pairs),
}
"""Without ResNet-152, which is ResNet-50 with more of the same blocks."""

every_model = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def output(model: nn.Module, inputs: Tensor) -> Tensor:
    result = model(inputs)
    assert isinstance(result, Tensor)
    return result


def evaluated(model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return output(model.eval(), inputs)


def test_every_model_is_tested() -> None:
    assert {*CASES, "resnet152"} == set(models.__all__)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (models.resnet18, 11_173_962),
        (lambda: models.resnet18(width=16), 701_466),
        (models.resnet50, 23_520_842),
        (models.resnet152, 58_156_618),
        (models.googlenet, 6_166_250),
        (lambda: models.googlenet(width=48), 392_738),
        (models.senet18, 11_260_354),
        (lambda: models.senet18(width=16), 706_744),
        (models.alexnet, 23_272_266),
        (models.vgg16, 14_728_266),
        (models.mlp, 1_126_410),
        (models.cnn, 963_018),
        (lambda: models.lstm(33_278), 53_450_278),
        (lambda: models.gpt(65), 10_795_776),
        (lambda: models.ncf(943, 1682), 170_657),
    ],
)
def test_number_of_parameters(make: Callable[[], nn.Module], expected: int) -> None:
    with META:
        assert size(make()) == expected


@pytest.mark.parametrize("num_classes", [10, 100])
@pytest.mark.parametrize("make", [*IMAGE_MODELS.values(), models.resnet152])
def test_image_models_give_a_logit_per_class(make: Classifier, num_classes: int) -> None:
    with META:
        assert output(make(num_classes), images(2)).shape == (2, num_classes)


@pytest.mark.parametrize("num_classes", [10, 100])
def test_digit_models_give_a_logit_per_class(num_classes: int) -> None:
    for model in (models.mlp(num_classes=num_classes), models.cnn(num_classes)):
        assert output(model, digits(3)).shape == (3, num_classes)


def test_mlp_has_the_layers_asked_for() -> None:
    model = models.mlp(inputs=6, hidden=5, layers=3, num_classes=4)
    linear = [(part.in_features, part.out_features) for part in model.modules() if isinstance(part, nn.Linear)]
    assert linear == [(6, 5), (5, 5), (5, 5), (5, 4)]


@every_model
def test_every_parameter_gets_a_gradient(case: Case) -> None:
    model = case.make()
    output(model, case.inputs(2)).square().mean().backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@every_model
def test_one_example_is_enough_to_evaluate_and_gives_what_it_gives_in_a_batch(case: Case) -> None:
    model, inputs = case.make(), case.inputs(2)
    torch.testing.assert_close(evaluated(model, inputs[:1]), evaluated(model, inputs)[:1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", IMAGE_MODELS.values(), ids=IMAGE_MODELS.keys())
def test_channels_last_changes_nothing(make: Classifier) -> None:
    model, inputs = make(10), images(2)
    contiguous = evaluated(model, inputs)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    moved = evaluated(model, inputs.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(moved, contiguous, rtol=1e-3, atol=1e-4)


@every_model
def test_parameters_can_be_given_from_outside(case: Case) -> None:
    model, other, inputs = case.make(), case.make(), case.inputs(2)
    with torch.no_grad():
        given = torch.func.functional_call(model.eval(), dict(other.named_parameters()), (inputs,))
    torch.testing.assert_close(given, evaluated(other, inputs))


@every_model
def test_trains_under_autocast(case: Case) -> None:
    model = case.make()
    with torch.autocast("cpu", torch.bfloat16):
        logits = output(model, case.inputs(2))
    assert logits.dtype == torch.bfloat16
    logits.float().square().mean().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in model.parameters())


@every_model
def test_a_seed_makes_the_same_weights(case: Case) -> None:
    first, again, other = (seeded(case, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def seeded(case: Case, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return case.make()


@every_model
def test_a_state_dict_brings_a_model_back(case: Case) -> None:
    model, other, inputs = case.make(), case.make(), case.inputs(2)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(evaluated(other, inputs), evaluated(model, inputs))


@pytest.mark.parametrize("name", ["lstm", "gpt"])
def test_a_token_changes_no_logits_ahead_of_it(name: str) -> None:
    model, before = CASES[name].make(), tokens(2)
    after = before.clone()
    after[:, 7] = (after[:, 7] + 1) % 50
    ahead, changed = evaluated(model, before), evaluated(model, after)
    assert ahead.shape == (2, 12, 50)
    torch.testing.assert_close(changed[:, :7], ahead[:, :7])
    assert not torch.allclose(changed[:, 7:], ahead[:, 7:])


def test_gpt_refuses_more_tokens_than_its_context() -> None:
    model = models.gpt(50, context=8, width=12, layers=1, heads=2)
    assert output(model, torch.zeros(1, 8, dtype=torch.long)).shape == (1, 8, 50)
    with pytest.raises(ValueError, match="9 tokens are more than the context of 8"):
        model(torch.zeros(1, 9, dtype=torch.long))


@pytest.mark.parametrize(
    ("make", "width", "allowed"),
    [
        (models.resnet18, 0, "at least 1"),
        (models.senet18, 8, "at least 16"),
        (models.googlenet, 0, "a multiple of 24"),
        (models.googlenet, 100, "a multiple of 24"),
    ],
)
def test_a_width_that_cannot_be_is_refused(make: Callable[..., nn.Module], width: int, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"width must be {allowed}.* not {width}"):
        make(width=width)


def test_gpt_refuses_heads_that_do_not_divide_its_width() -> None:
    with pytest.raises(ValueError, match="not 10 for 3 heads"):
        models.gpt(50, width=10, heads=3)


def test_gpt_starts_its_residual_projections_smaller() -> None:
    model = models.gpt(50, width=96, layers=8, heads=2)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            expected = 0.02 / 4 if "projection" in name else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.1), name


def test_lstm_of_one_layer() -> None:
    assert output(models.lstm(50, width=8, layers=1), tokens(2)).shape == (2, 12, 50)


@pytest.mark.parametrize("shape", [(), (7,), (4, 100)])
def test_ncf_gives_a_logit_per_pair(shape: tuple[int, ...]) -> None:
    model = models.ncf(30, 40)
    assert output(model, torch.randint(30, (*shape, 2))).shape == shape


def test_ncf_tells_users_from_items() -> None:
    model = models.ncf(2, 40)
    assert output(model, torch.tensor([1, 39])).isfinite()
    with pytest.raises(IndexError):
        model(torch.tensor([39, 1]))


def test_ncf_refuses_too_few_factors() -> None:
    with pytest.raises(ValueError, match="at least 2, not 1"):
        models.ncf(30, 40, factors=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@every_model
def test_a_step_can_be_captured_in_a_cuda_graph_under_autocast(case: Case) -> None:
    # 800 examples: embeddings have another backward pass for many indices
    model, inputs = case.make().cuda(), case.inputs(800).cuda()

    def step() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = output(model, inputs).float().square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    graph.replay()
    torch.cuda.synchronize()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.filterwarnings("ignore:RNN module weights")  # they cost a copy, no more
@every_model
def test_parameters_can_be_given_from_outside_on_cuda(case: Case) -> None:
    model, other, inputs = case.make().cuda(), case.make().cuda(), case.inputs(2).cuda()
    copies = {name: parameter.detach().clone() for name, parameter in other.named_parameters()}
    with torch.no_grad():
        given = torch.func.functional_call(model.eval(), copies, (inputs,))
    torch.testing.assert_close(given, evaluated(other, inputs), rtol=1e-2, atol=1e-2)
