"""The figure of a plan: the time of a step by the number of workers, and by bandwidth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gradsieve.report import drawing
from gradsieve.report.colours import Look, looks

HEIGHT = 460


class Curve(NamedTuple):
    """One scheme's step time in milliseconds."""

    by_workers: Sequence[float]
    by_bandwidth: Sequence[float]
    break_even: float
    """In bits a second; 0 or infinity: there is none to mark."""


def draw(curves: Mapping[str, Curve], workers: Sequence[int], bandwidths: Sequence[float], path: Path) -> None:
    """Write the figure as SVG or PNG, by the ending of its name."""
    megabits = [bits / 1e6 for bits in bandwidths]
    found = looks((_label(name), 1.0) for name in curves)
    with drawing.style():
        figure = drawing.new_figure(HEIGHT)
        above, below = figure.subplots(2)
        for axes in (above, below):
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_ylabel("ms of a step")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(_plain)
                axis.set_minor_formatter("")
        above.set_xticks(workers[::2])
        for name, curve in curves.items():
            look = found[_label(name), 1.0]
            above.plot(workers, curve.by_workers, label=name, **_drawn(look))
            below.plot(megabits, curve.by_bandwidth, label=name, **_drawn(look))
            if 0 < curve.break_even < math.inf and bandwidths[0] <= curve.break_even <= bandwidths[-1]:
                below.axvline(curve.break_even / 1e6, color=look.colour.light, linewidth=0.8, linestyle=":")
        above.set_title("By workers")
        above.set_xlabel("workers")
        below.set_title("By bandwidth; dotted: break-even with plain DDP")
        below.set_xlabel("Mbit/s, each way")
        drawing.write_file(figure, path)


def _plain(value: float, position: int | None) -> str:  # noqa: ARG001 - the signature of a formatter
    return f"{value:,g}"


def _label(name: str) -> str:
    """By which a colour is chosen: plain DDP has that of the method that sends everything."""
    return "dense" if name == "plain DDP" else name


def _drawn(look: Look) -> dict[str, object]:
    return {"color": look.colour.light, "linestyle": look.dash}
