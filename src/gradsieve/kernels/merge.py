"""The union of marked indices, in ascending order.

The plain twin is `reference.merged` followed by `reference.thinned`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsieve.kernels.pick import thinned
from gradsieve.kernels.sieve import num_ones
from gradsieve.kernels.tiling import MARKED, Decision

WORDS = MARKED // 32
"""Words of 32 marks that a program handles."""


@triton.jit
def _marks_of(marks, num_words, WORDS: tl.constexpr):
    """The words of this program's chunk, and which they are."""
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    return word, tl.load(marks + word, mask=word < num_words, other=0)


@triton.jit(do_not_specialize=["num_words"])
def _measure(marks, num_words, chunk_counts, WORDS: tl.constexpr):
    _, held = _marks_of(marks, num_words, WORDS)
    tl.store(chunk_counts + tl.program_id(0), tl.sum(num_ones(held)))


@triton.jit(do_not_specialize=["num_words", "num_chunks", "target", "percent", "capacity"])
def _merge(
    marks, num_words, upto, num_chunks, target, percent, record, learned, support, capacity,
    WORDS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    before = tl.load(upto + chunk - 1, mask=chunk > 0, other=0)
    distinct = tl.load(upto + num_chunks - 1)
    # too many: what is left out stays in the residual
    kept = tl.where(100 * distinct > percent * target.to(tl.int64), target.to(tl.int64), distinct)
    word, held = _marks_of(marks, num_words, WORDS)
    in_word = num_ones(held)
    number = before + (tl.cumsum(in_word) - in_word)
    # few are marked: bit by bit takes fewer turns than a word has bits
    for _ in range(tl.max(in_word)):
        lowest = held & -held
        index = word * 32 + num_ones(lowest - 1)
        place = number
        # nearly always all stay, and divisions take long
        if kept < distinct:
            place = thinned(number, distinct, kept)
        shown = (held != 0) & (place >= 0) & (place < capacity)
        tl.store(support + place, index.to(support.dtype.element_ty), mask=shown)
        held ^= lowest
        number += 1
    if chunk == 0:
        travelled = tl.load(record + 5)
        tl.store(record + 6, distinct)
        tl.store(record + 7, tl.minimum(kept, capacity))
        if (travelled > 0) & (distinct > 0):
            tl.store(learned + 1, travelled)
            tl.store(learned + 2, distinct)


def merge(
    marks: Tensor, chunk_counts: Tensor, decision: Decision, support: Tensor, *, target: int, percent: int
) -> None:
    """Write the marked indices into `support`, thinned to the target where they exceed `percent` of it.

    Notes in the record how many there are, and in what was learned how far proposals overlap.
    """
    grid = (len(chunk_counts),)
    _measure[grid](marks, len(marks), chunk_counts, WORDS=WORDS, num_warps=4)
    _merge[grid](
        marks,
        len(marks),
        torch.cumsum(chunk_counts, 0),
        len(chunk_counts),
        target,
        percent,
        decision.record,
        decision.following,
        support,
        len(support),
        WORDS=WORDS,
        num_warps=4,
    )
