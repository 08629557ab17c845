"""A colour for each method, the same in every figure and table, in a light and a dark theme.

The hues were searched for so that they stay apart for people who see no red or no green. Variants and densities of a
method share its colour and differ by dashes and markers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from gradsieve.report import texts

Series: TypeAlias = tuple[str, float]
"""A method's label and its density."""
Dash: TypeAlias = str | tuple[float, tuple[float, ...]]


class Colour(NamedTuple):
    """A colour by the name of its CSS variable. The light one is also what figures in files are drawn with."""

    name: str
    light: str
    dark: str

    @property
    def css(self) -> str:
        return f"var(--{self.name})"


PALETTE = (
    Colour("dense", "#3b4048", "#dee2e6"),
    Colour("topk", "#8b4ff2", "#b58bec"),
    Colour("cltk", "#b87a05", "#f6b02c"),
    Colour("hard_threshold", "#b02e88", "#e8489f"),
    Colour("randomk", "#71170b", "#c99391"),
    Colour("sidco", "#2367b7", "#3f94c4"),
    Colour("dgc", "#fd5170", "#ff6f5c"),
    Colour("deft", "#3d694a", "#b4f292"),
    Colour("gtopk", "#051875", "#7a4fdc"),
    Colour("oktopk", "#760f95", "#91685e"),
    Colour("micro", "#3428c7", "#7483ff"),
    Colour("exdyna", "#993e08", "#cf6a12"),
    Colour("iwp", "#049eda", "#55ccfb"),
    Colour("union", "#10a071", "#35d98f"),
)
"""By the name of the method, in the order of tables and legends."""
OTHERS = (
    Colour("other-0", "#6c7a00", "#cdd45a"),
    Colour("other-1", "#7b6a8f", "#b7a6cc"),
    Colour("other-2", "#008b8b", "#5fc4c4"),
    Colour("other-3", "#a0603a", "#d9a37e"),
)
"""For methods that this package does not know."""

TEXT = Colour("ink", "#1c2128", "#e6e9ee")
MUTED = Colour("muted", "#5c6670", "#9aa5b1")
GRID = Colour("grid", "#e3e7ec", "#2a323c")

FORWARD = Colour("forward", "#a9c9ec", "#3d5f8a")
BACKWARD = Colour("backward", "#5b8fc7", "#6d9fd8")
COMPUTE = Colour("compute", "#7fabd9", "#557fb4")
SELECT = Colour("select", "#e8a33d", "#f2bd63")
EXCHANGE = Colour("exchange", "#b5443c", "#e57a70")
REST = Colour("rest", "#c3c9d0", "#59636f")

ALL = (*PALETTE, *OTHERS, TEXT, MUTED, GRID, FORWARD, BACKWARD, COMPUTE, SELECT, EXCHANGE, REST)

SHEET = Colour("sheet", "#ffffff", "#151a21")
PAGE = (
    SHEET,
    Colour("page", "#f6f7f9", "#0e1217"),
    Colour("line", "#dfe3e8", "#28303a"),
    Colour("soft", "#eef1f4", "#1d242d"),
    Colour("good", "#0a7d56", "#46d39a"),
    Colour("bad", "#b3261e", "#ff8a80"),
)
"""Around the figures."""

DASHES: tuple[Dash, ...] = (
    "solid",
    (0, (5, 2)),
    (0, (1.5, 1.5)),
    (0, (6, 2, 1.5, 2)),
    (0, (9, 3)),
    (0, (3, 1, 1, 1, 1, 1)),
)
MARKERS = "osD^vP"

_KNOWN = {colour.name: place for place, colour in enumerate(PALETTE)}


@dataclass(frozen=True)
class Look:
    """How a series is drawn, and what it is called."""

    place: int
    """Its number among the series of the report: what a click on the legend refers to."""
    name: str
    colour: Colour
    dash: Dash
    marker: str

    @property
    def gid(self) -> str:
        """Marks the artists of the series."""
        return f"series:{self.place}"

    @property
    def dash_array(self) -> str:
        """The dashes as SVG has them."""
        return "" if isinstance(self.dash, str) else " ".join(f"{2 * length:g}" for length in self.dash[1])


def base_name(label: str) -> str:
    """
    >>> base_name("micro(control='paper')"), base_name("micro, float8")
    ('micro', 'micro')
    """
    return re.split(r"[(,]", label, maxsplit=1)[0]


def palette_place(base: str) -> int:
    """Where a method stands in the order of legends; unknown ones come last."""
    return _KNOWN.get(base, len(PALETTE))


def looks(series: Iterable[Series]) -> dict[Series, Look]:
    """A look for each series, in the order of legends."""
    ordered = sorted(set(series), key=lambda one: (palette_place(base_name(one[0])), one[0], -one[1]))
    colours = _colours(ordered)
    several = len({density for _, density in ordered if density < 1}) > 1
    seen: defaultdict[str, int] = defaultdict(int)
    found: dict[Series, Look] = {}
    for place, (label, density) in enumerate(ordered):
        base = base_name(label)
        variant = seen[base]
        seen[base] += 1
        dash, marker = DASHES[variant % len(DASHES)], MARKERS[(palette_place(base) + variant) % len(MARKERS)]
        found[label, density] = Look(place, _name(label, density, several), colours[base], dash, marker)
    return found


def _colours(series: Iterable[Series]) -> Mapping[str, Colour]:
    bases = list(dict.fromkeys(base_name(label) for label, _ in series))
    unknown = [base for base in bases if base not in _KNOWN]
    others = {base: OTHERS[place % len(OTHERS)] for place, base in enumerate(unknown)}
    return {base: PALETTE[_KNOWN[base]] if base in _KNOWN else others[base] for base in bases}


def _name(label: str, density: float, several: bool) -> str:
    name = texts.printable(label)
    return f"{name} at {density:g}" if several and density < 1 else name


def style_sheet() -> str:
    """The colours as CSS variables: light, dark if the system asks for it, and as the reader chose."""
    light = "".join(f"--{colour.name}:{colour.light};" for colour in (*ALL, *PAGE))
    dark = "".join(f"--{colour.name}:{colour.dark};" for colour in (*ALL, *PAGE))
    return (
        f":root{{{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
        f":root[data-theme=dark]{{{dark}}}\n"
    )
