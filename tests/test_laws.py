"""The laws that every method obeys, over the table of all methods, worlds and odd sizes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gradsieve
from gradsieve import Method, Simulation
from gradsieve.collectives import lockstep
from gradsieve.rounding import WIRES
from gradsieve.types import Reduced
from toys import VARIANTS, make

WORLDS, SELDOM_WORLD = (1, 2, 3, 5), 3
SIZES, SELDOM_SIZE = (0, 1, 3, 31, 1023, 40_000), 31
FEWER_BITS = [(1, 31, "bfloat16"), (2, 0, "bfloat16"), (3, 1023, "bfloat16"), (5, 3, "bfloat16")]
FEWER_BITS += [(2, 0, "float8"), (3, 1023, "float8"), (5, 3, "float8")]
"""The rest of a step is the same whatever values travel as."""


def case(world: int, numel: int, *more: str) -> Any:
    """What lies between others runs with the slow tests."""
    return pytest.param(world, numel, *more, marks=[pytest.mark.slow] * (world == SELDOM_WORLD or numel == SELDOM_SIZE))


CASES = [case(world, numel, "float32") for world in WORLDS for numel in SIZES] + FEWER_BITS


def layers_of(numel: int) -> list[int]:
    """A few tensors of unlike sizes, an empty one among them."""
    first, second = numel // 2, numel // 3
    return [first, 0, second, numel - first - second]


def gradients(steps: int, world: int, numel: int) -> Tensor:
    """Layers of unlike scale, a common signal and each worker's noise."""
    scale = torch.cat([torch.full((size,), 10.0**-place) for place, size in enumerate(layers_of(numel))])
    return (torch.randn(steps, 1, numel) + 0.5 * torch.randn(steps, world, numel)) * scale


class Observed:
    """A simulation whose steps show the accumulated vectors, too."""

    def __init__(self, method: Method, world: int, numel: int, wire: str) -> None:
        self.simulation = Simulation(method, world, numel, shapes=layers_of(numel), wire=wire)
        self.parameters = torch.linspace(-1, 1, numel)

    def step(self, given: Tensor) -> tuple[Tensor, list[Reduced]]:
        """What was accumulated, `[world, numel]`, and the outcome on each rank."""
        workers = self.simulation.workers
        for worker, gradient in zip(workers, given, strict=True):
            worker.begin(lambda: self.parameters)
            worker.feed(0, gradient)
        accumulated = self.simulation.residual.clone()
        outcomes = lockstep([worker.exchange() for worker in workers])
        for worker, reduced in zip(workers, outcomes, strict=True):
            worker.finish(reduced)
        return accumulated, outcomes


def spread(reduced: Reduced, numel: int) -> Tensor:
    mean = torch.zeros(numel)
    mean[reduced.indices] = reduced.mean
    return mean


def steps_of(
    variant: str, density: float, given: Tensor, wire: str = "float32"
) -> Iterator[tuple[Tensor, list[Reduced], Tensor]]:
    """Accumulated vectors, outcomes and the residuals after, of each step."""
    _, world, numel = given.shape
    observed = Observed(make(variant, density), world, numel, wire)
    for gradient in given:
        accumulated, outcomes = observed.step(gradient)
        yield accumulated, outcomes, observed.simulation.residual


@pytest.mark.parametrize(("world", "numel", "wire"), CASES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_mass_is_conserved_at_every_step(variant: str, world: int, numel: int, wire: str) -> None:
    for accumulated, outcomes, residual in steps_of(variant, 0.01, gradients(6, world, numel), wire):
        before = accumulated.sum(0)
        after = world * spread(outcomes[0], numel) + residual.sum(0)
        largest = accumulated.abs().sum(0).max().item() if numel else 0.0
        assert ((before - after).abs() <= 1e-6 * largest).all()


@pytest.mark.parametrize(("world", "numel", "wire"), CASES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_agree_and_the_support_is_ascending(variant: str, world: int, numel: int, wire: str) -> None:
    for _, (first, *others), _ in steps_of(variant, 0.05, gradients(4, world, numel), wire):
        for other in others:
            assert torch.equal(spread(first, numel), spread(other, numel))
            assert first.counts == other.counts
        assert len(first.counts) == world
        if isinstance(first.indices, Tensor):
            assert (first.indices[1:] > first.indices[:-1]).all()


@pytest.mark.parametrize(("world", "numel"), [case(world, numel) for world in WORLDS for numel in SIZES])
@pytest.mark.parametrize("variant", VARIANTS)
def test_density_one_is_the_plain_mean(variant: str, world: int, numel: int) -> None:
    given = gradients(3, world, numel)
    if variant == "dgc-clipped":
        given /= 1e6  # below the clipping norm
    for gradient, (_, outcomes, residual) in zip(given, steps_of(variant, 1.0, given), strict=True):
        torch.testing.assert_close(spread(outcomes[0], numel), gradient.mean(0), rtol=1e-5, atol=1e-7)
        assert not residual.any()


@pytest.mark.parametrize(("world", "numel", "wire"), FEWER_BITS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_density_one_in_fewer_bits_is_the_mean_to_its_rounding(variant: str, world: int, numel: int, wire: str) -> None:
    given = gradients(3, world, numel)
    if variant == "dgc-clipped":
        given /= 1e6  # below the clipping norm
    # a rounding of the values and one of their sum, each by half a step of eight bits, or of four
    rounding = 1.01 * 2**-7 if wire == "bfloat16" else 1.05 * 2**-3
    for accumulated, outcomes, residual in steps_of(variant, 1.0, given, wire):
        sums = accumulated.abs().sum(0)
        # in float8 what is small beside the largest does not travel
        small = 0.0 if wire == "bfloat16" or not numel else 2.0**-15 * float(sums.max())
        off = spread(outcomes[0], numel) - accumulated.mean(0)
        assert (off.abs() <= (rounding * sums + small) / world).all()
        assert (residual.abs() <= rounding * sums + small).all()
        if wire == "bfloat16":  # the sum travelled as eight bits
            mean = spread(outcomes[0], numel) * world
            torch.testing.assert_close(mean.bfloat16().float(), mean, rtol=1e-6, atol=0)


def build_up(variant: str, world: int, density: float = 0.01) -> float:
    """The largest actual density over the asked one, when workers see unlike gradients."""
    given = torch.randn(12, world, 20_000)
    trace = gradsieve.simulate(make(variant, density), given, parameters=torch.randn(20_000), shapes=[20_000])
    return max(stats.density for stats in trace.stats) / density


@pytest.mark.parametrize("world", [2, 5, 16])
def test_topk_builds_up_with_the_number_of_workers(world: int) -> None:
    assert 0.8 * world < build_up("topk", world) <= world


@pytest.mark.parametrize("world", [1, 2, 5, 16])
@pytest.mark.parametrize(
    "variant", ["micro", "exdyna", "union", "cltk", "iwp", "deft", "randomk", "iwp-per-layer", "gtopk"]
)
def test_steered_methods_do_not_build_up(variant: str, world: int) -> None:
    assert build_up(variant, world) <= 1.1


@pytest.mark.parametrize("world", [1, 2, 5, 16])
@pytest.mark.parametrize(("variant", "ceiling"), [("oktopk", 2.0), ("oktopk-tight", 1.0)])
def test_what_reaches_a_threshold_of_old_is_bounded(variant: str, ceiling: float, world: int) -> None:
    assert build_up(variant, world) <= ceiling


@given(
    variant=st.sampled_from(sorted(VARIANTS)),
    world=st.integers(1, 4),
    values=st.lists(st.sampled_from([0.0, 1.0, -1.0, 1e-30, 3e38, -2.5e-7, 4.0]), max_size=40),
    density=st.sampled_from([0.01, 0.3, 0.5, 0.99, 1.0]),
    wire=st.sampled_from(sorted(WIRES)),
)
def test_hard_vectors_break_nothing(
    variant: str, world: int, values: Sequence[float], density: float, wire: str
) -> None:
    """Zeros, ties, the limits of float32: the step ends, ranks agree, the support is within the vector."""
    given = torch.tensor([[values] * world] * 3, dtype=torch.float32).reshape(3, world, len(values)) / world / 8
    for _, outcomes, _ in steps_of(variant, density, given, wire):
        support = outcomes[0].indices
        if isinstance(support, Tensor) and len(support):
            assert support[0] >= 0
            assert support[-1] < len(values)


@pytest.mark.parametrize("variant", ["micro", "exdyna", "union", "iwp"])
def test_tied_gradients_are_all_sent_in_time(variant: str) -> None:
    """Where every entry is alike a threshold cannot choose; the density still holds and none waits for ever."""
    trace = gradsieve.simulate(make(variant, 0.1), torch.ones(40, 2, 500), parameters=torch.ones(500))
    assert all(stats.support <= 2 * stats.target for stats in trace.stats)
    assert all(stats.support > 0 for stats in trace.stats)
    assert (trace.mean.sum(0) > 0).all()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_not_finite_stops_no_step(variant: str, bad: float, wire: str) -> None:
    """It is not filtered: ranks stay together, and the density holds as ever."""
    given = gradients(4, 3, 999)
    given[0, 1, 5] = bad
    for _, (first, *others), _ in steps_of(variant, 0.05, given, wire):
        assert all(torch.equal(spread(first, 999) != 0, spread(other, 999) != 0) for other in others)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "variant",
    ["topk", "micro", "exdyna", "union", "union-overshoot", "cltk", "deft", "hard_threshold", "gtopk", "oktopk"],
)
def test_what_is_not_finite_is_sent_within_a_round_and_not_kept(variant: str, bad: float, wire: str) -> None:
    given = gradients(4, 3, 999)
    given[0, 1, 5] = bad
    trace = gradsieve.simulate(make(variant, 0.05), given, shapes=layers_of(999), wire=wire)
    assert not trace.mean[:, 5].isfinite().all()
    assert trace.residual.isfinite().all()


def imbalances(method: Method, seed: int) -> list[float]:
    """Twenty layers whose scales differ by a log-normal factor, eight workers, fifty steps."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(torch.randn(20, generator=generator)).repeat_interleave(15_000)
    simulation = Simulation(method, world=8, numel=300_000)
    return [simulation.step(torch.randn(8, 300_000, generator=generator) * scale)[1].imbalance for _ in range(50)]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_adaptive_blocks_balance_where_the_published_rule_is_slow(seed: int) -> None:
    assert statistics.median(imbalances(gradsieve.exdyna(), seed)[-10:]) < 0.15
    assert statistics.median(imbalances(gradsieve.exdyna(blocks="paper"), seed)[-10:]) > 0.26


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_residual_loses_only_rounding(variant: str, wire: str) -> None:
    given = gradients(5, 2, 3000)
    trace = gradsieve.simulate(
        make(variant, 0.05),
        given,
        parameters=torch.randn(3000),
        shapes=layers_of(3000),
        residual_dtype=torch.bfloat16,
        wire=wire,
    )
    assert trace.residual.dtype == torch.bfloat16
    if VARIANTS[variant][0] != "dgc" and variant != "iwp-momentum":
        lost = given.sum((0, 1)) - 2 * trace.mean.sum(0) - trace.residual.float().sum(0)
        assert lost.abs().max() < 0.1 * given.abs().max()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("variant", [v for v in VARIANTS if VARIANTS[v][0] != "dgc" and v != "iwp-momentum"])
def test_float64_residual_loses_only_the_rounding_of_float64(variant: str, wire: str) -> None:
    given = gradients(5, 3, 1000).double() * torch.rand(1000, dtype=torch.float64)
    trace = gradsieve.simulate(
        make(variant, 0.05), given, parameters=torch.randn(1000), residual_dtype=torch.float64, wire=wire
    )
    assert trace.mean.dtype == trace.residual.dtype == torch.float64
    lost = given.sum((0, 1)) - 3 * trace.mean.sum(0) - trace.residual.sum(0)
    assert lost.abs().max() <= 1e-14 * given.abs().sum((0, 1)).max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_seed_gives_the_same_bits_twice(variant: str) -> None:
    given = gradients(4, 3, 999)

    def once() -> Tensor:
        return gradsieve.simulate(make(variant, 0.05), given, parameters=torch.ones(999), seed=7).mean

    assert torch.equal(once(), once())
