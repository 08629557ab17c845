"""Which of two ways a step goes: plain torch, which works everywhere, or Triton's kernels, on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch

Path = Literal["auto", "plain", "triton"]
_chosen: Path = "auto"


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def uses_triton(device: torch.device) -> bool:
    """Do methods that have kernels use them here? What is already made goes on as it began."""
    if _chosen == "auto":
        return device.type == "cuda" and has_triton()
    return _chosen == "triton"


@contextmanager
def using(path: Path) -> Iterator[None]:
    """Make what is made within by this path: to compare the two."""
    global _chosen
    before, _chosen = _chosen, path
    try:
        yield
    finally:
        _chosen = before


def path(device: torch.device) -> str:
    """In words, how steps go here."""
    if uses_triton(device):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return f"Triton on {name}"
    why = "" if device.type != "cuda" or _chosen == "plain" else ", for Triton is not installed"
    return f"plain torch on {device.type}{why}"
