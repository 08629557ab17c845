"""`gradsieve report`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Optional

import typer

from gradsieve.checks import UsageError
from gradsieve.digests import is_digest, read_runs
from gradsieve.runs import Run
from gradsieve.training.folder import make_writable


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Runs or digests of some, or folders that hold such; or JSON files of a lab.", metavar="RUNS..."
        ),
    ],
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--output", help="Folder to write to. Default: report/ in the first of RUNS."),
    ] = None,
    title: Annotated[Optional[str], typer.Option("--title", help="Headline of the page.")] = None,  # noqa: UP045
) -> int:
    """Write a page with the papers' figures, from runs that train or compare made, or one on bandwidths from a lab's.

    The page is one file that needs no network; figures (PNG, SVG) and tables (CSV, Markdown) lie beside it.
    """
    of_lab = [path for path in runs if path.suffix == ".json" and not is_digest(path)]
    if of_lab and len(of_lab) < len(runs):
        raise UsageError("a page is of runs or of a lab's JSON files, not of both: write two")
    folder = (output or (runs[0].parent if runs[0].suffix == ".json" else runs[0]) / "report").expanduser().resolve()
    page = write_of_lab(runs, folder, title) if of_lab else write(read_runs(runs), folder, title)
    typer.echo(str(page))
    return 0


def check_packages() -> None:
    missing = [package for package in ("jinja2", "matplotlib") if find_spec(package) is None]
    if missing:
        raise UsageError(f"reports need {' and '.join(missing)}: pip install 'gradsieve[report]'")


def write(runs: list[Run], output: Path, title: str | None = None) -> Path:
    """Write the report of runs into a folder; returns the page's path."""
    check_packages()
    from gradsieve.report import write_report

    make_writable(output)
    return write_report(runs, output, title=title) if title else write_report(runs, output)


def write_of_lab(files: list[Path], output: Path, title: str | None = None) -> Path:
    """Write the page of a lab's measurements into a folder; returns its path."""
    check_packages()
    from gradsieve.report.lab_page import write_lab_page

    make_writable(output)
    return write_lab_page(files, output, title)
