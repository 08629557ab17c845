"""Where a run comes from: enough to know what was run, on what, and to run it again."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy
import torch

import gradsieve


def provenance(device: torch.device) -> dict[str, Any]:
    """Versions, commits, machine and command of this process, now."""
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": _command(),
        "gradsieve": gradsieve.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "commit": _commit(Path.cwd()),
        "package_commit": _commit(Path(__file__).parent),
    }


def _command() -> str:
    program = Path(sys.argv[0]).name if sys.argv else ""
    program = "python -m gradsieve" if program == "__main__.py" else program
    return " ".join([program, *map(shlex.quote, sys.argv[1:])])


def _cpu() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def _commit(folder: Path) -> str | None:
    """The commit checked out in a folder, marked if files differ from it; None outside of a repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
