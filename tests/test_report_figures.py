from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradsieve.report import figures
from gradsieve.report.colours import looks
from gradsieve.report.curves import MOST_POINTS
from gradsieve.report.drawing import figure_data, inline_svg, style, write_files
from gradsieve.report.figures import EXHIBITS, Draw, NothingToDrawError
from gradsieve.report.grouping import Section, sections
from synthetic_runs import PERPLEXITY, Plan, comparison, make_runs, odd_plans

METHODS = ("dense", "topk", "cltk", "micro", "union")
SHORT = Plan(epochs=4, steps_per_epoch=5)

Drawn = Callable[..., Figure]


@pytest.fixture(scope="module")
def section(tmp_path_factory: pytest.TempPathFactory) -> Section:
    plans = [*comparison(2, labels=METHODS), *(Plan("micro", world=8, seed=seed) for seed in (0, 1))]
    (only,) = sections(make_runs(tmp_path_factory.mktemp("runs"), plans))
    return only


@pytest.fixture
def draw() -> Iterator[Drawn]:
    def drawn(function: Draw, section: Section) -> Figure:
        return function(section, looks(group.series for group in section.groups))

    with style():
        yield drawn


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Section]:
    def make(*plans: Plan) -> Section:
        (only,) = sections(make_runs(tmp_path, plans))
        return only

    return make


def named(axes: Axes) -> dict[str, np.ndarray]:
    """The lines that a legend would name."""
    lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    return {str(line.get_label()): np.asarray(line.get_xydata()) for line in lines}


def test_measure_by_time_has_a_line_and_a_band_a_method(draw: Drawn, section: Section) -> None:
    (axes,) = draw(figures.measure_by_time, section).axes
    assert list(named(axes)) == list(METHODS)
    assert len(axes.collections) == len(METHODS)
    assert axes.get_xlabel() == "training time (s)"
    assert all(line[:, 1].max() > 90 for line in named(axes).values())


def test_measure_by_epoch_magnifies_the_end(draw: Drawn, section: Section) -> None:
    (axes,) = draw(figures.measure_by_epoch, section).axes
    (inset,) = axes.child_axes
    assert list(named(axes)) == list(METHODS)
    assert len(inset.lines) == len(METHODS)
    assert min(np.asarray(line.get_xdata()).min() for line in inset.lines) >= figures.MAGNIFIED_FROM * 12


def test_one_seed_has_no_band(draw: Drawn, small: Callable[..., Section]) -> None:
    (axes,) = draw(figures.measure_by_epoch, small(SHORT)).axes
    assert (len(named(axes)), len(axes.collections)) == (1, 0)


def test_a_wide_perplexity_gets_a_logarithmic_axis(draw: Drawn, small: Callable[..., Section]) -> None:
    section = small(replace(SHORT, measure=PERPLEXITY))
    (run,) = section.runs
    falling = [{**record, "eval/perplexity": 10.0 ** (5 - place)} for place, record in enumerate(run.evaluations)]
    group = replace(section.groups[0], runs=(replace(run, evaluations=falling),))
    (wide,) = draw(figures.measure_by_time, replace(section, groups=(group,))).axes
    (narrow,) = draw(figures.measure_by_time, section).axes
    assert (wide.get_yscale(), narrow.get_yscale()) == ("log", "linear")


def test_density_has_a_panel_for_each_asked_one(draw: Drawn, small: Callable[..., Section]) -> None:
    section = small(
        SHORT, replace(SHORT, density=0.1), replace(SHORT, label="topk"), replace(SHORT, label="dense", density=1.0)
    )
    panels = draw(figures.density_by_iteration, section).axes
    assert [len(named(axes)) for axes in panels] == [1, 2]
    for axes, asked in zip(panels, (0.1, 0.01), strict=True):
        assert axes.get_yscale() == "log"
        (line,) = [line for line in axes.lines if line.get_label() == "_asked"]
        assert set(np.asarray(line.get_ydata())) == {asked}
        low, high = axes.get_ylim()
        assert low <= asked / 2 < asked * 2 <= high


def test_a_density_that_was_to_change_is_drawn_as_it_was_asked(draw: Drawn, small: Callable[..., Section]) -> None:
    section = small(SHORT)
    (run,) = section.runs
    falling = [{**record, "sparsity/density_asked": 0.25 / (1 + place)} for place, record in enumerate(run.steps)]
    group = replace(section.groups[0], runs=(replace(run, steps=falling),))
    (axes,) = draw(figures.density_by_iteration, replace(section, groups=(group,))).axes
    assert sum(line.get_label() == "_asked" for line in axes.lines) == 2


def test_phases_are_stacked_in_milliseconds(draw: Drawn, section: Section) -> None:
    (axes,) = draw(figures.time_by_phase, section).axes
    assert [str(bars.get_label()) for bars in axes.containers] == [
        *("forward", "backward", "selection", "communication", "rest"),
    ]
    ends = [bar.get_x() + bar.get_width() for bar in axes.containers[-1]]
    assert ends == pytest.approx([1000 * group.phases.step for group in section.main])


def test_fused_computing_is_one_segment(draw: Drawn, small: Callable[..., Section]) -> None:
    (axes,) = draw(figures.time_by_phase, small(replace(SHORT, fused=True))).axes
    assert next(str(bars.get_label()) for bars in axes.containers) == "forward and backward"


def test_measure_by_world_has_the_methods_with_several(draw: Drawn, section: Section) -> None:
    (axes,) = draw(figures.measure_by_world, section).axes
    assert list(named(axes)) == ["micro"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4", "8"]
    assert len(axes.collections) == 1


def test_thresholds_stand_beside_the_error_scaled_to_the_same_sum(draw: Drawn, section: Section) -> None:
    panels = draw(figures.threshold_and_error, section).axes
    assert [axes.get_title(loc="left") for axes in panels] == ["micro", "union"]
    for axes in panels:
        threshold, error = named(axes).values()
        assert threshold[:, 1].sum() == pytest.approx(error[:, 1].sum())


def test_an_odd_number_of_panels_leaves_one_out(draw: Drawn, small: Callable[..., Section]) -> None:
    section = small(*(replace(SHORT, label=label) for label in ("micro", "exdyna", "union")))
    panels = draw(figures.threshold_and_error, section).axes
    assert [axes.get_visible() for axes in panels] == [True, True, True, False]
    assert [axes.get_xlabel() for axes in panels[:3]] == ["", "iteration", "iteration"]


def test_imbalance_is_of_methods_with_several_proposers(draw: Drawn, section: Section) -> None:
    (axes,) = draw(figures.imbalance_by_iteration, section).axes
    assert list(named(axes)) == ["topk", "micro", "union"]
    assert len(axes.lines) == 6


def test_bytes_are_bars_with_dense_as_the_reference(draw: Drawn, section: Section) -> None:
    (axes,) = draw(figures.bytes_per_step, section).axes
    (bars,) = axes.containers
    assert [bar.get_width() for bar in bars] == pytest.approx([group.wire_bytes for group in section.main])
    assert axes.get_xscale() == "log"
    notes = [text.get_text() for text in axes.texts]
    assert notes[0] == "4.51 MB"
    assert all(note.endswith("%") for note in notes[1:])


def test_the_frontier_is_of_the_undominated(draw: Drawn, section: Section) -> None:
    (axes,) = draw(figures.measure_by_bytes, section).axes
    assert list(named(axes)) == list(METHODS)
    (frontier,) = [line for line in axes.lines if line.get_label() == "_frontier"]
    sizes, finals = np.asarray(frontier.get_xydata()).T
    assert (np.diff(sizes) > 0).all()
    assert (np.diff(finals) > 0).all()
    assert finals[-1] == pytest.approx(100 * max(group.final.mean for group in section.main))


def test_projection_spans_the_bandwidths(draw: Drawn, section: Section) -> None:
    (axes,) = draw(figures.time_by_bandwidth, section).axes
    assert list(named(axes)) == list(METHODS)
    for group, line in zip(section.main, named(axes).values(), strict=True):
        assert line[[0, -1], 0].tolist() == pytest.approx([0.1, 100])
        assert line[0, 1] == pytest.approx(1000 * group.projected(0.1))


def test_long_runs_are_thinned(draw: Drawn, small: Callable[..., Section]) -> None:
    section = small(Plan(epochs=2, steps_per_epoch=500))
    for function in (figures.density_by_iteration, figures.threshold_and_error, figures.imbalance_by_iteration):
        figure = draw(function, section)
        assert max(len(line) for axes in figure.axes for line in named(axes).values()) == MOST_POINTS


@pytest.mark.parametrize(
    ("name", "plan", "reason"),
    [
        ("measure-by-time", replace(SHORT, stop_after=3), "evaluated"),
        ("density-by-iteration", replace(SHORT, label="dense", density=1.0), "sparsifies"),
        ("time-by-phase", replace(SHORT, stop_after=0), "timed steps"),
        ("bytes-per-step", replace(SHORT, stop_after=0), "counted bytes"),
        ("measure-by-bytes", replace(SHORT, stop_after=3), "evaluated"),
        ("time-by-bandwidth", replace(SHORT, stop_after=0), "timed steps"),
        ("measure-by-world", SHORT, "several world sizes"),
        ("threshold-and-error", replace(SHORT, label="topk"), "threshold"),
        ("imbalance-by-iteration", replace(SHORT, label="cltk"), "several workers propose"),
        ("imbalance-by-iteration", replace(SHORT, world=1), "several workers propose"),
    ],
)
def test_a_figure_without_data_says_what_it_needs(
    draw: Drawn, small: Callable[..., Section], name: str, plan: Plan, reason: str
) -> None:
    (exhibit,) = [exhibit for exhibit in EXHIBITS if exhibit.name == name]
    with pytest.raises(NothingToDrawError, match=reason):
        draw(exhibit.draw, small(plan))


def test_many_methods_get_no_more_panels_than_fit(draw: Drawn, small: Callable[..., Section]) -> None:
    section = small(*(replace(SHORT, density=0.001 * (1 + number)) for number in range(14)))
    assert len(draw(figures.threshold_and_error, section).axes) == figures.MOST_PANELS
    assert len(draw(figures.density_by_iteration, section).axes) == figures.MOST_PANELS


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_every_artist_of_a_method_is_marked_for_the_legend(
    section: Section, draw: Drawn, exhibit: figures.Exhibit
) -> None:
    svg = inline_svg(draw(exhibit.draw, section), "name", "words")
    marked = {int(part.split('"')[0]) for part in svg.split('data-series="')[1:]}
    assert marked
    assert marked <= set(range(len(METHODS)))


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_odd_runs_are_drawn_or_refused(
    small: Callable[..., Section], draw: Drawn, exhibit: figures.Exhibit, tmp_path: Path
) -> None:
    section = small(*(replace(plan, epochs=5) for plan in odd_plans()))
    try:
        figure = draw(exhibit.draw, section)
    except NothingToDrawError:
        assert exhibit.name == "measure-by-world"
    else:
        write_files(figure, tmp_path / "figure")
        assert (tmp_path / "figure.png").stat().st_size > 5_000


def test_inline_svg_takes_colours_and_fonts_from_the_page(section: Section, draw: Drawn) -> None:
    svg = inline_svg(draw(figures.measure_by_epoch, section), "the-name", 'a "quoted" <text>')
    assert "stroke: var(--micro)" in svg
    assert "fill: var(--muted)" in svg
    for absent in ("http", "#3428c7", "font-family", "<style", "<metadata", "xlink", "<text>"):
        assert absent not in svg
    ids = [part.split('"')[0] for part in svg.split(' id="')[1:]]
    assert ids
    assert len(ids) == len(set(ids))
    assert all(one.startswith("the-name-") for one in ids)


def test_files_stand_alone_and_are_the_same_each_time(section: Section, draw: Drawn, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_files(draw(figures.time_by_phase, section), tmp_path / name)
    svg = (tmp_path / "one.svg").read_text()
    assert "communication" in svg  # the legend
    assert "fill: #ffffff" in svg
    assert "<dc:date>" not in svg
    for suffix in (".svg", ".png"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


def test_figure_data_are_its_lines_and_bars(section: Section, draw: Drawn) -> None:
    lines = list(figure_data(draw(figures.measure_by_epoch, section)))
    assert {series for _, series, _, _ in lines} == set(METHODS)
    assert len(lines) == 12 * len(METHODS)
    bars = list(figure_data(draw(figures.time_by_phase, section)))
    assert [part for part, series, _, _ in bars if series == "topk"] == [
        *("forward", "backward", "selection", "communication", "rest"),
    ]


def test_bars_of_long_names_are_told_apart(draw: Drawn, small: Callable[..., Section]) -> None:
    labels = ("micro(control='paper')", "union(warmup_steps=100, warmup_density=0.05)", "union, float8")
    section = small(*(replace(SHORT, label=label, density=density) for label in labels for density in (0.01, 0.001)))
    figure = draw(figures.time_by_phase, section)
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names[:2] == ["micro at 0.01\n(control='paper')", "micro at 0.001\n(control='paper')"]
    assert names[2] == "union at 0.01\n(warmup_steps=100,\nwarmup_density=0.05)"
    assert len(set(names)) == 6
    written = {series for _, series, _, _ in figure_data(figure)}
    assert written == {f"{label} at {density:g}" for label in labels for density in (0.01, 0.001)}


def test_drawing_leaves_no_trace(section: Section) -> None:
    before = dict(mpl.rcParams)
    with style():
        figures.measure_by_time(section, looks(group.series for group in section.groups))
    assert dict(mpl.rcParams) == before
