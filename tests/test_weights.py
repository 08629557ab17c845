from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradsieve.weights import Weights


def weights_of(*tensors: Tensor) -> Weights:
    bounds = torch.tensor([0, *(tensor.numel() for tensor in tensors)]).cumsum(0).tolist()
    return Weights(lambda: torch.cat([tensor.flatten() for tensor in tensors]), tuple(bounds))


def test_the_scale_of_a_tensor_is_its_root_mean_square() -> None:
    scales = weights_of(torch.tensor([3.0, -4.0]), torch.full((5,), -2.0), torch.tensor([0.0, 0.0, 6.0, 0.0])).scales
    torch.testing.assert_close(scales, torch.tensor([12.5**0.5, 2.0, 3.0]))


def test_a_tensor_of_zeros_borrows_the_scale_of_the_model() -> None:
    scales = weights_of(torch.zeros(3), torch.tensor([4.0])).scales
    torch.testing.assert_close(scales, torch.tensor([2.0, 4.0]))


def test_an_empty_tensor_borrows_the_scale_of_the_model() -> None:
    scales = weights_of(torch.empty(0), torch.tensor([4.0, -4.0])).scales
    torch.testing.assert_close(scales, torch.tensor([4.0, 4.0]))


def test_a_model_of_zeros_has_the_scale_one() -> None:
    assert weights_of(torch.zeros(3), torch.zeros(2)).scales.tolist() == [1.0, 1.0]


TENSORS = torch.randn(7), torch.empty(0), torch.zeros(3), torch.randn(13) * 100, torch.empty(0)


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 23), (0, 0), (5, 5), (23, 23), (0, 7), (6, 8), (7, 10), (7, 7), (2, 22), (22, 23), (10, 23)],
)
def test_every_entry_of_a_stretch_has_the_scale_of_its_tensor(start: int, stop: int) -> None:
    weights = weights_of(*TENSORS)
    tensor_of_entry = [tensor for tensor, own in enumerate(TENSORS) for _ in range(own.numel())]
    expected = weights.scales[tensor_of_entry[start:stop]]
    assert torch.equal(weights.scale_of_entries(start, stop), expected)


def test_scales_of_entries_may_be_written_into() -> None:
    weights = weights_of(torch.full((4,), 3.0))
    weights.scale_of_entries(0, 4).zero_()
    assert weights.scale_of_entries(1, 3).tolist() == [3.0, 3.0]
    assert weights.scales.tolist() == [3.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_of_half_precision_do_not_overflow(dtype: torch.dtype) -> None:
    scales = weights_of(torch.full((1000,), 512.0, dtype=dtype)).scales
    assert scales.dtype == torch.float32
    assert scales.tolist() == [512.0]


def test_parameters_are_flattened_once_and_only_when_asked_for() -> None:
    calls: list[int] = []

    def flatten() -> Tensor:
        calls.append(1)
        return torch.arange(4.0)

    weights = Weights(flatten, (0, 4))
    assert calls == []
    assert weights.flat is weights.flat
    assert weights.scales is weights.scales
    assert calls == [1]
