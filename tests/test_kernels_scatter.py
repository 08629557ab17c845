"""`kernels.scatter` against `acc[..., support]` and `layout.write_back`, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gradsieve import layout
from gradsieve.layout import Layout
from gradsieve.types import Reduced
from kernel_place import DEVICE, MARKS, SIZES, Place, assert_same_bits, awkward, gather, write_back

pytestmark = MARKS

UNTOUCHED = 77.0


def support_of(place: Place, number: int, capacity: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """A support of so many entries, close together in one tile, with the vector's length behind its end."""
    close = torch.arange(4000, 4000 + number // 2)
    others = torch.randperm(place.numel)
    others = others[(others < 4000) | (others >= 4000 + number // 2)][: number - len(close)]
    entries = torch.cat([close, others]).sort().values
    assert len(entries) == number
    behind = torch.full((capacity - number,), place.numel)
    return torch.cat([entries, behind]).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("number", "capacity"), [(0, 1), (1, 1), (5, 20), (1500, 2100)])
def test_values_are_gathered(number: int, capacity: int, residual: torch.dtype, dtype: torch.dtype) -> None:
    place = Place(rows=2, dtype=residual)
    place.acc.copy_(awkward(*place.acc.shape))
    support = support_of(place, number, capacity, dtype)
    place.decision.record[7] = number
    # there is room for what travels whole beside them
    values = torch.full((2, capacity + 3), UNTOUCHED, device=DEVICE)
    gather(place.acc, support, place.decision, values)
    assert_same_bits(values[:, :number], place.acc[:, support[:number].long()].float())
    assert not values[:, number:capacity].any()
    assert (values[:, capacity:] == UNTOUCHED).all()


def written(place: Place, support: Tensor, mean: Tensor, gradient: Tensor) -> Tensor:
    """A flat gradient of the whole vector by the plain twin."""
    parameters = [nn.Parameter(torch.zeros(size, 1)) for size in SIZES]
    slots = Layout([(str(number), parameter) for number, parameter in enumerate(parameters)], set()).sparse
    reduced = Reduced(support.long(), mean, mean[:0], support.long(), (), (), len(support))
    flat = gradient.clone()
    layout.write_back(reduced, [(slot, flat[slot.start : slot.stop]) for slot in slots], place.bounds)
    return flat


GRADIENTS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", GRADIENTS, ids=str)
@pytest.mark.parametrize("number", [0, 1, 1000])
def test_means_are_written_and_zeros_elsewhere(number: int, dtype: torch.dtype) -> None:
    place = Place()
    support = support_of(place, number, 1100)
    mean = torch.randn(1100, device=DEVICE)
    gradient = torch.full((place.numel + 5,), UNTOUCHED, dtype=dtype, device=DEVICE)
    write_back(gradient, place.tiling.tiles, place.whole, place.sent(support), mean)
    expected = written(place, support[:number], mean[:number], gradient[: place.numel])
    assert_same_bits(gradient[: place.numel], expected)
    assert (gradient[place.numel :] == UNTOUCHED).all()


def test_means_that_are_no_numbers_are_written_as_they_are() -> None:
    place = Place()
    support, mean = support_of(place, 1000, 1000), awkward(1000)
    gradient = torch.empty(place.numel, device=DEVICE)
    write_back(gradient, place.tiling.tiles, place.whole, place.sent(support), mean)
    assert_same_bits(gradient, written(place, support, mean, gradient))


@pytest.mark.parametrize("dtype", GRADIENTS, ids=str)
def test_means_go_into_each_bucket_where_its_parameters_lie(dtype: torch.dtype) -> None:
    place = Place()
    support, mean = support_of(place, 900, 900), torch.randn(900, device=DEVICE)
    expected = written(place, support, mean, torch.empty(place.numel, dtype=dtype, device=DEVICE))
    for slots in ([4, 3], [1, 0, 2]):
        bucket = torch.full((10_000,), UNTOUCHED, dtype=dtype, device=DEVICE)
        whole, begins, begin = bucket.clone(), [], 3
        for slot in slots:
            begins.append((slot, begin))
            stretch = expected[place.bounds[slot] : place.bounds[slot + 1]]
            whole[begin : begin + len(stretch)] = stretch
            begin += len(stretch) + 3
        for run in place.tiling.bucket(begins):
            write_back(bucket, place.tiling.tiles, run, place.sent(support), mean)
        assert_same_bits(bucket, whole)


@given(st.permutations(range(5)), st.sets(st.integers(0, 4)), st.integers(0, 9))
def test_the_tiles_of_a_bucket_are_those_of_its_parameters(order: list[int], missing: set[int], gap: int) -> None:
    place = Place()
    begins, begin = [], gap
    for slot in order:
        if slot not in missing:
            begins.append((slot, begin))
            begin += SIZES[slot] + gap
    starts = place.tiling.tiles.starts.tolist()
    found: dict[int, int] = {}
    for run in place.tiling.bucket(begins):
        assert run.sources is not None
        assert run.num == len(run.sources)
        found |= zip(starts[run.first : run.first + run.num], run.sources.tolist(), strict=True)
    expected = {
        place.bounds[slot] + first: begin + first for slot, begin in begins for first in range(0, SIZES[slot], 4096)
    }
    assert found == expected
