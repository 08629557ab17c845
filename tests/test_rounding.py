from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.collectives import TeamCollectives, lockstep, run
from gradsieve.rounding import FLOAT8, WIRES, decoded, encoded, num_bytes, rounded, rounded_sum, wire_dtype
from ranks import CPU, Recording, recorders

BFLOAT16 = torch.bfloat16
LARGEST = torch.finfo(BFLOAT16).max


FEWER_BITS = [BFLOAT16, FLOAT8]
STEPS = {BFLOAT16: 2.0**-8, FLOAT8: 2.0**-4}
"""Half the distance of neighbours, relative to them."""


def summed(values: Tensor, wire: torch.dtype = BFLOAT16) -> tuple[Tensor, Tensor, list[Recording]]:
    """The sum of the rows, alike on all ranks, what each kept back, and the collectives of the ranks."""
    collectives = recorders(len(values))
    outcomes = lockstep([rounded_sum(row, wire, own) for row, own in zip(values, collectives, strict=True)])
    for total, _ in outcomes:
        assert total.dtype == values.dtype
        assert torch.equal(total.view(torch.uint8), outcomes[0][0].view(torch.uint8))
    return outcomes[0][0], torch.stack([rest for _, rest in outcomes]), collectives


def nearest_and_rest(values: Tensor, wire: torch.dtype) -> tuple[Tensor, Tensor]:
    message, rest = rounded(values, wire)
    assert message.nbytes == num_bytes(values.numel(), wire)
    return decoded(message, wire, values.dtype), rest


@pytest.mark.parametrize("name", WIRES)
def test_a_wire_is_named_like_its_type(name: str) -> None:
    assert str(wire_dtype(name)).startswith(f"torch.{name}")


@pytest.mark.parametrize("name", ["float16", "", None, torch.bfloat16])
def test_another_wire_is_refused_with_those_that_there_are(name: Any) -> None:
    with pytest.raises(ValueError, match=r"^wire must be one of 'float32', 'bfloat16', 'float8', not "):
        wire_dtype(cast("str", name))


finite = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=30)


@pytest.mark.parametrize("wire", FEWER_BITS, ids=str)
@given(finite)
def test_what_is_rounded_and_what_is_left_are_the_value_to_the_bit(wire: torch.dtype, values: list[float]) -> None:
    given = torch.tensor(values, dtype=torch.float32)
    nearest, rest = nearest_and_rest(given, wire)
    assert nearest.isfinite().all()
    assert torch.equal(nearest.double() + rest.double(), given.double())
    # half a step, or half of the smallest number there is; the largest may be further away
    smallest = 2.0**-134 if wire == BFLOAT16 else max([abs(value) for value in values], default=0) * 2.0**-17
    step = (given.double().abs() * STEPS[wire] * (1 + (given.abs() > 2.9e38))).clamp(min=max(smallest, 2.0**-134))
    assert (rest.double().abs() <= step).all()


@given(finite, st.data())
def test_eight_bits_that_have_arrived_travel_on_as_they_are_all_of_them_or_some(
    values: list[float], data: st.DataObject
) -> None:
    nearest, _ = nearest_and_rest(torch.tensor(values, dtype=torch.float32), FLOAT8)
    some = nearest[data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))]
    for arrived in (nearest, some):
        assert torch.equal(decoded(encoded(arrived, FLOAT8), FLOAT8, torch.float32), arrived)


def test_every_row_has_a_scale_of_its_own() -> None:
    values = torch.tensor([[1.0, 3.0, -7.0], [1e-20, 3e-20, 0.0], [1e30, -3e30, 7e30]])
    message, rest = rounded(values, FLOAT8)
    assert message.shape == (3, 4)
    assert (rest.abs() <= STEPS[FLOAT8] * values.abs()).all()


@pytest.mark.parametrize("wire", FEWER_BITS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_finite_travels_as_such_and_leaves_nothing(wire: torch.dtype, dtype: torch.dtype) -> None:
    nearest, rest = nearest_and_rest(torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0], dtype=dtype), wire)
    assert nearest.isfinite().tolist() == [False, False, False, True]
    assert wire == FLOAT8 or nearest[:2].tolist() == [torch.inf, -torch.inf]
    assert nearest[2].isnan()
    assert rest.tolist() == [0.0] * 4


@pytest.mark.parametrize(("wire", "largest"), [(BFLOAT16, LARGEST), (FLOAT8, 448 * 2.0**119)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float32, torch.finfo(torch.float32).max), (torch.float64, 1e300)], ids=str
)
def test_finite_numbers_beyond_the_largest_travel_as_that(
    dtype: torch.dtype, value: float, wire: torch.dtype, largest: float
) -> None:
    given = torch.tensor([value, -value], dtype=dtype)
    nearest, rest = nearest_and_rest(given, wire)
    assert nearest.tolist() == [largest, -largest]
    assert torch.equal(nearest.to(dtype) + rest, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 2, 3, 7, 100])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("wire", FEWER_BITS, ids=str)
def test_the_sum_and_what_is_left_are_what_was_there(
    wire: torch.dtype, world: int, numel: int, dtype: torch.dtype
) -> None:
    scales = 6 if wire == BFLOAT16 else 1
    values = torch.randn(world, numel, dtype=dtype) * torch.logspace(-scales, scales, numel, dtype=dtype)
    before = values.clone()
    total, rest, _ = summed(values, wire)
    assert rest.dtype == dtype
    assert (total.shape, rest.shape) == ((numel,), (world, numel))
    assert torch.equal(values, before)
    precision = torch.finfo(dtype).eps
    lost = values.double().sum(0) - total.double() - rest.double().sum(0)
    assert (lost.abs() <= world * precision * values.double().abs().sum(0)).all()
    smallest = 0.0 if wire == BFLOAT16 else 2.0**-16 * float(values.abs().sum())
    assert (rest.sum(0).abs() <= 2.1 * STEPS[wire] * values.abs().sum(0) + smallest).all()


def test_the_owner_of_a_shard_keeps_what_is_left_of_its_sum() -> None:
    # each is a number of eight bits, and no two of them have a sum of eight bits
    total, rest, _ = summed(torch.tensor([[256.0] * 6, [1.0] * 6, [2.0] * 6]))
    assert total.tolist() == [260.0] * 6
    assert rest.tolist() == [[-1.0, -1.0, 0, 0, 0, 0], [0, 0, -1.0, -1.0, 0, 0], [0, 0, 0, 0, -1.0, -1.0]]


def test_sums_are_not_rounded_on_their_way() -> None:
    # in bfloat16 each addition of 1 would be lost
    total, rest, _ = summed(torch.tensor([[256.0], *[[1.0]] * 4]))
    assert total.tolist() == [260.0]
    assert not rest.any()


@pytest.mark.parametrize("wire", FEWER_BITS, ids=str)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_sum_that_is_not_finite_leaves_nothing_for_ever(bad: float, wire: torch.dtype) -> None:
    total, rest, _ = summed(torch.tensor([[1.0, bad, 3.0], [1.0, 2.0, 1e-3]]), wire)
    assert total.isfinite().tolist() == [True, False, True]
    assert rest.isfinite().all()


def test_two_of_the_largest_are_infinite_as_in_float32() -> None:
    total, rest, _ = summed(torch.full((2, 1), torch.finfo(torch.float32).max))
    assert total.tolist() == [torch.inf]
    assert rest.isfinite().all()


@pytest.mark.parametrize("wire", FEWER_BITS, ids=str)
@pytest.mark.parametrize(("world", "numel", "per_shard"), [(1, 7, 7), (2, 7, 4), (3, 7, 3), (3, 6, 2), (5, 2, 1)])
def test_few_bytes_a_value_are_handed_over_and_as_many_for_the_own_shard(
    world: int, numel: int, per_shard: int, wire: torch.dtype
) -> None:
    _, _, collectives = summed(torch.randn(world, numel), wire)
    shard = 2 * per_shard if wire == BFLOAT16 else per_shard + 1
    for own in collectives:
        assert own.operations == ["all_to_all", "all_gather"]
        assert own.wire_bytes == sum(message.num_bytes for message in own.messages) == (world + 1) * shard
        # what passes through a link in a ring, in fewer bytes than four
        assert own.link_bytes == pytest.approx(2 * (world - 1) * shard)


@pytest.mark.parametrize("wire", FEWER_BITS, ids=str)
def test_nothing_is_no_message(wire: torch.dtype) -> None:
    _, _, collectives = summed(torch.empty(3, 0), wire)
    assert not any(own.messages for own in collectives)


@pytest.mark.parametrize("numel", [0, 1, 5, 64])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("wire", FEWER_BITS, ids=str)
def test_a_team_sums_what_ranks_in_process_sum(wire: torch.dtype, world: int, numel: int) -> None:
    values, team = torch.randn(world, numel), TeamCollectives(world, CPU)
    total, rest = run(rounded_sum(values, wire, team))
    expected, expected_rest, (first, *_) = summed(values, wire)
    assert torch.equal(total, expected)
    assert torch.equal(rest, expected_rest)
    assert (team.wire_bytes, team.num_messages) == (first.wire_bytes, first.num_messages)
    assert team.link_bytes == first.link_bytes
