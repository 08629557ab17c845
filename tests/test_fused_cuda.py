"""What only a device can show: steps that the host never waits for, vectors of any length, and training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradsieve
import small_runs
from fleet import Fleet
from gradsieve import Simulation, kernels
from kernel_place import assert_same_bits
from twins import METHODS, PATHS, Case, Given, Twins, told

pytestmark = pytest.mark.gpu

STEPS = 100


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whoever waits for the device in here fails."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", ["micro", "exdyna", "union", "iwp"])
def test_a_team_never_waits_not_even_in_its_first_step(name: str) -> None:
    world, numel = 16, 300_001
    simulation = Simulation(METHODS[name](0.01), world, numel, shapes=[200_000, 0, 100_001], device="cuda")
    noise, dense = torch.randn(4, world, numel, device="cuda"), torch.randn(world, 7, device="cuda")
    parameters, mean = torch.randn(numel, device="cuda"), torch.empty(numel, device="cuda")
    with no_waiting():
        for step in range(STEPS):
            gradients = noise[step % 4] * (1 + step % 3)
            _, (pending,) = simulation.average(gradients, mean, lambda: parameters, dense, use_up=True)
    stats = pending.read()
    assert stats.step == STEPS - 1
    assert 0.5 * stats.target <= stats.support <= 1.1 * stats.target
    assert int(mean.count_nonzero()) == stats.support


def _trained_without_a_wait(name: str, scope: str) -> tuple[float, float]:
    """The loss at the beginning and at the end."""
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers).cuda(), bucket_cap_mb=0.1)
    sieve = gradsieve.sparsify(model, METHODS[name](0.05), scope="bucket" if scope == "bucket" else "model")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = torch.randn(128, 64, device="cuda"), torch.arange(128, device="cuda") % 10
    losses = []

    def step() -> None:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())

    # DDP makes its buckets anew, kernels are compiled, and NCCL sets itself up
    for _ in range(3):
        step()
    with no_waiting():
        for _ in range(STEPS):
            step()
    assert sieve.stats is not None
    assert sieve.stats.support > 0
    return losses[0].item(), losses[-1].item()


@pytest.mark.parametrize("scope", ["model", "bucket"])
@pytest.mark.parametrize("name", ["micro", "exdyna", "union"])
def test_the_hook_never_waits(name: str, scope: str, fleets: Callable[[int], Fleet]) -> None:
    ((first, last),) = fleets(1).run(_trained_without_a_wait, name, scope, backend="nccl")
    assert last < first / 2


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_vectors_and_many_workers_give_the_same_by_both_paths(name: str, dtype: torch.dtype) -> None:
    for case in (Case(3, 3_000_001, 0.01, dtype, dtype), Case(16, 100_003, 0.001, gradient=dtype)):
        twins = Twins(METHODS[name](case.density), case)
        for given in told("unsteady", case, exact=False):
            twins.step(given)
        twins.assert_same_state()


def test_hundreds_of_workers_give_the_same_by_both_paths() -> None:
    case = Case(300, 20_000, 0.01)
    twins = Twins(gradsieve.exdyna(density=case.density), case)
    # whole numbers, whose sums do not depend on an order
    for _ in range(5):
        twins.step(Given(torch.randn(300, 20_000, device="cuda").mul(64).round(), torch.ones(20_000, device="cuda")))
    twins.assert_same_state()


def _steps_of(name: str) -> tuple[Tensor, Tensor]:
    case = Case(8, 200_003, 0.01)
    simulation = Twins(METHODS[name](case.density), case).by_kernels
    means = [simulation.step(*given)[0] for _ in range(2) for given in told("unsteady", case, exact=False)]
    return torch.stack(means), simulation.residual


@pytest.mark.parametrize("name", METHODS)
def test_two_runs_give_the_same_bits(name: str) -> None:
    for one, other in zip(_steps_of(name), _steps_of(name), strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("name", ["micro", "exdyna", "union", "iwp"])
def test_training_by_virtual_workers_is_the_same_by_both_paths(name: str, tmp_path: Path) -> None:
    records = []
    for path in PATHS:
        with kernels.using(path):
            run = small_runs.here(tmp_path / path, device="cuda", method=name, virtual=4, epochs=10)
        # messages are of another size
        records.append(
            [{key: value for key, value in record.items() if "comm" not in key} for record in small_runs.told(run)]
        )
    assert len(records[0]) >= 50
    assert records[0] == records[1]


# --- vectors that 32 bits cannot count ----------------------------------------------------------------------------

LONG = 2**31 + 100_000
DENSITY = 1e-6
TARGET = int(DENSITY * LONG)
SHAPES = [2**31 - 5, 70_001, LONG - 2**31 + 5 - 70_001]


def long_simulation(name: str) -> Simulation:
    """Of a single worker, with 16 bits an entry."""
    options = {"device": "cuda", "residual_dtype": torch.bfloat16, "as_team": True}
    simulation = Simulation(METHODS[name](DENSITY), 1, LONG, shapes=SHAPES, **options)  # type: ignore[arg-type]
    assert simulation._fused is not None
    return simulation


def planted(step: int) -> Tensor:
    """As many places as may be sent, at both ends of the vector and on both sides of what 32 bits reach."""
    beginning, around = 3 * torch.arange(1000) + step, 2**31 - 50 + torch.arange(100) + 7 * step
    end = LONG - 1 - 5 * torch.arange(TARGET - 1100) - step
    return torch.cat([beginning, around, end]).sort().values.cuda()


@pytest.mark.parametrize("name", ["micro", "exdyna", "union"])
def test_entries_that_32_bits_do_not_reach_are_sent(name: str) -> None:
    simulation = long_simulation(name)
    gradients = torch.empty(1, LONG, dtype=torch.bfloat16, device="cuda")
    mean = torch.empty(LONG, dtype=torch.bfloat16, device="cuda")
    for step in range(3):
        places = planted(step)
        values = (1 + torch.randint(0, 128, places.shape, device="cuda") / 128).bfloat16()
        gradients.zero_()
        gradients[0, places] = values
        _, (pending,) = simulation.average(gradients, mean, use_up=True)
        assert pending.read().support == TARGET
        assert torch.equal(mean[places], values)
        assert int(mean.count_nonzero()) == TARGET
    assert int(simulation.residual.count_nonzero()) == 0


def test_a_long_vector_without_zeros_finds_its_threshold() -> None:
    simulation = long_simulation("micro")
    gradients = torch.empty(1, LONG, dtype=torch.bfloat16, device="cuda").normal_()
    mean = torch.empty(LONG, dtype=torch.bfloat16, device="cuda")
    _, (pending,) = simulation.average(gradients, mean)
    stats = pending.read()
    assert stats.threshold is not None
    # numbers of eight bits lie so far apart that a seventh more may reach the threshold than shall pass
    reaching = [int((part.abs() >= stats.threshold).sum()) for part in torch.split(gradients[0], 1 << 28)]
    assert 0.97 * TARGET <= stats.support <= 1.03 * TARGET
    assert sum(reaching) <= 1.3 * TARGET
    assert int(mean.count_nonzero()) == stats.support
