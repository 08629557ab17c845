"""A table of texts and values: what a page, Markdown, CSV and a console make their tables from."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass, replace
from html import escape

from gradsieve.report import texts
from gradsieve.report.colours import Series


@dataclass(frozen=True)
class Column:
    """A column: its name in CSV, its title for people, and what it holds."""

    key: str
    title: str
    numeric: bool = False
    long: bool = False
    """May its texts be sentences?"""


@dataclass(frozen=True)
class Cell:
    """A value, and how people read it."""

    value: str | float | int | None
    text: str


@dataclass(frozen=True)
class Table:
    """A table of texts. Writes itself as CSV, of full values, and as Markdown."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    series: tuple[Series | None, ...] = ()
    """What series each row is of, for its colour."""

    def only(self, *keys: str) -> Table:
        """The columns of these names, as far as they hold anything."""
        places = [place for key in keys for place, column in enumerate(self.columns) if column.key == key]
        kept = [place for place in places if any(row[place].text != texts.ABSENT for row in self.rows)]
        columns = tuple(self.columns[place] for place in kept)
        return replace(self, columns=columns, rows=tuple(tuple(row[place] for place in kept) for row in self.rows))

    def filled(self) -> Table:
        """The columns that hold anything."""
        return self.only(*(column.key for column in self.columns))

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(column.key for column in self.columns)
        writer.writerows([_plain(cell.value) for cell in row] for row in self.rows)
        return text.getvalue()

    def markdown(self) -> str:
        head = [column.title for column in self.columns]
        line = ["---:" if column.numeric else "---" for column in self.columns]
        body = [[cell.text for cell in row] for row in self.rows]
        return "".join(f"| {' | '.join(map(_markdown, row))} |\n" for row in (head, line, *body))


def _plain(value: str | float | int | None) -> str | float | int:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value


def _markdown(text: str) -> str:
    return escape(texts.printable(text), quote=False).replace("|", "\\|")
