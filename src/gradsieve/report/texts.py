"""Numbers and names as people read them."""

from __future__ import annotations

import math
import re
import textwrap

ABSENT = "\N{EN DASH}"
"""Stands for a number that there is not."""
MINUS = "\N{MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"
MOST_LINES = 3
"""Of a label's options."""
_LABEL = re.compile(r"([^(,]*?)([(,].*?)?( at [\d.e-]+)?")


def number(value: float, digits: int = 3) -> str:
    """So many significant digits, no exponent within reason.

    >>> number(0.0123456), number(1234.5)
    ('0.0123', '1234')
    """
    if not math.isfinite(value):
        return ABSENT
    if value == 0 or not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits}g}"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


def percent(fraction: float, digits: int = 2) -> str:
    """
    >>> percent(0.00634), percent(1.0)
    ('0.63 %', '100 %')
    """
    return f"{number(100 * fraction, digits)} %" if math.isfinite(fraction) else ABSENT


def signed(value: float, places: int) -> str:
    """
    >>> signed(0.314, 2), signed(0.0, 2), signed(-0.001, 2)
    ('+0.31', '0.00', '0.00')
    """
    if not math.isfinite(value):
        return ABSENT
    size = f"{abs(value):.{places}f}"
    return size if float(size) == 0 else f"{MINUS if value < 0 else '+'}{size}"


def data(num_bytes: float, digits: int = 3) -> str:
    """
    >>> data(512), data(45_300), data(4_505_640)
    ('512 B', '45.3 kB', '4.51 MB')
    """
    if not math.isfinite(num_bytes):
        return ABSENT
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{number(num_bytes / size, digits)} {unit}"
    return f"{num_bytes:.0f} B"


def milliseconds(seconds: float) -> str:
    """
    >>> milliseconds(0.00231)
    '2.31'
    """
    return number(1000 * seconds)


def times(factor: float) -> str:
    return f"{number(factor)}{TIMES}" if math.isfinite(factor) else ABSENT


def words(name: str) -> str:
    """
    >>> words("bits_per_character")
    'bits per character'
    """
    return name.replace("_", " ")


def count(amount: int, thing: str) -> str:
    """
    >>> count(1, "worker"), count(4, "worker")
    ('1 worker', '4 workers')
    """
    return f"{amount} {thing}" if amount == 1 else f"{amount} {thing}s"


def listed(values: list[str], most: int = 12) -> str:
    """Values in a row, the tail of a long row counted only."""
    rest = len(values) - most
    return ", ".join(values[:most]) + (f" and {rest} more" if rest > 0 else "")


def kept(text: str) -> str:
    """Text that no line break cuts."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def printable(text: str) -> str:
    """One line without control characters, which neither SVG nor a table can hold."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def shortened(text: str, width: int) -> str:
    """
    >>> shortened("hard_threshold", 8)
    'hard_th…'
    """
    line = printable(text)
    return line if len(line) <= width else line[: width - 1] + "…"


def wrapped(label: str, width: int) -> str:
    """A long label in lines: its method and density, which tells it from others, and its options below.

    >>> wrapped("micro(control='paper') at 0.001", 20)
    "micro at 0.001\\n(control='paper')"
    >>> wrapped("union, float8 at 0.01", 20)
    'union at 0.01\\nfloat8'
    >>> wrapped("hard_threshold at 0.001", 20)
    'hard_threshold\\nat 0.001'
    """
    line = printable(label)
    if len(line) <= width:
        return line
    parts = _LABEL.fullmatch(line)
    assert parts is not None  # whatever has one line
    method, options, density = (part or "" for part in parts.groups())
    first = [method + density] if len(method + density) <= width else [shortened(method, width), density.strip()]
    further = textwrap.wrap(
        options.removeprefix(", "), width, max_lines=MOST_LINES, placeholder=" …", break_on_hyphens=False
    )
    return "\n".join(filter(None, [*first, *further]))
