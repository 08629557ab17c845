"""Values that travel in fewer bits than they are computed in; what rounding leaves out stays in the residual.

[Note: eight bits]
A float8 has four bits of exponent, too few for gradients of any scale. So a message of them ends with a byte more: the
power of two that they are to be multiplied with, the smallest by which the largest of them fits. What is smaller than
that one by more than 2^18 does not travel. Powers of two change no digits, so a message made of what was read from one,
or of a part of it, is exact.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradsieve.checks import check_choice
from gradsieve.collectives import Collectives

FLOAT8 = torch.float8_e4m3fn
WIRES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": FLOAT8}
"""What values may travel as. With float32 they travel in the type of the residual where that has more bits."""
LARGEST = torch.finfo(FLOAT8).max
EXPONENTS = -126, 119
"""Of that power: both ends, and their inverses, are numbers of float32, and so is the largest value with each."""
BIAS = 127


def wire_dtype(name: str) -> torch.dtype:
    check_choice("wire", name, tuple(WIRES))
    return WIRES[name]


async def rounded_sum(values: Tensor, wire: torch.dtype, collectives: Collectives) -> tuple[Tensor, Tensor]:
    """The sum over ranks, as it travels in the type `wire`, and what of this rank's part in it did not travel.

    Every rank adds up one shard of all ranks, in the type of `values` and in the order of ranks, and keeps what is left
    out when that sum is rounded. An all-reduce would round at every addition, and nobody would know by how much.
    """
    (*rows, num_values), world = values.shape, collectives.world
    per_shard = -(-num_values // world)
    shards = pad(values, (0, world * per_shard - num_values)).reshape(*rows, world, per_shard)
    message, rest = rounded(shards, wire)
    arrived = await collectives.all_to_all(message, "rounded values")
    message, rest_of_sum = rounded(reduce(torch.add, decoded(arrived, wire, values.dtype).unbind(-2)), wire)
    collectives.own_shard(rest).add_(rest_of_sum)
    total = decoded(await collectives.all_gather(message, "rounded sums"), wire, values.dtype)
    return total.flatten()[:num_values], rest.flatten(-2)[..., :num_values]


def rounded(values: Tensor, wire: torch.dtype) -> tuple[Tensor, Tensor]:
    """A message of the nearest numbers of the type `wire`, one for each row, and how far they are from the values."""
    message = encoded(values, wire)
    # infinity less infinity would be no number, in the residual for ever
    return message, (values - decoded(message, wire, values.dtype)).nan_to_num_(nan=0.0)


def num_bytes(count: int, wire: torch.dtype) -> int:
    """Of a message of so many values."""
    return count * wire.itemsize + (1 if wire == FLOAT8 and count else 0)


def encoded(values: Tensor, wire: torch.dtype) -> Tensor:
    """The message. Finite values stay finite; what is not finite stays what it is or, in eight bits, is no number."""
    if wire == FLOAT8:
        return _in_eight_bits(values)
    largest = torch.finfo(wire).max
    return torch.where(values.isinf(), values, values.clamp(-largest, largest)).to(wire)


def decoded(message: Tensor, wire: torch.dtype, dtype: torch.dtype) -> Tensor:
    """The values of a message."""
    if wire != FLOAT8 or not message.shape[-1]:
        return message.to(dtype)
    return message[..., :-1].view(FLOAT8).to(dtype) * _power_of_two(message[..., -1:].int() - BIAS).to(dtype)


def _in_eight_bits(values: Tensor) -> Tensor:
    if not values.shape[-1]:
        return values.to(torch.uint8)
    largest = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().amax(-1, keepdim=True)
    digits, exponents = torch.frexp(largest.double() / LARGEST)
    exponents = (exponents - (digits == 0.5).int()).clamp(*EXPONENTS)
    fitting = (values * _power_of_two(-exponents).to(values.dtype)).clamp(-LARGEST, LARGEST)
    # there is no infinity among these numbers
    numbers = torch.where(values.isinf(), torch.nan, fitting).to(FLOAT8)
    return torch.cat([numbers.view(torch.uint8), (exponents + BIAS).to(torch.uint8)], dim=-1)


def _power_of_two(exponents: Tensor) -> Tensor:
    """By its bits: functions for it may be off by a rounding."""
    return ((exponents.int() + BIAS) << 23).view(torch.float32)
