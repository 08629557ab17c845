"""Sieves in checkpoints of torch.distributed.checkpoint, over real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from fleet import Fleet
from gradsieve import Sharded
from gradsieve.sharded import BLOCK, _as_state, _as_tensors
from test_hook_states import unsent
from test_states import plain, saved
from toys import averaged, flat, make, sparsified

DENSITY = 0.05
RUNS = {"union": "model", "exdyna": "model", "dgc": "model", "exdyna-paper": "bucket", "iwp-per-layer": "model"}
NEVER_REBUILT = {"find_unused_parameters": True}


def _save(folder: str) -> dict[str, list[Tensor]]:
    """Three steps of each, a checkpoint, and the three steps that follow."""
    found = {}
    for variant, scope in RUNS.items():
        model, sieve = sparsified(make(variant, DENSITY), ddp=NEVER_REBUILT, scope=scope)
        averaged(model, 3)
        save({"model": model.state_dict(), "sieve": Sharded(sieve)}, checkpoint_id=f"{folder}/{variant}")
        torch.save(sieve.state_dict(), f"{folder}/{variant}-{dist.get_rank()}.pt")
        found[variant] = averaged(model, 3, first=3)
    return found


def _load(folder: str) -> dict[str, tuple[Tensor, list[Tensor]]]:
    """What is not sent yet, and the three steps that follow."""
    found = {}
    for variant, scope in RUNS.items():
        model, sieve = sparsified(make(variant, DENSITY), ddp=NEVER_REBUILT, scope=scope)
        path = f"{folder}/{variant}"
        load({"model": model.state_dict(), "sieve": Sharded(sieve, checkpoint=path)}, checkpoint_id=path)
        found[variant] = unsent(sieve), averaged(model, 3, first=3)
    return found


def states_of(folder: Path, variant: str, world: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{variant}-{rank}.pt", weights_only=True) for rank in range(world)]


def test_the_same_world_goes_on_bit_for_bit(fleet2: Fleet, tmp_path: Path) -> None:
    expected, found = fleet2.run(_save, str(tmp_path)), fleet2.run(_load, str(tmp_path))
    for then, now in zip(expected, found, strict=True):
        for variant, means in then.items():
            assert all(torch.equal(a, b) for a, b in zip(means, now[variant][1], strict=True)), variant


def check_another_world(saving: Fleet, loading: Fleet, folder: Path) -> None:
    saving.run(_save, str(folder))
    ranks = loading.run(_load, str(folder))
    for variant in RUNS:
        expected = gradsieve.reshard(states_of(folder, variant, saving.world), loading.world)
        for found, state in zip(ranks, expected, strict=True):
            own, means = found[variant]
            assert torch.equal(own, flat(list(state["residuals"].values())).double())
            assert all(torch.equal(a, b) for a, b in zip(means, ranks[0][variant][1], strict=True))


@pytest.mark.parametrize(("old", "new"), [(3, 2), (2, 3)])
def test_another_world_gets_what_reshard_makes(
    old: int, new: int, fleets: Callable[[int], Fleet], tmp_path: Path
) -> None:
    check_another_world(fleets(old), fleets(new), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("new", [1, 2, 3, 8])
def test_four_ranks_go_on_as_others(new: int, fleets: Callable[[int], Fleet], tmp_path: Path) -> None:
    check_another_world(fleets(4), fleets(new), tmp_path)


def _asked_for(folder: str) -> list[str]:
    _, sieve = sparsified(make("union", DENSITY), ddp=NEVER_REBUILT)
    return [*Sharded(sieve, checkpoint=f"{folder}/union").state_dict()]


def test_a_rank_reads_only_what_it_needs(fleets: Callable[[int], Fleet], tmp_path: Path) -> None:
    fleets(2).run(_save, str(tmp_path))
    assert fleets(2).run(_asked_for, str(tmp_path)) == [["rank 0 of 2"], ["rank 1 of 2"]]
    middle = ["rank 0 of 2", "rank 1 of 2"]
    assert fleets(3).run(_asked_for, str(tmp_path)) == [["rank 0 of 2"], middle, ["rank 1 of 2"]]


def _without_checkpoint(folder: str) -> bool:
    _, sieve = sparsified(make("union", DENSITY), ddp=NEVER_REBUILT)
    load({"sieve": Sharded(sieve)}, checkpoint_id=f"{folder}/union")
    state = torch.load(f"{folder}/union-{dist.get_rank()}.pt", weights_only=True)
    return bool(plain(sieve.state_dict()) == plain(state))


def test_in_the_same_world_the_path_may_be_left_out(fleet2: Fleet, tmp_path: Path) -> None:
    fleet2.run(_save, str(tmp_path))
    assert fleet2.run(_without_checkpoint, str(tmp_path)) == [True, True]


def _direct(folder: str) -> tuple[str, bool]:
    """What a bare sieve says to its checkpoint, and whether it is as it was before."""
    model, sieve = sparsified(make("micro", DENSITY), ddp=NEVER_REBUILT)
    averaged(model, 3)
    save({"sieve": sieve}, checkpoint_id=folder)
    _, other = sparsified(make("micro", DENSITY), ddp=NEVER_REBUILT)
    before = plain(other.state_dict())
    try:
        load({"sieve": other}, checkpoint_id=folder)
    except ValueError as error:
        return str(error), plain(other.state_dict()) == before
    return "", torch.equal(unsent(other), unsent(sieve))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_bare_sieve_never_takes_the_residual_of_another_rank(
    world: int, fleets: Callable[[int], Fleet], tmp_path: Path
) -> None:
    """DCP keeps for each key the value of one rank, not always of the same."""
    answers = fleets(world).run(_direct, str(tmp_path / "bare"))
    assert all(unharmed for _, unharmed in answers)
    assert sum(message == "" for message, _ in answers) <= 1
    assert all("gradsieve.Sharded(sieve)" in message for message, _ in answers if message)
    assert world > 1 or answers == [("", True)]


def _refused(folder: str) -> dict[str, str]:
    """Before DCP reads anything: on every rank alike."""
    _, sieve = sparsified(make("union", DENSITY))
    _, with_momentum = sparsified(make("dgc", DENSITY))
    smaller = gradsieve.sparsify(DistributedDataParallel(nn.Linear(3, 3)), make("union", DENSITY))
    save({"model": sieve.residuals()}, checkpoint_id=f"{folder}/foreign")
    if dist.get_rank() == 0:
        (Path(folder) / "damaged").mkdir()
        (Path(folder) / "damaged" / ".metadata").write_bytes(b"no metadata")
    dist.barrier()
    cases = {
        "missing": (sieve, "nowhere"),
        "foreign": (sieve, "foreign"),
        "damaged": (sieve, "damaged"),
        "model": (smaller, "union"),
        "momentum": (with_momentum, "union"),
    }
    messages = {}
    for key, (loading, name) in cases.items():
        path = f"{folder}/{name}"
        with pytest.raises(ValueError, match=name) as caught:
            load({"sieve": Sharded(loading, checkpoint=path)}, checkpoint_id=path)
        messages[key] = str(caught.value)
    return messages


def _refused_after_reading(folder: str) -> str:
    _, sieve = sparsified(make("topk", DENSITY))
    path = f"{folder}/union"
    with pytest.raises(ValueError, match="this state") as caught:
        load({"sieve": Sharded(sieve, checkpoint=path)}, checkpoint_id=path)
    return str(caught.value)


def test_checkpoints_that_do_not_fit_are_refused(fleet2: Fleet, tmp_path: Path) -> None:
    fleet2.run(_save, str(tmp_path))
    for messages in fleet2.run(_refused, str(tmp_path)):
        assert "is no whole checkpoint of torch.distributed.checkpoint" in messages["missing"]
        assert "is no whole checkpoint of torch.distributed.checkpoint" in messages["damaged"]
        assert "holds no sieve" in messages["foreign"]
        assert "gradsieve.Sharded(sieve)" in messages["foreign"]
        assert "holds a sieve of another model, method or exclude=" in messages["model"]
        assert "holds a sieve of another model, method or exclude=" in messages["momentum"]
    for message in fleet2.run(_refused_after_reading, str(tmp_path)):
        assert f"saved with method '{gradsieve.union(density=0.05)!r}'" in message


@pytest.mark.parametrize("variant", ["union", "exdyna", "exdyna-paper", "dgc", "sidco"])
def test_a_state_is_all_tensors_and_comes_back_to_the_bit(variant: str) -> None:
    state = saved(variant, 2)[1]
    held = _as_tensors(state)
    numbers = held.pop("numbers")
    assert len(numbers) % BLOCK == 0
    assert all(isinstance(tensor, Tensor) for kind in held.values() for tensor in kind.values())
    assert plain(_as_state("rank 1 of 2", held | {"numbers": numbers})) == plain(state)


def test_damaged_numbers_are_refused() -> None:
    held = _as_tensors(saved("exdyna", 2)[1])
    numbers = held["numbers"]
    cut, flipped = numbers.clone(), numbers.clone()
    cut[100:] = 0
    flipped[:40] ^= 0x55
    ours = "rank 1 of 2"
    refused: list[tuple[str, Any]] = [
        (ours, held | {"numbers": cut}),
        (ours, held | {"numbers": flipped}),
        (ours, held | {"numbers": torch.zeros(BLOCK, dtype=torch.uint8)}),
        (ours, held | {"numbers": numbers.float()}),
        (ours, {}),
        (ours, None),
        ("rank 0 of 2", held),
        (ours, held | {"numbers": torch.frombuffer(bytearray(b'{".int64": "x"}'), dtype=torch.uint8)}),
    ]
    for key, given in refused:
        with pytest.raises(ValueError, match=r"damaged|holds no state of a sieve"):
            _as_state(key, given)


def test_only_sieves_are_taken() -> None:
    with pytest.raises(TypeError, match=r"Sharded takes what gradsieve\.sparsify returned, not Linear"):
        Sharded(nn.Linear(2, 2))  # type: ignore[arg-type]
