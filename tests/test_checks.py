from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from gradsieve.checks import check_choice, check_flag, check_fraction, check_number, check_whole


@pytest.mark.parametrize(
    "check",
    [
        lambda: check_fraction("x", 1),
        lambda: check_fraction("x", 1e-9),
        lambda: check_whole("x", 3, at_least=3),
        lambda: check_number("x", 0, at_least=0),
        lambda: check_number("x", -1e300),
        lambda: check_number("x", 0.999, at_least=0, below=1),
        lambda: check_choice("x", "b", ("a", "b")),
        lambda: check_flag("x", False),
    ],
)
def test_what_is_allowed_passes(check: Callable[[], Any]) -> None:
    check()


@pytest.mark.parametrize(
    ("check", "error", "message"),
    [
        (lambda: check_fraction("x", 0), ValueError, "x must lie in (0, 1], not 0"),
        (lambda: check_fraction("x", math.nan), ValueError, "x must lie in (0, 1], not nan"),
        (lambda: check_whole("x", 2, at_least=3), ValueError, "x must be at least 3, not 2"),
        (lambda: check_whole("x", True, at_least=0), TypeError, "x must be a whole number, not True"),
        (lambda: check_number("x", 0, above=0), ValueError, "x must be above 0, not 0"),
        (lambda: check_number("x", 1, at_least=0, below=1), ValueError, "x must be at least 0 and below 1, not 1"),
        (lambda: check_number("x", math.nan, at_least=0), ValueError, "x must be at least 0, not nan"),
        (lambda: check_number("x", math.inf), ValueError, "x must be finite, not inf"),
        (lambda: check_number("x", 10**309, above=0), ValueError, "x must be a number of at most 1.8e+308 either way"),
        (lambda: check_whole("x", 2**63, at_least=0), ValueError, f"x must be below {2**63}, not {2**63}"),
        (lambda: check_whole("x", -(16**5000), at_least=0), ValueError, "not something very large of type int"),
        (lambda: check_fraction("x", 10**300), ValueError, f"x must lie in (0, 1], not 1{'0' * 196}...: 0.01"),
        (lambda: check_choice("x", "c", ("a", "b")), ValueError, "x must be one of 'a', 'b', not 'c'"),
    ],
)
def test_a_refusal_says_what_came_and_what_is_allowed(
    check: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        check()
