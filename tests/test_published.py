from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from fleet import Fleet
from gradsieve import Method, StepStats
from published import Floats, Outcome, PublishedExDyna, PublishedMicro

STEPS = 300
FACTORS = {1.005, 1.00125, 0.995}
BLOCK = 32
SMALLEST = 1024 * BLOCK
"""The least number of elements that the published block rule holds for."""

both_methods = pytest.mark.parametrize("name", ["micro", "exdyna"])


def _method(name: str, density: float) -> Method:
    return gradsieve.method(name, density=density, control="paper")


def _yardstick(name: str, world: int, numel: int, density: float) -> PublishedMicro:
    return {"micro": PublishedMicro, "exdyna": PublishedExDyna}[name](world, numel, density)


def _layered_gradients(world: int, numel: int, density: float, steps: int = STEPS) -> Iterator[Floats]:
    """Noise whose scale differs between twelve layers, swings in each of them at another phase, and drops late."""
    random = np.random.default_rng(0)
    layers = np.arange(numel) * 12 // numel
    start = 1 / (2 * math.sqrt(density * numel))
    scales = start / 20 * np.exp(random.normal(size=12))
    for step in range(steps):
        swing = np.exp(0.8 * np.sin(2 * np.pi * (step / 150 + np.arange(12) / 24)))
        drop = 0.3 if step >= 220 else 1.0
        scale = (scales * swing * drop).astype(np.float32)[layers]
        yield random.standard_normal((world, numel), dtype=np.float32) * scale


def _differences(outcome: Outcome, mean: Floats, stats: StepStats) -> list[str]:
    """In what the library departs from the published step."""
    agreements = {
        "threshold": stats.threshold == outcome.threshold,
        "counts": stats.counts == outcome.counts,
        "support": stats.support == sum(outcome.counts),
        "positions": np.array_equal(mean != 0, outcome.mean != 0),
        # the order of summation over ranks is nobody's promise
        "mean": np.allclose(mean, outcome.mean, rtol=1e-5, atol=1e-7),
    }
    return [name for name, agrees in agreements.items() if not agrees]


class Pair:
    """The library and the published step side by side; a step on which they differ is an assertion error."""

    def __init__(self, name: str, world: int, numel: int, density: float) -> None:
        self.published = _yardstick(name, world, numel, density)
        self.simulation = gradsieve.Simulation(_method(name, density), world, numel)

    def step(self, gradients: Floats) -> Outcome:
        mean, stats = self.simulation.step(torch.from_numpy(gradients))
        outcome = self.published.step(gradients)
        assert (stats.step, _differences(outcome, mean.numpy(), stats)) == (stats.step, [])
        return outcome

    def assert_same_residuals(self) -> None:
        assert np.array_equal(self.simulation.residual.numpy(), self.published.residual)


def _blocks(published: PublishedMicro) -> tuple[int, ...]:
    return tuple(published.blocks) if isinstance(published, PublishedExDyna) else ()


def _factors(thresholds: Sequence[float]) -> set[float]:
    return {round(after / before, 5) for before, after in pairwise(thresholds)}


# The whole course of a run


def _assert_equal_courses(name: str, world: int, numel: int, density: float) -> None:
    pair = Pair(name, world, numel, density)
    thresholds, blocks = [], []
    for gradients in _layered_gradients(world, numel, density):
        thresholds.append(pair.step(gradients).threshold)
        blocks.append(_blocks(pair.published))
    pair.assert_same_residuals()
    assert _factors(thresholds) == FACTORS, "these gradients do not lead through every branch of the law"
    if name == "exdyna":
        first = [sizes[0] for sizes in blocks]
        moves = {after - before for before, after in pairwise(first)}
        assert moves == {-1, 0, 1}, "these gradients do not move the borders to and fro"


@both_methods
@pytest.mark.parametrize("world", [2, 4, pytest.param(7, marks=pytest.mark.slow)])
def test_simulated_run_is_the_published_one_at_every_step(name: str, world: int) -> None:
    _assert_equal_courses(name, world, 50_000, 0.01)


@pytest.mark.slow
@both_methods
@pytest.mark.parametrize("world", [2, 4, 7])
@pytest.mark.parametrize(
    ("numel", "density"), [(50_000, 0.001), (123_457, 0.01), (123_457, 0.001), (400_000, 0.01), (400_000, 0.001)]
)
def test_longer_vectors_and_lower_densities_run_as_published(name: str, world: int, numel: int, density: float) -> None:
    _assert_equal_courses(name, world, numel, density)


@both_methods
def test_simulate_returns_the_published_run(name: str) -> None:
    world, numel, density, steps = 3, 40_000, 0.01, 60
    gradients = (torch.from_numpy(step) for step in _layered_gradients(world, numel, density, steps))
    trace = gradsieve.simulate(_method(name, density), gradients)
    published = _yardstick(name, world, numel, density)
    outcomes = [published.step(step) for step in _layered_gradients(world, numel, density, steps)]
    rows = zip(outcomes, trace.mean.numpy(), trace.stats, strict=True)
    assert [_differences(*row) for row in rows] == [[]] * steps
    assert np.array_equal(trace.residual.numpy(), published.residual)


# Real processes


class Given(nn.Module):
    """Parameters whose gradients are exactly those that the forward pass is given."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(100, 150), (37, 41), (200, 120), (1, 83), (96, 98)]
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        products = [(weight * gradient).sum() for weight, gradient in zip(self.weights, gradients, strict=True)]
        return torch.stack(products).sum()


def _averaged(model: DistributedDataParallel, gradient: Tensor) -> Floats:
    """What DDP makes of this rank's flat gradient, in the order of the model's parameters."""
    parameters = [parameter for _, parameter in model.module.named_parameters()]
    pieces = torch.split(gradient, [parameter.numel() for parameter in parameters])
    shaped = [piece.view_as(parameter) for piece, parameter in zip(pieces, parameters, strict=True)]
    model.zero_grad()
    model(shaped).backward()
    averaged = [parameter.grad.flatten() for parameter in parameters if parameter.grad is not None]
    flat: Floats = torch.cat(averaged).numpy()
    return flat


def _import_everything() -> None:
    DistributedDataParallel(Given())


def _departures(name: str, density: float) -> tuple[int, list[tuple[int, list[str]]], bool]:
    """Steps done, those on which this rank departs from the published step and in what, and are residuals equal?"""
    world, rank = dist.get_world_size(), dist.get_rank()
    # several buckets, so that the vector reaches the library in pieces
    model = DistributedDataParallel(Given(), bucket_cap_mb=0.05)
    sieve = gradsieve.sparsify(model, _method(name, density), exclude=())
    numel = sum(parameter.numel() for parameter in model.parameters())
    published = _yardstick(name, world, numel, density)
    departures = []
    for gradients in _layered_gradients(world, numel, density):
        mean = _averaged(model, torch.from_numpy(gradients[rank]))
        assert sieve.stats is not None
        if differences := _differences(published.step(gradients), mean, sieve.stats):
            departures.append((sieve.stats.step, differences))
    residual = torch.cat([part.flatten() for part in sieve.residuals().values()])
    return published.index, departures, np.array_equal(residual.numpy(), published.residual[rank])


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("micro", 2),
        pytest.param("exdyna", 2, marks=pytest.mark.slow),
        pytest.param("exdyna", 4, marks=pytest.mark.slow),
        pytest.param("micro", 4, marks=pytest.mark.slow),
        pytest.param("micro", 7, marks=pytest.mark.slow),
        pytest.param("exdyna", 7, marks=pytest.mark.slow),
    ],
)
def test_ddp_run_is_the_published_one_at_every_step(fleets: Callable[[int], Fleet], name: str, world: int) -> None:
    # a task of its own, because seven processes on few cores spend half of a task's time on it
    fleets(world).run(_import_everything)
    assert fleets(world).run(_departures, name, 0.01) == [(STEPS, [], True)] * world


# The threshold law


def _with_entries(world: int, numel: int, sizes: Sequence[int], counts: Sequence[int]) -> Floats:
    """Gradients that reach any threshold at the first `counts[p]` elements of slice p, and are zero elsewhere."""
    gradients = np.zeros((world, numel), np.float32)
    for start, count in zip(np.cumsum([0, *sizes]), counts, strict=False):
        gradients[:, start : start + count] = 1
    return gradients


@both_methods
@pytest.mark.parametrize(
    ("support", "factor"),
    [(500, 0.995), (909, 0.995), (910, 1.00125), (1000, 1.00125), (1100, 1.00125), (1101, 1.005), (9000, 1.005)],
)
def test_threshold_takes_the_published_factor_for_the_last_support(name: str, support: int, factor: float) -> None:
    pair = Pair(name, world=2, numel=100_000, density=0.01)
    counts = [support // 2, support - support // 2]
    first = pair.step(_with_entries(2, 100_000, pair.published.sizes(), counts))
    assert first.threshold == 1 / (2 * math.sqrt(1000))
    assert sum(first.counts) == support
    second = pair.step(np.zeros((2, 100_000), np.float32))
    assert second.threshold == first.threshold * factor


@both_methods
def test_entry_equal_to_the_threshold_is_proposed_and_the_next_smaller_is_not(name: str) -> None:
    numel = 102_400  # 1024 entries asked for: the first threshold is 1/64, which float32 holds exactly
    pair = Pair(name, world=2, numel=numel, density=0.01)
    gradients = np.zeros((2, numel), np.float32)
    gradients[:, 10:20] = -1 / 64
    gradients[:, 30:40] = np.nextafter(np.float32(1 / 64), np.float32(0))
    outcome = pair.step(gradients)
    assert outcome.threshold == 1 / 64
    assert np.flatnonzero(outcome.mean).tolist() == list(range(10, 20))


# Who proposes where nothing reaches the threshold


@both_methods
def test_rank_that_finds_nothing_proposes_one_index_that_walks_through_its_slice(name: str) -> None:
    world, numel = 4, SMALLEST + 3
    pair = Pair(name, world, numel, density=0.01)
    starts = {"micro": [0, 8193, 16386, 24579], "exdyna": [0, 8192, 16384, 24576]}[name]
    for step in range(12):
        outcome = pair.step(np.full((world, numel), 1e-9, np.float32))
        assert outcome.counts == (1, 1, 1, 1)
        assert np.flatnonzero(outcome.mean).tolist() == [start + step for start in starts]


def test_index_of_a_rank_that_finds_nothing_starts_again_at_the_end_of_its_slice() -> None:
    pair = Pair("micro", world=2, numel=7, density=0.5)
    for step in range(12):
        outcome = pair.step(np.full((2, 7), 1e-9, np.float32))
        assert np.flatnonzero(outcome.mean).tolist() == [step % 4, 4 + step % 3]


def test_micro_with_fewer_elements_than_ranks_leaves_the_others_nothing_to_propose() -> None:
    pair = Pair("micro", world=7, numel=3, density=0.7)
    random = np.random.default_rng(0)
    for step in range(50):
        outcome = pair.step(random.standard_normal((7, 3), dtype=np.float32))
        owners = [(slice_index - step) % 7 for slice_index in range(3)]
        assert outcome.counts == tuple(int(rank in owners) for rank in range(7))
    pair.assert_same_residuals()


# The borders of ExDyna


def _shown_sizes(pair: Pair) -> list[int]:
    """The slices' sizes, as a step shows them in which every element reaches the threshold."""
    world, numel, step = pair.published.world, pair.published.numel, pair.published.index
    outcome = pair.step(np.ones((world, numel), np.float32))
    return [outcome.counts[(part - step) % world] for part in range(world)]


@pytest.mark.parametrize(
    ("counts", "blocks"),
    [
        ([1050, 950], [512, 512]),
        ([1051, 949], [511, 513]),
        ([949, 1051], [513, 511]),
        ([1060, 953, 987], [342, 341, 341]),
        ([1060, 952, 988], [341, 342, 341]),
        # two overloaded neighbours: nothing moves between them
        ([1500, 1400, 50, 50], [256, 255, 257, 256]),
        # the block that slice 1 takes from slice 0 counts, so that it takes none from slice 2
        ([1060, 951, 1060, 929], [255, 257, 255, 257]),
        # the block that slice 1 gives to slice 0 counts, so that it gives none to slice 2
        ([900, 1052, 900, 1148], [257, 255, 257, 255]),
        # slice 2 gives in both directions
        ([1050, 951, 1060, 939], [256, 257, 254, 257]),
    ],
)
def test_one_block_moves_across_a_border_from_over_1_05_to_under_0_95238_of_the_mean(
    counts: list[int], blocks: list[int]
) -> None:
    world = len(counts)
    pair = Pair("exdyna", world, SMALLEST, density=0.05)
    outcome = pair.step(_with_entries(world, SMALLEST, pair.published.sizes(), counts))
    assert outcome.counts == tuple(counts)
    assert _shown_sizes(pair) == [BLOCK * number for number in blocks]


@pytest.mark.parametrize(("world", "floor"), [(2, 128), pytest.param(4, 64, marks=pytest.mark.slow), (7, 37)])
@pytest.mark.parametrize("side", ["first", "last"])
def test_partition_never_falls_under_a_quarter_of_its_fair_share(world: int, floor: int, side: str) -> None:
    pair = Pair("exdyna", world, SMALLEST, density=0.05)
    gradients = np.zeros((world, SMALLEST), np.float32)
    gradients[:, slice(100) if side == "first" else slice(-100, None)] = 1
    for _ in range(400):
        pair.step(gradients)
    assert _shown_sizes(pair)[0 if side == "first" else -1] == BLOCK * floor


@pytest.mark.parametrize("world", [2, 4, 7])
@pytest.mark.parametrize("numel", [1, 5, 1023, 1024, 1025, 20_000, SMALLEST - 1])
def test_exdyna_partitions_vectors_too_short_for_its_blocks(world: int, numel: int) -> None:
    simulation = gradsieve.Simulation(_method("exdyna", 0.5 if numel < 100 else 0.05), world, numel)
    scale = torch.linspace(0, 0.1, numel)
    for _ in range(100):
        mean, stats = simulation.step(torch.randn(world, numel) * scale)
        # without build-up: no element is proposed twice
        assert sum(stats.counts) == stats.support <= numel
        assert torch.count_nonzero(mean) <= stats.support
    mean, stats = simulation.step(torch.full((world, numel), 1000.0))
    assert sum(stats.counts) == stats.support == torch.count_nonzero(mean) == numel
