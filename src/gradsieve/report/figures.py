"""The figures: one function each, from the runs of a section to a matplotlib figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from gradsieve.projection import LATENCY
from gradsieve.report import texts
from gradsieve.report.colours import (
    BACKWARD,
    COMPUTE,
    EXCHANGE,
    FORWARD,
    MUTED,
    REST,
    SELECT,
    SHEET,
    TEXT,
    Colour,
    Look,
    Series,
    base_name,
)
from gradsieve.report.curves import Array, Curve, curve, smoothed
from gradsieve.report.drawing import new_figure
from gradsieve.report.frontier import far_behind, methods
from gradsieve.report.grouping import Group, Section
from gradsieve.runs import WARM_UP_FRACTION, WARM_UP_STEPS

T = TypeVar("T")
Looks: TypeAlias = Mapping[Series, Look]
Draw: TypeAlias = Callable[[Section, Looks], Figure]

HEIGHT = 280
LINE = 14
"""Of text."""
MAGNIFIED_FROM = 0.6
BAND = 0.14
DASHED = (0, (4, 2.5))
FAINT = 0.25
MOST_PANELS = 12
SMOOTHING = 0.06
"""The part of a line that its moving mean runs over."""
BANDWIDTHS = np.geomspace(0.1, 100, 61)
"""Gbit/s."""
WITHOUT_PROPOSALS = frozenset({"dense", "randomk"})
PHASES: Mapping[str, tuple[str, Colour]] = {
    "forward": ("forward", FORWARD),
    "backward": ("backward", BACKWARD),
    "compute": ("forward and backward", COMPUTE),
    "select": ("selection", SELECT),
    "exchange": ("communication", EXCHANGE),
    "rest": ("rest", REST),
}


class NothingToDrawError(ValueError):
    """The runs hold no data for a figure; the message says what it needs."""


class Key(NamedTuple):
    """What a colour means."""

    words: str
    colour: Colour
    dashed: bool = False
    """A line; otherwise an area, and only if it is in the figure."""


@dataclass(frozen=True)
class Exhibit:
    """A figure's place in the report. Its texts may name the `{measure}` and the `{workers}`."""

    name: str
    title: str
    caption: str
    draw: Draw
    timed: bool = False
    """Does it show times, which are those of a simulation where workers shared a process?"""
    keys: tuple[Key, ...] = ()
    """What its colours mean, where they are not the methods'."""


def measure_by_time(section: Section, looks: Looks) -> Figure:
    curves = _measure_curves(section, "time/elapsed")
    longest = max(float(np.nanmax(line.x)) for _, line in curves)
    seconds, unit = (3600, "h") if longest > 7200 else (60, "min") if longest > 120 else (1, "s")
    scaled = [(group, line._replace(x=line.x / seconds)) for group, line in curves]
    return _drawn_measure(section, looks, scaled, f"training time ({unit})")


def measure_by_epoch(section: Section, looks: Looks) -> Figure:
    curves = _measure_curves(section, "epoch")
    figure = _drawn_measure(section, looks, curves, "epoch")
    _magnify_end(figure.axes[0], section, looks, curves)
    return figure


def _magnify_end(axes: Axes, section: Section, looks: Looks, curves: Sequence[tuple[Group, Curve]]) -> None:
    """The last epochs again, larger, where the curves leave room: methods differ by little there."""
    start = MAGNIFIED_FROM * max(float(np.nanmax(line.x)) for _, line in curves)
    late = np.concatenate([line.mean[line.x >= start] for _, line in curves])
    means = np.concatenate([line.mean for _, line in curves])
    if np.isfinite(late).sum() < 4 or np.nanmax(late) - np.nanmin(late) > 0.25 * (np.nanmax(means) - np.nanmin(means)):
        return
    inset = axes.inset_axes((0.44, 0.13 if section.measure.higher_is_better else 0.45, 0.55, 0.46))
    inset.set_facecolor(SHEET.light)
    for group, line in curves:
        _line(inset, looks[group.series], line.x[line.x >= start], line.mean[line.x >= start], label="_magnified")
    inset.set_title("the end, magnified", fontsize=10)
    inset.yaxis.set_major_locator(MaxNLocator(4))
    inset.xaxis.set_major_locator(MaxNLocator(4, integer=True))


def _measure_curves(section: Section, by: str) -> list[tuple[Group, Curve]]:
    factor = section.measure.shown(1.0)
    curves = [
        (group, curve(group.runs, f"eval/{section.measure.name}", by=by, of="evaluations").times(factor))
        for group in section.main
    ]
    return _held([(group, line) for group, line in curves if not line.empty], "needs runs that were evaluated")


def _drawn_measure(section: Section, looks: Looks, curves: Sequence[tuple[Group, Curve]], label: str) -> Figure:
    figure, axes = _single()
    for group, line in curves:
        _banded(axes, looks[group.series], line, markers=True)
    values = np.concatenate([line.mean for _, line in curves])
    if not section.measure.percent and _decades(values) > 1.3:
        _log_axis(axes, "y")
    _label(axes, label, section.measure.axis)
    return figure


def density_by_iteration(section: Section, looks: Looks) -> Figure:
    """A panel for each asked density."""
    name = "sparsity/density_actual"
    groups = _held(
        [group for group in section.main if not group.is_dense and group.has(name)],
        "needs recorded steps of a method that sparsifies",
    )
    asked = sorted({group.density for group in groups}, reverse=True)[:MOST_PANELS]
    figure = new_figure(HEIGHT if len(asked) == 1 else 50 + 150 * len(asked))
    for density, axes in zip(asked, np.ravel(figure.subplots(len(asked), sharex=True)), strict=True):
        _density_panel(axes, density, [group for group in groups if group.density == density], looks)
    axes.set_xlabel("iteration")
    return figure


def _density_panel(axes: Axes, asked: float, groups: Sequence[Group], looks: Looks) -> None:
    extremes = [asked / 2, asked * 2]
    for group in groups:
        line = curve(group.runs, "sparsity/density_actual")
        _banded(axes, looks[group.series], line)
        extremes += [*line.mean[line.mean > 0]]
        _moving_target(axes, group, looks[group.series])
    axes.axhline(asked, color=MUTED.light, linestyle=DASHED, linewidth=1.2, label="_asked")
    _log_axis(axes, "y")
    axes.set_ylim(min(extremes) / 1.1, 1.1 * max(extremes))
    axes.set_title(f"actual density, {asked:g} asked")


def _moving_target(axes: Axes, group: Group, look: Look) -> None:
    """The density asked for, where it changes from step to step."""
    asked = curve(group.runs, "sparsity/density_asked")
    if not asked.empty and np.nanmax(asked.mean) > 1.001 * np.nanmin(asked.mean):
        _dashed(axes, asked.x, asked.mean, look.colour, label="_asked", gid=look.gid)


def time_by_phase(section: Section, looks: Looks) -> Figure:
    groups = _held([group for group in section.main if math.isfinite(_phase_sum(group))], "needs runs that timed steps")
    figure, axes = _bars(groups, looks)
    left = np.zeros(len(groups))
    for phase, (words, colour) in PHASES.items():
        width = 1000 * np.array([_or_zero(getattr(group.phases, phase)) for group in groups])
        if width.any():
            _bar_segments(axes, groups, looks, width, left, words, colour)
            left += width
    for place, (group, total) in enumerate(zip(groups, left, strict=True)):
        _note(axes, total, place, texts.number(total), looks[group.series])
    axes.set_xlim(0, 1.14 * max(left))
    axes.set_xlabel("milliseconds an iteration")
    return figure


def _phase_sum(group: Group) -> float:
    measured = [getattr(group.phases, phase) for phase in PHASES]
    return math.fsum(seconds for seconds in measured if math.isfinite(seconds)) or math.nan


def _or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _bar_segments(
    axes: Axes, groups: Sequence[Group], looks: Looks, width: Array, left: Array, words: str, colour: Colour
) -> None:
    bars = axes.barh(range(len(groups)), width, left=left, color=colour.light, height=0.62, label=words)
    for group, bar in zip(groups, bars, strict=True):
        bar.set_gid(looks[group.series].gid)


def measure_by_world(section: Section, looks: Looks) -> Figure:
    several = _held(_over_worlds(section), "needs evaluated runs of one method with several world sizes")
    figure, axes = _single()
    worlds = sorted({group.world for groups in several for group in groups})
    for place, groups in enumerate(several):
        shift = 2 ** (0.18 * ((place + 0.5) / len(several) - 0.5))  # side by side, so that ranges stay apart
        x = [group.world * shift for group in groups]
        _points_with_range(axes, section, looks[groups[0].series], groups, x)
    axes.set_xscale("log", base=2)
    axes.set_xticks(worlds, [str(world) for world in worlds])
    axes.xaxis.set_minor_locator(NullLocator())
    _label(axes, "workers", f"final {section.measure.axis}")
    return figure


def _over_worlds(section: Section) -> list[list[Group]]:
    """The groups of each series that was judged at several worlds, by world."""
    judged: dict[Series, list[Group]] = {}
    for group in sorted(section.judged, key=lambda group: group.world):
        judged.setdefault(group.series, []).append(group)
    return [groups for groups in judged.values() if len(groups) > 1]


def _points_with_range(
    axes: Axes, section: Section, look: Look, groups: Sequence[Group], x: Sequence[float], *, named: bool = True
) -> None:
    shown, colour = section.measure.shown, look.colour.light
    low = [shown(group.final.low) for group in groups]
    high = [shown(group.final.high) for group in groups]
    means = [shown(group.final.mean) for group in groups]
    axes.vlines(x, low, high, colors=colour, linewidth=1.2, gid=look.gid, label="_range")
    label = look.name if named else "_point"
    axes.plot(x, means, color=colour, linestyle=look.dash, marker=look.marker, gid=look.gid, label=label)


def threshold_and_error(section: Section, looks: Looks) -> Figure:
    """A panel for each method that has thresholds."""
    names = ("sparsity/threshold", "sparsity/error_norm")
    groups = _held(
        [group for group in section.main if all(map(group.has, names))],
        "needs recorded steps of a method with a threshold",
    )
    groups = groups[:MOST_PANELS]
    columns = min(2, len(groups))
    rows = -(-len(groups) // columns)
    titles = [texts.wrapped(looks[group.series].name, 24) for group in groups]
    figure = new_figure(HEIGHT if rows == 1 else 60 + (90 + LINE * _most_lines(titles)) * rows)
    panels = np.ravel(figure.subplots(rows, columns, squeeze=False, sharex=True))
    for group, title, axes in zip(groups, titles, panels, strict=False):
        _threshold_panel(axes, group, looks[group.series])
        axes.set_title(title, color=looks[group.series].colour.light).set_gid(looks[group.series].gid)
    for axes in panels[len(groups) :]:
        axes.set_visible(False)
    for axes in panels[len(groups) - columns : len(groups)]:
        axes.set_xlabel("iteration")
        axes.tick_params(labelbottom=True)
    return figure


def _threshold_panel(axes: Axes, group: Group, look: Look) -> None:
    threshold = curve(group.runs, "sparsity/threshold")
    error = curve(group.runs, "sparsity/error_norm")
    both = np.isfinite(threshold.mean) & np.isfinite(error.mean)
    scale = threshold.mean[both].sum() / (error.mean[both].sum() or math.nan)
    _line(axes, look, threshold.x, threshold.mean)
    _dashed(axes, error.x, scale * error.mean, MUTED, label="scaled error norm", gid=look.gid)
    if _decades(threshold.mean) > 1.3:
        _log_axis(axes, "y")
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))


def imbalance_by_iteration(section: Section, looks: Looks) -> Figure:
    groups = _held(
        [group for group in section.main if _has_several_proposers(group)],
        "needs recorded steps of a method in which several workers propose",
    )
    figure, axes = _single()
    for group in groups:
        line, look = curve(group.runs, "sparsity/imbalance"), looks[group.series]
        smooth = smoothed(line.mean, max(3, int(SMOOTHING * len(line.mean))))
        axes.plot(line.x, line.mean, color=look.colour.light, alpha=FAINT, linewidth=0.9, gid=look.gid, label="_raw")
        _line(axes, look, line.x, smooth)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    _label(axes, "iteration", "imbalance of proposed entries")
    return figure


def _has_several_proposers(group: Group) -> bool:
    """With a single proposer the imbalance is `world - 1` in every step."""
    if base_name(group.label) in WITHOUT_PROPOSALS or group.world == 1:
        return False
    values = np.concatenate([run.series("sparsity/imbalance") for run in group.runs])
    values = values[np.isfinite(values)]
    return bool(len(values)) and bool((values < group.world - 1 - 1e-6).any())


def bytes_per_step(section: Section, looks: Looks) -> Figure:
    groups = _held([group for group in section.main if group.wire_bytes > 0], "needs runs that counted bytes")
    figure, axes = _bars(groups, looks)
    sizes = [group.wire_bytes for group in groups]
    colours = [looks[group.series].colour.light for group in groups]
    bars = axes.barh(range(len(groups)), sizes, color=colours, height=0.62, label="_bytes")
    dense = section.dense(section.main_world)
    for place, (group, bar) in enumerate(zip(groups, bars, strict=True)):
        bar.set_gid(looks[group.series].gid)
        _note(axes, group.wire_bytes, place, _size_note(group, dense), looks[group.series])
    axes.set_xscale("log")
    axes.set_xlim(*_room_for_notes(sizes))
    _format_bytes(axes)
    axes.set_xlabel("bytes a step and worker")
    return figure


def _room_for_notes(sizes: Sequence[float]) -> tuple[float, float]:
    """Limits of a logarithmic axis: the shortest bar is seen, and beside each there is room for its note."""
    left, longest, shortest = min(sizes) / 4, max(sizes), min(sizes)
    ends = [left * (longest / left) ** (1 / 0.78), left * (shortest / left) ** (1 / 0.6), 10 * left]
    return left, max(ends)


def _size_note(group: Group, dense: Group | None) -> str:
    size = texts.data(group.wire_bytes)
    if dense is None or group.is_dense or not dense.wire_bytes > 0:
        return size
    return f"{size}, {texts.percent(group.wire_bytes / dense.wire_bytes)}"


def measure_by_bytes(section: Section, looks: Looks) -> Figure:
    """A line a method, through its densities."""
    lines = _held(methods(section), "needs evaluated runs over several workers that counted bytes")
    groups = [group for line in lines for group in line]
    figure, axes = _single()
    frontier = _frontier(section, groups)
    sizes, finals = zip(
        *((group.link_bytes, section.measure.shown(group.final.mean)) for group in frontier), strict=True
    )
    axes.step(sizes, finals, where="post", color=MUTED.light, linewidth=1, linestyle=(0, (2, 2)), label="_frontier")
    for line in lines:
        of_method = looks[line[-1].series]
        _line_of_method(axes, section, of_method, line)
        for group in line:
            look = replace(looks[group.series], marker=of_method.marker)
            _points_with_range(axes, section, look, [group], [group.link_bytes], named=len(line) == 1)
            axes.lines[-1].set_markersize(6)
    axes.set_xscale("log")
    _format_bytes(axes)
    _leave_out(axes, section, groups, far_behind(section, groups))
    _label(axes, "bytes through a worker's link in a step, each way", f"final {section.measure.axis}")
    return figure


def _leave_out(axes: Axes, section: Section, groups: Sequence[Group], far: Sequence[Group]) -> None:
    """Give the room to the others, and name who is outside of it."""
    if not far:
        return
    ends = [section.measure.shown(end) for group in groups if group not in far for end in group.final[2:4]]
    margin = 0.05 * (max(ends) - min(ends))
    axes.set_ylim(min(ends) - margin, max(ends) + margin)
    names = dict.fromkeys(texts.printable(group.label) for group in far)
    axes.text(0.02, 0.02, f"outside: {', '.join(names)}", transform=axes.transAxes, fontsize=10, color=MUTED.light)


def _line_of_method(axes: Axes, section: Section, look: Look, groups: Sequence[Group]) -> None:
    """Through the densities of a method; dense has one, and is the level to reach."""
    if groups[0].is_dense:
        level = section.measure.shown(groups[0].final.mean)
        axes.axhline(level, color=look.colour.light, linestyle=DASHED, linewidth=1.2, label="_level", gid=look.gid)
    elif len(groups) > 1:
        sizes = np.array([group.link_bytes for group in groups])
        finals = np.array([section.measure.shown(group.final.mean) for group in groups])
        axes.plot(
            sizes,
            finals,
            color=look.colour.light,
            linestyle=look.dash,
            gid=look.gid,
            label=texts.printable(groups[0].label),
        )


def _frontier(section: Section, groups: Iterable[Group]) -> list[Group]:
    """The groups that no other beats with fewer bytes."""
    best: list[Group] = []
    for group in sorted(groups, key=lambda group: group.link_bytes):
        if not best or section.measure.better(group.final.mean, best[-1].final.mean):
            best.append(group)
    return best


def time_by_bandwidth(section: Section, looks: Looks) -> Figure:
    groups = _held(
        [group for group in section.main if math.isfinite(group.projected(1.0))],
        "needs runs that timed steps and bytes",
    )
    figure, axes = _single()
    for group in groups:
        _line(
            axes,
            looks[group.series],
            BANDWIDTHS,
            1000 * np.array([group.projected(gigabits) for gigabits in BANDWIDTHS]),
        )
    axes.set_xscale("log")
    _log_axis(axes, "y")
    axes.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    axes.xaxis.set_minor_formatter(NullFormatter())
    _label(axes, "bandwidth of a worker's link (Gbit/s)", "projected milliseconds a step")
    return figure


def _held(groups: list[T], reason: str) -> list[T]:
    if not groups:
        raise NothingToDrawError(reason)
    return groups


def _single() -> tuple[Figure, Axes]:
    figure = new_figure(HEIGHT)
    return figure, figure.subplots()


def _bars(groups: Sequence[Group], looks: Looks) -> tuple[Figure, Axes]:
    """Room for a bar a group, named at the left."""
    names = [texts.wrapped(looks[group.series].name, 20) for group in groups]
    figure = new_figure(max(HEIGHT, 56 + max(27, LINE * _most_lines(names)) * len(groups)))
    axes = figure.subplots()
    axes.set_yticks(range(len(groups)), names, color=TEXT.light)
    for group, label in zip(groups, axes.get_yticklabels(), strict=True):
        label.set_gid(looks[group.series].gid)
        label.set_label(looks[group.series].name)
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    return figure, axes


def _most_lines(names: Iterable[str]) -> int:
    return max(name.count("\n") + 1 for name in names)


def _note(axes: Axes, x: float, y: float, words: str, look: Look) -> None:
    axes.annotate(words, (x, y), (4, 0), textcoords="offset points", va="center", fontsize=10, gid=look.gid)


def _label(axes: Axes, x: str, y: str) -> None:
    """The name of the vertical axis stands above it, where it needs no turned head."""
    axes.set_xlabel(x)
    axes.set_title(y)


def _line(axes: Axes, look: Look, x: Array, y: Array, *, label: str | None = None) -> None:
    axes.plot(x, y, color=look.colour.light, linestyle=look.dash, gid=look.gid, label=label or look.name)


def _dashed(axes: Axes, x: Array, y: Array, colour: Colour, *, label: str, gid: str) -> None:
    axes.plot(x, y, color=colour.light, linestyle=DASHED, linewidth=1.2, label=label, gid=gid)


def _banded(axes: Axes, look: Look, line: Curve, *, markers: bool = False) -> None:
    """The mean over seeds, in a band from the least to the most."""
    if not np.array_equal(line.low, line.high, equal_nan=True):
        band = axes.fill_between(line.x, line.low, line.high, color=look.colour.light, alpha=BAND, linewidth=0)
        band.set_gid(look.gid)
    _line(axes, look, line.x, line.mean)
    if markers or np.isfinite(line.mean).sum() == 1:
        axes.lines[-1].set_marker(look.marker)
        stride = max(1, len(line.x) // 6)
        axes.lines[-1].set_markevery((look.place % stride, stride))


def _decades(values: Array) -> float:
    """Orders of magnitude between the small and the large ones."""
    positive = values[np.isfinite(values) & (values > 0)]
    return float(np.log10(np.quantile(positive, 0.99) / np.quantile(positive, 0.01))) if len(positive) else 0.0


def _log_axis(axes: Axes, which: Literal["x", "y"]) -> None:
    """Ticks at 1, 2 and 5, as plain numbers."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _format_bytes(axes: Axes) -> None:
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3) if high < 3000 * low else (1,), numticks=7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: texts.data(value, 1)))
    axes.xaxis.set_minor_locator(NullLocator())


EXHIBITS = (
    Exhibit(
        "measure-by-time",
        "{Measure} by training time",
        "Mean over seeds, in a band from the least to the most; {workers}. Time is that of training alone, "
        "without evaluation and logging.",
        measure_by_time,
        timed=True,
    ),
    Exhibit(
        "measure-by-epoch",
        "{Measure} by epoch",
        "The same evaluations over the epochs: what a method costs in {measure} when time is no matter.",
        measure_by_epoch,
    ),
    Exhibit(
        "density-by-iteration",
        "Actual density by iteration",
        "The part of the sparsified entries that was exchanged in each step. The dashed line is what was asked for; "
        "above it, supports build up.",
        density_by_iteration,
        keys=(Key("asked", MUTED, dashed=True),),
    ),
    Exhibit(
        "time-by-phase",
        "Time of an iteration",
        "Slowest worker, mean over iterations and seeds; the first "
        f"{WARM_UP_STEPS} steps or {100 * WARM_UP_FRACTION:g} %, whichever is less, are left out.",
        time_by_phase,
        timed=True,
        keys=tuple(Key(words, colour) for words, colour in PHASES.values()),
    ),
    Exhibit(
        "bytes-per-step",
        "Bytes a step",
        "What a worker hands over in a step, on a logarithmic scale, with its part of what dense hands over. "
        "Parameters that are excluded from sparsification are in it.",
        bytes_per_step,
    ),
    Exhibit(
        "measure-by-bytes",
        "Final {measure} against bytes",
        "What really passes through a worker's link in a step, each way, indices and excluded parameters included. "
        "Points are means over seeds, joined through the densities of a method, upright lines run from the least to "
        "the most. The dashed level is dense; the dotted steps are the frontier: no method does better with fewer "
        "bytes.",
        measure_by_bytes,
    ),
    Exhibit(
        "time-by-bandwidth",
        "Projected step by bandwidth",
        "Compute, selection and rest as measured here, plus the bytes through a worker's link at each bandwidth and "
        f"{LATENCY * 1e6:.0f} µs a message. It assumes that exchange and backward do not overlap.",
        time_by_bandwidth,
        timed=True,
    ),
    Exhibit(
        "measure-by-world",
        "Final {measure} by workers",
        "Means over seeds, lines from the least to the most; drawn side by side.",
        measure_by_world,
    ),
    Exhibit(
        "threshold-and-error",
        "Threshold and error norm",
        "The threshold, and the norm of the residual scaled to the same sum: a threshold that follows the error keeps "
        "the density.",
        threshold_and_error,
        keys=(Key("scaled error norm", MUTED, dashed=True),),
    ),
    Exhibit(
        "imbalance-by-iteration",
        "Imbalance by iteration",
        "How far the largest number of proposed entries exceeds the mean over workers; raw values faint, their moving "
        "mean in full. Methods with one proposer have none.",
        imbalance_by_iteration,
    ),
)
"""In the order of the page."""
