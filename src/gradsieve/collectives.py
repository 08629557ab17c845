"""The only caller of `torch.distributed`, and its twin for ranks that share a process.

Every collective is a coroutine. Over a process group it runs through without suspending; in process it suspends
until every rank has arrived (`lockstep`). So a step is written once, for one rank, and reads the same in both.

Bytes are counted here, where they are handed over: the input of an all-gather or all-reduce, and of a broadcast
at its source only. Beside them stands what passes through a rank's link, each way, by the ring algorithms that process
groups use. All ranks bring the same shape, so an empty message is no message. Results may be shared between ranks:
read them, do not write into them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
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
        self.link_bytes = 0.0
        self.num_messages = 0
        self.watch = self._stopwatch()

    async def all_gather(self, tensor: Tensor) -> Tensor:
        """Everyone's tensor, stacked by rank; all have the same shape."""
        own = self._own(tensor)
        if own.numel() == 0:
            return own.new_empty((self.world, *own.shape))
        with self._handing_over(own, times_through_link=self.world - 1):
            return await self._all_gather(tensor)

    async def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, the same bits on each. Uses the tensor up."""
        own = self._own(tensor)
        if own.numel() == 0:
            return own
        with self._handing_over(own, times_through_link=2 * (self.world - 1) / self.world):
            return await self._all_reduce(tensor)

    async def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor of rank `source`; the others bring one of the same shape."""
        if tensor.numel() == 0:
            return tensor
        with self._handing_over(tensor, times_through_link=min(1, self.world - 1), own=self.rank == source):
            return await self._broadcast(tensor, source)

    async def gather_pieces(self, own: Tensor, counts: Sequence[int], sources: Sequence[int]) -> list[Tensor]:
        """The tensors of the ranks in `sources`, whose lengths everyone knows.

        Where all ranks bring one, an all-gather, padded to the longest; where few do, a broadcast from each.
        """
        if len(sources) == self.world:
            padded = own.new_zeros(max(counts))
            padded[: len(own)] = own
            rows = await self.all_gather(padded)
            return [row[:count] for row, count in zip(rows, counts, strict=True)]
        messages = [own if rank == self.rank else own.new_empty(counts[rank]) for rank in sources]
        return [await self.broadcast(message, rank) for message, rank in zip(messages, sources, strict=True)]

    async def gather_numbers(self, numbers: Tensor | Sequence[int]) -> list[list[int]]:
        """Everyone's numbers, by rank, on the host.

        Synchronises: sizes of messages and the choice of a threshold are decisions of the host.
        """
        gathered = await self.all_gather(torch.as_tensor(numbers, dtype=torch.int64, device=self.device))
        return await self._on_host(gathered)

    async def sum_numbers(self, numbers: Tensor) -> list[float]:
        """The sum over ranks of a small tensor, on the host. Synchronises: the host plans with it."""
        return await self._on_host(await self.all_reduce(numbers))

    async def _on_host(self, tensor: Tensor) -> list[Any]:
        numbers: list[Any] = await self.alike(tensor.tolist) if tensor.numel() else tensor.tolist()
        return numbers

    async def alike(self, compute: Callable[[], T]) -> T:
        """What every rank computes alike from what all were told; ranks that share a process compute it once."""
        return compute()

    def _own(self, tensor: Tensor) -> Tensor:
        """The part of a tensor that one rank brings."""
        return tensor

    def _stopwatch(self) -> Stopwatch:
        return Stopwatch(self.device)

    @contextmanager
    def _handing_over(self, tensor: Tensor, times_through_link: float, *, own: bool = True) -> Iterator[None]:
        num_bytes = tensor.numel() * tensor.element_size()
        self.wire_bytes += num_bytes if own else 0
        self.link_bytes += num_bytes * times_through_link
        self.num_messages += 1
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


class TeamCollectives(Collectives):
    """Between ranks that share a process and step as one: their tensors come stacked, one row each.

    So what is to be gathered is there already. Counts what rank 0 would hand over.
    """

    def __init__(self, world: int, device: torch.device) -> None:
        super().__init__(0, world, device)

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor[0]

    async def _all_gather(self, tensor: Tensor) -> Tensor:
        return tensor

    async def _all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.sum(0, dtype=tensor.dtype)

    async def _broadcast(self, tensor: Tensor, source: int) -> Tensor:  # noqa: ARG002 - all are here
        return tensor

    async def gather_pieces(self, own: Tensor, counts: Sequence[int], sources: Sequence[int]) -> list[Tensor]:
        """`own` holds the pieces of all ranks, one after the other."""
        pieces = torch.split(own, list(counts))
        if len(sources) < self.world:
            return [await self.broadcast(pieces[rank], rank) for rank in sources]
        # what each would hand over is padded to the longest
        await self.all_gather(own.new_empty(max(counts)).expand(self.world, -1))
        return list(pieces)


class _Offer(NamedTuple):
    """What a rank brings to a meeting in process."""

    operation: str
    tensor: Tensor
    source: int = 0

    @property
    def kind(self) -> tuple[Any, ...]:
        """What all ranks must bring alike."""
        return self.operation, self.source, self.tensor.dtype, self.tensor.shape

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

    async def alike(self, compute: Callable[[], T]) -> T:
        phase = self.watch.switch(None)
        answer: T = await _suspended(compute)
        self.watch.switch(phase)
        return answer

    def _stopwatch(self) -> Stopwatch:
        # events in a stream that all ranks share would tell one rank's work for another's
        return Stopwatch(torch.device("cpu"))

    async def _meet(self, offer: _Offer) -> Tensor:
        # the time until everyone has arrived is the work of the other ranks
        self.watch.switch(None)
        result: Tensor = await _suspended(offer)
        self.watch.switch("exchange")
        return result


@coroutine
def _suspended(offer: _Offer | Callable[[], Any]) -> Generator[Any, Any, Any]:
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
    answer: Any = None
    while True:
        offers: list[_Offer | Callable[[], Any]] = []
        results: list[T] = []
        for step in steps:
            try:
                offers.append(step.send(answer))
            except StopIteration as stop:
                results.append(stop.value)
        if not offers:
            return results
        answer = _combined(offers, world=len(steps))


def _combined(offers: Sequence[_Offer | Callable[[], Any]], world: int) -> Any:
    """What all ranks are told at a meeting."""
    met = [offer for offer in offers if isinstance(offer, _Offer)]
    if not met and len(offers) == world:
        compute = offers[0]
        assert callable(compute)
        return compute()
    if len(met) != world or len({offer.kind for offer in met}) != 1:
        names = sorted({str(offer) if isinstance(offer, _Offer) else "a computation" for offer in offers})
        raise RuntimeError(
            f"ranks disagree on the next collective: {len(offers)} of {world} arrived, at {', '.join(names)}"
        )
    operation, source = met[0].operation, met[0].source
    tensors = [offer.tensor for offer in met]
    if operation == "broadcast":
        return tensors[source]
    stacked = torch.stack(tensors)
    return stacked if operation == "all_gather" else stacked.sum(0, dtype=stacked.dtype)
