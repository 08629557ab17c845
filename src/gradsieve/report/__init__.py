"""Reports: from the folders of runs to one page with its figures and tables.

`write_report` needs matplotlib and jinja2, the extra `report`; the rows and tables need neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradsieve.report.summary import RESULT_KEYS, TIME_KEYS, SummaryRow, summary_rows, summary_table
from gradsieve.report.table import Cell, Column, Table
from gradsieve.runs import Run

__all__ = [
    "RESULT_KEYS",
    "TIME_KEYS",
    "Cell",
    "Column",
    "MissingExtraError",
    "SummaryRow",
    "Table",
    "summary_rows",
    "summary_table",
    "write_report",
]

TITLE = "Gradient sparsification compared"


class MissingExtraError(ImportError):
    """A package of the extra `report` is not installed."""


def write_report(runs: Sequence[Run], output: Path, *, title: str = TITLE) -> Path:
    """Write `index.html`, which needs no other file, with `figures` and `tables` beside it; returns the page's path."""
    if not runs:
        raise ValueError("a report needs at least one run: give folders that gradsieve train or compare wrote")
    try:
        from gradsieve.report.page import write_page
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gradsieve"):
            raise
        raise MissingExtraError(
            f"reports need {error.name}, which is not installed: pip install 'gradsieve[report]'", name=error.name
        ) from error
    return write_page(runs, Path(output), title)
