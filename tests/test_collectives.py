from __future__ import annotations

import gc
import re
import time
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fleet import Fleet
from gradsieve.collectives import Collectives, GroupCollectives, LocalCollectives, lockstep, run

CPU = torch.device("cpu")
Program = Callable[[Collectives], Coroutine[Any, Any, Any]]


class Outcome(NamedTuple):
    result: Any
    wire_bytes: int
    seconds: dict[str, float]


def own(collectives: Collectives, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of this rank's; small whole numbers, so that sums are exact in any order."""
    numbers = torch.arange(1, torch.Size(shape).numel() + 1) * (collectives.rank + 1)
    return numbers.reshape(shape).to(dtype)


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


async def broadcast_from_each(collectives: Collectives) -> list[Tensor]:
    return [await collectives.broadcast(own(collectives, 4), source) for source in range(collectives.world)]


async def broadcast_columns(collectives: Collectives) -> Tensor:
    return await collectives.broadcast(own(collectives, 4, 3).t(), collectives.world - 1)


async def gather_numbers(collectives: Collectives) -> list[list[int]]:
    return await collectives.gather_numbers([collectives.rank, 7, 2**31 - 1])


async def sum_numbers(collectives: Collectives) -> list[float]:
    return await collectives.sum_numbers(own(collectives, 3))


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
        broadcast_from_each,
        broadcast_columns,
        gather_numbers,
        sum_numbers,
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
        result = run(PROGRAMS[name](collectives))
        outcomes[name] = Outcome(result, collectives.wire_bytes, collectives.watch.seconds())
    return outcomes


def in_process(program: Program, world: int) -> list[Outcome]:
    ranks = [LocalCollectives(rank, world, CPU) for rank in range(world)]
    results = lockstep([program(collectives) for collectives in ranks])
    return [
        Outcome(result, collectives.wire_bytes, collectives.watch.seconds())
        for result, collectives in zip(results, ranks, strict=True)
    ]


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
    assert [twin.wire_bytes for twin in twins] == [rank[name].wire_bytes for rank in over_group]


@pytest.mark.parametrize(
    ("program", "wire_bytes"),
    [
        (gather_vectors, [20, 20, 20]),
        (gather_matrices, [24, 24, 24]),
        (gather_scalars, [8, 8, 8]),
        (reduce_doubles, [32, 32, 32]),
        (broadcast_from_each, [16, 16, 16]),
        (broadcast_columns, [0, 0, 48]),  # only the source hands something over
        (gather_numbers, [24, 24, 24]),
        (sum_numbers, [12, 12, 12]),
        (nothing, [0, 0, 0]),
    ],
)
def test_bytes_are_those_that_a_rank_hands_over(program: Program, wire_bytes: list[int]) -> None:
    assert [outcome.wire_bytes for outcome in in_process(program, world=3)] == wire_bytes


def test_an_empty_message_is_no_meeting() -> None:
    # run() refuses a coroutine that suspends, so this one never waits for another rank
    outcome = run(nothing(LocalCollectives(0, 4, CPU)))
    assert [_plain(part) for part in outcome] == [
        ("torch.float32", (4, 0, 3), [[], [], [], []]),
        ("torch.float32", (0, 3), []),
        ("torch.float32", (0, 3), []),
        [[], [], [], []],
        [],
    ]


@pytest.mark.parametrize("program", [gather_vectors, reduce_floats, broadcast_from_each, gather_numbers, all_in_a_row])
def test_a_world_of_one_is_not_special(program: Program) -> None:
    (outcome,) = in_process(program, world=1)
    assert outcome.wire_bytes > 0
    assert _plain(outcome.result)


def test_all_gather_stacks_by_rank_and_all_reduce_adds_up() -> None:
    gathered, reduced = (in_process(program, 3)[0].result for program in (gather_matrices, reduce_floats))
    first = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert gathered.tolist() == torch.stack([first, first * 2, first * 3]).tolist()
    assert reduced.tolist() == [6.0 * number for number in range(1, 8)]


def test_a_new_step_forgets_the_bytes_and_times_of_the_last() -> None:
    collectives = LocalCollectives(0, 1, CPU)
    lockstep([gather_vectors(collectives)])
    assert collectives.wire_bytes == 20
    assert collectives.watch.seconds()
    collectives.start_step()
    assert collectives.wire_bytes == 0
    assert collectives.watch.seconds() == {}


def _in_subgroup() -> list[Any] | None:
    members = [1, 2]
    group = dist.new_group(members)
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
