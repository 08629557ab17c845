"""Every kernel compiles for a GPU; that needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to compile")

COMPILE = Path(__file__).parent / "compile_kernels.py"


def test_every_kernel_compiles_for_a_gpu() -> None:
    # in a process of its own, for here they may be run by the interpreter
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    names = set(done.stdout.split())
    assert {"_sieve", "_clear", "_count", "_decide", "_pick", "_pack", "_tally", "_unpack"} <= names
    assert {"_measure", "_merge", "_gather", "_write_back"} <= names
