"""From matplotlib's figures to files, and to SVG that takes its colours and fonts from the page."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from gradsieve.report.colours import ALL, GRID, MUTED, SHEET, TEXT

WIDTH = 400
"""Of a figure, in the pixels that its text is 11 of: a phone shows it nearly so."""
DOTS_PER_INCH = 200
POINTS_PER_INCH = 72

STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED.light,
    "axes.facecolor": "none",
    "axes.formatter.limits": (-5, 6),
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.labelcolor": MUTED.light,
    "axes.labelsize": 11,
    "axes.linewidth": 0.8,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": MUTED.light,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titlepad": 8,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.facecolor": "none",
    "font.size": 11,
    "grid.color": GRID.light,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "lines.linewidth": 1.7,
    "lines.markersize": 4.5,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "gradsieve",
    "text.color": TEXT.light,
    "text.parse_math": False,
    "xtick.color": MUTED.light,
    "xtick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.color": MUTED.light,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}

_LINK = "{http://www.w3.org/1999/xlink}href"
_REFERENCE = re.compile(r"#([\w.:-]+)")
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_FONT = re.compile(r"font-family:[^;\"]*;?\s*")
_FONT_IN_SHORT = re.compile(r"font:[^;\"]*?([\d.]+px)[^;\"]*")
_VARIABLES = {colour.light: colour.css for colour in (*ALL, SHEET)}
_COLOUR = re.compile("|".join(_VARIABLES))


@contextmanager
def style() -> Iterator[None]:
    """The look of the figures, whatever the user's matplotlibrc says. For making them and for writing them."""
    with matplotlib.style.context(["default", STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+")  # names in scripts that the font lacks
        yield


def new_figure(height: float) -> Figure:
    return Figure(figsize=(WIDTH / POINTS_PER_INCH, height / POINTS_PER_INCH), layout="constrained")


def inline_svg(figure: Figure, name: str, description: str) -> str:
    """The figure for a place in a page: ids of its own, colours by variable, the page's font."""
    root = ElementTree.fromstring(_svg(figure, facecolor="none"))
    _bare(root)
    used = {reference for element in root.iter() for reference in _references(element)}
    for element in root.iter():
        _adapt(element, name, used)
    width, height = (figure.get_size_inches() * POINTS_PER_INCH).round()
    root.attrib = {"viewBox": f"0 0 {width:g} {height:g}", "role": "img", "aria-label": description}
    return ElementTree.tostring(root, encoding="unicode")


def write_files(figure: Figure, stem: Path) -> None:
    """The figure alone, on white and with its legend, as SVG and PNG. It is changed: call this last."""
    _add_legend(figure)
    svg = with_font(_svg(figure, facecolor="white"), "font-family: system-ui, sans-serif; ")
    stem.with_suffix(".svg").write_text(svg, encoding="utf-8")
    figure.set_layout_engine("none")  # it is laid out by now, and half of the time goes there
    figure.savefig(stem.with_suffix(".png"), dpi=DOTS_PER_INCH, facecolor="white", metadata={"Software": None})


def write_file(figure: Figure, path: Path) -> None:
    """The same as one file, SVG or PNG by the ending of its name."""
    _add_legend(figure)
    if path.suffix == ".svg":
        svg = with_font(_svg(figure, facecolor="white"), "font-family: system-ui, sans-serif; ")
        path.write_text(svg, encoding="utf-8")
    else:
        figure.savefig(path, dpi=DOTS_PER_INCH, facecolor="white", metadata={"Software": None})


def with_font(text: str, font: str) -> str:
    """Another font in place of matplotlib's, which some versions name in shorthand.

    >>> with_font("font: 11px 'DejaVu Sans', sans-serif; text-anchor: middle", "")
    'font-size: 11px; text-anchor: middle'
    >>> with_font("font-size: 11px; font-family: 'DejaVu Sans'; text-anchor: middle", "")
    'font-size: 11px; text-anchor: middle'
    """
    return _FONT_IN_SHORT.sub(rf"{font}font-size: \1", _FONT.sub(font, text))


def figure_data(figure: Figure) -> Iterator[tuple[str, str, float, float]]:
    """Panel, series, x and y: the points of named lines, and the lengths of bars by their places."""
    for axes in figure.axes:
        named = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
        panel = axes.get_title(loc="left").replace("\n", " ")
        for line in named:
            points = np.column_stack([line.get_xdata(orig=False), line.get_ydata(orig=False)])
            yield from ((panel, str(line.get_label()), float(x), float(y)) for x, y in points)
        for bars in axes.containers:
            if isinstance(bars, BarContainer):
                yield from _bar_data(axes, bars)


def _bar_data(axes: Axes, bars: BarContainer) -> Iterator[tuple[str, str, float, float]]:
    part = str(bars.get_label()).removeprefix("_")
    for place, (name, bar) in enumerate(zip(axes.get_yticklabels(), bars, strict=True)):
        yield part, str(name.get_label()) or name.get_text(), float(bar.get_width()), float(place)


def _svg(figure: Figure, facecolor: str) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", facecolor=facecolor, metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _bare(root: ElementTree.Element) -> None:
    """Without what would reach out of the figure in a page: metadata, style rules for everything."""
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.text = element.text if element.tag == "text" or (element.text or "").strip() else None
        element.tail = None
    for element in list(root):
        if element.tag == "metadata" or element.find("style") is not None:
            root.remove(element)


def _references(element: ElementTree.Element) -> list[str]:
    return _REFERENCE.findall(element.get(_LINK, "") + " " + element.get("clip-path", ""))


def _adapt(element: ElementTree.Element, name: str, used: set[str]) -> None:
    for key, value in list(element.attrib.items()):
        del element.attrib[key]
        if key == "id":
            element.attrib |= _identity(value, name, used)
        elif not value.startswith("rotate(-0 "):
            element.set("href" if key == _LINK else key, _adapted(key, value, name))


def _identity(gid: str, name: str, used: set[str]) -> dict[str, str]:
    """Only what is referred to keeps an id; a series is marked for the legend."""
    if gid.startswith("series:"):
        return {"data-series": gid.removeprefix("series:")}
    return {"id": f"{name}-{gid}"} if gid in used else {}


def _adapted(key: str, value: str, name: str) -> str:
    if key == "style":
        return _COLOUR.sub(lambda match: _VARIABLES[match[0]], with_font(value, ""))
    if key in (_LINK, "clip-path"):
        return value.replace("#", f"#{name}-")
    return " ".join(_LONG_NUMBER.sub(lambda match: f"{float(match[0]):.2f}", value).split())


def labels(figure: Figure) -> dict[str, Any]:
    """What a legend would name, with its artists."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    return entries


def _add_legend(figure: Figure) -> None:
    """Below the axes, which keep their size."""
    entries = labels(figure)
    if not entries:
        return
    columns = max(1, min(3, 66 // max(6 + len(label) for label in entries)))
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + (18 * -(-len(entries) // columns) + 8) / POINTS_PER_INCH)
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns)
