"""Refusals of bad options: what came and what is allowed."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterable
from typing import Any

LARGEST_WHOLE = (1 << 63) - 1
"""Whole numbers are kept in 64 bits."""


class UsageError(ValueError):
    """Something the user asked for that cannot be; the message is one line that says what to do."""


def nearest(word: str, valid: Iterable[str], most: int = 32) -> str:
    """For an error on an unknown name: the ones that it may have been meant for, and those that there are."""
    names = list(valid)
    if not names:
        return "there are none"
    near = difflib.get_close_matches(word, names, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(name) for name in near)}? " if near else ""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{hint}valid are: {', '.join(names[:most])}{more}"


def shown(value: Any) -> str:
    """What came, for an error: in a length that can be read."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # of a whole number of more digits than Python writes, or a deep one of rows
        return f"something very large of type {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:197]}..."


def check_fraction(name: str, value: float) -> None:
    """Refuse what is not a number in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number in (0, 1], not {shown(value)}")
    if not 0 < value <= 1:
        raise ValueError(
            f"{name} must lie in (0, 1], not {shown(value)}: 0.01 keeps one entry in a hundred, 1 keeps all"
        )


def check_whole(name: str, value: int, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {shown(value)}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, not {shown(value)}")
    if value > LARGEST_WHOLE:
        raise ValueError(f"{name} must be below {LARGEST_WHOLE + 1}, not {shown(value)}")


def check_number(
    name: str, value: float, *, at_least: float = -math.inf, above: float = -math.inf, below: float = math.inf
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {shown(value)}")
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError(f"{name} must be a number of at most {sys.float_info.max:.3g} either way, not {shown(value)}")
    if not (at_least <= value and above < value < below):
        limits = {"at least": at_least, "above": above, "below": below}
        wanted = " and ".join(f"{words} {limit}" for words, limit in limits.items() if math.isfinite(limit))
        raise ValueError(f"{name} must be {wanted or 'finite'}, not {shown(value)}")


def check_choice(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, valid))}, not {shown(value)}")


def check_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {shown(value)}")
