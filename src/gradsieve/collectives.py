"""The only caller of `torch.distributed`, and its twin for ranks that share a process.

Every collective is a coroutine. Over a process group it runs through without suspending, or suspends while it is under
way (`OverlappedCollectives`); in process it suspends until every rank has arrived (`lockstep`). So a step is written
once, for one rank, and reads the same in all.

Bytes are counted here, where they are handed over: the input of an all-gather, all-reduce or all-to-all, and of a
broadcast at its source only. Beside them stands what passes through a rank's link, each way, by the ring algorithms
that process groups use, and by the direct ones that take their place for short messages ([Note: direct]). All ranks
bring the same shape, so an empty message is no message; but for `all_to_all_pieces`, in which a rank may have nothing
to bring and takes part all the same. Results may be shared between ranks: read them, do not write into them.

[Note: direct]
In a ring of N ranks a message takes N - 1 hops, one after the other, and twice as many if it is summed up on its way:
for a short one that is nearly all of its time. Sent from everyone to everyone it takes one, and a sum two, for the same
bytes: every rank sums one stretch and tells all. gloo knows rings only, so there short messages travel as all-to-alls.

A collective that a process group gives up is an `ExchangeError` that says which one it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import perf_counter
from types import coroutine
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve.clock import Stopwatch

T = TypeVar("T")


@dataclass(frozen=True)
class Letter(Generic[T]):
    """What travels as bytes. Between ranks of one process it is handed over unwritten, and counts all the same."""

    content: T
    num_bytes: int
    write: Callable[[], Tensor]


# `all_gather_into_tensor` was renamed in torch 2.13.
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


DIRECT_BYTES = 1 << 23
"""Up to so many, over all that it is for, a rank sends a message directly over gloo: see [Note: direct]."""

_OF_THIS_DEVICE = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors that a collective may meet with and that no other rank has to do with."""


class ExchangeError(RuntimeError):
    """A collective did not come to its end, as a rank has died, hangs or is stopped; says which collective."""


class Collectives(ABC):
    """One rank's access to the others.

    `what` is what a collective carries, in the words of an error.
    """

    _failures: tuple[type[Exception], ...] = ()
    """What a collective raises that is given up."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.rank = rank
        self.world = world
        self.device = device
        self.start_step()

    def start_step(self, index: int = 0) -> None:
        """Forget the bytes and the times of the step before."""
        self.step = index
        self.wire_bytes = 0
        self.link_bytes = 0.0
        self.num_messages = 0
        self.watch = self._stopwatch()

    async def all_gather(self, tensor: Tensor, what: str = "tensors") -> Tensor:
        """Everyone's tensor, stacked by rank; all have the same shape."""
        own = self._own(tensor)
        if own.numel() == 0:
            return own.new_empty((self.world, *own.shape))
        with self._handing_over(own.nbytes, "all-gather", what, own.nbytes * (self.world - 1)):
            return await self._all_gather(tensor)

    async def all_reduce(self, tensor: Tensor, what: str = "tensors") -> Tensor:
        """The sum over ranks, the same bits on each. Uses the tensor up."""
        own = self._own(tensor)
        if own.numel() == 0:
            return own
        with self._handing_over(own.nbytes, "all-reduce", what, own.nbytes * (2 * (self.world - 1) / self.world)):
            return await self._all_reduce(tensor)

    async def all_to_all(self, tensor: Tensor, what: str = "tensors") -> Tensor:
        """What each rank has for this one, by rank: of a tensor `[world, ...]`, row r is for rank r."""
        own = self._own(tensor)
        if own.numel() == 0:
            return tensor
        with self._handing_over(own.nbytes, "all-to-all", what, own.nbytes * ((self.world - 1) / self.world)):
            return await self._all_to_all(tensor)

    async def all_to_all_pieces(
        self, pieces: Sequence[Tensor], lengths: Sequence[int], what: str = "tensors"
    ) -> list[Tensor]:
        """The same for flat pieces of any lengths, all of one type: piece r is for rank r, and of rank r come
        `lengths[r]` entries.

        What leaves a rank and what arrives there need not be alike: the larger one counts as what its link passes.
        """
        size = pieces[0].element_size()
        with self._swapping([size * len(piece) for piece in pieces], [size * length for length in lengths], what):
            return await self._all_to_all_pieces(pieces, lengths)

    async def swap_letters(
        self,
        letters: Sequence[Letter[T] | None],
        lengths: Sequence[int],
        read: Callable[[int, Tensor], T],
        what: str = "letters",
    ) -> list[T]:
        """The contents of what each rank has for this one, by rank, where it has anything: letter r is for rank r, and
        of rank r come `lengths[r]` bytes, which `read` is given with r."""
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        pieces = [nothing if letter is None else letter.write() for letter in letters]
        arrived = await self.all_to_all_pieces(pieces, lengths, what)
        return [read(rank, message) for rank, message in enumerate(arrived) if len(message)]

    async def gather_letters(
        self, letter: Letter[T], read: Callable[[int, Tensor], T], what: str = "letters"
    ) -> Sequence[T]:
        """The contents of everyone's letter, by rank; all are of one size."""
        messages = await self.all_gather(letter.write(), what)
        return await self.alike(lambda: [read(rank, message) for rank, message in enumerate(messages)])

    async def broadcast_letter(
        self, letter: Letter[T], source: int, read: Callable[[Tensor], T], what: str = "letters"
    ) -> T:
        """The content of the letter of rank `source`; the others bring one of the same size."""
        if self.rank == source:
            message = letter.write()
        else:
            message = torch.empty(letter.num_bytes, dtype=torch.uint8, device=self.device)
        told = await self.broadcast(message, source, what)
        return await self.alike(lambda: read(told))

    async def broadcast(self, tensor: Tensor, source: int, what: str = "tensors") -> Tensor:
        """The tensor of rank `source`; the others bring one of the same shape."""
        if tensor.numel() == 0:
            return tensor
        with self._telling(tensor.nbytes, source, what):
            return await self._broadcast(tensor, source)

    async def gather_pieces(self, own: Tensor, sources: Sequence[int], what: str = "tensors") -> list[Tensor]:
        """The tensors of the ranks in `sources`; all ranks bring one of the same shape.

        An all-gather where all of them count; where few do, a broadcast from each.
        """
        if len(sources) == self.world:
            return list(await self.all_gather(own, what))
        return [await self.broadcast(self._brought_by(rank, own), rank, what) for rank in sources]

    async def gather_numbers(self, numbers: Tensor | Sequence[int], what: str = "numbers") -> list[list[int]]:
        """Everyone's numbers, by rank, on the host.

        Synchronises: sizes of messages and the choice of a threshold are decisions of the host.
        """
        gathered = await self.all_gather(torch.as_tensor(numbers, dtype=torch.int64, device=self.device), what)
        return await self._on_host(gathered)

    async def swap_numbers(self, rows: Tensor, what: str = "numbers") -> tuple[list[list[int]], list[list[int]]]:
        """What this rank tells each, as it was given, `[world, any]`, and what each tells this one, on the host.

        Synchronises, once for both: they are the sizes of messages.
        """
        heard = await self.all_to_all(rows, what)
        told, answers = torch.stack([rows, heard]).tolist()
        return told, answers

    async def gather_texts(self, text: str, what: str = "texts") -> list[str]:
        """Everyone's text, by rank. Synchronises."""
        own = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.device)
        lengths = [row[0] for row in await self.gather_numbers([len(own)], what)]
        padded = torch.nn.functional.pad(own, (0, max(lengths) - len(own)))
        rows = await self._on_host(await self.all_gather(padded, what))
        return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]

    async def sum_numbers(self, numbers: Tensor, what: str = "numbers") -> list[float]:
        """The sum over ranks of a small tensor, on the host. Synchronises: the host plans with it."""
        return await self._on_host(await self.all_reduce(numbers, what))

    async def _on_host(self, tensor: Tensor) -> list[Any]:
        numbers: list[Any] = await self.alike(tensor.tolist) if tensor.numel() else tensor.tolist()
        return numbers

    async def alike(self, compute: Callable[[], T]) -> T:
        """What every rank computes alike from what all were told; ranks that share a process compute it once."""
        return compute()

    def own_shard(self, shards: Tensor) -> Tensor:
        """Of a tensor with a row for each rank, `[world, ...]`, the row for this one, in the same memory."""
        return shards[self.rank]

    def _own(self, tensor: Tensor) -> Tensor:
        """The part of a tensor that one rank brings."""
        return tensor

    def _brought_by(self, rank: int, own: Tensor) -> Tensor:
        """What is handed to a broadcast from `rank`; this rank's own tensor must not be overwritten by another's."""
        return own if rank == self.rank else torch.empty_like(own)

    def _stopwatch(self) -> Stopwatch:
        return Stopwatch(self.device)

    def _telling(self, num_bytes: int, source: int, what: str) -> AbstractContextManager[None]:
        """A broadcast of so many bytes."""
        return self._handing_over(num_bytes, "broadcast", what, num_bytes * min(1, self.world - 1), source=source)

    def _swapping(self, leaving: Sequence[int], arriving: Sequence[int], what: str) -> AbstractContextManager[None]:
        """A swap of so many bytes, by rank."""
        link_bytes = max(sum(each) - each[self.rank] for each in (leaving, arriving))
        return self._handing_over(sum(leaving), "all-to-all", what, link_bytes)

    @contextmanager
    def _handing_over(
        self, num_bytes: int, operation: str, what: str, link_bytes: float, *, source: int | None = None
    ) -> Iterator[None]:
        self.wire_bytes += num_bytes if source in (None, self.rank) else 0
        self.link_bytes += link_bytes
        self.num_messages += 1
        number, began = self.num_messages, perf_counter()
        interrupted = self.watch.switch("exchange")
        try:
            yield
        except self._failures as error:
            if isinstance(error, _OF_THIS_DEVICE):
                raise
            name = f"{operation} of the {what}" + ("" if source is None else f" from rank {source}")
            place = f"{num_bytes:,} bytes, collective {number} of step {self.step}"
            raise self._given_up(f"{name} ({place})", perf_counter() - began) from error
        finally:
            self.watch.switch(interrupted)

    def _given_up(self, exchange: str, seconds: float) -> ExchangeError:
        return ExchangeError(
            f"rank {self.rank} of {self.world} waited {seconds:.1f} s in vain for the {exchange}: "
            "another rank has died, hangs or is stopped. See what the others say, and go on from the last checkpoint; "
            "if one was only slow, give the process group a longer timeout"
        )

    @abstractmethod
    async def _all_gather(self, tensor: Tensor) -> Tensor: ...

    @abstractmethod
    async def _all_reduce(self, tensor: Tensor) -> Tensor: ...

    @abstractmethod
    async def _all_to_all(self, tensor: Tensor) -> Tensor: ...

    async def _all_to_all_pieces(self, pieces: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        # a team's tensors come stacked, which pieces of unlike lengths cannot
        raise NotImplementedError(f"{type(self).__name__} moves tensors of one shape only")

    @abstractmethod
    async def _broadcast(self, tensor: Tensor, source: int) -> Tensor: ...


class GroupCollectives(Collectives):
    """Over a process group: gloo or NCCL."""

    _overlaps = False
    # gloo's errors have no type of their own
    _failures = (RuntimeError,)

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), device)
        self._group = group
        # with two ranks a ring is direct
        self._knows_rings_only = dist.get_backend(group) == "gloo" and device.type == "cpu" and self.world > 2

    async def _all_gather(self, tensor: Tensor) -> Tensor:
        if self._goes_directly(self.world * tensor.nbytes):
            return await self._told(tensor)
        gathered = tensor.new_empty((self.world, *tensor.shape))
        await self._done(
            _all_gather_into(_as_bytes(gathered), _as_bytes(tensor), group=self._group, async_op=self._overlaps)
        )
        return gathered

    async def _all_reduce(self, tensor: Tensor) -> Tensor:
        if self._goes_directly(tensor.nbytes):
            stretches = await self._swapped(_in_equal_parts(tensor.reshape(-1), self.world))
            total = await self._told(stretches.sum(0, dtype=tensor.dtype))
            return total.reshape(-1)[: tensor.numel()].view(tensor.shape)
        await self._done(dist.all_reduce(tensor, group=self._group, async_op=self._overlaps))
        return tensor

    async def _all_to_all(self, tensor: Tensor) -> Tensor:
        return await self._swapped(tensor)

    async def _all_to_all_pieces(self, pieces: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        message = torch.cat(list(pieces))
        arrived, size = message.new_empty(sum(lengths)), message.element_size()
        await self._done(
            dist.all_to_all_single(
                _as_bytes(arrived),
                _as_bytes(message),
                [size * length for length in lengths],
                [size * len(piece) for piece in pieces],
                group=self._group,
                async_op=self._overlaps,
            )
        )
        return list(torch.split(arrived, list(lengths)))

    def _goes_directly(self, num_bytes: int) -> bool:
        return self._knows_rings_only and num_bytes <= DIRECT_BYTES

    async def _told(self, tensor: Tensor) -> Tensor:
        """Everyone's tensor, sent from each to each."""
        return await self._swapped(tensor.expand(self.world, *tensor.shape).contiguous())

    async def _swapped(self, rows: Tensor) -> Tensor:
        """What each rank has for this one; row r is for rank r."""
        arrived = rows.new_empty(rows.shape)
        await self._done(
            dist.all_to_all_single(_as_bytes(arrived), _as_bytes(rows), group=self._group, async_op=self._overlaps)
        )
        return arrived

    async def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        message = tensor.contiguous()
        await self._done(dist.broadcast(message, group=self._group, group_src=source, async_op=self._overlaps))
        return message

    async def _done(self, work: Any) -> None:
        """The end of a collective that was started; here it has ended already."""


class OverlappedCollectives(GroupCollectives):
    """The same, but a collective suspends the coroutine once it is started: whoever drives it does other things
    meanwhile, and drives every rank's coroutines in the same order.
    """

    _overlaps = True

    async def _done(self, work: Any) -> None:
        # what is done meanwhile is not the time of this exchange
        phase = self.watch.switch(None)
        await _suspended(work)
        self.watch.switch(phase)
        work.wait()


def _as_bytes(tensor: Tensor) -> Tensor:
    """Flat, as gloo takes a concatenation, not a stack; as bytes, as it does not move every type."""
    return tensor.reshape(-1).view(torch.uint8)


def _in_equal_parts(vector: Tensor, parts: int) -> Tensor:
    """As a table with a row for each part, with zeros at its end where they do not come out even."""
    return torch.nn.functional.pad(vector, (0, -len(vector) % parts)).view(parts, -1)


class TeamCollectives(Collectives):
    """Between ranks that share a process and step as one: their tensors come stacked, one row each.

    So what is to be gathered is there already. Counts what rank 0 would hand over.
    """

    def __init__(self, world: int, device: torch.device) -> None:
        super().__init__(0, world, device)

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor[0]

    def _brought_by(self, rank: int, own: Tensor) -> Tensor:
        return own[rank]

    def own_shard(self, shards: Tensor) -> Tensor:
        return shards.diagonal(dim1=0, dim2=1).movedim(-1, 0)

    async def _all_gather(self, tensor: Tensor) -> Tensor:
        return tensor

    async def _all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.sum(0, dtype=tensor.dtype)

    async def _all_to_all(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1)

    async def _broadcast(self, tensor: Tensor, source: int) -> Tensor:  # noqa: ARG002 - all are here
        return tensor


class _Offer(NamedTuple):
    """What a rank brings to a meeting in process."""

    operation: str
    tensor: Tensor
    source: int = 0
    pieces: tuple[Any, ...] | None = None
    """Tensors or letters for each rank, where ranks bring unlike lengths."""
    letter: Letter[Any] | None = None
    """What the tensor, which has no memory then, stands for."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """What all ranks must bring alike."""
        shape = self.tensor.shape if self.pieces is None else ()
        return self.operation, self.source, self.tensor.dtype, shape

    def __str__(self) -> str:
        origin = f" from {self.source}" if self.operation == "broadcast" else ""
        return f"{self.operation}{origin} of {self.tensor.dtype} {list(self.tensor.shape)}"


class LocalCollectives(Collectives):
    """Between ranks that share a process and are driven by `lockstep`."""

    writes_letters = False
    """Letters need not be written, as nobody has to read them."""

    async def _all_gather(self, tensor: Tensor) -> Tensor:
        gathered: Tensor = await self._meet(_Offer("all_gather", tensor))
        return gathered

    async def _all_reduce(self, tensor: Tensor) -> Tensor:
        total: Tensor = await self._meet(_Offer("all_reduce", tensor))
        return total

    async def _all_to_all(self, tensor: Tensor) -> Tensor:
        met: Tensor = await self._meet(_Offer("all_to_all", tensor))
        return met[:, self.rank]

    async def _all_to_all_pieces(self, pieces: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        met = await self._meet(_Offer("all_to_all_pieces", pieces[0], pieces=tuple(pieces)))
        arrived = [brought[self.rank] for brought in met]
        self._check_lengths([len(piece) for piece in arrived], lengths)
        return arrived

    async def swap_letters(
        self,
        letters: Sequence[Letter[T] | None],
        lengths: Sequence[int],
        read: Callable[[int, Tensor], T],
        what: str = "letters",
    ) -> list[T]:
        if self.writes_letters:
            return await super().swap_letters(letters, lengths, read, what)
        with self._swapping(_sizes(letters), lengths, what):
            met = await self._meet(_Offer("swap_letters", _standing_for(0), pieces=tuple(letters)))
        arrived = [brought[self.rank] for brought in met]
        self._check_lengths(_sizes(arrived), lengths)
        return [letter.content for letter in arrived if letter is not None]

    async def gather_letters(
        self, letter: Letter[T], read: Callable[[int, Tensor], T], what: str = "letters"
    ) -> Sequence[T]:
        if self.writes_letters:
            return await super().gather_letters(letter, read, what)
        with self._handing_over(letter.num_bytes, "all-gather", what, letter.num_bytes * (self.world - 1)):
            met = await self._meet(_Offer("gather_letters", _standing_for(letter.num_bytes), letter=letter))
        return [brought.content for brought in met]

    async def broadcast_letter(
        self, letter: Letter[T], source: int, read: Callable[[Tensor], T], what: str = "letters"
    ) -> T:
        if self.writes_letters:
            return await super().broadcast_letter(letter, source, read, what)
        with self._telling(letter.num_bytes, source, what):
            met = await self._meet(_Offer("broadcast_letter", _standing_for(letter.num_bytes), source, letter=letter))
        told: T = met[source].content
        return told

    def _check_lengths(self, found: Sequence[int], awaited: Sequence[int]) -> None:
        if list(found) != list(awaited):
            raise RuntimeError(f"rank {self.rank} awaits pieces of {list(awaited)} entries, and {list(found)} come")

    async def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        told: Tensor = await self._meet(_Offer("broadcast", tensor, source))
        return told

    async def alike(self, compute: Callable[[], T]) -> T:
        phase = self.watch.switch(None)
        answer: T = await _suspended(compute)
        self.watch.switch(phase)
        return answer

    def _stopwatch(self) -> Stopwatch:
        # events in a stream that all ranks share would tell one rank's work for another's
        return Stopwatch(torch.device("cpu"))

    async def _meet(self, offer: _Offer) -> Any:
        # the time until everyone has arrived is the work of the other ranks
        self.watch.switch(None)
        result = await _suspended(offer)
        self.watch.switch("exchange")
        return result


def _sizes(letters: Sequence[Letter[Any] | None]) -> list[int]:
    return [0 if letter is None else letter.num_bytes for letter in letters]


def _standing_for(num_bytes: int) -> Tensor:
    """A message that nobody wrote."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


@coroutine
def _suspended(offer: Any) -> Generator[Any, Any, Any]:
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
    if met[0].pieces is not None:
        return [offer.pieces for offer in met]
    if met[0].letter is not None:
        return [offer.letter for offer in met]
    tensors = [offer.tensor for offer in met]
    if operation == "broadcast":
        return tensors[source]
    stacked = torch.stack(tensors)
    return stacked.sum(0, dtype=stacked.dtype) if operation == "all_reduce" else stacked
