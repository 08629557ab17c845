from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradsieve.layout import (
    Layout,
    excluded_names,
    fewer_than_two_dimensions,
    flattened,
    shaped,
    write_back,
)
from gradsieve.types import ALL, Indices, Reduced, Span

Named = list[tuple[str, nn.Parameter]]


def conv_net() -> Named:
    """Matrices, vectors, channels-last convolutions, a scalar, a parameter without entries."""
    net = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Linear(4, 5))
    net[0].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    net.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    net.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
    return list(net.named_parameters())


NAMES = ["scale", "empty", "0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]


def test_the_example_is_what_the_tests_below_think() -> None:
    named = dict(conv_net())
    assert list(named) == NAMES
    assert not named["0.weight"].is_contiguous()


@pytest.mark.parametrize(
    ("exclude", "names"),
    [
        ("*.bias", {"0.bias", "1.bias", "2.bias"}),
        ("scale", {"scale"}),
        (["1.*", "2.weight"], {"1.weight", "1.bias", "2.weight"}),
        (["*.bias", "0.*"], {"0.weight", "0.bias", "1.bias", "2.bias"}),
        ([], set()),
        ((), set()),
        (lambda name, parameter: "1" in name or parameter.dim() == 4, {"0.weight", "1.weight", "1.bias"}),
        (lambda name, parameter: False, set()),  # noqa: ARG005 - a predicate of both
        (fewer_than_two_dimensions, {"scale", "0.bias", "1.weight", "1.bias", "2.bias"}),
    ],
)
def test_parameters_are_excluded_by_pattern_or_predicate(exclude: Any, names: set[str]) -> None:
    assert excluded_names(conv_net(), exclude) == names


@pytest.mark.parametrize("exclude", ["*.gain", ["*.bias", "*.gain"]])
def test_a_pattern_that_matches_nothing_is_refused_with_names_to_choose_from(exclude: str | list[str]) -> None:
    with pytest.raises(ValueError, match=r"no parameter matches '\*\.gain'.*named like scale, empty, 0\.weight"):
        excluded_names(conv_net(), exclude)


def test_patterns_mind_upper_and_lower_case() -> None:
    with pytest.raises(ValueError, match=r"no parameter matches '\*\.BIAS'"):
        excluded_names(conv_net(), "*.BIAS")


@pytest.mark.parametrize("excluded", [set(), {"0.bias", "2.weight"}, {"scale"}, set(NAMES)])
def test_slots_tile_the_two_vectors_in_the_order_of_the_parameters(excluded: set[str]) -> None:
    named = conv_net()
    layout = Layout(named, excluded)
    for slots, total, names in (
        (layout.sparse, layout.numel, [name for name in NAMES if name not in excluded]),
        (layout.dense, layout.dense_numel, [name for name in NAMES if name in excluded]),
    ):
        assert [slot.name for slot in slots] == names
        assert [entry for slot in slots for entry in range(slot.start, slot.stop)] == list(range(total))
    assert layout.numel + layout.dense_numel == sum(parameter.numel() for _, parameter in named)
    for name, parameter in named:
        slot = layout.slot(parameter)
        assert slot.name == name
        assert slot.parameter is parameter
        assert slot.stop - slot.start == parameter.numel()
        assert slot.span == Span(slot.start, slot.stop)
        assert slot.sparse == (name not in excluded)


def test_bounds_are_where_the_sparsified_parameters_begin_and_end() -> None:
    layout = Layout(conv_net(), {"0.bias", "scale"})
    assert layout.bounds == (0, 0, 48, 52, 56, 76, 81)
    assert layout.numel == 81
    assert layout.dense_numel == 5


def test_a_layout_of_nothing_is_empty() -> None:
    layout = Layout([], set())
    assert (layout.numel, layout.dense_numel, layout.bounds) == (0, 0, (0,))


def _numbered(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


COMPACT: dict[str, Callable[[], Tensor]] = {
    "scalar": lambda: torch.tensor(3.0),
    "vector": lambda: _numbered(5),
    "matrix": lambda: _numbered(3, 4),
    "transposed": lambda: _numbered(3, 4).t(),
    "channels last": lambda: _numbered(4, 3, 2, 5).to(memory_format=torch.channels_last),
    "channels last, one channel": lambda: _numbered(4, 1, 2, 5).to(memory_format=torch.channels_last),
    "channels last, 1x1": lambda: _numbered(4, 3, 1, 1).to(memory_format=torch.channels_last),
    "channels last 3d": lambda: _numbered(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
    "permuted": lambda: _numbered(2, 3, 4).permute(1, 2, 0),
    "permuted, with an odd stride where there is one entry": lambda: _numbered(12).as_strided((3, 1, 4), (1, 50, 3)),
    "part of a vector": lambda: _numbered(20)[6:12].view(2, 3),
    "empty": lambda: torch.empty(0, 3),
    "empty channels last": lambda: torch.empty(2, 0, 3, 3).to(memory_format=torch.channels_last),
}
GAPPED: dict[str, Callable[[], Tensor]] = {
    "every other column": lambda: _numbered(3, 8)[:, ::2],
    "expanded": lambda: _numbered(3, 1).expand(3, 4),
    "columns of a wider matrix": lambda: _numbered(4, 6)[:, :3],
}


@pytest.mark.parametrize("make", [*COMPACT.values(), *GAPPED.values()], ids=[*COMPACT, *GAPPED])
def test_a_tensor_of_any_memory_layout_comes_back_from_flat(make: Callable[[], Tensor]) -> None:
    tensor = make()
    flat = flattened(tensor)
    assert flat.shape == (tensor.numel(),)
    assert torch.equal(shaped(flat, tensor), tensor)
    # and from a stretch in the middle of a longer vector
    vector = torch.cat([torch.full((7,), -1.0), flat, torch.full((5,), -1.0)])
    assert torch.equal(shaped(vector[7 : 7 + tensor.numel()], tensor), tensor)


@pytest.mark.parametrize("make", COMPACT.values(), ids=COMPACT)
def test_a_compact_tensor_is_flattened_without_a_copy_in_the_order_of_memory(make: Callable[[], Tensor]) -> None:
    tensor = make()
    flat = flattened(tensor)
    assert flat.data_ptr() == tensor.data_ptr()
    flat.fill_(9.0)
    assert bool((tensor == 9).all())


def test_channels_last_is_flattened_with_channels_innermost() -> None:
    tensor = _numbered(2, 3, 2, 2)
    flat = flattened(tensor.to(memory_format=torch.channels_last))
    assert torch.equal(flat, tensor.permute(0, 2, 3, 1).flatten())


@pytest.mark.parametrize("make", COMPACT.values(), ids=COMPACT)
def test_writing_into_the_shape_writes_into_the_vector(make: Callable[[], Tensor]) -> None:
    tensor = make()
    vector = torch.zeros(tensor.numel() + 4)
    shaped(vector[4:], tensor).copy_(tensor)
    assert torch.equal(vector[4:], flattened(tensor))
    assert not vector[:4].any()


def test_flat_parameters_are_a_copy_of_the_sparsified_ones_in_order() -> None:
    layout = Layout(conv_net(), {"0.bias", "scale"})
    flat = layout.flat_parameters()
    assert not flat.requires_grad
    assert torch.equal(flat, torch.cat([flattened(slot.parameter.detach()) for slot in layout.sparse]))
    flat.zero_()
    assert any(bool(slot.parameter.any()) for slot in layout.sparse)


def test_flat_parameters_by_name_are_the_parameters() -> None:
    named = conv_net()
    layout = Layout(named, {"0.bias"})
    by_name = layout.by_name(layout.flat_parameters())
    assert set(by_name) == {name for name, _ in named} - {"0.bias"}
    for slot in layout.sparse:
        assert torch.equal(by_name[slot.name], slot.parameter)


def test_fill_is_the_inverse_of_by_name() -> None:
    layout = Layout(conv_net(), {"1.bias"})
    vector, restored = torch.randn(layout.numel), torch.zeros(layout.numel)
    layout.fill(restored, layout.by_name(vector))
    assert torch.equal(restored, vector)


def test_fill_takes_tensors_of_another_memory_layout() -> None:
    # a checkpoint may come from a run that was not channels-last
    layout = Layout(conv_net(), set())
    vector, restored = torch.randn(layout.numel), torch.zeros(layout.numel)
    layout.fill(restored, {name: tensor.contiguous() for name, tensor in layout.by_name(vector).items()})
    assert torch.equal(restored, vector)


def test_by_name_is_a_copy() -> None:
    layout = Layout(conv_net(), set())
    vector = torch.randn(layout.numel)
    before = vector.clone()
    for tensor in layout.by_name(vector).values():
        tensor.zero_()
    assert torch.equal(vector, before)


def reduced_of(indices: Indices, mean: Tensor, dense: Tensor) -> Reduced:
    return Reduced(
        indices=indices, mean=mean, dense=dense, sent=indices, counts=(len(mean),), thresholds=(), distinct=len(mean)
    )


def written(layout: Layout, reduced: Reduced, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The gradients after `write_back`, in the order in which DDP's buckets hold them: last layers first."""
    slots = [*layout.sparse, *layout.dense][::-1]
    gradients = [(slot, torch.full((slot.stop - slot.start,), 77.0, dtype=dtype)) for slot in slots]
    write_back(reduced, gradients, layout.bounds)
    return {slot.name: gradient for slot, gradient in gradients}


@pytest.mark.parametrize("support", [[], [0], [80], [0, 1, 47, 48, 51, 52, 60, 80], list(range(81))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_are_the_means_at_the_support_and_zero_elsewhere(support: list[int], dtype: torch.dtype) -> None:
    layout = Layout(conv_net(), {"0.bias", "scale"})
    indices, mean = torch.tensor(support, dtype=torch.int64), torch.arange(1.0, len(support) + 1)
    dense = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0])
    gradients = written(layout, reduced_of(indices, mean, dense), dtype)
    expected = torch.zeros(layout.numel)
    expected[indices] = mean
    sparse = torch.cat([gradients[slot.name] for slot in layout.sparse])
    assert sparse.dtype == dtype
    assert torch.equal(sparse.float(), expected)
    assert gradients["scale"].tolist() == [-1.0]
    assert gradients["0.bias"].tolist() == [-2.0, -3.0, -4.0, -5.0]


def test_gradients_of_a_dense_method_are_the_means() -> None:
    layout = Layout(conv_net(), {"0.bias"})
    mean, dense = torch.randn(layout.numel), torch.randn(4)
    gradients = written(layout, reduced_of(ALL, mean, dense))
    assert torch.equal(torch.cat([gradients[slot.name] for slot in layout.sparse]), mean)
    assert torch.equal(gradients["0.bias"], dense)


def test_gradients_that_did_not_arrive_are_left_out() -> None:
    layout = Layout(conv_net(), set())
    slot = layout.sparse[2]
    gradient = torch.full((slot.stop - slot.start,), 77.0)
    indices = torch.tensor([0, slot.start + 3, layout.numel - 1])
    write_back(reduced_of(indices, torch.tensor([1.0, 2.0, 3.0]), torch.empty(0)), [(slot, gradient)], layout.bounds)
    assert gradient.nonzero().flatten().tolist() == [3]
    assert float(gradient[3]) == 2.0
