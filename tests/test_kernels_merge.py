"""`kernels.merge` against `reference.merged` and `reference.thinned`, index for index."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve import control, kernels
from gradsieve.kernels.tiling import Decision, Record
from kernel_place import DEVICE, MARKS, merge

pytestmark = MARKS


def marks_of(indices: Tensor, numel: int) -> Tensor:
    """A bit for each entry of the vector, set where it is among the indices."""
    bits = torch.zeros(-(-numel // 32) * 32, dtype=torch.int64)
    bits[indices] = 1
    words = (bits.view(-1, 32) << torch.arange(32)).sum(1)
    return words.to(torch.int32).to(DEVICE)


def assert_merged(
    indices: Tensor,
    numel: int,
    *,
    target: int,
    percent: int = 105,
    travelled: int | None = None,
    dtype: torch.dtype = torch.int32,
    lately: tuple[int, int] = (5, 3),
) -> None:
    """That the union is that of the plain twins, cut where it is too large, and what is learned is noted."""
    travelled = len(indices) if travelled is None else travelled
    decision = Decision.empty(1, 1, 1, DEVICE)
    decision.record[5:8] = travelled
    decision.following.copy_(torch.tensor([77, *lately]))
    support = torch.full((target * percent // 100 + 1,), -1, dtype=dtype, device=DEVICE)
    merge(marks_of(indices, numel), decision, support, numel=numel, target=target, percent=percent)
    union = kernels.merged(indices)
    expected = union if 100 * len(union) <= percent * target else kernels.thinned(union, target)
    assert support.dtype == dtype
    assert support.tolist() == expected.tolist() + [numel] * (len(support) - len(expected))
    record = Record.of(decision.record.tolist(), 1)
    assert (record.travelled, record.distinct, record.support) == (travelled, len(union), len(expected))
    overlap = control.next_overlap(*lately, travelled, len(union)) if travelled and len(union) else lately
    assert decision.following.tolist() == [77, *overlap]


def drawn(number: int, numel: int) -> Tensor:
    """So many indices, some of them several times."""
    return torch.randint(0, numel, (number,), generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("target", [5000, 3900, 3000, 100, 1])
@pytest.mark.parametrize("numel", [20_000, 8192, 8193])
def test_the_union_is_merged_and_cut_to_the_target(numel: int, target: int, dtype: torch.dtype) -> None:
    assert_merged(drawn(4000, numel), numel, target=target, dtype=dtype)


@pytest.mark.parametrize("percent", [100, 105])
@pytest.mark.parametrize("distinct", [99, 100, 101, 105, 106])
def test_the_union_is_cut_where_it_exceeds_the_tolerance(distinct: int, percent: int) -> None:
    assert_merged(torch.randperm(9000)[:distinct], 9000, target=100, percent=percent)


@pytest.mark.parametrize("lately", [1, 1.7, 64])
@pytest.mark.parametrize("travelled", [300, 301, 997])
def test_what_is_learned_moves_by_a_part_of_the_step(lately: float, travelled: int) -> None:
    known = int(lately * control.OVERLAP_UNIT), control.OVERLAP_UNIT
    assert_merged(torch.randperm(9000)[:300], 9000, target=300, travelled=travelled, lately=known)


@pytest.mark.parametrize("travelled", [0, 40])
@pytest.mark.parametrize("indices", [[], [0], [8191, 8192, 8999]], ids=str)
def test_from_nothing_nothing_is_learned(indices: list[int], travelled: int) -> None:
    assert_merged(torch.tensor(indices, dtype=torch.int64), 9000, target=4, travelled=travelled)


@given(st.lists(st.integers(0, 99), max_size=120), st.integers(1, 99), st.sampled_from([100, 101, 105]))
@example([], 1, 105)
@example(list(range(100)), 99, 100)
def test_small_unions_are_merged_too(indices: list[int], target: int, percent: int) -> None:
    assert_merged(torch.tensor(indices, dtype=torch.int64), 100, target=target, percent=percent)


@pytest.mark.parametrize("target", [900, 300])
def test_programs_that_look_at_several_stretches_of_marks_merge_them_in_order(
    target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradsieve.kernels.merge.MOST_CHUNKS", 3)
    assert_merged(drawn(1000, 9 * 8192), 9 * 8192, target=target)


def test_marks_up_to_the_last_bit_of_a_word_count() -> None:
    assert_merged(torch.arange(31, 64 * 32, 32), 64 * 32, target=64)


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [2**31 - 1, 2**31 + 100_000])
def test_a_long_vector_is_merged_rightly(numel: int) -> None:
    entries = torch.cat([torch.arange(0, 300), torch.arange(numel - 300, numel)])
    words = torch.zeros(-(-numel // 32), dtype=torch.int32, device="cuda")
    for index in entries.tolist():
        words[index // 32] |= (1 << index % 32) - (1 << 32 if index % 32 == 31 else 0)
    decision = Decision.empty(1, 1, 1, DEVICE)
    support = torch.full((700,), -1, dtype=torch.int64, device="cuda")
    merge(words, decision, support, numel=numel, target=1000, percent=105)
    assert support.tolist() == entries.tolist() + [numel] * 100
