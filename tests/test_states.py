"""States of a run as they are saved, without a run: made by hand, from simulations."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gradsieve
import toys
from gradsieve import METHODS, Simulation, states
from gradsieve.methods import method_of
from gradsieve.region import Blocks, SteppingBlocks
from gradsieve.states import Origin, Vectors, loadable, weights
from gradsieve.types import Setup

SHAPES = {"first": (20, 30), "empty": (0, 4), "second": (40,), "third": (7, 5)}
NUMEL = 600 + 40 + 35
WORLDS = [1, 2, 3, 4, 7, 8]


def simulated(variant: str, world: int, steps: int = 5, seed: int = 3) -> Simulation:
    simulation = Simulation(toys.make(variant, 0.05), world, NUMEL, shapes=list(SHAPES.values()), seed=seed)
    draw = torch.Generator().manual_seed(world)
    for _ in range(steps):
        simulation.step(torch.randn(world, NUMEL, generator=draw), torch.linspace(-1, 1, NUMEL))
    return simulation


def by_name(vector: Tensor) -> dict[str, Tensor]:
    sizes = [int(np.prod(shape)) for shape in SHAPES.values()]
    return {
        name: part.reshape(shape).clone()
        for (name, shape), part in zip(SHAPES.items(), torch.split(vector, sizes), strict=True)
    }


def origin(variant: str, rank: int, world: int, **changed: Any) -> Origin:
    values: dict[str, Any] = {
        "scope": "model",
        "shapes": SHAPES,
        "names": tuple(SHAPES),
        "dtype": torch.float32,
    } | changed
    return Origin(rank, world, values.pop("method", toys.make(variant, 0.05)), **values)


def saved(variant: str, world: int, steps: int = 5, **changed: Any) -> list[dict[str, Any]]:
    """What the ranks of a run save."""
    found = []
    for rank, worker in enumerate(simulated(variant, world, steps).workers):
        vectors = dict(worker.residual.named())
        parts = [{"names": list(SHAPES), "learned": worker.state_dict()}]
        velocities = by_name(vectors["velocity"]) if "velocity" in vectors else {}
        learned = {"step": worker.step, "seed": worker.seed, "rate": None, "parts": parts}
        found.append(
            states.saved(
                origin(variant, rank, world, **changed), Vectors(learned, by_name(vectors["residual"]), velocities)
            )
        )
    return found


def mean(states: list[dict[str, Any]], kind: str = "residuals") -> dict[str, Tensor]:
    return {name: torch.stack([state[kind][name].double() for state in states]).mean(0) for name in states[0][kind]}


def plain(state: Any) -> Any:
    """Tensors as lists, rows as lists: so that states can be compared."""
    if isinstance(state, Tensor):
        return [str(state.dtype), state.tolist()]
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return [plain(each) for each in state] if isinstance(state, (list, tuple)) else state


class TestWeights:
    @pytest.mark.parametrize("new", WORLDS)
    @pytest.mark.parametrize("old", WORLDS)
    def test_rows_add_up_to_one_and_columns_to_the_same(self, old: int, new: int) -> None:
        table = np.zeros((new, old))
        for rank in range(new):
            for other, weight in weights(rank, old, new).items():
                table[rank, other] = weight
        np.testing.assert_allclose(table.sum(1), 1, rtol=1e-12)
        np.testing.assert_allclose(table.sum(0), new / old, rtol=1e-12)
        assert (table >= 0).all()

    def test_an_equal_world_leaves_each_rank_its_own(self) -> None:
        assert [weights(rank, 5, 5) for rank in range(5)] == [{rank: 1.0} for rank in range(5)]

    def test_some(self) -> None:
        assert weights(0, 4, 2) == {0: 0.5, 1: 0.5}
        assert weights(1, 2, 3) == {0: 0.5, 1: 0.5}
        assert weights(3, 2, 4) == {1: 1.0}


class TestReshard:
    @pytest.mark.parametrize("variant", toys.VARIANTS)
    def test_the_mean_is_conserved_and_the_rest_goes_on(self, variant: str) -> None:
        old = saved(variant, 4)
        for world in (1, 2, 3, 8):
            new = gradsieve.reshard(old, world)
            assert [state["rank"] for state in new] == [*range(world)]
            for kind in ("residuals", "velocities"):
                before, after = mean(old, kind), mean(new, kind)
                assert before.keys() == after.keys()
                for name in before:
                    torch.testing.assert_close(after[name], before[name], rtol=1e-6, atol=1e-6)
            for rank, state in enumerate(new):
                vectors = loadable(state, origin(variant, rank, world))
                assert (vectors.learned["step"], vectors.learned["seed"]) == (5, 3)

    @pytest.mark.parametrize("variant", toys.VARIANTS)
    def test_to_the_same_world_nothing_changes(self, variant: str) -> None:
        old = saved(variant, 3)
        assert plain(gradsieve.reshard(list(reversed(old)), 3)) == plain(old)

    def test_thresholds_go_on_and_counts_of_ranks_start_anew(self) -> None:
        old = saved("union", 4)
        for state in gradsieve.reshard(old, 2):
            was, now = (s["learned"]["parts"][0]["learned"]["criterion"] for s in (old[0], state))
            assert now == {"thresholds": was["thresholds"], "travelled": 1, "distinct": 1, "recent": ()}
            assert was["thresholds"][0] > 0
            assert len(was["recent"]) == 4

    def test_given_states_stay_what_they_are(self) -> None:
        old = saved("exdyna", 2)
        before = plain(old)
        for world in (2, 3):
            for state in gradsieve.reshard(old, world):
                for residual in state["residuals"].values():
                    residual.fill_(9)
        assert plain(old) == before

    def test_states_that_do_not_belong_together_are_refused(self) -> None:
        old, other = saved("micro", 3), saved("micro", 3, steps=6)
        refused: list[tuple[list[Any], str]] = [
            (old[:2], r"the states of ranks \[2\] of 3 are missing"),
            ([*old, old[1]], "rank 1 of 3 came twice"),
            ([*old[:2], other[2]], r"ranks 0 and 2 learned different things \(after 5 and 6 steps\)"),
            ([*old[:2], saved("topk", 3)[2]], "method .topk.*give the states of one run"),
            ([*old[:2], saved("micro", 4)[2]], "world 4, but here world is 3: give the states of one run"),
            ([gradsieve.consolidated(old)], "a consolidated state needs no conversion"),
            ([old[0] | {"rank": 7}, *old[1:]], "this state's rank is 7"),
        ]
        for given, message in refused:
            with pytest.raises(ValueError, match=message):
                gradsieve.reshard(given, 2)
        nothings: list[Any] = [[], old[0], None]
        for nothing in nothings:
            with pytest.raises(TypeError, match="states must be a list"):
                gradsieve.reshard(nothing, 2)
        for world in (0, -1, 1.5, True):
            with pytest.raises(ValueError, match="world must be a whole number of at least 1"):
                gradsieve.reshard(old, world)  # type: ignore[arg-type]

    def test_a_world_that_the_method_does_not_fit_is_refused(self) -> None:
        old = saved("iwp", 3, method=gradsieve.iwp(density=0.05, num_broadcasters=3))
        with pytest.raises(ValueError, match="num_broadcasters=3, but there are only 2 ranks"):
            gradsieve.reshard(old, 2)


class TestConsolidated:
    @pytest.mark.parametrize("variant", ["union", "dgc", "exdyna-paper", "sidco"])
    def test_it_loads_on_every_rank_of_any_world_with_the_mean(self, variant: str) -> None:
        old = saved(variant, 4)
        state = gradsieve.consolidated(old)
        assert state["form"] == "consolidated"
        for world in (1, 3, 4):
            vectors = [loadable(state, origin(variant, rank, world)) for rank in range(world)]
            for name, residual in mean(old).items():
                for own in vectors:
                    torch.testing.assert_close(own.residuals[name].double(), residual, rtol=1e-6, atol=1e-6)
        same = loadable(state, origin(variant, 2, 4)).learned
        assert plain(same) == plain(old[2]["learned"])

    def test_it_is_saved_safely(self) -> None:
        file = io.BytesIO()
        torch.save([gradsieve.consolidated(saved("exdyna", 2)), *saved("exdyna", 2)], file)
        file.seek(0)
        first, second, _ = torch.load(file, weights_only=True)
        assert loadable(first, origin("exdyna", 1, 2)).learned["step"] == 5
        assert plain(second) == plain(saved("exdyna", 2)[0])

    def test_it_is_refused_by_another_method_and_model(self) -> None:
        state = gradsieve.consolidated(saved("micro", 2))
        with pytest.raises(ValueError, match=r"saved with method .micro"):
            loadable(state, origin("union", 0, 2))
        with pytest.raises(ValueError, match="another model or another exclude="):
            loadable(state, origin("micro", 0, 2, shapes={"first": (20, 30)}, names=("first",)))


class TestRefusals:
    def test_each_says_what_differs_and_what_to_do(self) -> None:
        state = saved("micro", 4)[1]
        cases: list[tuple[Origin, str]] = [
            (origin("micro", 1, 2), r"world 4, but here world is 2: .*gradsieve\.reshard\(states, world=2\)"),
            (origin("micro", 0, 4), r"rank 1, but here rank is 0: .*gradsieve\.consolidated.*gradsieve\.Sharded"),
            (origin("topk", 1, 4), r"saved with method .micro.*here method is 'topk.*make the sieve with micro\("),
            (origin("micro", 1, 4, scope="bucket"), "scope 'model', but here scope is 'bucket': make the sieve with"),
            (origin("micro", 1, 4, dtype=torch.bfloat16), r"would lose a part: give sparsify residual_dtype=torch\.fl"),
            (
                origin("micro", 1, 4, shapes=SHAPES | {"third": (5, 7)}),
                r"1 parameters differ, the first is 'third' \(saved \(7, 5\), here \(5, 7\)\)",
            ),
        ]
        for here, message in cases:
            with pytest.raises(ValueError, match=message):
                loadable(state, here)

    def test_wider_residuals_take_narrower_ones(self) -> None:
        assert loadable(saved("micro", 2)[0], origin("micro", 0, 2, dtype=torch.float64)).learned["step"] == 5

    def test_numbers_that_are_not_finite_are_refused_unless_they_may_be_there(self) -> None:
        state = saved("dgc", 2)[0]
        state["velocities"]["third"][0, 0] = float("nan")
        vectors = Vectors(state["learned"], state["residuals"], state["velocities"])
        state = states.saved(origin("dgc", 0, 2), vectors)
        with pytest.raises(ValueError, match=r"velocities of 'third' are not all finite: go on from an earlier"):
            loadable(state, origin("dgc", 0, 2))
        loadable(state, origin("dgc", 0, 2, finite=False))

    def test_a_state_of_the_version_before_is_refused(self) -> None:
        state = saved("micro", 2)[0]
        for key in ("form", "package", "parameters"):
            del state[key]
        with pytest.raises(ValueError, match=r"saved with version 3, but here version is 4: load it with"):
            loadable(state | {"version": 3}, origin("micro", 0, 2))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where there is something in a state, from the top down."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, each in value.items():
            yield from places(each, (*path, key))
    elif isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            yield from places(each, (*path, place))


def with_changed(value: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """A copy in which something is different at one place; where `change` raises KeyError, it is missing."""
    if not path:
        return change(value)
    if isinstance(value, dict):
        copied = dict(value)
        try:
            copied[path[0]] = with_changed(copied[path[0]], path[1:], change)
        except KeyError:
            del copied[path[0]]
        return copied
    items = list(value)
    try:
        items[path[0]] = with_changed(items[path[0]], path[1:], change)
    except KeyError:
        del items[path[0]]
    return type(value)(items)


def missing(_: Any) -> Any:
    raise KeyError


def _same_kind(one: Any, other: Tensor) -> bool:
    """Can nothing tell them apart, for there are no numbers in them?"""
    if not isinstance(one, Tensor) or one.is_meta or other.numel():
        return False
    return (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)


def damages(draw: random.Random, value: Any) -> Any:
    """Something else in place of a value, which is of no use there."""
    if isinstance(value, Tensor):
        kinds: list[Any] = [value.to(torch.int32), value.to(torch.complex64), value.unsqueeze(0), value.tolist(), None]
        kinds += [
            torch.full_like(value, float("nan")) if value.is_floating_point() else value - (1 << 40),
            value.bool(),
        ]
        kinds += [value.to("meta"), value.to_sparse(), torch.zeros(0), value.half()]
        return draw.choice([kind for kind in kinds if not _same_kind(kind, value)])
    kinds = [
        None,
        -1,
        -7,
        float("nan"),
        float("inf"),
        -0.5,
        "garbage",
        b"\0\xff",
        True,
        1 << 70,
        10**5000,
        object(),
        {"x": 1},
    ]
    kinds += [[[]], {1, 2}, torch.tensor(3), complex(1, 1), "", [None], (float("nan"),), {0: 0}, 1e300 * 10]
    return draw.choice(kinds)


def damaged(draw: random.Random, state: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A state in which one thing is wrong, and where."""
    path = draw.choice(list(places(state)))
    kind = draw.random()
    # an entry that falls out of a row of recent counts leaves a valid row
    if kind < 0.3 and path[-2:-1] != ("recent",):
        return path, with_changed(state, path, missing)
    if kind < 0.4:
        return ("more",), {**state, draw.choice(["more", "Rank", "state dict"]): 1}
    # a rate of none is as it was
    worthless = -1 if path[-1] == "rate" else None
    return path, with_changed(state, path, lambda value: _or(damages(draw, value), worthless))


def _or(damage: Any, instead: Any) -> Any:
    return instead if damage is None else damage


def refusal(state: Any, here: Origin) -> str:
    try:
        loadable(state, here)
    except (ValueError, TypeError) as error:
        return str(error)
    return "let through"


@pytest.mark.parametrize("variant", ["union", "exdyna", "exdyna-paper", "sidco", "dgc", "iwp-per-layer", "micro-paper"])
def test_damaged_states_are_refused_with_a_clear_message(variant: str) -> None:
    draw, good = random.Random(variant), saved(variant, 2)
    forms = [good[1], gradsieve.consolidated(good)]
    here = origin(variant, 1, 2)
    before = plain(forms)
    for _ in range(1500):
        path, state = damaged(draw, draw.choice(forms))
        message = refusal(state, here)
        assert "this state" in message, (path, message)
        assert len(message) < 900
        # what was wrong is told; the digest is for what looks right
        assert "digest is not" not in message, path
    assert plain(forms) == before
    for form in forms:
        loadable(form, here)


@pytest.mark.parametrize("form", ["rank", "consolidated"])
def test_what_looks_right_and_is_not_is_refused_by_its_digest(form: str) -> None:
    good = saved("dgc", 3)
    state = good[1] if form == "rank" else gradsieve.consolidated(good)
    here = origin("dgc", 1, 3)
    loadable(state, here)
    learned, residuals = state["learned"], state["residuals"]
    bit = residuals["first"].clone()
    bit.view(torch.int32)[3, 4] ^= 1
    changes: list[dict[str, Any]] = [
        {"residuals": residuals | {"first": bit}},
        {"residuals": residuals | {"third": good[2]["residuals"]["third"]}},
        {"residuals": good[2]["residuals"], "velocities": good[2]["velocities"]},
        {"residuals": good[2]["residuals"], "velocities": good[2]["velocities"], "digest": good[2]["digest"]},
        {"velocities": residuals, "residuals": state["velocities"]},
        {"learned": learned | {"step": 6}},
        {"package": "9.9"},
        {"digest": "0" * 64},
    ]
    for change in changes:
        assert "digest is not that of what is in it" in refusal(state | change, here)


class TestBlocks:
    @pytest.mark.parametrize("new", WORLDS)
    @pytest.mark.parametrize("old", WORLDS)
    def test_partitions_follow_the_old_borders_and_stay_valid(self, old: int, new: int) -> None:
        region, draw = SteppingBlocks(), np.random.default_rng(old * 10 + new)
        for numel in (3, 7, 50, 5_000, 1_000_000):
            state = self._moved(region, Setup(old, numel, (0, numel)), draw)
            resized = region.resized(state, old, new)
            region.check(resized, Setup(new, numel, (0, numel)))
            if old == new:
                assert resized == state
            share = np.linspace(0, 1, new + 1)
            expected = np.interp(share, np.linspace(0, 1, old + 1), np.cumsum([0, *state.num_blocks]))
            if numel >= 5_000:  # of few blocks each partition needs its own
                assert np.abs(np.cumsum([0, *resized.num_blocks]) - expected).max() <= 2

    def _moved(self, region: SteppingBlocks, setup: Setup, draw: np.random.Generator) -> Blocks:
        blocks = list(region.start(setup).num_blocks)
        least = region._fewest(sum(blocks), setup.world)
        for left, right in [*pairwise(range(setup.world))] * 50:
            giver, taker = (left, right) if draw.random() < 0.3 else (right, left)
            if blocks[giver] > least:
                blocks[giver], blocks[taker] = blocks[giver] - 1, blocks[taker] + 1
        state = Blocks(tuple(blocks))
        region.check(state, setup)
        return state


@pytest.mark.parametrize("name", METHODS)
def test_a_method_comes_back_from_its_text(name: str) -> None:
    for variant, (of, _) in toys.VARIANTS.items():
        if of == name:
            assert repr(method_of(repr(toys.make(variant, 0.05)))) == repr(toys.make(variant, 0.05))


@pytest.mark.parametrize(
    "text", ["", "micro", "micro(", "micro(0.1)", "micro(density=0.1)", "nothing()", "micro(density=__import__('os'))"]
)
def test_what_is_no_method_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no method of this version"):
        method_of(text)


class TestSimulations:
    @pytest.mark.parametrize("as_team", [False, True])
    @pytest.mark.parametrize("variant", toys.VARIANTS)
    def test_another_number_of_workers_conserves_the_mean_and_goes_on(self, variant: str, as_team: bool) -> None:
        simulation = Simulation(toys.make(variant, 0.05), 3, NUMEL, shapes=list(SHAPES.values()), as_team=as_team)
        weights = torch.linspace(-1, 1, NUMEL)
        given = torch.zeros(NUMEL, dtype=torch.float64)
        sent = torch.zeros(NUMEL, dtype=torch.float64)
        for world in (3, 5, 2, 1, 4):
            before = simulation.residual.double().mean(0)
            simulation = simulation.resized(world)
            torch.testing.assert_close(simulation.residual.double().mean(0), before, rtol=1e-5, atol=1e-6)
            for _ in range(4):
                gradients = torch.randn(world, NUMEL)
                found, stats = simulation.step(gradients, weights)
                given += gradients.double().mean(0)
                sent += found.double()
            assert stats.step == 4 * [3, 5, 2, 1, 4].index(world) + 3
        if not toys.make(variant, 0.05).feedback.momentum and toys.make(variant, 0.05).feedback.clip is None:
            torch.testing.assert_close(simulation.residual.double().mean(0) + sent, given, rtol=1e-4, atol=1e-4)

    def test_damaged_states_change_nothing(self) -> None:
        simulation = simulated("exdyna", 2)
        good = simulation.state_dict()
        draw = random.Random(1)
        for _ in range(300):
            bad = copy.deepcopy(good)
            path = draw.choice(list(places(bad[1])))
            bad[1] = with_changed(
                bad[1], path, missing if draw.random() < 0.5 else lambda _: draw.choice([None, -1, "x"])
            )
            if path[-2:-1] == ("recent",):
                continue
            with pytest.raises(ValueError, match=r"state|worker"):
                simulation.load_state_dict(bad)
        assert plain(simulation.state_dict()) == plain(good)
