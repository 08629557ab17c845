"""Checkpoints of a run: the state of every worker beside what all share.

    checkpoint/shared.pt    model, optimizer, steps done, seconds elapsed
    checkpoint/rank-N.pt    residual and what the method learned, for each worker
    checkpoint/*.sha256     the SHA-256 of each of them, as `sha256sum -c` reads it

torch.load does not look at the checksums in a file, and takes one with a wrong bit for whole. So a file is loaded only
if it is what was saved. Checkpoints of before there were sums have none at all, and are loaded without.

A new one is written beside the old, flushed to the disk and put in its place by a rename, so that a kill at any time
leaves a whole one. It may be loaded by another number of workers than saved it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from gradsieve.runs import RunError
from gradsieve.training.engine import Engine

CURRENT, NEXT, LAST = "checkpoint", "checkpoint.partial", "checkpoint.last"

_BLOCK = 1 << 20
"""Bytes of a file that are read at a time."""


def save_checkpoint(folder: Path, engine: Engine, shared: dict[str, Any]) -> None:
    """Save all workers; every process calls it."""
    partial = folder / NEXT
    if engine.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _save(shared | {"world": engine.plan.world}, partial / "shared.pt")
    engine.barrier()
    for rank, state in engine.worker_states().items():
        _save(state, partial / _worker_file(rank))
    engine.barrier()
    if engine.rank == 0:
        _replace(folder)
    engine.barrier()


def _save(value: Any, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(value, file)
        _flush(file)
    with _sum_file(path).open("wb") as file:
        file.write(_sum_line(path))
        _flush(file)


def _flush(file: BinaryIO) -> None:
    file.flush()
    # or the disk might hear of the rename before it hears of what was renamed
    os.fsync(file.fileno())


def _sum_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _sum_line(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return f"{digest.hexdigest()}  {path.name}\n".encode()


def _flush_names(folder: Path) -> None:
    """Bring to the disk which files a folder holds."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(folder: Path) -> None:
    _flush_names(folder / NEXT)
    if (folder / CURRENT).exists():
        shutil.rmtree(folder / LAST, ignore_errors=True)
        (folder / CURRENT).rename(folder / LAST)
    (folder / NEXT).rename(folder / CURRENT)
    _flush_names(folder)
    shutil.rmtree(folder / LAST, ignore_errors=True)


def checkpoint_of(folder: Path) -> Path | None:
    """The last whole checkpoint of a run, if there is one."""
    return next((folder / name for name in (CURRENT, LAST) if (folder / name).is_dir()), None)


def load_checkpoint(folder: Path, engine: Engine) -> dict[str, Any]:
    """Bring the workers of this process to where the checkpoint was; returns what all share."""
    checkpoint = checkpoint_of(folder)
    if checkpoint is None:
        raise RunError(f"{folder} has no checkpoint to go on from: start it anew, with --checkpoint-every above 0")
    shared = _load(checkpoint / "shared.pt", engine.device)
    # checkpoints of before they could be loaded by other numbers of workers do not say it
    saved_world = shared.pop("world", None) or len(list(checkpoint.glob(_worker_file("*"))))
    engine.load_worker_states(_reader(checkpoint, saved_world, engine))
    return shared


def _reader(checkpoint: Path, saved_world: int, engine: Engine) -> Callable[[int], dict[str, Any]]:
    """Brings the state of a rank; where another number of workers saved, a share of all of theirs."""
    world = engine.plan.world
    if saved_world == world:
        return lambda rank: _load(checkpoint / _worker_file(rank), engine.device)
    saved = [_load(checkpoint / _worker_file(rank), torch.device("cpu")) for rank in range(saved_world)]
    return engine.resized(saved).__getitem__


def _worker_file(rank: int | str) -> str:
    return f"rank-{rank}.pt"


def _load(path: Path, device: torch.device) -> dict[str, Any]:
    try:
        _check_sum(path)
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch.load fails in many ways on a damaged file
        raise RunError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(state, dict):
        raise RunError(f"{path} cannot be loaded: it holds a {type(state).__name__} and no state of a run")
    return state


def _check_sum(path: Path) -> None:
    if any(path.parent.glob(_sum_file(Path("*.pt")).name)) and _sum_file(path).read_bytes() != _sum_line(path):
        raise ValueError(
            f"it is not what was saved there, for its SHA-256 is not that in {_sum_file(path).name}; "
            "start the run anew, or put a copy of the checkpoint in its place"
        )
