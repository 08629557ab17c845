"""The command line: `gradsieve train`, `compare`, `report`, `demo`, `bench`."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `gradsieve` command and of `python -m gradsieve`."""
    try:
        from gradsieve.cli.app import run
    except ImportError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"gradsieve: the command line needs {error.name}: pip install 'gradsieve[cli]'")
    run()
