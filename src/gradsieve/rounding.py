"""Values that travel in fewer bits than they are computed in; what rounding leaves out stays in the residual."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradsieve.checks import check_choice
from gradsieve.collectives import Collectives

WIRES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What values may travel as. With float32 they travel in the type of the residual where that has more bits."""


def wire_dtype(name: str) -> torch.dtype:
    check_choice("wire", name, tuple(WIRES))
    return WIRES[name]


async def rounded_sum(values: Tensor, wire: torch.dtype, collectives: Collectives) -> tuple[Tensor, Tensor]:
    """The sum over ranks, in the type `wire`, and what of this rank's part in it did not travel.

    Every rank adds up one shard of all ranks, in the type of `values` and in the order of ranks, and keeps what is left
    out when that sum is rounded. An all-reduce would round at every addition, and nobody would know by how much.
    """
    (*rows, num_values), world = values.shape, collectives.world
    per_shard = -(-num_values // world)
    shards = pad(values, (0, world * per_shard - num_values)).reshape(*rows, world, per_shard)
    message, rest = rounded(shards, wire)
    arrived = await collectives.all_to_all(message, "rounded values")
    message, rest_of_sum = rounded(reduce(torch.add, arrived.to(values.dtype).unbind(-2)), wire)
    collectives.own_shard(rest).add_(rest_of_sum)
    total = await collectives.all_gather(message, "rounded sums")
    return total.flatten()[:num_values], rest.flatten(-2)[..., :num_values]


def rounded(values: Tensor, wire: torch.dtype) -> tuple[Tensor, Tensor]:
    """The nearest numbers of the type `wire`, and how far they are from the values.

    Finite values stay finite, and what is not finite stays what it is.
    """
    largest = torch.finfo(wire).max
    nearest = torch.where(values.isinf(), values, values.clamp(-largest, largest)).to(wire)
    # infinity less infinity would be no number, in the residual for ever
    return nearest, (values - nearest.to(values.dtype)).nan_to_num_(nan=0.0)
