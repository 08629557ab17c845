"""Sieves in checkpoints of torch.distributed.checkpoint, over real processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from fleet import Fleet
from gradsieve import Sharded
from gradsieve.sharded import BLOCK, _as_state, _as_tensors
from test_hook_states import unsent
from test_states import plain, saved
from toys import averaged, flat, make, sparsified

DENSITY = 0.05
RUNS = [("union", "model"), ("exdyna", "model"), ("dgc", "model"), ("exdyna-paper", "bucket"), ("iwp-per-layer", "model")]
RARELY_REBUILT = {"find_unused_parameters": True}


def _save(folder: str) -> dict[str, list[Tensor]]:
    """Three steps of each, a checkpoint, and the three steps that follow."""
    found = {}
    for variant, scope in RUNS:
        model, sieve = sparsified(make(variant, DENSITY), ddp=RARELY_REBUILT, scope=scope)
        averaged(model, 3)
        path = f"{folder}/{variant}"
        dcp.save({"model": model.state_dict(), "training": {"sieve": Sharded(sieve)}}, checkpoint_id=path)
        torch.save(sieve.state_dict(), f"{folder}/{variant}-{dist.get_rank()}.pt")
        found[variant] = averaged(model, 3, first=3)
    return found


def _load(folder: str) -> dict[str, tuple[Tensor, list[Tensor]]]:
    found = {}
    for variant, scope in RUNS:
        model, sieve = sparsified(make(variant, DENSITY), ddp=RARELY_REBUILT, scope=scope)
        path = f"{folder}/{variant}"
        dcp.load({"model": model.state_dict(), "training": {"sieve": Sharded(sieve, checkpoint=path)}}, checkpoint_id=path)
        found[variant] = unsent(sieve), averaged(model, 3, first=3)
    return found
