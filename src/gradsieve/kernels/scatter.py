"""Values out of the accumulated vector, and means into the gradient.

The plain twins are `acc[..., support]`, `torch.bincount` and `layout.write_back` with `Residual.clear`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gradsieve.kernels.tiling import TILE, Decision, Run, Sent, Tiles

ENTRIES = 128
"""Entries of the support that a program handles."""
WRITTEN = 512
"""Entries that a program writes at a time, one a thread: some tiles have thousands."""
WRITE_WARPS = 16


@triton.jit(do_not_specialize=["capacity", "stride"])
def _gather(acc, acc_row, support, record, values, stride, capacity, ENTRIES: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    there = place < tl.load(record + 7)
    index = tl.load(support + place, mask=there, other=0).to(tl.int64)
    value = tl.load(acc + row * acc_row + index, mask=there, other=0.0).to(values.dtype.element_ty)
    tl.store(values + row * stride + place, value, mask=place < capacity)


def gather(acc: Tensor, support: Tensor, decision: Decision, values: Tensor) -> None:
    """The values of all rows at the support, `values[:, :capacity]`; zeros behind its end."""
    capacity = len(support)
    _gather[(-(-capacity // ENTRIES), len(acc))](
        acc,
        acc.stride(0),
        support,
        decision.record,
        values,
        values.stride(0),
        capacity,
        ENTRIES=ENTRIES,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["first_tile"])
def _write_back(
    gradient, starts, sources, first_tile, support, mean, borders,
    TILE: tl.constexpr, ENTRIES: tl.constexpr, ALIGNED: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    tile = first_tile + tl.program_id(0)
    flat = tl.load(starts + tile)
    length = (tl.load(starts + tile + 1) - flat).to(tl.int32)
    source = flat if IN_PLACE else tl.load(sources + tl.program_id(0))
    if ALIGNED:
        source = tl.multiple_of(source, 8)
    gradient += source
    first = tl.load(borders + tile)
    last = tl.load(borders + tile + 1)
    # nearly always all entries of the tile: they are on their way while the zeros are written
    numbers = first + tl.arange(0, ENTRIES)
    inside = numbers < last
    index = tl.load(support + numbers, mask=inside, other=0).to(tl.int64)
    value = tl.load(mean + numbers, mask=inside, other=0.0)
    place = tl.arange(0, TILE)
    nothing = tl.zeros([TILE], dtype=gradient.dtype.element_ty)
    # a mask would forbid wide stores
    if length == TILE:
        tl.store(gradient + place, nothing)
    else:
        tl.store(gradient + place, nothing, mask=place < length)
    # the means go over the zeros
    tl.debug_barrier()
    tl.store(gradient + (index - flat), value.to(gradient.dtype.element_ty), mask=inside)
    for number in range(first + ENTRIES, last, ENTRIES):
        numbers = number + tl.arange(0, ENTRIES)
        inside = numbers < last
        index = tl.load(support + numbers, mask=inside, other=0).to(tl.int64)
        value = tl.load(mean + numbers, mask=inside, other=0.0)
        tl.store(gradient + (index - flat), value.to(gradient.dtype.element_ty), mask=inside)


def write_back(gradient: Tensor, tiling: Tiles, run: Run, sent: Sent, mean: Tensor) -> None:
    """Write the means into a bucket's gradient over a run of tiles, and zeros elsewhere."""
    _write_back[(run.num,)](
        gradient,
        tiling.starts,
        tiling.starts if run.sources is None else run.sources,
        run.first,
        sent.support,
        mean,
        sent.borders,
        TILE=TILE,
        ENTRIES=WRITTEN,
        ALIGNED=run.aligned,
        IN_PLACE=run.sources is None,
        num_warps=WRITE_WARPS,
    )
