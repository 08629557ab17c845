"""Entries that travel with their values: indices as `wire` has them, then the values, in one message of bytes.

Its size is known to sender and receivers from the shape of the indices and the type of the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradsieve import kernels, rounding, wire
from gradsieve.collectives import Letter
from gradsieve.wire import Shape


class Entries(NamedTuple):
    """Some entries of the flat vector."""

    indices: Tensor
    """Ascending."""
    values: Tensor

    def at(self, places: Tensor) -> Entries:
        return Entries(self.indices[places], self.values[places])


def entries_of(acc: Tensor, indices: Tensor) -> Entries:
    """A rank's own, in the type that values are added up in."""
    return Entries(indices, acc.index_select(0, indices).to(torch.promote_types(acc.dtype, torch.float32)))


def travelling(entries: Entries, dtype: torch.dtype) -> tuple[Entries, Entries]:
    """The entries as they are once they have travelled as `dtype`, and what of them that leaves out, which is for the
    residual."""
    if dtype == torch.float32:  # or the type that they are in, if it has more bits
        return entries, Entries(entries.indices[:0], entries.values[:0])
    message, rest = rounding.rounded(entries.values, dtype)
    nearest = rounding.decoded(message, dtype, entries.values.dtype)
    return entries._replace(values=nearest), entries._replace(values=rest)


def num_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Of a message: no longer where it holds fewer entries."""
    return shape.num_bytes + rounding.num_bytes(shape.most, dtype)


def packed(entries: Entries, start: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    """A message of entries that lie in the stretch from `start` on and whose values are numbers of the type `dtype`."""
    values = entries.values.new_zeros(shape.most)
    values[: len(entries.values)] = entries.values
    return torch.cat([wire.encode(entries.indices, start, shape), rounding.encoded(values, dtype).view(torch.uint8)])


def unpacked(message: Tensor, shape: Shape, dtype: torch.dtype, *, start: int = 0, stop: int | None = None) -> Entries:
    """The entries in a message, with values of at least float32; refused as `wire.decode` does."""
    indices = wire.decode(message[: shape.num_bytes], shape, start=start, stop=stop).indices
    # copied, because a view in numbers must begin at a multiple of their size
    stored = message[shape.num_bytes :].clone().view(torch.uint8 if dtype == rounding.FLOAT8 else dtype)
    values = rounding.decoded(stored, dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    return Entries(indices, values[: len(indices)])


def letter_of(entries: Entries, start: int, shape: Shape, dtype: torch.dtype) -> Letter[Entries]:
    """The same, not written yet."""
    return Letter(entries, num_bytes(shape, dtype), lambda: packed(entries, start, shape, dtype))


def wire_of(entries: Entries, dtype: torch.dtype) -> torch.dtype:
    """What the values of entries really travel as, where `dtype` is asked for."""
    return entries.values.dtype if dtype == torch.float32 else dtype


def summed(parts: Sequence[Entries], dtype: torch.dtype) -> Entries:
    """The sum of sparse vectors, added up in their order."""
    indices = kernels.merged(torch.cat([part.indices for part in parts]))
    values = torch.zeros(len(indices), dtype=dtype, device=indices.device)
    for part in parts:
        # no index comes twice in a part, so that the order of additions is known on every device
        values.index_add_(0, torch.searchsorted(indices, part.indices), part.values.to(dtype))
    return Entries(indices, values)


def settled(acc: Tensor, left: Tensor, stayed: Sequence[Entries]) -> tuple[Tensor, Tensor | None]:
    """`Reduced.sent` and `Reduced.rest` of a rank whose entries at the indices `left` are gone, and to whose residual
    is added what `stayed` here."""
    stayed = [entries for entries in stayed if len(entries.indices)]
    if not stayed:
        return left, None
    sent = kernels.merged(torch.cat([left, *(entries.indices for entries in stayed)]))
    rest = entries_of(acc, sent).values
    rest[torch.searchsorted(sent, left)] = 0
    for entries in stayed:
        rest.index_add_(0, torch.searchsorted(sent, entries.indices), entries.values.to(rest.dtype))
    return sent, rest
