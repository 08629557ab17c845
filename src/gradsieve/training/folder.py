"""Where a new run is written."""

from __future__ import annotations

import re
import tempfile
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

from gradsieve.checks import UsageError
from gradsieve.runs import is_run
from gradsieve.training.config import TrainConfig
from gradsieve.training.plan import Plan

RUNS = Path("runs")


def run_name(plan: Plan) -> str:
    """A folder name that says what a run is."""
    return cell_name(f"{plan.task.name}-{plan.config.model}-{plan.label}", plan.config, plan.world)


def cell_name(start: str, config: TrainConfig, world: int) -> str:
    """A name that tells a run from the others of its grid; the method's is in the start."""
    density = "" if config.density is None else f"-{config.density!r}"
    kind = "v" if config.virtual is not None else "w"
    return plain_name(f"{start}{density}-{kind}{world}-s{config.seed}")


def plain_name(text: str) -> str:
    """A text as the name of a folder."""
    return re.sub(r"[^\w.]+", "-", text).strip("-")


def new_folder(plan: Plan) -> Path:
    """Make the folder that was asked for, or one with a name of its own."""
    if plan.config.output is not None:
        return empty_folder(plan.config.output)
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{run_name(plan)}"
    make_writable(RUNS)
    for attempt in count(1):
        folder = RUNS / (stem if attempt == 1 else f"{stem}-{attempt}")
        with suppress(FileExistsError):  # another run was begun in the same second
            folder.mkdir()
            return folder.resolve()
    raise AssertionError("there is always another number")


def empty_folder(folder: Path) -> Path:
    """Make a folder for a run, and see that it can be written."""
    folder = folder.expanduser().resolve()
    if is_run(folder):
        raise UsageError(f"{folder} holds a run already: go on with it by --resume {folder}, or give another --output")
    make_writable(folder)
    return folder


def make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"cannot write to the folder {folder}: {error.strerror or error}") from error
