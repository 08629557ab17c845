"""The union of marked indices, in ascending order.

The plain twin is `reference.merged` followed by `reference.thinned`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsieve.control import OVERLAP_REACH, OVERLAP_STEPS, OVERLAP_UNIT
from gradsieve.kernels.pick import thinned
from gradsieve.kernels.sieve import num_ones
from gradsieve.kernels.tiling import MOST_CHUNKS, Decision

WORDS = 256
"""Words of 32 marks that a program looks at at a time."""
_CHUNKS = tl.constexpr(MOST_CHUNKS)
_UNIT = tl.constexpr(OVERLAP_UNIT)
_STEPS = tl.constexpr(OVERLAP_STEPS)
_REACH = tl.constexpr(OVERLAP_REACH)


@triton.jit
def _marks_from(marks, first, num_words, WORDS: tl.constexpr):
    """The words from number `first` on, and which they are."""
    word = first + tl.arange(0, WORDS)
    return word, tl.load(marks + word, mask=word < num_words, other=0)


@triton.jit(do_not_specialize=["num_words", "share"])
def _measure(marks, num_words, share, chunk_counts, WORDS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * share
    ones = tl.zeros([WORDS], dtype=tl.int32)
    for first in range(start, tl.minimum(start + share, num_words), WORDS):
        _, held = _marks_from(marks, first, num_words, WORDS)
        ones += num_ones(held)
    tl.store(chunk_counts + tl.program_id(0), tl.sum(ones))


@triton.jit(do_not_specialize=["num_words", "share", "num_chunks", "target", "percent", "capacity", "numel"])
def _merge(
    marks, num_words, share, chunk_counts, num_chunks, target, percent, record, learned, support, capacity, numel,
    WORDS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    chunks = tl.arange(0, _CHUNKS)
    counts = tl.load(chunk_counts + chunks, mask=chunks < num_chunks, other=0).to(tl.int64)
    distinct = tl.sum(counts)
    before = tl.sum(tl.where(chunks < chunk, counts, 0))
    # too many: what is left out stays in the residual
    kept = tl.where(100 * distinct > percent * target.to(tl.int64), target.to(tl.int64), distinct)
    start = chunk.to(tl.int64) * share
    for first in range(start, tl.minimum(start + share, num_words), WORDS):
        word, held = _marks_from(marks, first, num_words, WORDS)
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
        before += tl.sum(in_word)
    behind = tl.zeros([WORDS], dtype=support.dtype.element_ty) + numel
    for first in range(kept + chunk * WORDS, capacity, num_chunks * WORDS):
        place = first + tl.arange(0, WORDS)
        tl.store(support + place, behind, mask=place < capacity)
    if chunk == 0:
        travelled = tl.load(record + 5)
        tl.store(record + 6, distinct)
        tl.store(record + 7, tl.minimum(kept, capacity))
        if (travelled > 0) & (distinct > 0):
            # the plain twin is `control.next_overlap`
            lately, latest = tl.load(learned + 1), _UNIT * travelled // distinct
            smooth = tl.minimum(((_STEPS - 1) * lately + latest) // _STEPS, latest * (_REACH + 1) // _REACH)
            smooth = tl.maximum(tl.maximum(smooth, latest * _REACH // (_REACH + 1)), _UNIT)
            tl.store(learned + 1, tl.where(tl.load(learned + 2) == _UNIT, smooth, latest))
            tl.store(learned + 2, distinct * 0 + _UNIT)


def merge(marks: Tensor, decision: Decision, support: Tensor, *, numel: int, target: int, percent: int) -> None:
    """Write the marked indices into `support`, thinned to the target where they exceed `percent` of it, then `numel`.

    Notes in the record how many there are, and in what was learned how far proposals overlap.
    """
    num_words = len(marks)
    share = WORDS * triton.cdiv(num_words, WORDS * MOST_CHUNKS)
    num_chunks = triton.cdiv(num_words, share)
    chunk_counts = torch.empty(num_chunks, dtype=torch.int32, device=marks.device)
    _measure[(num_chunks,)](marks, num_words, share, chunk_counts, WORDS=WORDS, num_warps=4)
    _merge[(num_chunks,)](
        marks,
        num_words,
        share,
        chunk_counts,
        num_chunks,
        target,
        percent,
        decision.record,
        decision.following,
        support,
        len(support),
        numel,
        WORDS=WORDS,
        num_warps=4,
    )
