from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from gradsieve.report.findings import Finding, finding
from gradsieve.report.grouping import sections
from gradsieve.runs import Run
from synthetic_runs import PERPLEXITY, Plan, make_runs, odd_plans

SHORT = Plan(epochs=2, steps_per_epoch=3)
DENSE = replace(SHORT, label="dense", density=1.0)
SPACE = "\N{NO-BREAK SPACE}"

Find = Callable[..., Finding]


@pytest.fixture
def found(tmp_path: Path) -> Find:
    """The finding from runs that end at the given measures and send the given bytes."""

    def find(*plans: Plan, ends: Mapping[str, tuple[float, ...]] | None = None, **sizes: float) -> Finding:
        runs = [_ending(run, ends or {}, sizes) for run in make_runs(tmp_path, plans)]
        (section,) = sections(runs)
        return finding(section)

    return find


def _ending(run: Run, ends: Mapping[str, tuple[float, ...]], sizes: Mapping[str, float]) -> Run:
    last = {f"eval/{run.measure}": ends[run.method][run.seed]} if run.method in ends else {}
    size = {"comm/wire_bytes": sizes[run.method]} if run.method in sizes else {}
    steps = [{**record, **size} for record in run.steps]
    return replace(run, steps=steps, evaluations=[*run.evaluations[:-1], {**run.evaluations[-1], **last}])


def test_bytes_and_points_against_dense(found: Find) -> None:
    said = found(DENSE, SHORT, ends={"dense": (0.984,), "micro": (0.981,)}, dense=1000, micro=6)
    assert said.sentence == (
        f"micro at density 0.01 sends 0.60{SPACE}% of the bytes of dense and ends 0.30 points below it."
    )


@pytest.mark.parametrize(
    ("measure", "ends", "words"),
    [
        (None, {"dense": (0.98,), "micro": (0.99,)}, "ends 1.00 points above it."),
        (None, {"dense": (0.98,), "micro": (0.98001,)}, "ends level with it."),
        (PERPLEXITY, {"dense": (50.0,), "micro": (50.5,)}, "ends 0.500 perplexity worse."),
        (PERPLEXITY, {"dense": (50.0,), "micro": (49.5,)}, "ends 0.500 perplexity better."),
    ],
)
def test_how_it_ends(
    found: Find, measure: dict[str, object] | None, ends: Mapping[str, tuple[float, ...]], words: str
) -> None:
    said = found(replace(DENSE, measure=measure), replace(SHORT, measure=measure), ends=ends)
    assert said.sentence.endswith(words)


def test_ranges_that_overlap_are_told(found: Find) -> None:
    plans = [replace(plan, seed=seed) for plan in (DENSE, SHORT) for seed in (0, 1)]
    assert "overlap" in found(*plans, ends={"dense": (0.98, 0.99), "micro": (0.97, 0.985)}).sentence


def test_ranges_apart_are_not_called_overlapping(found: Find) -> None:
    plans = [replace(plan, seed=seed) for plan in (DENSE, SHORT) for seed in (0, 1)]
    assert "overlap" not in found(*plans, ends={"dense": (0.98, 0.99), "micro": (0.96, 0.97)}).sentence


def test_the_fewest_bytes_among_those_close_to_dense(found: Find) -> None:
    plans = [DENSE, *(replace(SHORT, label=label) for label in ("topk", "micro", "iwp"))]
    ends = {"dense": (0.98,), "topk": (0.979,), "micro": (0.975,), "iwp": (0.90,)}
    said = found(*plans, ends=ends, dense=1000, topk=50, micro=20, iwp=1)
    assert said.sentence.startswith("micro")
    assert "fewest bytes" in said.rule


def test_of_nearly_the_same_bytes_the_better_one(found: Find) -> None:
    plans = [DENSE, replace(SHORT, label="exdyna"), SHORT]
    ends = {"dense": (0.98,), "exdyna": (0.972,), "micro": (0.979,)}
    assert found(*plans, ends=ends, dense=1000, exdyna=100, micro=101).sentence.startswith("micro")


def test_the_best_where_none_is_close(found: Find) -> None:
    ends = {"dense": (0.98,), "micro": (0.5,), "topk": (0.6,)}
    said = found(DENSE, SHORT, replace(SHORT, label="topk"), ends=ends)
    assert said.sentence.startswith("topk")
    assert said.rule.startswith("No method ends within a point")


def test_without_dense_the_best_alone(found: Find) -> None:
    said = found(SHORT, replace(SHORT, label="union"), ends={"micro": (0.97,), "union": (0.98,)}, union=50_000, micro=1)
    assert (
        said.sentence
        == "union at density 0.01 ends at 98.00 % accuracy, sending 50.0 kB a step, the best of those compared."
    )


def test_a_single_run(found: Find) -> None:
    said = found(DENSE, ends={"dense": (0.97,)})
    assert said.sentence == "dense ends at 97.00 % accuracy, sending 4.51 MB a step."
    assert [card.title for card in said.cards] == ["final accuracy", "bytes a step", "runs"]


def test_a_density_far_from_the_asked_one_is_told(found: Find) -> None:
    said = found(replace(SHORT, label="micro(control='paper')", epochs=12), replace(DENSE, epochs=12))
    assert re.match(r"micro\(control='paper'\) at density 0\.01 \(in fact 0\.01[2-4]\) sends", said.sentence)


def test_nothing_evaluated(tmp_path: Path) -> None:
    (section,) = sections(make_runs(tmp_path, [replace(SHORT, stop_after=0, status="unfinished")]))
    said = finding(section)
    assert said.sentence == "No run has been evaluated yet."
    assert [(card.value, card.note) for card in said.cards] == [("1", "1 unfinished")]


def test_cards_about_the_method_of_the_sentence(found: Find) -> None:
    said = found(DENSE, SHORT, ends={"dense": (0.98,), "micro": (0.975,)})
    cards = {card.title: card for card in said.cards}
    assert list(cards) == ["final accuracy", "bytes a step", "actual density", "speed-up at 1 Gbit/s", "runs"]
    assert cards["final accuracy"].note == f"micro; dense 98.00{SPACE}%"
    assert cards["runs"].note == "all finished"


def test_odd_runs_have_a_finding(tmp_path: Path) -> None:
    (section,) = sections(make_runs(tmp_path, odd_plans()))
    assert "finished" in finding(section).cards[-1].note
