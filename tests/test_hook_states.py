"""States of sieves over real processes: the same world, another world, one state for all, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from fleet import Fleet
from gradsieve import METHODS, Sieve
from test_states import damaged, plain
from toys import averaged, flat, make, sparsified

SCOPES = ("model", "bucket")
RUNS = [(variant, "model") for variant in (*METHODS, "exdyna-paper", "iwp-momentum")]
RUNS += [(variant, "bucket") for variant in ("union", "exdyna", "exdyna-paper", "dgc", "deft", "oktopk")]
AT_A_TIME = 7
"""Of them, so many in one task of a fleet, whose time is bounded."""
DENSITY = 0.05


def state_of(folder: str, rank: int, key: str) -> Any:
    return torch.load(Path(folder) / f"{key}-{rank}.pt", weights_only=True)


def store(folder: str, key: str, state: Any) -> None:
    torch.save(state, Path(folder) / f"{key}-{dist.get_rank()}.pt")


def unsent(sieve: Sieve) -> Tensor:
    return flat(list(sieve.residuals().values())).double()


def _save_all(folder: str, runs: Sequence[tuple[str, str]]) -> None:
    """Three steps of each, then each rank's state, and one for all."""
    for variant, scope in runs:
        model, sieve = sparsified(make(variant, DENSITY), scope=scope)
        averaged(model, 3)
        store(folder, f"{variant}-{scope}", sieve.state_dict())
        store(folder, f"{variant}-{scope}-all", sieve.consolidated_state_dict())


@pytest.fixture(scope="module")
def saved_by_four(fleets: Callable[[int], Fleet], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the states of all `RUNS` over four ranks."""
    folder = str(tmp_path_factory.mktemp("four"))
    for first in range(0, len(RUNS), AT_A_TIME):
        fleets(4).run(_save_all, folder, RUNS[first : first + AT_A_TIME])
    return folder


def _go_on(
    folder: str, old_world: int, runs: Sequence[tuple[str, str]]
) -> dict[str, tuple[Tensor, Tensor, list[Tensor]]]:
    """What each method has not sent, from the states of another world and from that for all, and two further steps."""
    found = {}
    for variant, scope in runs:
        key = f"{variant}-{scope}"
        model, sieve = sparsified(make(variant, DENSITY), scope=scope)
        sieve.load_state_dict(state_of(folder, 0, f"{key}-all"))
        from_all = unsent(sieve)
        states = [state_of(folder, rank, key) for rank in range(old_world)]
        sieve.load_state_dict(gradsieve.reshard(states, dist.get_world_size())[dist.get_rank()])
        own = unsent(sieve)
        means = averaged(model, 2, first=3)
        assert sieve.stats is not None
        assert sieve.stats.step == 4
        found[key] = own, from_all, means
    return found


def check_world(going_on: Fleet, folder: str) -> None:
    for first in range(0, len(RUNS), AT_A_TIME):
        check_ranks(going_on.run(_go_on, folder, 4, RUNS[first : first + AT_A_TIME]), folder)


def check_ranks(ranks: list[dict[str, tuple[Tensor, Tensor, list[Tensor]]]], folder: str) -> None:
    for key in ranks[0]:
        states = [state_of(folder, rank, key)["residuals"] for rank in range(4)]
        expected = torch.stack([flat(list(residuals.values())).double() for residuals in states]).mean(0)
        owns, from_alls, means = zip(*(found[key] for found in ranks), strict=True)
        for mean in (torch.stack(owns).mean(0), torch.stack(from_alls).mean(0)):
            assert (mean - expected).norm() <= 1e-6 * expected.norm(), key
        for step in range(2):
            assert means[0][step].isfinite().all()
            assert means[0][step].any()
            assert all(torch.equal(own[step], means[0][step]) for own in means), key


@pytest.mark.parametrize("world", [2, 3])
def test_states_of_one_world_go_on_in_another(world: int, fleets: Callable[[int], Fleet], saved_by_four: str) -> None:
    """Every method, by model and by bucket: the mean of what was not sent is the same, and all ranks agree."""
    check_world(fleets(world), saved_by_four)


@pytest.mark.slow
def test_states_go_on_in_twice_the_world(fleets: Callable[[int], Fleet], saved_by_four: str) -> None:
    check_world(fleets(8), saved_by_four)


def test_one_state_for_all_is_the_same_on_every_rank_and_without_the_run(saved_by_four: str) -> None:
    for key in ("union-model", "iwp-momentum-model", "exdyna-bucket"):
        online = [state_of(saved_by_four, rank, f"{key}-all") for rank in range(4)]
        assert all(plain(each) == plain(online[0]) for each in online)
        offline = gradsieve.consolidated([state_of(saved_by_four, rank, key) for rank in range(4)])
        assert offline.keys() == online[0].keys()
        assert plain(offline["learned"]) == plain(online[0]["learned"])
        for kind in ("residuals", "velocities"):
            for name, vector in offline[kind].items():
                torch.testing.assert_close(vector, online[0][kind][name], rtol=1e-6, atol=1e-6)


def _through_a_file(folder: str, variant: str, scope: str) -> tuple[bool, bool]:
    ddp = {"find_unused_parameters": True}  # buckets that DDP never rebuilds
    model, sieve = sparsified(make(variant, DENSITY), ddp=ddp, scope=scope)
    averaged(model, 3)
    store(folder, "state", sieve.state_dict())
    expected = averaged(model, 3, first=3)
    other, restored = sparsified(make(variant, DENSITY), ddp=ddp, scope=scope)
    restored.load_state_dict(state_of(folder, dist.get_rank(), "state"))
    found = averaged(other, 3, first=3)
    same = all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    return same, plain(restored.state_dict()) == plain(sieve.state_dict())


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("variant", ["union", "exdyna", "exdyna-paper", "dgc", "iwp-per-layer", "sidco"])
def test_the_same_world_goes_on_bit_for_bit(variant: str, scope: str, fleet2: Fleet, tmp_path: Path) -> None:
    assert fleet2.run(_through_a_file, str(tmp_path), variant, scope) == [(True, True)] * 2


def _refusals() -> dict[str, str]:
    model, sieve = sparsified(make("union", DENSITY))
    _, other = sparsified(make("topk", DENSITY))
    averaged(model, 2)
    state, everyone = sieve.state_dict(), sieve.consolidated_state_dict()
    every: list[Any] = [None, None]
    dist.all_gather_object(every, state)
    smaller = DistributedDataParallel(nn.Linear(3, 3))
    another = gradsieve.sparsify(smaller, make("union", DENSITY))
    cases: dict[str, tuple[Sieve, Any]] = {
        "rank": (sieve, state | {"rank": 1 - dist.get_rank()}),
        "world": (sieve, gradsieve.reshard(every, 3)[0]),
        "method": (other, state),
        "method of all": (other, everyone),
        "model": (another, state),
        "model of all": (another, everyone),
        "nothing": (sieve, {}),
    }
    messages = {}
    for key, (loading, given) in cases.items():
        before = plain(loading.state_dict())
        with pytest.raises(ValueError, match="this state") as caught:
            loading.load_state_dict(given)
        assert plain(loading.state_dict()) == before
        messages[key] = str(caught.value)
    return messages


def test_refusals_say_what_differs_and_how_to_convert(fleet2: Fleet) -> None:
    for messages in fleet2.run(_refusals):
        assert "gradsieve.Sharded(sieve)" in messages["rank"]
        assert "gradsieve.reshard(states, world=2)" in messages["world"]
        assert "Sieve.consolidated_state_dict()" in messages["world"]
        for key in ("method", "method of all"):
            assert f"make the sieve with {gradsieve.union(density=0.05)!r}" in messages[key]
        for key in ("model", "model of all"):
            assert "belongs to another model or another exclude=" in messages[key]
        assert "lacks" in messages["nothing"]


def _damaged(num: int, scope: str) -> tuple[int, bool]:
    """How many of `num` damaged states were refused, and whether the sieve is as if none had come."""
    model, sieve = sparsified(make("exdyna", DENSITY), ddp={"find_unused_parameters": True}, scope=scope)
    averaged(model, 3)
    forms = [sieve.state_dict(), sieve.consolidated_state_dict()]
    draw, refused = random.Random(dist.get_rank()), 0
    for _ in range(num):
        _, state = damaged(draw, draw.choice(forms))
        try:
            sieve.load_state_dict(state)
        except (ValueError, TypeError) as error:
            refused += "this state" in str(error)
    unchanged = plain(sieve.state_dict()) == plain(forms[0])
    averaged(model, 1, first=3)
    return refused, unchanged


@pytest.mark.parametrize("scope", SCOPES)
def test_damaged_states_are_refused_and_change_nothing(scope: str, fleet2: Fleet) -> None:
    assert fleet2.run(_damaged, 2500, scope) == [(2500, True)] * 2


def _different_steps() -> str:
    model, sieve = sparsified(make("union", DENSITY))
    averaged(model, 1)
    sieve._parts.step += dist.get_rank()
    with pytest.raises(RuntimeError) as caught:
        sieve.consolidated_state_dict()
    return str(caught.value)


def test_one_state_for_all_needs_all_at_the_same_step(fleet2: Fleet) -> None:
    assert all("different numbers of steps ([1, 2])" in message for message in fleet2.run(_different_steps))


class Task:
    """A small regression, the whole of it shared out among the ranks in each step."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.inputs = torch.randn(96, 12)
        self.targets = torch.tanh(self.inputs @ torch.randn(12, 4))
        self.network = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))
        self.model = DistributedDataParallel(self.network)
        options: dict[str, Any] = {} if name == "dense" else {"density": 0.1}
        if name == "dgc":
            options["momentum"] = 0.0  # the optimizer below has none either
        self.sieve = gradsieve.sparsify(self.model, gradsieve.method(name, **options))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2)

    def train(self, steps: int) -> float:
        own = slice(dist.get_rank(), None, dist.get_world_size())
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(self.inputs[own]), self.targets[own])
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        with torch.no_grad():
            return nn.functional.mse_loss(self.network(self.inputs), self.targets).item()


NAMES = [*METHODS]


def _first_half(folder: str, names: list[str]) -> dict[str, float]:
    """Trains on at the end, as if nothing had happened."""
    losses = {}
    for name in names:
        task = Task(name)
        task.train(100)
        store(folder, name, {"model": task.network.state_dict(), "sieve": task.sieve.state_dict()})
        losses[name] = task.train(100)
    return losses


def _second_half(folder: str, names: list[str], old_world: int) -> dict[str, float]:
    losses = {}
    for name in names:
        task, saved = Task(name), [state_of(folder, rank, name) for rank in range(old_world)]
        task.network.load_state_dict(saved[0]["model"])
        states = gradsieve.reshard([each["sieve"] for each in saved], dist.get_world_size())
        task.sieve.load_state_dict(states[dist.get_rank()])
        losses[name] = task.train(100)
    return losses


def check_training(saving: Fleet, going_on: Fleet, name: str, folder: str) -> None:
    (expected, *_), (found, *_) = (
        saving.run(_first_half, folder, [name]),
        going_on.run(_second_half, folder, [name], saving.world),
    )
    assert found[name] <= 1.15 * expected[name]


@pytest.mark.faults
@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("name", ["micro", "union"])
def test_training_goes_on_in_another_world(
    name: str, world: int, fleets: Callable[[int], Fleet], tmp_path: Path
) -> None:
    check_training(fleets(4), fleets(world), name, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("name", NAMES)
def test_so_it_does_with_every_method(name: str, world: int, fleets: Callable[[int], Fleet], tmp_path: Path) -> None:
    check_training(fleets(4), fleets(world), name, str(tmp_path))
