from __future__ import annotations

import pickle
import re
from itertools import pairwise
from typing import Any

import pytest

import gradsieve
from gradsieve import METHODS, Method
from gradsieve.methods import Budget
from gradsieve.region import BalancedBlocks, SteppingBlocks

NAMES = [
    *("dense", "topk", "randomk", "cltk", "hard_threshold", "sidco"),
    *("deft", "gtopk", "oktopk", "dgc", "micro", "exdyna", "iwp", "union"),
]


def test_all_methods_are_listed_and_public() -> None:
    assert list(METHODS) == NAMES
    for name in NAMES:
        assert METHODS[name] is getattr(gradsieve, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_method_by_name_is_the_constructor(name: str) -> None:
    made = gradsieve.method(name)
    assert isinstance(made, Method)
    assert made == METHODS[name]()
    assert made.name == name
    assert repr(made).startswith(f"{name}(")
    assert METHODS[name].__doc__


@pytest.mark.parametrize("name", [name for name in NAMES if name != "dense"])
def test_repr_can_be_evaluated(name: str) -> None:
    made = gradsieve.method(name, density=0.003)
    assert eval(repr(made), vars(gradsieve)) == made
    assert made.density == 0.003
    assert len({made, gradsieve.method(name, density=0.003), gradsieve.method(name, density=0.004)}) == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_method_travels_to_another_process(name: str) -> None:
    made = gradsieve.method(name)
    assert pickle.loads(pickle.dumps(made)) == made


def test_the_table_of_methods_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        METHODS["mine"] = gradsieve.dense  # type: ignore[index]


def test_blocks_follow_control_unless_given() -> None:
    assert isinstance(gradsieve.exdyna().region, BalancedBlocks)
    assert isinstance(gradsieve.exdyna(control="paper").region, SteppingBlocks)
    assert isinstance(gradsieve.exdyna(control="paper", blocks="adaptive").region, BalancedBlocks)
    assert isinstance(gradsieve.exdyna(blocks="paper").region, SteppingBlocks)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "dense"])
@pytest.mark.parametrize("density", [0, -0.1, 1.5, float("nan"), float("inf")])
def test_density_outside_its_range_is_refused(name: str, density: float) -> None:
    with pytest.raises(ValueError, match=re.escape("density must lie in (0, 1]")):
        gradsieve.method(name, density=density)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("micor", {}, ValueError, "unknown method 'micor'; did you mean 'micro'"),
        ("", {}, ValueError, "unknown method ''; valid are: dense"),
        ("micro", {"densty": 0.1}, TypeError, "micro() has no option 'densty'; did you mean 'density' or"),
        ("micro", {"blocks": "paper"}, TypeError, "micro() has no option 'blocks'; valid are: density, control"),
        ("dense", {"density": 0.1}, TypeError, "dense() has no option 'density'; there are none"),
        ("micro", {"density": "0.1"}, TypeError, "density must be a number in (0, 1], not '0.1'"),
        ("micro", {"density": True}, TypeError, "density must be a number in (0, 1], not True"),
        ("micro", {"control": "pid"}, ValueError, "control must be one of 'adaptive', 'paper', not 'pid'"),
        ("exdyna", {"blocks": 7}, ValueError, "blocks must be one of 'adaptive', 'paper', not 7"),
        ("micro", {"control": "paper", "ceiling": 2.0}, ValueError, "ceiling has no meaning with control='paper'"),
        ("union", {"ceiling": 0.5}, ValueError, "ceiling must be at least 1"),
        ("union", {"ceiling": float("nan")}, ValueError, "ceiling must be at least 1"),
        ("iwp", {"num_broadcasters": 0}, ValueError, "num_broadcasters must be at least 1, not 0"),
        ("iwp", {"num_broadcasters": 1.5}, TypeError, "num_broadcasters must be a whole number, not 1.5"),
        ("iwp", {"eps": -1}, ValueError, "eps must be at least 0"),
        ("iwp", {"momentum": 1.0}, ValueError, "momentum must be at least 0 and below 1, not 1.0"),
        ("iwp", {"per_layer": "yes"}, TypeError, "per_layer must be True or False, not 'yes'"),
        ("iwp", {"warmup_steps": 0.5}, TypeError, "warmup_steps must be a whole number, not 0.5"),
        ("union", {"warmup_steps": -1}, ValueError, "warmup_steps must be at least 0, not -1"),
        ("micro", {"warmup_density": 0}, ValueError, "warmup_density must lie in (0, 1], not 0"),
        ("exdyna", {"warmup_density": 1.5}, ValueError, "warmup_density must lie in (0, 1], not 1.5"),
        ("micro", {"overshoot": 1.0}, ValueError, "overshoot must be at least 0 and below 1, not 1.0"),
        ("oktopk", {"ceiling": 0.9}, ValueError, "ceiling must be at least 1"),
        ("gtopk", {"ceiling": 2.0}, TypeError, "gtopk() has no option 'ceiling'; valid are: density"),
        ("dgc", {"sample": 0}, ValueError, "sample must lie in (0, 1]"),
        ("dgc", {"warmup_steps": -1}, ValueError, "warmup_steps must be at least 0, not -1"),
        ("dgc", {"clip": 0}, ValueError, "clip must be above 0"),
        ("hard_threshold", {"threshold": -1.0}, ValueError, "threshold must be at least 0"),
    ],
)
def test_bad_options_are_refused_at_construction(
    name: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        gradsieve.method(name, **options)


def test_options_go_by_name_only() -> None:
    with pytest.raises(TypeError, match=re.escape("micro() takes options by name only; valid are: density")):
        gradsieve.micro(0.01)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=re.escape("dense() takes options by name only; there are none")):
        gradsieve.dense(0.01)  # type: ignore[call-arg]


def test_target_is_the_whole_part_and_at_least_one() -> None:
    budget = Budget(0.01)
    assert [budget.target(0, numel) for numel in (0, 1, 99, 250, 11_173_962)] == [0, 1, 1, 2, 111_739]
    assert Budget(1.0).target(0, 7) == 7


def test_warmup_falls_exponentially_to_the_density() -> None:
    budget = Budget(0.001, warmup_steps=4)
    targets = [budget.target(step, 1_000_000) for step in range(6)]
    assert targets[0] == 250_000
    assert targets[4:] == [1000, 1000]
    ratios = [later / earlier for earlier, later in pairwise(targets[:4])]
    assert ratios == pytest.approx([250 ** (-1 / 4)] * 3, rel=1e-3)


@pytest.mark.parametrize("name", ["dgc", "micro", "exdyna", "iwp", "union"])
def test_warmup_begins_where_it_is_told_to(name: str) -> None:
    budget = gradsieve.method(name, density=0.01, warmup_steps=2, warmup_density=0.04).budget
    assert [budget.target(step, 10_000) for step in range(4)] == [400, 200, 100, 100]
    # there is nothing to fall from
    low = gradsieve.method(name, density=0.01, warmup_steps=2, warmup_density=0.001).budget
    assert [low.target(step, 10_000) for step in range(3)] == [100, 100, 100]
