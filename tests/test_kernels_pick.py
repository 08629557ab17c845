"""`kernels.pick` against `reference.at_least` and `reference.thinned`, index for index."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from gradsieve import control, kernels
from gradsieve.fused import uploaded
from kernel_place import DEVICE, MARKS, SIZES, Place, awkward, pick, uneven

pytestmark = MARKS

RUNG = 30
FILLER = -7


Share = Callable[[int], tuple[int, int]]
SHARES: list[Share] = [
    lambda reached: (reached, reached),
    lambda reached: (reached * 2 // 3, reached * 2 // 3),
    lambda reached: (max(0, reached - 1), max(0, reached - 1)),
    lambda reached: (min(1, reached), min(1, reached)),
    lambda _: (0, 0),
    lambda reached: (reached, min(reached, 37)),
    lambda reached: (reached * 2 // 3, min(reached * 2 // 3, 53)),
]
"""From the number of entries that reach the threshold to a rank's quota and what of it may travel."""
EVERYTHING, MANY, _, _, _, LITTLE_ROOM, _ = SHARES


def reaching(place: Place, row: int, threshold: float) -> Tensor:
    """What a row looks at that reaches a threshold, ascending."""
    return kernels.at_least(place.scores(row), threshold) + place.stretches[row][0]


def picked_by(place: Place, rungs: Tensor | None, rung: int, *, capacity: int, first_rank: int) -> Tensor:
    picked = torch.full((place.rows, capacity), FILLER, dtype=torch.int32, device=DEVICE)
    pick(
        place.acc,
        place.tiling.tiles,
        place.sight,
        place.found,
        place.decision,
        picked,
        rungs=rungs,
        rung=torch.tensor([rung], device=DEVICE),
        first_rank=first_rank,
    )
    return picked


def assert_picked(place: Place, rungs: Tensor | None, rung: int, threshold: float, shares_of: Sequence[Share]) -> None:
    """That each row proposes what reaches the threshold, thinned to its quota and again to what may travel."""
    place.count(rungs)
    first_rank = place.world - place.rows
    found = [reaching(place, row, threshold) for row in range(place.rows)]
    shares = [share(len(indices)) for share, indices in zip(shares_of, found, strict=True)]
    others = [0] * first_rank
    place.note(
        [*others, *map(len, found)],
        [*others, *(quota for quota, _ in shares)],
        [*others, *(length for _, length in shares)],
    )
    capacity = max(1, *(length for _, length in shares))
    picked = picked_by(place, rungs, rung, capacity=capacity, first_rank=first_rank)
    for row, indices in enumerate(found):
        quota, length = shares[row]
        expected = kernels.thinned(kernels.thinned(indices, quota), length).tolist()
        assert len(expected) == length
        assert picked[row].tolist() == expected + [FILLER] * (capacity - length)


def looking(rows: int, world: int, dtype: torch.dtype, *, weights: Tensor | None = None, num_chunks: int = 3) -> Place:
    """Rows that look at different parts, with some hundreds of entries near the threshold."""
    place = Place(rows=rows, world=world, num_chunks=num_chunks)
    stretches = itertools.cycle([(0, place.numel), (1000, 5003)])
    place.look(list(itertools.islice(stretches, rows)), weights=weights, group=(8, 64))
    place.acc.copy_(awkward(*place.acc.shape, seed=1) / 8)
    place.feed((awkward(*place.acc.shape) / 8).to(dtype))
    return place


def threshold_of(rungs: control.Bits, rung: int) -> float:
    return float(control.from_bits(rungs[rung : rung + 1])[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_out_of_what_was_collected_each_rank_picks_its_share(dtype: torch.dtype) -> None:
    place = looking(len(SHARES), len(SHARES), dtype)
    threshold = threshold_of(control.warm_ladder(place.last), RUNG)
    assert_picked(place, None, RUNG, threshold, SHARES)


@pytest.mark.parametrize("group", [(1, 128), (4, 32), (8, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_out_of_a_long_tile_and_short_ones_each_rank_picks_its_share(
    dtype: torch.dtype, group: tuple[int, int]
) -> None:
    place = Place(rows=len(SHARES))
    place.look([(0, place.numel), (3000, 8500)] * 3 + [(4100, 8000)], group=group)
    place.feed(uneven(place).to(dtype))
    threshold = threshold_of(control.warm_ladder(place.last), RUNG)
    assert_picked(place, None, RUNG, threshold, SHARES)


def test_out_of_the_vector_itself_each_rank_picks_its_share() -> None:
    place = looking(len(SHARES), len(SHARES), torch.float32)
    place.look([(4000, 4400)] * len(SHARES))
    bits = control.to_bits(0.2)
    rungs = uploaded(np.full(control.NUM_RUNGS, bits, dtype=np.int32), DEVICE)
    assert_picked(place, rungs, 0, 0.2, SHARES)


@pytest.mark.parametrize("look_at_all", [False, True])
def test_who_looks_at_nothing_picks_nothing(look_at_all: bool) -> None:
    place = looking(2, 2, torch.float32)
    place.look([(50, 50), (4000, 4200)])
    place.feed(awkward(*place.acc.shape))
    ladder = control.warm_ladder(place.last)
    rungs = uploaded(ladder.astype(np.int32), DEVICE) if look_at_all else None
    assert_picked(place, rungs, RUNG, threshold_of(ladder, RUNG), [EVERYTHING] * 2)


@pytest.mark.parametrize("look_at_all", [False, True])
def test_importance_decides_what_is_picked(look_at_all: bool) -> None:
    weights = torch.randn(sum(SIZES), device=DEVICE)
    place = Place()
    place.look([(4090, 4300)], weights=weights)
    place.feed(awkward(*place.acc.shape).to(torch.float16))
    ladder = control.warm_ladder(place.last)
    rungs = uploaded(ladder.astype(np.int32), DEVICE) if look_at_all else None
    assert_picked(place, rungs, RUNG, threshold_of(ladder, RUNG), [MANY])


@pytest.mark.parametrize("rung", [0, 6, 63])
def test_any_rung_may_be_the_threshold(rung: int) -> None:
    place = looking(1, 1, torch.float32)
    threshold = threshold_of(control.warm_ladder(place.last), rung)
    assert_picked(place, None, rung, threshold, [EVERYTHING])


def test_a_rank_that_is_alone_in_its_process_finds_its_own_quota() -> None:
    place = looking(1, 4, torch.float32)
    threshold = threshold_of(control.warm_ladder(place.last), RUNG)
    assert_picked(place, None, RUNG, threshold, [MANY])


@pytest.mark.parametrize("num_chunks", [1, 2, 5])
def test_the_number_of_chunks_changes_nothing(num_chunks: int) -> None:
    place = looking(1, 1, torch.float32, num_chunks=num_chunks)
    place.look([(0, place.numel)], group=(2, 64))
    threshold = threshold_of(control.warm_ladder(place.last), RUNG)
    assert_picked(place, None, RUNG, threshold, [LITTLE_ROOM])


def test_the_level_of_an_entry_of_16_bits_is_that_above_the_threshold_of_its_own_step() -> None:
    """By the time entries are picked the next step's threshold is known, and is not to be confused with it."""
    place = looking(1, 1, torch.bfloat16)
    threshold = threshold_of(control.warm_ladder(place.last), RUNG)
    place.count()
    found = reaching(place, 0, threshold)
    place.note([len(found)], [len(found)], [len(found)])
    place.decision.learned[0] = control.to_bits(0.5)
    picked = picked_by(place, None, RUNG, capacity=len(found), first_rank=0)
    assert picked[0].tolist() == found.tolist()
