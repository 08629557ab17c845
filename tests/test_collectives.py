from __future__ import annotations

import gc
import re
import time
import warnings
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fleet import Fleet
from gradsieve import collectives as collectives_module
from gradsieve.collectives import (
    Collectives,
    ExchangeError,
    GroupCollectives,
    Letter,
    LocalCollectives,
    TeamCollectives,
    lockstep,
    run,
)

CPU = torch.device("cpu")
Program = Callable[[Collectives], Coroutine[Any, Any, Any]]


class Outcome(NamedTuple):
    result: Any
    wire_bytes: int
    link_bytes: float
    num_messages: int
    seconds: dict[str, float]

    @property
    def traffic(self) -> tuple[int, float, int]:
        return self.wire_bytes, self.link_bytes, self.num_messages


def outcome_of(result: Any, collectives: Collectives) -> Outcome:
    counted = collectives.wire_bytes, collectives.link_bytes, collectives.num_messages
    return Outcome(result, *counted, collectives.watch.seconds())


def own(collectives: Collectives, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of this rank's; small whole numbers, so that sums are exact in any order. A team's are stacked."""
    if isinstance(collectives, TeamCollectives):
        return torch.stack([_numbers(rank, shape).to(dtype) for rank in range(collectives.world)])
    return _numbers(collectives.rank, shape).to(dtype)


def _numbers(rank: int, shape: tuple[int, ...]) -> Tensor:
    return (torch.arange(1, torch.Size(shape).numel() + 1) * (rank + 1)).reshape(shape)


async def gather_vectors(collectives: Collectives) -> Tensor:
    return await collectives.all_gather(own(collectives, 5))


async def gather_matrices(collectives: Collectives) -> Tensor:
    return await collectives.all_gather(own(collectives, 2, 3, dtype=torch.int32))


async def gather_columns(collectives: Collectives) -> Tensor:
    return await collectives.all_gather(own(collectives, 4, 3).t())


async def gather_scalars(collectives: Collectives) -> Tensor:
    return await collectives.all_gather(own(collectives, dtype=torch.float64))


async def reduce_floats(collectives: Collectives) -> Tensor:
    return await collectives.all_reduce(own(collectives, 7))


async def reduce_doubles(collectives: Collectives) -> Tensor:
    return await collectives.all_reduce(own(collectives, 2, 2, dtype=torch.float64))


async def reduce_integers(collectives: Collectives) -> Tensor:
    return await collectives.all_reduce(own(collectives, 3, dtype=torch.int32))


async def exchange_rows(collectives: Collectives) -> Tensor:
    return await collectives.all_to_all(own(collectives, collectives.world, 5, dtype=torch.bfloat16))


async def exchange_matrices(collectives: Collectives) -> Tensor:
    return await collectives.all_to_all(own(collectives, 3, 2, collectives.world).movedim(-1, 0))


async def exchange_pieces(collectives: Collectives) -> list[Tensor]:
    """For rank r as many entries as the number of the sender, and r more; but rank 1 has nothing for anyone."""
    world, rank = collectives.world, collectives.rank
    pieces = [own(collectives, (rank + each) * (rank != 1)) for each in range(world)]
    return await collectives.all_to_all_pieces(pieces, [(each + rank) * (each != 1) for each in range(world)])


async def hand_over(collectives: Collectives) -> list[Tensor]:
    """The last rank hands three numbers of two bytes to the first; the others have nothing to do with it."""
    world, rank = collectives.world, collectives.rank
    pieces, lengths = [torch.empty(0, dtype=torch.bfloat16)] * world, [0] * world
    if rank == world - 1:
        pieces[0] = own(collectives, 3, dtype=torch.bfloat16)
    if rank == 0:
        lengths[-1] = 3
    return await collectives.all_to_all_pieces(pieces, lengths)


def letter(content: Tensor) -> Letter[Tensor]:
    return Letter(content, content.nbytes, lambda: content.view(torch.uint8))


def read(message: Tensor) -> Tensor:
    return message.clone().view(torch.bfloat16)


async def swap_letters(collectives: Collectives) -> list[Tensor]:
    """As `exchange_pieces`."""
    world, rank = collectives.world, collectives.rank
    letters = [
        letter(own(collectives, rank + each, dtype=torch.bfloat16)) if rank != 1 and rank + each else None
        for each in range(world)
    ]
    lengths = [2 * (each + rank) * (each != 1) for each in range(world)]
    return await collectives.swap_letters(letters, lengths, lambda _, message: read(message))


async def gather_letters(collectives: Collectives) -> list[Tensor]:
    own_letter = letter(own(collectives, 3, dtype=torch.bfloat16))
    return list(await collectives.gather_letters(own_letter, lambda rank, message: read(message) * (rank >= 0)))


async def broadcast_letters(collectives: Collectives) -> list[Tensor]:
    own_letter = letter(own(collectives, 4, dtype=torch.bfloat16))
    return [await collectives.broadcast_letter(own_letter, source, read) for source in range(collectives.world)]


async def swap_numbers(collectives: Collectives) -> list[Any]:
    told, heard = await collectives.swap_numbers(own(collectives, collectives.world, 2, dtype=torch.int64))
    return [told, heard]


async def gather_half_precision(collectives: Collectives) -> Tensor:
    return await collectives.all_gather(own(collectives, 3, dtype=torch.bfloat16))


async def broadcast_from_each(collectives: Collectives) -> list[Tensor]:
    return [await collectives.broadcast(own(collectives, 4), source) for source in range(collectives.world)]


async def broadcast_columns(collectives: Collectives) -> Tensor:
    return await collectives.broadcast(own(collectives, 4, 3).t(), collectives.world - 1)


async def gather_numbers(collectives: Collectives) -> list[list[int]]:
    return await collectives.gather_numbers([collectives.rank, 7, 2**31 - 1])


async def gather_own_numbers(collectives: Collectives) -> list[list[int]]:
    return await collectives.gather_numbers(own(collectives, 3, dtype=torch.int64))


async def sum_numbers(collectives: Collectives) -> list[float]:
    return await collectives.sum_numbers(own(collectives, 3))


async def pieces_of_all(collectives: Collectives) -> list[Tensor]:
    return await collectives.gather_pieces(own(collectives, 4, dtype=torch.int32), range(collectives.world))


async def piece_of_the_first(collectives: Collectives) -> list[Tensor]:
    return await collectives.gather_pieces(own(collectives, 5, dtype=torch.uint8), [0])


async def pieces_of_all_but_the_first(collectives: Collectives) -> list[Tensor]:
    return await collectives.gather_pieces(own(collectives, 3, dtype=torch.uint8), range(1, collectives.world))


async def no_pieces(collectives: Collectives) -> list[Any]:
    empty = own(collectives, 0, dtype=torch.uint8)
    return [await collectives.gather_pieces(empty, sources) for sources in (range(collectives.world), [0], [])]


async def alike(collectives: Collectives) -> list[Any]:
    """What all compute alike from what they were told, between messages."""
    gathered = await gather_vectors(collectives)
    total = await collectives.alike(lambda: gathered.sum(0))
    return [total, await collectives.alike(gathered.tolist), await reduce_floats(collectives)]


async def all_in_a_row(collectives: Collectives) -> list[Any]:
    """Later messages are made of earlier results, as in a step."""
    counts = await collectives.gather_numbers([collectives.rank + 1])
    padded = own(collectives, max(row[0] for row in counts))
    gathered = await collectives.all_gather(padded)
    summed = await collectives.all_reduce(gathered.sum(0) + collectives.rank)
    return [counts, gathered, await collectives.broadcast(summed * (collectives.rank + 1), collectives.world - 1)]


async def nothing(collectives: Collectives) -> list[Any]:
    empty = torch.empty(0, 3)
    return [
        await collectives.all_gather(empty),
        await collectives.all_reduce(empty),
        await collectives.broadcast(empty, 0),
        await collectives.all_to_all(torch.empty(collectives.world, 0)),
        await collectives.gather_numbers([]),
        await collectives.sum_numbers(torch.empty(0)),
    ]


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        gather_vectors,
        gather_matrices,
        gather_columns,
        gather_scalars,
        reduce_floats,
        reduce_doubles,
        reduce_integers,
        exchange_rows,
        exchange_matrices,
        exchange_pieces,
        hand_over,
        swap_letters,
        gather_letters,
        broadcast_letters,
        swap_numbers,
        gather_half_precision,
        broadcast_from_each,
        broadcast_columns,
        gather_numbers,
        gather_own_numbers,
        sum_numbers,
        pieces_of_all,
        piece_of_the_first,
        pieces_of_all_but_the_first,
        no_pieces,
        alike,
        all_in_a_row,
        nothing,
    )
}


def _world_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _over_group(names: list[str]) -> dict[str, Outcome]:
    """One rank of a fleet: run programs over the process group."""
    outcomes = {}
    for name in names:
        collectives = GroupCollectives(_world_group(), CPU)
        outcomes[name] = outcome_of(run(PROGRAMS[name](collectives)), collectives)
    return outcomes


def in_process(program: Program, world: int) -> list[Outcome]:
    ranks = [LocalCollectives(rank, world, CPU) for rank in range(world)]
    results = lockstep([program(collectives) for collectives in ranks])
    return [outcome_of(result, collectives) for result, collectives in zip(results, ranks, strict=True)]


def as_team(program: Program, world: int) -> Outcome:
    team = TeamCollectives(world, CPU)
    return outcome_of(run(program(team)), team)


def _plain(result: Any) -> Any:
    """Tensors as what can be compared: type, shape and numbers."""
    if isinstance(result, Tensor):
        return str(result.dtype), tuple(result.shape), result.tolist()
    return [_plain(part) for part in result] if isinstance(result, list) else result


@pytest.fixture(scope="module", params=[2, 3])
def over_group(request: pytest.FixtureRequest, fleets: Callable[[int], Fleet]) -> list[dict[str, Outcome]]:
    """What each rank of real processes got out of each program."""
    return fleets(request.param).run(_over_group, list(PROGRAMS))


@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_in_process_get_what_ranks_of_a_group_get(over_group: list[dict[str, Outcome]], name: str) -> None:
    twins = in_process(PROGRAMS[name], world=len(over_group))
    assert [_plain(twin.result) for twin in twins] == [_plain(rank[name].result) for rank in over_group]


@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_in_process_count_the_bytes_that_ranks_of_a_group_count(
    over_group: list[dict[str, Outcome]], name: str
) -> None:
    twins = in_process(PROGRAMS[name], world=len(over_group))
    assert [twin.traffic for twin in twins] == [rank[name].traffic for rank in over_group]


@pytest.mark.parametrize(
    ("program", "wire_bytes"),
    [
        (gather_vectors, [20, 20, 20]),
        (gather_matrices, [24, 24, 24]),
        (gather_scalars, [8, 8, 8]),
        (reduce_doubles, [32, 32, 32]),
        (exchange_rows, [30, 30, 30]),  # the own row, too
        (exchange_pieces, [4 * (0 + 1 + 2), 0, 4 * (2 + 3 + 4)]),
        (hand_over, [0, 0, 6]),
        (swap_numbers, [48, 48, 48]),
        (gather_half_precision, [6, 6, 6]),
        (broadcast_from_each, [16, 16, 16]),
        (broadcast_columns, [0, 0, 48]),  # only the source hands something over
        (gather_numbers, [24, 24, 24]),
        (sum_numbers, [12, 12, 12]),
        (pieces_of_all, [16, 16, 16]),
        (piece_of_the_first, [5, 0, 0]),
        (pieces_of_all_but_the_first, [0, 3, 3]),
        (nothing, [0, 0, 0]),
    ],
)
def test_bytes_are_those_that_a_rank_hands_over(program: Program, wire_bytes: list[int]) -> None:
    assert [outcome.wire_bytes for outcome in in_process(program, world=3)] == wire_bytes


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("program", "num_messages", "link_bytes"),
    [
        (gather_vectors, 1, lambda world: (world - 1) * 20),
        (gather_matrices, 1, lambda world: (world - 1) * 24),
        (gather_numbers, 1, lambda world: (world - 1) * 24),
        (reduce_floats, 1, lambda world: 2 * (world - 1) / world * 28),
        (exchange_rows, 1, lambda world: (world - 1) * 10),
        (sum_numbers, 1, lambda world: 2 * (world - 1) / world * 12),
        (broadcast_columns, 1, lambda world: 48 if world > 1 else 0),
        (pieces_of_all, 1, lambda world: (world - 1) * 16),
        (alike, 2, lambda world: (world - 1) * 20 + 2 * (world - 1) / world * 28),
        (nothing, 0, lambda _: 0),
        (no_pieces, 0, lambda _: 0),
    ],
)
def test_through_every_link_passes_what_a_ring_passes_on(
    program: Program, num_messages: int, link_bytes: Callable[[int], float], world: int
) -> None:
    for outcome in in_process(program, world):
        assert outcome.num_messages == num_messages
        assert outcome.link_bytes == pytest.approx(link_bytes(world), rel=1e-12)


def test_through_a_link_passes_the_larger_of_what_leaves_and_what_arrives() -> None:
    outcomes = in_process(exchange_pieces, world=3)
    # what is for the rank itself does not pass; rank 1 sends nothing and gets 1 and 3 entries
    assert [(outcome.num_messages, outcome.link_bytes) for outcome in outcomes] == [(1, 12), (1, 16), (1, 20)]
    outcomes = in_process(hand_over, world=3)
    assert [(outcome.num_messages, outcome.link_bytes) for outcome in outcomes] == [(1, 6), (1, 0), (1, 6)]


def test_pieces_of_other_lengths_than_awaited_are_an_error() -> None:
    async def surprised(collectives: Collectives) -> list[Tensor]:
        return await collectives.all_to_all_pieces([torch.ones(2), torch.ones(1)], [2, 2])

    with pytest.raises(RuntimeError, match=re.escape("rank 1 awaits pieces of [2, 2] entries, and [1, 1] come")):
        in_process(surprised, world=2)


def test_so_are_letters_and_those_of_one_size_must_be() -> None:
    async def surprised(collectives: Collectives) -> list[Tensor]:
        return await collectives.swap_letters([letter(torch.ones(2)), None], [8, 8], lambda _, message: message)

    with pytest.raises(RuntimeError, match=re.escape("rank 1 awaits pieces of [8, 8] entries, and [0, 0] come")):
        in_process(surprised, world=2)

    async def unlike(collectives: Collectives) -> Any:
        return await collectives.gather_letters(letter(torch.ones(1 + collectives.rank)), lambda _, message: message)

    with pytest.raises(RuntimeError, match="ranks disagree on the next collective"):
        in_process(unlike, world=2)


def test_between_ranks_of_a_process_letters_are_not_written() -> None:
    async def untold(collectives: Collectives) -> list[Any]:
        sealed: Letter[str] = Letter(f"from {collectives.rank}", 8, lambda: pytest.fail("was written"))
        return [
            await collectives.swap_letters([sealed] * 2, [8] * 2, lambda _, message: str(message)),
            await collectives.gather_letters(sealed, lambda _, message: str(message)),
            await collectives.broadcast_letter(sealed, 1, str),
        ]

    for outcome in in_process(untold, world=2):
        assert outcome.result == [["from 0", "from 1"], ["from 0", "from 1"], "from 1"]


def test_a_team_has_no_pieces_of_unlike_lengths() -> None:
    with pytest.raises(NotImplementedError, match="TeamCollectives moves tensors of one shape only"):
        run(TeamCollectives(1, CPU).all_to_all_pieces([torch.ones(2)], [2]))


def test_every_broadcast_is_a_message_that_passes_through_every_link_once() -> None:
    outcomes = in_process(broadcast_from_each, world=3)
    assert [(outcome.num_messages, outcome.link_bytes) for outcome in outcomes] == [(3, 48)] * 3
    outcomes = in_process(pieces_of_all_but_the_first, world=3)
    assert [(outcome.num_messages, outcome.link_bytes) for outcome in outcomes] == [(2, 6)] * 3


@pytest.mark.parametrize("world", [1, 2, 3])
def test_pieces_come_by_source(world: int) -> None:
    for program, dtype, sources in (
        (pieces_of_all, torch.int32, range(world)),
        (pieces_of_all_but_the_first, torch.uint8, range(1, world)),
    ):
        for outcome in in_process(program, world):
            assert len(outcome.result) == len(sources)
            for rank, piece in zip(sources, outcome.result, strict=True):
                assert piece.dtype == dtype
                assert piece.tolist() == [(rank + 1) * number for number in range(1, len(piece) + 1)]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "program",
    [
        gather_vectors,
        gather_matrices,
        gather_scalars,
        reduce_floats,
        reduce_doubles,
        reduce_integers,
        gather_own_numbers,
        sum_numbers,
        pieces_of_all,
        piece_of_the_first,
        pieces_of_all_but_the_first,
        no_pieces,
        alike,
    ],
)
def test_a_team_gets_and_counts_what_rank_0_of_ranks_in_process_does(program: Program, world: int) -> None:
    team, first = as_team(program, world), in_process(program, world)[0]
    assert _plain(team.result) == _plain(first.result)
    assert team.traffic == first.traffic


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_in_a_team_every_rank_gets_the_rows_for_it(world: int) -> None:
    team, ranks = as_team(exchange_rows, world), in_process(exchange_rows, world)
    assert [_plain(result) for result in team.result] == [_plain(rank.result) for rank in ranks]
    assert team.traffic == ranks[0].traffic


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_own_shard_is_the_row_for_this_rank(world: int) -> None:
    shards = torch.arange(world * world * 2).reshape(world, world, 2)
    before = shards.clone()
    TeamCollectives(world, CPU).own_shard(shards).neg_()
    for rank, own_shards in enumerate(before):
        LocalCollectives(rank, world, CPU).own_shard(own_shards).neg_()
    assert torch.equal(shards, before)
    assert (shards < 0).sum() == 2 * world - 1  # 0 has no sign


def test_a_team_hands_nothing_over_where_every_rank_brings_nothing() -> None:
    team = TeamCollectives(3, CPU)
    gathered = run(team.all_gather(torch.empty(3, 0, 2)))
    reduced = run(team.all_reduce(torch.empty(3, 0)))
    assert (gathered.shape, reduced.shape) == ((3, 0, 2), (0,))
    assert run(team.all_to_all(torch.empty(3, 3, 0))).shape == (3, 3, 0)
    assert run(team.gather_numbers(torch.empty(3, 0))) == [[], [], []]
    assert run(team.sum_numbers(torch.empty(3, 0))) == []
    assert (team.wire_bytes, team.link_bytes, team.num_messages) == (0, 0, 0)


def test_an_empty_message_is_no_meeting() -> None:
    # run() refuses a coroutine that suspends, so this one never waits for another rank
    outcome = run(nothing(LocalCollectives(0, 4, CPU)))
    assert [_plain(part) for part in outcome] == [
        ("torch.float32", (4, 0, 3), [[], [], [], []]),
        ("torch.float32", (0, 3), []),
        ("torch.float32", (0, 3), []),
        ("torch.float32", (4, 0), [[], [], [], []]),
        [[], [], [], []],
        [],
    ]


@pytest.mark.parametrize(
    "program", [gather_vectors, reduce_floats, exchange_rows, hand_over, broadcast_from_each, gather_numbers]
)
def test_a_world_of_one_is_not_special(program: Program) -> None:
    (outcome,) = in_process(program, world=1)
    assert outcome.wire_bytes > 0
    assert _plain(outcome.result)


def test_all_gather_stacks_by_rank_and_all_reduce_adds_up() -> None:
    gathered, reduced = (in_process(program, 3)[0].result for program in (gather_matrices, reduce_floats))
    first = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert gathered.tolist() == torch.stack([first, first * 2, first * 3]).tolist()
    assert reduced.tolist() == [6.0 * number for number in range(1, 8)]


def test_all_to_all_gives_what_each_rank_has_for_this_one() -> None:
    for rank, outcome in enumerate(in_process(exchange_rows, 3)):
        rows = torch.arange(1, 16).reshape(3, 5)[rank]
        assert outcome.result.tolist() == torch.stack([rows, rows * 2, rows * 3]).tolist()


def test_a_new_step_forgets_the_bytes_and_times_of_the_last() -> None:
    collectives = LocalCollectives(0, 1, CPU)
    lockstep([gather_vectors(collectives)])
    assert collectives.wire_bytes == 20
    assert collectives.watch.seconds()
    collectives.start_step()
    assert (collectives.wire_bytes, collectives.link_bytes, collectives.num_messages) == (0, 0, 0)
    assert collectives.watch.seconds() == {}


class _Broken(GroupCollectives):
    """Over a group that gives up."""

    def __init__(self, error: Exception) -> None:
        Collectives.__init__(self, 1, 4, CPU)
        self._error = error

    async def _all_gather(self, tensor: Tensor) -> Tensor:  # noqa: ARG002 - as of a group
        raise self._error

    async def _all_to_all_pieces(self, pieces: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:  # noqa: ARG002
        raise self._error

    async def _broadcast(self, tensor: Tensor, source: int) -> Tensor:  # noqa: ARG002
        raise self._error


def test_a_collective_that_is_given_up_is_named() -> None:
    cause = RuntimeError("Connection closed by peer")
    collectives = _Broken(cause)
    collectives.start_step(17)
    collectives.num_messages = 2
    message = (
        r"^rank 1 of 4 waited 0\.\d s in vain for the all-gather of the counts "
        r"\(4,000 bytes, collective 3 of step 17\): "
        r"another rank has died, hangs or is stopped\. See .* go on from the last checkpoint; .* longer timeout$"
    )
    with pytest.raises(ExchangeError, match=message) as caught:
        run(collectives.all_gather(torch.zeros(1000), "counts"))
    assert caught.value.__cause__ is cause
    with pytest.raises(ExchangeError, match="broadcast of the indices from rank 2"):
        run(collectives.broadcast(torch.zeros(3), 2, "indices"))
    with pytest.raises(ExchangeError, match=r"all-to-all of the picked entries \(12 bytes, collective 5 of step 17\)"):
        run(collectives.all_to_all_pieces([torch.zeros(3), *[torch.zeros(0)] * 3], [0] * 4, "picked entries"))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), ValueError("another mistake")])
def test_what_no_other_rank_has_to_do_with_is_told_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        run(_Broken(error).all_gather(torch.zeros(3)))


def _in_subgroup() -> list[Any] | None:
    members = [1, 2]
    group = dist.new_group(members)
    dist.barrier()  # an outsider that leaves early would break the connections of the others
    if dist.get_rank() not in members:
        return None
    collectives = GroupCollectives(group, CPU)
    assert (collectives.rank, collectives.world) == (dist.get_rank(group), 2)
    return [run(gather_vectors(collectives)), run(broadcast_from_each(collectives))]


def test_ranks_and_sources_are_counted_within_the_group(fleet3: Fleet) -> None:
    outsider, *members = fleet3.run(_in_subgroup)
    assert outsider is None
    expected = [[twin.result for twin in in_process(program, 2)] for program in (gather_vectors, broadcast_from_each)]
    assert [_plain(result) for result in members] == [_plain(list(results)) for results in zip(*expected, strict=True)]


def _by_both_ways(length: int) -> list[tuple[Tensor, Tensor, float]]:
    """What an all-gather and an all-reduce bring, directly and in rings, with the bytes through the link."""
    found, group = [], _world_group()
    for limit in (collectives_module.DIRECT_BYTES, 0):
        collectives = GroupCollectives(group, torch.device("cpu"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives_module, "DIRECT_BYTES", limit)
            gathered = run(collectives.all_gather(own(collectives, length)))
            total = run(collectives.all_reduce(own(collectives, length)))
        found.append((gathered, total, collectives.link_bytes))
    return found


@pytest.mark.parametrize("length", [1, 2, 3, 1000])
def test_short_messages_go_directly_and_bring_what_a_ring_brings(length: int, fleet3: Fleet) -> None:
    outcomes = fleet3.run(_by_both_ways, length)
    for directly, in_rings in outcomes:
        assert torch.equal(directly[0], in_rings[0])
        torch.testing.assert_close(directly[1], in_rings[1])
        assert directly[2] == in_rings[2]
    totals = [directly[1] for directly, _ in outcomes]
    assert all(torch.equal(total, totals[0]) for total in totals)


def _counted(calls: list[int]) -> Program:
    """Compute alike, and note who did."""

    async def program(collectives: Collectives) -> list[int]:
        def compute() -> list[int]:
            calls.append(collectives.rank)
            return [collectives.world, 7]

        return await collectives.alike(compute)

    return program


def _computed_over_group() -> tuple[list[int], list[int]]:
    calls: list[int] = []
    computed = run(_counted(calls)(GroupCollectives(_world_group(), CPU)))
    # nothing was sent: one that leaves early would break off the others, which may still be connecting
    dist.barrier()
    return computed, calls


def test_over_a_group_every_rank_computes_for_itself(fleet3: Fleet) -> None:
    assert fleet3.run(_computed_over_group) == [([3, 7], [rank]) for rank in range(3)]


@pytest.mark.parametrize("world", [1, 3])
def test_ranks_in_process_compute_once_for_all(world: int) -> None:
    calls: list[int] = []
    results = [outcome.result for outcome in in_process(_counted(calls), world)]
    assert results == [[world, 7]] * world
    assert all(result is results[0] for result in results)
    assert len(calls) == 1


def test_a_team_computes_once() -> None:
    calls: list[int] = []
    assert as_team(_counted(calls), 3).result == [3, 7]
    assert len(calls) == 1


@pytest.mark.parametrize("world", [1, 3])
def test_what_is_computed_alike_is_no_message(world: int) -> None:
    for outcome in in_process(_counted([]), world):
        assert outcome.traffic == (0, 0, 0)


def test_numbers_are_read_to_the_host_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    read, tolist = [], Tensor.tolist

    def counting(tensor: Tensor) -> Any:
        read.append(tensor.shape)
        return tolist(tensor)

    monkeypatch.setattr(Tensor, "tolist", counting)
    in_process(gather_numbers, 4)
    assert read == [(4, 3)]


def test_an_error_in_what_is_computed_alike_comes_through() -> None:
    async def failing(collectives: Collectives) -> None:
        def compute() -> None:
            raise KeyError("of all ranks")

        await collectives.alike(compute)

    with pytest.raises(KeyError, match="of all ranks"):
        in_process(failing, 3)
    with pytest.raises(KeyError, match="of all ranks"):
        as_team(failing, 3)


WORK = 0.4


async def late(collectives: Collectives) -> None:
    """The last rank works longer than the others, then all meet, and all work a little on."""
    collectives.watch.switch("select")
    if collectives.rank == collectives.world - 1:
        time.sleep(WORK)
    await collectives.all_reduce(own(collectives, 4))
    time.sleep(WORK / 4)
    collectives.watch.switch(None)


def _late_over_group() -> dict[str, float]:
    collectives = GroupCollectives(_world_group(), CPU)
    run(late(collectives))
    return collectives.watch.seconds()


def test_over_a_group_waiting_for_a_slower_rank_is_exchange(fleet2: Fleet) -> None:
    fast, slow = fleet2.run(_late_over_group)
    assert slow["select"] >= WORK * 1.25
    assert slow["exchange"] < WORK / 2
    assert fast["exchange"] > WORK / 2


def test_in_process_the_work_of_other_ranks_is_nobodys_time() -> None:
    fast, slow = (outcome.seconds for outcome in in_process(late, 2))
    assert slow["select"] >= WORK * 1.25
    assert WORK / 4 <= fast["select"] < WORK
    assert fast["exchange"] < WORK / 2


def test_run_returns_the_result_of_what_never_suspends() -> None:
    async def answer() -> int:
        return 42

    assert run(answer()) == 42


def test_run_passes_on_an_error() -> None:
    async def failing() -> None:
        raise KeyError("of the step")

    with pytest.raises(KeyError, match="of the step"):
        run(failing())


def test_run_refuses_what_must_meet_other_ranks_and_names_lockstep() -> None:
    with pytest.raises(RuntimeError, match=r"ranks of one process.* use lockstep\(\)"):
        run(gather_vectors(LocalCollectives(0, 2, CPU)))


def test_lockstep_of_no_rank_has_no_result() -> None:
    assert lockstep([]) == []


def disagreeing(*programs: Program) -> str:
    """The error that ranks of one process get, each with a program of its own."""
    ranks = [LocalCollectives(rank, len(programs), CPU) for rank in range(len(programs))]
    with pytest.raises(RuntimeError, match="ranks disagree on the next collective") as caught:
        lockstep([program(collectives) for program, collectives in zip(programs, ranks, strict=True)])
    return str(caught.value)


async def finish_early(collectives: Collectives) -> None:  # noqa: ARG001 - a program that meets nobody
    return


async def broadcast_from_first(collectives: Collectives) -> Tensor:
    return await collectives.broadcast(own(collectives, 4), 0)


async def broadcast_from_last(collectives: Collectives) -> Tensor:
    return await collectives.broadcast(own(collectives, 4), collectives.world - 1)


async def broadcast_longer(collectives: Collectives) -> Tensor:
    return await collectives.broadcast(own(collectives, 6), 0)


async def gather_longer(collectives: Collectives) -> Tensor:
    return await collectives.all_gather(own(collectives, 6))


async def gather_doubles(collectives: Collectives) -> Tensor:
    return await collectives.all_gather(own(collectives, 5, dtype=torch.float64))


def test_ranks_at_different_collectives_are_an_error_that_names_them() -> None:
    message = disagreeing(gather_vectors, reduce_floats)
    assert "all_gather" in message
    assert "all_reduce" in message


def test_a_rank_that_finishes_early_is_an_error_that_counts_the_others() -> None:
    message = disagreeing(gather_vectors, finish_early, gather_vectors)
    assert "2 of 3 arrived, at all_gather" in message


async def compute_alone(collectives: Collectives) -> int:
    return await collectives.alike(lambda: 1)


def test_a_rank_that_computes_while_another_gathers_is_an_error_that_names_both() -> None:
    for programs in ((compute_alone, gather_vectors), (gather_vectors, compute_alone)):
        message = disagreeing(*programs)
        assert "2 of 2 arrived, at a computation, all_gather of torch.float32 [5]" in message


def test_a_rank_that_finishes_while_another_computes_is_an_error() -> None:
    assert "2 of 3 arrived, at a computation" in disagreeing(compute_alone, finish_early, compute_alone)


def test_an_empty_message_against_a_full_one_is_an_error() -> None:
    assert "1 of 2 arrived, at all_reduce" in disagreeing(nothing, reduce_floats)


def test_different_sources_of_a_broadcast_are_an_error_that_names_them() -> None:
    message = disagreeing(broadcast_from_first, broadcast_from_last)
    assert re.search(r"at broadcast\b.*\b0\b.*\bbroadcast\b.*\b1\b", message)


@pytest.mark.parametrize(
    "programs",
    [(gather_vectors, gather_longer), (gather_vectors, gather_doubles), (broadcast_from_first, broadcast_longer)],
    ids=["shapes of all_gather", "dtypes of all_gather", "shapes of broadcast"],
)
def test_different_messages_are_an_error_as_over_a_group_they_corrupt(programs: tuple[Program, Program]) -> None:
    disagreeing(*programs)


def _failure_of_rank_0() -> str:
    async def failing(collectives: Collectives) -> Tensor:
        if collectives.rank == 0:
            raise KeyError("rank 0 is ill")
        return await gather_vectors(collectives)

    try:
        in_process(failing, 2)
    except KeyError as error:
        return str(error)
    return "no error"


def test_the_error_of_one_rank_comes_through_without_warnings_from_the_others() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert "rank 0 is ill" in _failure_of_rank_0()
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
