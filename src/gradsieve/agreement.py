"""Do all ranks want, and get, the same?

What differs between ranks (an older package on one host, another density in one script) would show as a hang, or not at
all. So ranks tell one another what they were given before the first step, and may compare what they got now and then.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsieve.collectives import Collectives

_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd number of 64 bits without a pattern, as a signed one."""
_CHUNK = 1 << 22
"""Entries of which a digest is made at a time."""
_GIVEN = "arguments of sparsify"


class AgreementError(RuntimeError):
    """Ranks that must be alike are not. Raised on every rank."""


def digest(tensors: Sequence[Tensor]) -> int:
    """A number of 64 bits that differs, nearly always, where any bit of the tensors does. Waits for the device."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    begin = 0
    for tensor in tensors:
        for chunk in torch.split(_bits(tensor), _CHUNK):
            place = torch.arange(begin, begin + len(chunk), device=chunk.device)
            total += ((chunk.long() + 1) * (place * _FACTOR | 1)).sum()
            begin += len(chunk)
    return int(total)


def _bits(tensor: Tensor) -> Tensor:
    # at most 32 at a time, or the factors would move the highest ones out of the sum
    kinds = {1: torch.uint8, 2: torch.int16}
    return tensor.detach().reshape(-1).view(kinds.get(tensor.element_size(), torch.int32))


def disagreement(step: int, digests: Sequence[int]) -> str:
    """The text of an error: whose averaged gradients differ."""
    usual, _ = Counter(digests).most_common(1)[0]
    others = [rank for rank, each in enumerate(digests) if each != usual]
    return (
        f"step {step}: the averaged gradients of {_ranks(others)} differ from those of the other "
        f"{len(digests) - len(others)}: the models drift apart from here; look for faulty memory, another version of "
        "torch on that host, or code that changes gradients on some ranks only, and go on from an earlier checkpoint"
    )


async def check_alike(own: Mapping[str, Any], collectives: Collectives) -> None:
    """Refuse to go on if ranks were given different things, or any of them failed and told `failure`."""
    texts = await collectives.gather_texts(json.dumps(own), _GIVEN)
    told: list[Mapping[str, Any]] = [json.loads(text) for text in texts]
    failed = {rank: each["error"] for rank, each in enumerate(told) if "error" in each}
    if failed:
        rank, error = next(iter(failed.items()))
        raise AgreementError(f"sparsify failed on {_ranks(list(failed))}: no rank can go on; on rank {rank}: {error}")
    for name in told[0]:
        values = [each.get(name) for each in told]
        odd = [rank for rank, value in enumerate(values) if value != values[0]]
        if odd:
            raise AgreementError(
                f"ranks disagree on {name}: {_ranks([0])} has {values[0]}, {_ranks(odd)} {values[odd[0]]}: "
                "give sparsify the same on every rank, and install one version everywhere"
            )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


async def tell_failure(error: Exception, collectives: Collectives) -> None:
    """Let the other ranks know, in their `check_alike`, that this one cannot go on."""
    await collectives.gather_texts(json.dumps({"error": f"{type(error).__name__}: {error}"}), _GIVEN)


async def check_same_model(words: Sequence[str], collectives: Collectives) -> None:
    """Refuse to go on if the parameters differ between ranks."""
    text = "\n".join(words)
    # a digest first, for the list of a large model is long
    digests = await collectives.gather_texts(hashlib.sha256(text.encode()).hexdigest(), _GIVEN)
    if len(set(digests)) > 1:
        lists = [each.split("\n") for each in await collectives.gather_texts(text, _GIVEN)]
        raise AgreementError(f"ranks disagree on the model: {_first_difference(lists)}")


def _first_difference(lists: Sequence[Sequence[str]]) -> str:
    for place in range(max(map(len, lists))):
        entries = [each[place] if place < len(each) else "no further parameter" for each in lists]
        odd = [rank for rank, entry in enumerate(entries) if entry != entries[0]]
        if odd:
            return f"at parameter {place} rank 0 has {entries[0]}, {_ranks(odd)} {entries[odd[0]]}"
    return "nowhere"
