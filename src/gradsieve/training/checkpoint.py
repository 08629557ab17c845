"""Checkpoints of a run: the state of every worker beside what all share.

    checkpoint/shared.pt    model, optimizer, steps done, seconds elapsed
    checkpoint/rank-N.pt    residual and what the method learned, for each worker

A new one is written beside the old and takes its place at once, so that a kill at any time leaves a whole one.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from gradsieve.runs import RunError
from gradsieve.training.engine import Engine

CURRENT, NEXT, LAST = "checkpoint", "checkpoint.partial", "checkpoint.last"


def save_checkpoint(folder: Path, engine: Engine, shared: dict[str, Any]) -> None:
    """Save all workers; every process calls it."""
    partial = folder / NEXT
    if engine.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        torch.save(shared, partial / "shared.pt")
    engine.barrier()
    for rank, state in engine.worker_states().items():
        torch.save(state, partial / _worker_file(rank))
    engine.barrier()
    if engine.rank == 0:
        _replace(folder)
    engine.barrier()


def _replace(folder: Path) -> None:
    if (folder / CURRENT).exists():
        shutil.rmtree(folder / LAST, ignore_errors=True)
        (folder / CURRENT).rename(folder / LAST)
    (folder / NEXT).rename(folder / CURRENT)
    shutil.rmtree(folder / LAST, ignore_errors=True)


def checkpoint_of(folder: Path) -> Path | None:
    """The last whole checkpoint of a run, if there is one."""
    return next((folder / name for name in (CURRENT, LAST) if (folder / name).is_dir()), None)


def load_checkpoint(folder: Path, engine: Engine) -> dict[str, Any]:
    """Bring the workers of this process to where the checkpoint was; returns what all share."""
    checkpoint = checkpoint_of(folder)
    if checkpoint is None:
        raise RunError(f"{folder} has no checkpoint to go on from: start it anew, with --checkpoint-every above 0")
    engine.load_worker_states(lambda rank: _load(checkpoint / _worker_file(rank), engine.device))
    return _load(checkpoint / "shared.pt", engine.device)


def _worker_file(rank: int) -> str:
    return f"rank-{rank}.pt"


def _load(path: Path, device: torch.device) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch.load fails in many ways on a damaged file
        raise RunError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    return state
