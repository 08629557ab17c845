"""Workers that step as one (`as_team=True`) against workers in lockstep: the same, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import gradsieve
import toys
from gradsieve import Method, Simulation, StepStats, kernels
from gradsieve.pipeline import PendingStats, Team
from gradsieve.rounding import WIRES
from gradsieve.types import Indices, Reduced

TEAMS = {
    *("topk", "cltk", "hard_threshold", "micro", "exdyna", "iwp", "union"),
    *("micro-paper", "exdyna-paper", "exdyna-paper-blocks", "exdyna-paper-control"),
    *("iwp-stochastic", "iwp-momentum", "union-tight", "union-overshoot", "union-warm-up"),
}
"""The variants that can step as one; the others run in lockstep, whatever is asked."""
STEPS = 4

Kind = Callable[[Tensor, int], Tensor]
"""Makes the gradients of a step out of noise, `[world, numel]`, and the step's index."""


def sparse_noise(noise: Tensor, index: int) -> Tensor:
    """Mostly zeros; one rank has nothing else, and in one step no rank has."""
    gradients = noise * (noise.abs() > 1) * (index != 1)
    gradients[index % len(noise)] = 0
    return gradients


def not_finite(noise: Tensor, index: int) -> Tensor:
    gradients = noise.clone()
    for place, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        gradients[index % 2 :: 2, index + place :: 17 + place] = value
    return gradients


KINDS: dict[str, Kind] = {
    "noise": lambda noise, _: noise,
    "ties": lambda noise, _: (2 * noise).round(),
    "nothing but ties": lambda noise, _: torch.ones_like(noise),
    "zeros": sparse_noise,
    "not finite": not_finite,
    "a sudden factor": lambda noise, index: noise * (20 if index >= 2 else 1),
    "sudden agreement": lambda noise, index: noise[:1].expand_as(noise) if index >= 2 else noise,
    "bfloat16": lambda noise, _: noise.bfloat16(),
}


class Case(NamedTuple):
    world: int
    numel: int
    density: float
    residual_dtype: torch.dtype = torch.float32
    dense_numel: int | None = None
    wire: str = "float32"


CASES = [
    Case(3, 0, 0.3, dense_numel=2),
    Case(5, 1, 0.01),
    Case(5, 3, 0.3, torch.bfloat16, dense_numel=2),
    Case(2, 40, 1.0, torch.bfloat16),
    Case(3, 40, 0.3, dense_numel=0),
    Case(1, 1023, 0.01, dense_numel=2),
    Case(5, 1023, 0.01, torch.bfloat16, dense_numel=2),
    Case(3, 5000, 0.001, dense_numel=2),
]
ALL_CASES = [
    Case(world, numel, density, dtype, dense_numel=(numel + world) % 3 or None, wire=wire)
    for world, numel, density, dtype, wire in itertools.product(
        (1, 2, 3, 5), (0, 1, 3, 40, 1023, 5000), (0.001, 0.01, 0.3, 1.0), (torch.float32, torch.bfloat16), WIRES
    )
]


class Given(NamedTuple):
    """What a simulation is given in a step."""

    gradients: Tensor
    parameters: Tensor
    dense: Tensor | None


def given_in_each_step(kind: str, case: Case, steps: int = STEPS, device: str = "cpu") -> list[Given]:
    generator, given = torch.Generator().manual_seed(1), []
    for index in range(steps):
        noise, parameters = (torch.randn(rows, case.numel, generator=generator) for rows in (case.world, 1))
        dense = None if case.dense_numel is None else torch.randn(case.world, case.dense_numel, generator=generator)
        gradients = KINDS[kind](noise, index)
        given.append(Given(gradients.to(device), parameters[0].to(device), None if dense is None else dense.to(device)))
    return given


def simulation_of(method: Method, case: Case, *, as_team: bool, device: str = "cpu") -> Simulation:
    half = case.numel // 2
    return Simulation(
        method,
        case.world,
        case.numel,
        shapes=[half, 0, case.numel - half],
        device=device,
        residual_dtype=case.residual_dtype,
        wire=case.wire,
        as_team=as_team,
    )


def reduced_by(simulation: Simulation, given: Given) -> tuple[Reduced, list[PendingStats]]:
    return simulation.reduce(given.gradients, lambda: given.parameters, given.dense)


def assert_same_bits(one: Indices, other: Indices) -> None:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        assert one == other
        return
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    if one.is_floating_point():
        # what is not a number has many patterns of bits
        assert torch.equal(one.isnan(), other.isnan())
        one, other = (vector.masked_fill(vector.isnan(), 0).view(torch.uint8) for vector in (one, other))
    assert torch.equal(one, other)


def plain(state: Any) -> Any:
    """Tensors as what can be compared."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, Tensor) else state


def assert_same_outcome(one: tuple[Reduced, list[PendingStats]], other: tuple[Reduced, list[PendingStats]]) -> None:
    """The same means at the same support, and the same record for rank 0."""
    (reduced, records), (other_reduced, other_records) = (
        (reduced._replace(rest=of_rank_0(reduced.rest)), records) for reduced, records in (one, other)
    )
    for field, value in reduced._asdict().items():
        if isinstance(value, Tensor | slice):
            assert_same_bits(value, getattr(other_reduced, field))
        else:
            assert value == getattr(other_reduced, field)
    assert timeless(records[0].read()) == timeless(other_records[0].read())


def of_rank_0(rest: Tensor | None) -> Tensor | None:
    """A team's has a row for each rank."""
    return rest[0] if rest is not None and rest.dim() == 2 else rest


def timeless(stats: StepStats) -> StepStats:
    return replace(stats, select_seconds=0, exchange_seconds=0)


def assert_same_state(one: Simulation, other: Simulation) -> None:
    for mine, others in zip(one.workers, other.workers, strict=True):
        assert plain(mine.state_dict()) == plain(others.state_dict())
        for (name, vector), (other_name, other_vector) in zip(
            mine.residual.named(), others.residual.named(), strict=True
        ):
            assert name == other_name
            assert_same_bits(vector, other_vector)


def assert_same_run(method: Method, kind: str, case: Case, steps: int = STEPS, device: str = "cpu") -> None:
    lockstep, team = (simulation_of(method, case, as_team=as_team, device=device) for as_team in (False, True))
    for given in given_in_each_step(kind, case, steps, device):
        assert_same_outcome(reduced_by(team, given), reduced_by(lockstep, given))
        assert_same_state(team, lockstep)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", sorted(TEAMS))
def test_a_team_does_what_workers_in_lockstep_do(variant: str, kind: str) -> None:
    for case in CASES:
        assert_same_run(toys.make(variant, case.density), kind, case)


@pytest.mark.parametrize(
    "kind",
    [
        "noise",
        "ties",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("not finite", "a sudden factor", "bfloat16")),
    ],
)
@pytest.mark.parametrize("variant", sorted(TEAMS))
def test_so_it_does_where_values_travel_as_bfloat16(variant: str, kind: str) -> None:
    for case in CASES:
        assert_same_run(toys.make(variant, case.density), kind, case._replace(wire="bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", toys.VARIANTS)
def test_a_team_does_what_workers_in_lockstep_do_everywhere(variant: str, kind: str) -> None:
    for case in ALL_CASES:
        assert_same_run(toys.make(variant, case.density), kind, case, steps=8)


@pytest.mark.parametrize("kind", ["noise", "ties", "a sudden factor", "sudden agreement"])
@pytest.mark.parametrize(
    "method",
    [
        gradsieve.hard_threshold(density=0.01, threshold=2.5),
        gradsieve.iwp(density=0.01, num_broadcasters=2),
        gradsieve.iwp(density=0.05, num_broadcasters=3, stochastic=True, momentum=0.9),
        gradsieve.micro(density=0.01, ceiling=1.0),
        gradsieve.union(density=0.2, ceiling=1.0),
    ],
    ids=repr,
)
def test_options_change_nothing_in_it(method: Method, kind: str) -> None:
    assert_same_run(method, kind, Case(4, 2000, method.density), steps=10)


@pytest.mark.parametrize("variant", ["micro", "exdyna", "union", "iwp"])
def test_a_long_run_of_a_team_is_one_in_lockstep(variant: str) -> None:
    assert_same_run(toys.make(variant, 0.02), "noise", Case(3, 1500, 0.02), steps=60)


@pytest.mark.parametrize("variant", toys.VARIANTS)
def test_methods_that_do_not_suit_a_team_run_in_lockstep(variant: str) -> None:
    case = Case(3, 40, 0.1)
    method, (given,) = toys.make(variant, case.density), given_in_each_step("noise", case, steps=1)
    assert Team.suits(method) == (variant in TEAMS)
    asked, told_not_to, by_default = (
        Simulation(method, case.world, case.numel, as_team=as_team) for as_team in (True, False, None)
    )
    # in lockstep every rank has a record of its own
    assert len(reduced_by(asked, given)[1]) == (1 if variant in TEAMS else case.world)
    assert len(reduced_by(told_not_to, given)[1]) == len(reduced_by(by_default, given)[1]) == case.world


@pytest.mark.parametrize("variant", toys.VARIANTS)
def test_state_moves_between_a_team_and_workers_in_lockstep(variant: str) -> None:
    case = Case(3, 400, 0.05, dense_numel=2)
    method, given = toys.make(variant, case.density), given_in_each_step("noise", case, steps=8)
    whole = simulation_of(method, case, as_team=False)
    expected = [reduced_by(whole, each) for each in given]
    moving, found = simulation_of(method, case, as_team=True), []
    for index, each in enumerate(given):
        if index in (2, 5):
            moved = simulation_of(method, case, as_team=index == 5)
            moved.load_state_dict(moving.state_dict())
            moving = moved
        found.append(reduced_by(moving, each))
    for outcome, other in zip(found, expected, strict=True):
        assert_same_outcome(outcome, other)
    assert_same_state(moving, whole)


@pytest.mark.parametrize("variant", toys.VARIANTS)
def test_a_step_of_a_team_is_a_step_in_lockstep(variant: str) -> None:
    case = Case(2, 300, 0.05)
    method, given = toys.make(variant, case.density), given_in_each_step("noise", case)
    lockstep, team = (Simulation(method, case.world, case.numel, as_team=as_team) for as_team in (False, True))
    for gradients, parameters, _ in given:
        before = gradients.clone()
        (mean, stats), (expected, expected_stats) = (each.step(gradients, parameters) for each in (team, lockstep))
        assert_same_bits(mean, expected)
        assert stats.select_seconds > 0
        assert stats.exchange_seconds > 0
        assert timeless(stats) == timeless(expected_stats)
        assert torch.equal(gradients, before)
    assert_same_bits(team.residual, lockstep.residual)
    assert_same_bits(team.residual, torch.stack([worker.residual.acc for worker in team.workers]))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", sorted(TEAMS))
def test_on_cuda_a_team_does_what_workers_in_lockstep_do(variant: str, kind: str) -> None:
    # the team of plain torch: that of the kernels is held to it in test_fused.py, and sizes its messages otherwise
    with kernels.using("plain"):
        for case, wire in itertools.product(CASES, WIRES):
            assert_same_run(toys.make(variant, case.density), kind, case._replace(wire=wire), device="cuda")


@pytest.mark.gpu
def test_on_cuda_workers_are_a_team_unless_told_otherwise() -> None:
    given = torch.randn(3, 40, device="cuda")
    records = [
        Simulation(gradsieve.micro(density=0.1), 3, 40, device="cuda", as_team=as_team).reduce(given)[1]
        for as_team in (None, True, False)
    ]
    assert [len(each) for each in records] == [1, 1, 3]


@pytest.mark.gpu
@pytest.mark.parametrize("as_team", [True, False])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    "variant",
    [
        *("topk", "cltk", "micro", "exdyna", "union", "union-tight"),
        *("micro-paper", "exdyna-paper", "exdyna-paper-blocks", "exdyna-paper-control"),
    ],
)
def test_cuda_does_what_the_cpu_does_where_sums_are_exact(variant: str, world: int, as_team: bool) -> None:
    """Whole numbers and a world of a power of two: no sum or mean depends on the order or the device."""
    method, numel = toys.make(variant, 0.02), 5000
    cpu, cuda = (Simulation(method, world, numel, device=device, as_team=as_team) for device in ("cpu", "cuda"))
    for index in range(6):
        # distinct, so that no tie is broken by chance
        gradients = torch.stack([torch.randperm(1 << 18)[:numel] for _ in range(world)]).float() - (1 << 17)
        (mean, stats), (cuda_mean, cuda_stats) = cpu.step(gradients), cuda.step(gradients.cuda())
        assert_same_bits(cuda_mean.cpu(), mean)
        assert (cuda_stats.counts, cuda_stats.threshold) == (stats.counts, stats.threshold), index
    assert_same_bits(cuda.residual.cpu(), cpu.residual)
