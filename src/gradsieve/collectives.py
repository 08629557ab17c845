"""The only caller of `torch.distributed`, and its twin for ranks that share a process.

Every collective is a coroutine. Over a process group it runs through without suspending; in process it suspends
until every rank has arrived (`lockstep`). So a step is written once, for one rank, and reads the same in both.

Bytes are counted here, where they are handed over: the input of an all-gather or all-reduce, and of a broadcast
at its source only. All ranks bring the same shape, so an empty message is no message. Results may be shared between
ranks: read them, do not write into them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from types import coroutine
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve.clock import Stopwatch

T = TypeVar("T")

# `all_gather_into_tensor` was renamed in torch 2.13.
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Collectives(ABC):
    """One rank's access to the others."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.rank = rank
        self.world = world
        self.device = device
        self.start_step()

    def start_step(self) -> None:
        """Forget the bytes and the times of the step before."""
        self.wire_bytes = 0
        self.watch = Stopwatch(self.device)

    async def all_gather(self, tensor: Tensor) -> Tensor:
        """Everyone's tensor, stacked by rank; all have the same shape."""
        if tensor.numel() == 0:
            return tensor.new_empty((self.world, *tensor.shape))
        with self._handing_over(tensor):
            return await self._all_gather(tensor)

    async def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, the same bits on each. Uses the tensor up."""
        if tensor.numel() == 0:
            return tensor
        with self._handing_over(tensor):
            return await self._all_reduce(tensor)

    async def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor of rank `source`; the others bring one of the same shape."""
        if tensor.numel() == 0:
            return tensor
        with self._handing_over(tensor if self.rank == source else None):
            return await self._broadcast(tensor, source)

    async def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Everyone's numbers, by rank, on the host.

        Synchronises: sizes of messages and the choice of a threshold are decisions of the host.
        """
        gathered = await self.all_gather(torch.tensor(numbers, dtype=torch.int64, device=self.device))
        rows: list[list[int]] = gathered.tolist()
        return rows

    async def sum_numbers(self, numbers: Tensor) -> list[float]:
        """The sum over ranks of a small tensor, on the host. Synchronises: the host plans with it."""
        summed: list[float] = (await self.all_reduce(numbers)).tolist()
        return summed

    @contextmanager
    def _handing_over(self, tensor: Tensor | None) -> Iterator[None]:
        if tensor is not None:
            self.wire_bytes += tensor.numel() * tensor.element_size()
        interrupted = self.watch.switch("exchange")
        try:
            yield
        finally:
            self.watch.switch(interrupted)

    @abstractmethod
    async def _all_gather(self, tensor: Tensor) -> Tensor: ...

    @abstractmethod
    async def _all_reduce(self, tensor: Tensor) -> Tensor: ...

    @abstractmethod
    async def _broadcast(self, tensor: Tensor, source: int) -> Tensor: ...


class GroupCollectives(Collectives):
    """Over a process group: gloo or NCCL."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), device)
        self._group = group

    async def _all_gather(self, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty((self.world, *tensor.shape))
        # flat on both sides: gloo takes a concatenation, not a stack
        _all_gather_into(gathered.view(-1), tensor.reshape(-1), group=self._group)
        return gathered

    async def _all_reduce(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self._group)
        return tensor

    async def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        message = tensor.contiguous()
        dist.broadcast(message, group=self._group, group_src=source)
        return message


class _Offer(NamedTuple):
    """What a rank brings to a meeting in process."""

    operation: str
    tensor: Tensor
    source: int = 0

    def __str__(self) -> str:
        origin = f" from {self.source}" if self.operation == "broadcast" else ""
        return f"{self.operation}{origin} of {self.tensor.dtype} {list(self.tensor.shape)}"


class LocalCollectives(Collectives):
    """Between ranks that share a process and are driven by `lockstep`."""

    async def _all_gather(self, tensor: Tensor) -> Tensor:
        return await self._meet(_Offer("all_gather", tensor))

    async def _all_reduce(self, tensor: Tensor) -> Tensor:
        return await self._meet(_Offer("all_reduce", tensor))

    async def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return await self._meet(_Offer("broadcast", tensor, source))

    async def _meet(self, offer: _Offer) -> Tensor:
        # the time until everyone has arrived is the work of the other ranks
        self.watch.switch(None)
        result = await _suspended(offer)
        self.watch.switch("exchange")
        return result


@coroutine
def _suspended(offer: _Offer) -> Generator[_Offer, Tensor, Tensor]:
    return (yield offer)


def run(step: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine over a process group to its end; it never suspends."""
    try:
        step.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    step.close()
    raise RuntimeError("a collective between ranks of one process was run as if over a process group: use lockstep()")


def lockstep(steps: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run the coroutines of all ranks together, from meeting to meeting, and return their results by rank."""
    try:
        return _driven(steps)
    finally:
        # after an error on one rank the others stand half-way
        for step in steps:
            step.close()


def _driven(steps: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    answer: Tensor | None = None
    while True:
        offers: list[_Offer] = []
        results: list[T] = []
        for step in steps:
            try:
                offers.append(step.send(answer))
            except StopIteration as stop:
                results.append(stop.value)
        if not offers:
            return results
        answer = _combined(offers, world=len(steps))


def _combined(offers: Sequence[_Offer], world: int) -> Tensor:
    kinds = sorted({str(offer) for offer in offers})
    if len(kinds) != 1 or len(offers) != world:
        raise RuntimeError(
            f"ranks disagree on the next collective: {len(offers)} of {world} arrived, at {', '.join(kinds)}"
        )
    operation, source = offers[0].operation, offers[0].source
    tensors = [offer.tensor for offer in offers]
    if operation == "broadcast":
        return tensors[source]
    stacked = torch.stack(tensors)
    return stacked if operation == "all_gather" else stacked.sum(0, dtype=stacked.dtype)
