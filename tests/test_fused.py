"""Simulations by Triton's kernels against the same in plain torch: the same, bit for bit."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

import gradsieve
from gradsieve import Method
from gradsieve.collectives import TeamCollectives
from gradsieve.rounding import WIRES
from gradsieve.wire import WireError
from kernel_place import DEVICE, INTERPRETED, MARKS, assert_same_bits
from twins import METHODS, STORIES, Case, Given, Twins, assert_same_records, told

pytestmark = MARKS

SOME: list[tuple[str, Case]] = [
    ("micro", Case(1, 5, 0.3)),
    ("micro", Case(5, 6, 0.001, torch.bfloat16)),
    ("micro", Case(2, 9000, 0.01)),
    ("exdyna", Case(2, 1023, 0.3)),
    ("exdyna", Case(3, 40, 0.1, torch.bfloat16, torch.float16)),
    ("union", Case(2, 300, 0.05, torch.bfloat16, torch.bfloat16)),
    ("union that overshoots", Case(3, 300, 0.05)),
    ("union that overshoots", Case(2, 40, 0.1, torch.bfloat16)),
    ("union that warms up", Case(3, 300, 0.01)),
    ("iwp", Case(2, 300, 0.05, gradient=torch.bfloat16)),
    ("iwp by two", Case(3, 40, 0.3)),
]
ALL = [
    (name, Case(world, numel, density, residual, gradient))
    for name, world, numel, density, residual, gradient in itertools.product(
        METHODS,
        (1, 2, 3, 5),
        (5, 31, 1023, 9000),
        (0.3, 0.001),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float16),
    )
    if not (name == "iwp by two" and world == 1)
]


def assert_same_run(method: Method, case: Case, story: str, *, exact: bool = True) -> None:
    twins = Twins(method, case)
    for given in told(story, case, exact=exact):
        twins.step(given)
    twins.assert_same_state()


@pytest.mark.parametrize(("name", "case"), SOME, ids=str)
def test_kernels_do_what_plain_torch_does(name: str, case: Case) -> None:
    assert_same_run(METHODS[name](case.density), case, "unsteady")


@pytest.mark.parametrize("story", [story for story in STORIES if story not in ("steady", "unsteady")])
def test_so_they_do_in_every_story(story: str) -> None:
    case = Case(2, 100, 0.1)
    assert_same_run(gradsieve.union(density=case.density), case, story)


def test_so_they_do_where_sums_are_rounded() -> None:
    case = Case(3, 300, 0.05)
    assert_same_run(gradsieve.exdyna(density=case.density), case, "jumps", exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("name", METHODS)
def test_so_they_do_everywhere(name: str, story: str) -> None:
    cases = [case for method, case in ALL if method == name]
    if INTERPRETED:  # all of them would take hours
        cases = random.Random(f"{name} {story}").sample(cases, 4)
    for case in cases:
        assert_same_run(METHODS[name](case.density), case, story)


def test_a_large_team_does_the_same() -> None:
    case = Case(9, 40, 0.2)
    twins = Twins(gradsieve.union(density=case.density), case)
    for given in itertools.islice(told("steady", case), 2):
        twins.step(given)


@pytest.mark.parametrize("name", ["exdyna", "union"])
def test_state_moves_between_the_paths(name: str) -> None:
    case = Case(2, 100, 0.1)
    twins = Twins(METHODS[name](case.density), case)
    for index, given in enumerate(told("steady", case)):
        if index in (1, 5):
            twins.move()
        twins.step(given)
    twins.assert_same_state()


def test_what_is_saved_before_the_first_step_starts_anew() -> None:
    case = Case(2, 100, 0.1)
    twins = Twins(gradsieve.exdyna(density=case.density), case)
    twins.assert_same_state()
    twins.move()
    for given in itertools.islice(told("steady", case), 2):
        twins.step(given)


def test_gradients_are_left_alone_unless_they_may_be_used_up() -> None:
    case = Case(2, 100, 0.1)
    careful, careless = (Twins(gradsieve.micro(density=case.density), case).by_kernels for _ in range(2))
    for gradients, parameters in itertools.islice(told("steady", case), 3):
        before = gradients.clone()
        mean, stats = careful.step(gradients, parameters)
        assert_same_bits(gradients, before)
        other = torch.full_like(mean, 77)
        _, (pending,) = careless.average(gradients, other, use_up=True)
        assert_same_bits(mean, other)
        assert_same_records(stats, pending.read())
    assert_same_bits(careful.residual, careless.residual)


@pytest.mark.parametrize("wire", WIRES)
def test_what_travels_whole_beside_is_averaged_alike(wire: str) -> None:
    case = Case(3, 40, 0.2)
    twins = Twins(gradsieve.exdyna(density=case.density), case, wire=wire)
    for gradients, _ in itertools.islice(told("steady", case), 2):
        whole = torch.randn(3, 7, device=DEVICE)
        dense = [
            each.average(gradients, torch.empty(case.numel, device=DEVICE), dense=whole)[0]
            for each in (twins.by_kernels, twins.plain)
        ]
        assert_same_bits(*dense)


def test_an_outcome_without_its_zeros_is_the_same() -> None:
    case = Case(2, 100, 0.1)
    twins = Twins(gradsieve.union(density=case.density), case)
    for gradients, _ in itertools.islice(told("steady", case), 3):
        (mine, _), (others, _) = (each.reduce(gradients) for each in (twins.by_kernels, twins.plain))
        for field, value in mine._asdict().items():
            if isinstance(value, Tensor):
                assert_same_bits(value, getattr(others, field))
            else:
                assert value == getattr(others, field), field


@pytest.mark.parametrize(
    ("name", "wire"),
    [
        *(("micro", "float32"), ("exdyna", "bfloat16"), ("union", "bfloat16"), ("union", "float8")),
        ("union that overshoots", "bfloat16"),
    ],
)
def test_mass_is_conserved(name: str, wire: str) -> None:
    case = Case(3, 300, 0.05)
    simulation = Twins(METHODS[name](case.density), case, wire=wire).by_kernels
    held = torch.zeros(case.world, case.numel, device=DEVICE)
    for gradients, _ in itertools.islice(told("jumps", case), 4):
        accumulated = held + gradients
        mean, _ = simulation.step(gradients)
        held = simulation.residual
        off = accumulated.sum(0) - case.world * mean - held.sum(0)
        assert (off.abs() <= 1e-6 * accumulated.abs().sum(0).max()).all()
        assert mean.any()


def test_a_damaged_message_is_noticed_once_the_numbers_of_its_step_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(2, 100, 0.1)
    first, second = (Twins(gradsieve.micro(density=case.density), case).by_kernels for _ in range(2))
    whole = TeamCollectives._all_gather

    async def damaged(team: TeamCollectives, tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.uint8:
            tensor[1, -1] ^= 1
        return await whole(team, tensor)

    monkeypatch.setattr(TeamCollectives, "_all_gather", damaged)
    given, mean = torch.randn(3, 2, 100, device=DEVICE), torch.empty(100, device=DEVICE)
    with pytest.raises(WireError, match="step 0: the indices of rank 1 were damaged"):
        first.step(given[0])
    # who does not read them is told when the host comes to know them
    second.average(given[0], mean)
    second.average(given[1], mean)
    with pytest.raises(WireError, match="step 0"):
        second.average(given[2], mean)


# --- hard cases ---------------------------------------------------------------------------------------------------


def test_gradients_need_not_lie_row_by_row() -> None:
    case = Case(2, 100, 0.1)
    twins = Twins(gradsieve.micro(density=case.density), case)
    gradients = torch.randn(100, 2, device=DEVICE).t()
    assert_same_bits(*(each.step(gradients)[0] for each in (twins.by_kernels, twins.plain)))


def test_one_rank_may_propose_all_that_the_ranks_together_did() -> None:
    """After ranks agreed the goal is several times the target; then one of them has all the large entries."""
    case = Case(5, 700, 0.05)
    twins = Twins(gradsieve.union(density=case.density), case)
    # whole numbers, whose sums do not depend on an order
    noise, parameters = torch.randn(5, case.numel).mul(64).round().to(DEVICE), torch.ones(case.numel, device=DEVICE)
    alone = noise.clone()
    alone[0] *= 100
    for gradients in (noise[:1].repeat(5, 1), noise[1:2].repeat(5, 1), alone):
        twins.step(Given(gradients, parameters))


def test_gradients_may_have_64_bits() -> None:
    case = Case(2, 1000, 0.1)
    twins = Twins(gradsieve.micro(density=case.density), case)
    for _ in range(2):
        twins.step(Given(torch.randn(2, 1000, dtype=torch.float64, device=DEVICE), torch.ones(1000, device=DEVICE)))


def test_parameters_that_are_no_numbers_count_as_in_plain_torch() -> None:
    case = Case(2, 100, 0.1)
    twins = Twins(gradsieve.iwp(density=case.density), case)
    for gradients, parameters in itertools.islice(told("steady", case), 3):
        parameters[7] = torch.nan
        gradients[:, 7] = 0
        twins.step(Given(gradients, parameters))
