from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.parcel import Entries, entries_of, num_bytes, packed, settled, summed, travelling, unpacked
from gradsieve.rounding import FLOAT8
from gradsieve.wire import Shape, WireError

NUMEL = 40
some_indices = st.lists(st.integers(0, NUMEL - 1), unique=True, max_size=NUMEL).map(sorted)


def entries(indices: list[int], values: list[float] | Tensor, dtype: torch.dtype = torch.float32) -> Entries:
    return Entries(torch.tensor(indices, dtype=torch.int64), torch.as_tensor(values).to(dtype))


def spread(sparse: Entries) -> Tensor:
    dense = torch.zeros(NUMEL, dtype=torch.float64)
    dense[sparse.indices] = sparse.values.double()
    return dense


@given(indices=some_indices, more=st.integers(0, 5), start=st.integers(0, 1 << 40))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_entries_arrive_as_they_were_sent(indices: list[int], more: int, start: int, dtype: torch.dtype) -> None:
    shape, sent = Shape.of(len(indices) + more, NUMEL), entries(indices, torch.randn(len(indices)), dtype)
    sent = sent._replace(indices=sent.indices + start)
    message = packed(sent, start, shape, dtype)
    assert len(message) == num_bytes(shape, dtype)
    arrived = unpacked(message, shape, dtype, start=start, stop=start + NUMEL)
    assert torch.equal(arrived.indices, sent.indices)
    assert torch.equal(arrived.values, sent.values.to(arrived.values.dtype))
    assert arrived.values.dtype == torch.promote_types(dtype, torch.float32)


def test_padding_is_zero_and_not_what_lay_in_memory() -> None:
    message = packed(entries([3], [1.0]), 0, Shape.of(4, NUMEL), torch.float32)
    assert not message[-12:].any()


def test_an_index_outside_the_stretch_is_refused() -> None:
    shape = Shape.of(2, NUMEL)
    with pytest.raises(WireError, match="indices from 3 to 30, outside 10:40"):
        unpacked(packed(entries([3, 30], [1.0, 2.0]), 0, shape, torch.float32), shape, torch.float32, start=10, stop=40)


@given(parts=st.lists(some_indices, min_size=1, max_size=4))
def test_a_sum_has_each_index_once(parts: list[list[int]]) -> None:
    given = [entries(indices, torch.randn(len(indices)), torch.float64) for indices in parts]
    total = summed(given, torch.float64)
    assert total.indices.tolist() == sorted({index for indices in parts for index in indices})
    torch.testing.assert_close(spread(total), torch.stack([spread(part) for part in given]).sum(0))


@pytest.mark.parametrize("wire", [torch.bfloat16, FLOAT8], ids=str)
def test_what_travels_in_fewer_bits_and_what_stays_are_the_whole(wire: torch.dtype) -> None:
    whole, shape = entries(list(range(NUMEL)), torch.randn(NUMEL)), Shape.of(NUMEL, NUMEL)
    sent, stays = travelling(whole, wire)
    assert torch.equal(spread(sent) + spread(stays), spread(whole))
    message = packed(sent, 0, shape, wire)
    assert len(message) == num_bytes(shape, wire) < num_bytes(shape, torch.float32)
    assert torch.equal(unpacked(message, shape, wire).values, sent.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_float32_or_more_all_of_it_travels(dtype: torch.dtype) -> None:
    whole = entries([1, 5], [0.1, 0.2], dtype)
    sent, stays = travelling(whole, torch.float32)
    assert sent is whole
    assert len(stays.indices) == 0


@given(left=some_indices, stayed=st.lists(some_indices, max_size=3))
def test_the_residual_loses_what_left_and_gains_what_stayed(left: list[int], stayed: list[list[int]]) -> None:
    acc = torch.randn(NUMEL, dtype=torch.float64)
    kept = [entries(indices, torch.randn(len(indices)), torch.float64) for indices in stayed]
    sent, rest = settled(acc, torch.tensor(left, dtype=torch.int64), kept)
    assert sent.tolist() == sorted({*left, *(index for indices in stayed for index in indices)})
    after = acc.clone()
    after[sent] = torch.zeros(len(sent), dtype=torch.float64) if rest is None else rest
    expected = acc.index_fill(0, torch.tensor(left, dtype=torch.int64), 0)
    torch.testing.assert_close(after, expected + sum((spread(each) for each in kept), torch.zeros(NUMEL)))
    assert (rest is None) == (not any(stayed))


def test_values_are_added_up_in_at_least_float32() -> None:
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    taken = [entries_of(torch.ones(3, dtype=dtype), torch.tensor([0, 2])).values.dtype for dtype in dtypes]
    assert taken == [torch.float32, torch.float32, torch.float64]
