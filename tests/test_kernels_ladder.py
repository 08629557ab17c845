"""`kernels.ladder` against `reference.count_at_least` and `control`, number for number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve import control
from gradsieve.fused import uploaded
from gradsieve.kernels import reference
from gradsieve.kernels.ladder import WIDE
from gradsieve.kernels.tiling import Decision, Record
from gradsieve.search import Goal
from kernel_place import DEVICE, MARKS, Place, awkward, decide, group_shape, uneven

pytestmark = MARKS

BEYOND = 2**31 - 1


# --- counting -----------------------------------------------------------------------------------------------------


def at_rungs(place: Place, rungs: control.Bits) -> Tensor:
    """By the plain twin, of each row."""
    thresholds = torch.from_numpy(control.from_bits(rungs)).to(DEVICE)
    return torch.stack([reference.count_at_least(place.scores(row), thresholds) for row in range(place.rows)])


def assert_counted(place: Place, rungs: control.Bits) -> None:
    """That the numbers, and those by chunk, are what the plain twin counts."""
    expected = at_rungs(place, rungs)
    assert place.decision.counts.tolist() == expected.tolist()
    assert place.decision.chunk_counts.sum(2).tolist() == expected.tolist()


def fed(dtype: torch.dtype, *, group: tuple[int, int] = (4, 64), num_chunks: int = 3, last: float = 1.0) -> Place:
    """A place with three rows, one of which looks at nothing, that collected."""
    place = Place(rows=3, num_chunks=num_chunks)
    place.look([(0, place.numel), (1000, 5003), (50, 50)], last, group=group)
    place.acc.copy_(awkward(*place.acc.shape, seed=1) * last / 8)
    place.feed((awkward(*place.acc.shape) * last / 8).to(dtype))
    return place


@pytest.mark.parametrize(("group", "num_chunks"), [((4, 128), 1), ((8, 64), 3), ((32, 16), 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_was_collected_is_counted_by_level(dtype: torch.dtype, group: tuple[int, int], num_chunks: int) -> None:
    place = fed(dtype, group=group, num_chunks=num_chunks)
    place.count()
    assert_counted(place, control.warm_ladder(place.last))


@pytest.mark.parametrize("group", [(1, 128), (4, 32), (8, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_long_tile_is_counted_beside_short_ones(dtype: torch.dtype, group: tuple[int, int]) -> None:
    place = Place(rows=2)
    place.look([(0, place.numel), (3000, 8500)], group=group)
    place.feed(uneven(place).to(dtype))
    assert place.found.tile_counts.max() > group[1] + 3 * WIDE
    assert place.found.tile_counts.min() < group[1]
    place.count()
    assert_counted(place, control.warm_ladder(place.last))


@pytest.mark.parametrize(
    ("last", "dtype"),
    [
        (control.TINY, torch.float32),
        (1e-37, torch.bfloat16),
        (1e-20, torch.float32),
        (1e20, torch.bfloat16),
        (1e38, torch.float32),
        (1e38, torch.bfloat16),
    ],
    ids=str,
)
def test_levels_count_rightly_at_any_scale(last: float, dtype: torch.dtype) -> None:
    """Where the ladder meets an end of the scale some of its rungs are alike."""
    place = fed(dtype, last=last)
    place.count()
    assert_counted(place, control.warm_ladder(place.last))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_importance_is_counted_by_level(dtype: torch.dtype) -> None:
    place = Place(rows=2)
    weights = torch.randn(place.numel, device=DEVICE)
    place.look([(7, place.numel), (4000, 4200)], weights=weights)
    place.feed(awkward(2, place.numel).to(dtype))
    place.count()
    assert_counted(place, control.warm_ladder(place.last))


LADDERS = {
    "all scales": control.cold_ladder(),
    "few scales": control.ladder_between(control.to_bits(0.9), control.to_bits(1.1)),
    "one rung": np.full(control.NUM_RUNGS, control.to_bits(1.0)),
}


@pytest.mark.parametrize(
    ("importance", "dtype"), [(False, torch.float32), (False, torch.bfloat16), (True, torch.float32)]
)
@pytest.mark.parametrize("rungs", LADDERS)
def test_a_vector_is_counted_by_the_bits_of_its_scores(rungs: str, dtype: torch.dtype, importance: bool) -> None:
    place = Place([4097, 0, 300], rows=2, dtype=dtype, num_chunks=2)
    weights = torch.randn(place.numel, device=DEVICE) if importance else None
    place.look([(0, place.numel), (4000, 4100)], weights=weights)
    place.acc.copy_(awkward(*place.acc.shape))
    ladder = LADDERS[rungs]
    place.count(uploaded(ladder.astype(np.int32), DEVICE))
    assert_counted(place, ladder)


def test_counts_are_added_to_those_that_are_there_and_chunks_told_anew() -> None:
    place = fed(torch.float32)
    place.count()
    once, chunks = place.decision.counts.clone(), place.decision.chunk_counts.clone()
    place.count()
    assert torch.equal(place.decision.counts, 2 * once)
    assert torch.equal(place.decision.chunk_counts, chunks)


def test_chunks_are_stretches_of_tiles_in_their_order() -> None:
    place = Place([4096] * 10, num_chunks=3)
    place.look([(4096, 9 * 4096)], group=(2, 16))
    gradient = torch.full((1, place.numel), 0.5, device=DEVICE)
    gradient[:, ::512] = 1
    place.feed(gradient)
    place.count()
    # eight tiles in groups of two: two groups for each chunk, as far as they go
    lowest = place.decision.chunk_counts[0, 0]
    assert lowest.tolist() == [4 * 8, 4 * 8, 0]


@given(st.floats(0, 1e4))
@example(0.0)
def test_a_group_is_always_of_one_size(per_tile: float) -> None:
    tiles, entries = group_shape(per_tile)
    assert tiles * entries == 128
    assert 16 <= entries <= 128
    assert entries == 128 or entries >= 2 * per_tile


# --- deciding -----------------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """What a choice depends on, beside the counts."""

    target: int
    most: int = BEYOND
    ceiling: int = 2000
    room: int | None = None
    travelled: int = 1
    distinct: int = 1

    @property
    def goal(self) -> int:
        return min((self.target * self.travelled + self.distinct // 2) // self.distinct, self.most)

    @property
    def limit(self) -> int:
        return self.goal * self.ceiling // 1000

    def totals(self, table: Tensor) -> list[int]:
        rows = Goal(self.goal, self.limit, self.room).travelling(table.tolist())
        return [sum(column) for column in zip(*rows, strict=True)]


class Choice:
    """A decision to make, on the device."""

    def __init__(self, asked: Asked, world: int, ladder: control.Bits, last: int) -> None:
        self.asked = asked
        self.decision = Decision.empty(world, world, 1, DEVICE)
        self.decision.learned.copy_(torch.tensor([last, asked.travelled, asked.distinct]))
        self._ladder = uploaded(ladder.astype(np.int32), DEVICE)
        self._next_ladder = torch.zeros_like(self._ladder)
        self._offsets = uploaded(control.OFFSETS, DEVICE)

    @property
    def ladder(self) -> list[int]:
        """Of the next round, or of the next step once this one is settled."""
        rungs: list[int] = (self._next_ladder if self.record.settled else self._ladder).tolist()
        return rungs

    @property
    def record(self) -> Record:
        return Record.of(self.decision.record.tolist(), self.decision.world)

    def make(self, table: Tensor, **how: bool) -> None:
        # as in a team, where the counts of this process are the gathered ones
        self.decision.counts.copy_(table)
        asked = self.asked
        decide(
            self.decision.counts,
            self._ladder,
            self._next_ladder,
            self._offsets,
            self.decision,
            target=asked.target,
            most=asked.most,
            ceiling=asked.ceiling,
            room=-1 if asked.room is None else asked.room,
            **how,
        )
        assert not self.decision.counts.any()

    def assert_made(self, table: Tensor, ladder: control.Bits, last: int) -> None:
        """That it is the one that the plain rules make."""
        asked, rows = self.asked, table.tolist()
        goal = Goal(asked.goal, asked.limit, asked.room)
        rung, thinned = control.settle(asked.totals(table), asked.goal, asked.limit)
        reaching = tuple(row[rung] for row in rows)
        shared = [row[rung] for row in goal.travelling(rows)]
        quotas = control.shares(shared, asked.goal) if thinned else goal.proposed(reaching)
        lengths = quotas if asked.room is None else tuple(min(quota, asked.room) for quota in quotas)
        bits, travelled = int(ladder[rung]), sum(lengths)
        threshold = float(control.from_bits(ladder[rung : rung + 1])[0])
        following = control.to_bits(control.next_threshold(threshold, sum(quotas), asked.goal))
        assert self.record == Record(
            threshold_bits=bits,
            rung=rung,
            goal=asked.goal,
            proposed=sum(quotas),
            settled=1,
            travelled=travelled,
            distinct=travelled,
            support=travelled,
            last_bits=last,
            reaching=reaching,
            quotas=quotas,
            lengths=lengths,
            found=(0,) * len(rows),
            stated=(0,) * len(rows),
        )
        assert self.ladder == control.warm_ladder(following).tolist()
        assert self.decision.applied.tolist() == [bits] * control.NUM_RUNGS
        assert self.decision.following.tolist() == [following, asked.travelled, asked.distinct]


@st.composite
def tables(draw: st.DrawFn) -> Tensor:
    """Counts of one to five ranks at the rungs: they fall from rung to rung, in few steps or many."""
    world = draw(st.integers(1, 5))
    rows = []
    for _ in range(world):
        drops = draw(st.dictionaries(st.integers(0, control.NUM_RUNGS - 1), st.integers(0, 400), max_size=12))
        counts = np.zeros(control.NUM_RUNGS, dtype=np.int64)
        for place, number in drops.items():
            counts[: place + 1] += number
        rows.append(counts)
    return torch.from_numpy(np.stack(rows)).int()


@st.composite
def choices(draw: st.DrawFn) -> tuple[Tensor, Asked]:
    """Counts, and goals that often are near one of the totals."""
    table = draw(tables())
    totals = table.sum(0).tolist()
    near = draw(st.sampled_from(totals)) + draw(st.integers(-20, 20))
    distinct = draw(st.integers(1, 200))
    asked = Asked(
        target=max(1, draw(st.sampled_from([near, near // 2, draw(st.integers(1, 3000))]))),
        most=draw(st.sampled_from([BEYOND, 2**40, max(1, near)])),
        ceiling=draw(st.sampled_from([1000, 1010, 2000])),
        room=draw(st.one_of(st.none(), st.integers(1, 500))),
        travelled=draw(st.sampled_from([distinct, 2 * distinct, distinct + 7, 5 * distinct])),
        distinct=distinct,
    )
    return table, asked


@given(choices(), st.one_of(st.just(1.0), st.floats(control.TINY, 2.0**127, width=32)))
@example((torch.zeros(3, 64, dtype=torch.int32), Asked(5)), 1.0)
@example((torch.full((1, 64), 100, dtype=torch.int32), Asked(100)), 1.0)
@example((torch.full((2, 64), 100, dtype=torch.int32), Asked(10, room=4)), control.TINY)
@example((torch.full((2, 64), 100, dtype=torch.int32), Asked(10, room=7)), control.TINY)
def test_a_warm_choice_is_that_of_the_plain_rules(choice: tuple[Tensor, Asked], last: float) -> None:
    table, asked = choice
    bits = control.to_bits(last)
    ladder = control.warm_ladder(bits)
    made = Choice(asked, len(table), ladder, bits)
    made.make(table)
    made.assert_made(table, ladder, bits)


def counts_of(vectors: Sequence[Tensor], ladder: control.Bits) -> Tensor:
    rungs = torch.from_numpy(control.from_bits(ladder))
    return torch.stack([reference.count_at_least(vector, rungs) for vector in vectors]).int()


def assert_searched(vectors: Sequence[Tensor], asked: Asked) -> int:
    """That the rounds of a search from nothing are those of the plain rules; returns how many it took to settle."""
    ladder, settled_after = control.cold_ladder(), 0
    made = Choice(asked, len(vectors), ladder, last=1)
    for number in range(control.COLD_ROUNDS):
        final = number == control.COLD_ROUNDS - 1
        # once it has settled, what is counted no longer matters
        table = counts_of(vectors, ladder) if not settled_after else torch.full((len(vectors), 64), 7)
        made.make(table, cold=True, first=number == 0, final=final)
        if settled_after:
            continue
        finer = control.next_ladder(ladder, asked.totals(table), asked.goal, asked.limit)
        if finer is None or final:
            made.assert_made(table, ladder, last=1)
            settled_after, settled = number + 1, made.record
            following = made.ladder
        else:
            assert made.record.settled == 0
            assert made.ladder == finer.tolist()
            ladder = finer
    assert made.record == settled
    assert made.ladder == following
    return settled_after


values = st.one_of(st.floats(0, 2.0**127, width=32), st.sampled_from([0.0, 1.0, 1.0001, 2.0**-100, 3e38]))
owned_values = st.lists(st.tuples(values, st.integers(0, 4)), max_size=80)
rooms = st.one_of(st.none(), st.integers(1, 9))


@given(owned_values, st.integers(1, 5), st.integers(1, 60), st.sampled_from([1000, 2000]), rooms)
def test_a_search_from_nothing_goes_by_the_plain_rules(
    owned: list[tuple[float, int]], world: int, target: int, ceiling: int, room: int | None
) -> None:
    vectors = [torch.tensor([value for value, owner in owned if owner % world == rank]) for rank in range(world)]
    assert_searched(vectors, Asked(target, ceiling=ceiling, room=room))


@pytest.mark.parametrize(
    ("spread", "rounds"),
    [(1e30, {1, 2}), (10.0, {2, 3}), (1.001, {3, 4}), (1.0, {4})],
)
def test_a_search_takes_the_more_rounds_the_nearer_the_entries_are(spread: float, rounds: set[int]) -> None:
    vectors = [torch.logspace(0, np.log10(spread), 500) * 1e-8 for _ in range(3)]
    assert assert_searched(vectors, Asked(100)) in rounds
