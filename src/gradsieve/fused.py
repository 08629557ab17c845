"""The step of methods that hold a threshold, as a fixed sequence of kernels that the host never waits for.

The same outcome as `pipeline.Worker` (or `pipeline.Team`, for ranks that share a process), bit for bit where values
travel as float32: the choice of the threshold and the borders of partitions follow the same rules, only on the device.

[Note: what the host does not know]
The host launches a step without knowing how many entries anyone proposes. So messages have a size that it can work out
from numbers of earlier steps (`control.room`), and what does not fit stays in the residual. Those numbers travel to
the host beside the computation, into memory of its own; it reads those of step t at the beginning of step t + `LAG`. By
then they are nearly always there: the host waits only if it has run ahead of the device by more than a whole step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradsieve import control, kernels, wire
from gradsieve.collectives import Collectives, TeamCollectives, run
from gradsieve.exchange import SteeredUnion, owed
from gradsieve.kernels.tiling import MOST_CHUNKS, TILE, Decision, Found, Record, Run, Sent, Sight, Tiles
from gradsieve.layout import Slot, write_dense
from gradsieve.methods import Method
from gradsieve.nonfinite import LateNonFiniteError, OnNonfinite
from gradsieve.pipeline import Learned, Numbers, PendingStats, Worker
from gradsieve.recent import Recent
from gradsieve.region import BalancedBlocks, Region, RotatingSlices, Whole, even_borders
from gradsieve.residual import Residual
from gradsieve.rounding import rounded_sum
from gradsieve.score import Importance, Magnitude
from gradsieve.search import Searched, SearchState
from gradsieve.types import Setup, Span, Step
from gradsieve.weights import Weights

MOST_RANKS = 512
"""One program looks at the counts of all ranks."""
LOOKS = 1024
"""Where rows looked is kept on the device for so many cases: partitions in rotation come again."""
EXPECTED = 3.0
"""About so many times the entries that are sent reach the lowest rung."""
FEW = 64
"""Entries of a tile, on average, up to which they are collected one by one: [Note: few or many] in `kernels.sieve`."""


def suits(method: Method, setup: Setup, residual_dtype: torch.dtype) -> bool:
    """Is this a method for these kernels? Whether they can run here is for `kernels.uses_triton` to say."""
    criterion = method.criterion
    return (
        isinstance(criterion, Searched)
        and not criterion.per_layer
        and (isinstance(criterion.score, Magnitude) or _plain_importance(criterion.score))
        and type(method.region) in (Whole, RotatingSlices, BalancedBlocks)
        and not method.feedback.momentum
        and method.feedback.clip is None
        and residual_dtype in (torch.float32, torch.bfloat16)
        and method.budget.target(0, setup.numel) < setup.numel
        and setup.world <= MOST_RANKS
    )


def _plain_importance(score: Any) -> bool:
    return isinstance(score, Importance) and not score.stochastic


class Tiling:
    """The tiles of the whole vector: see [Note: tiles] in `kernels.sieve`."""

    def __init__(self, bounds: Sequence[int], device: torch.device) -> None:
        self._device = device
        slots = [np.arange(start, stop, TILE, dtype=np.int64) for start, stop in pairwise(bounds)]
        numbers = [len(starts) for starts in slots]
        self._starts = np.concatenate([*slots, [bounds[-1]]])
        self._first = np.cumsum([0, *numbers])
        self.tiles = Tiles(
            starts=uploaded(self._starts, device),
            slots=uploaded(np.repeat(np.arange(len(slots), dtype=np.int32), numbers), device),
        )
        self.edges = self.tiles.starts.to(index_dtype(bounds[-1]))
        self.whole = [Run(0, self.tiles.num, None, aligned=not (self._starts[:-1] % 8).any())]

    def bucket(self, slots: Sequence[tuple[int, int]]) -> list[Run]:
        """The runs of tiles of a bucket, from the number of each slot in it and the place where it begins there."""
        places = sorted((slot, source) for slot, source in slots if self._first[slot] < self._first[slot + 1])
        runs: list[list[tuple[int, int]]] = []
        for slot, source in places:
            if runs and self._first[runs[-1][-1][0] + 1] == self._first[slot]:
                runs[-1].append((slot, source))
            else:
                runs.append([(slot, source)])
        return [self._run(run) for run in runs]

    def _run(self, slots: Sequence[tuple[int, int]]) -> Run:
        first, last = int(self._first[slots[0][0]]), int(self._first[slots[-1][0] + 1])
        starts = self._starts[first:last]
        shifts = [source - self._starts[self._first[slot]] for slot, source in slots]
        sources = starts + np.repeat(shifts, [self._first[slot + 1] - self._first[slot] for slot, _ in slots])
        aligned = not ((starts % 8).any() or (sources % 8).any())
        return Run(first, last - first, uploaded(sources, self._device), aligned)

    def touched(self, start: int, stop: int) -> tuple[int, int]:
        """The numbers of the tiles that a stretch touches, first and one behind the last."""
        if start >= stop:
            return 0, 0
        starts = self._starts[:-1]
        first = int(np.searchsorted(starts, start, side="right")) - 1
        return first, int(np.searchsorted(starts, stop, side="left"))


def _left_out(runs: Sequence[tuple[int, int]], num: int) -> list[tuple[int, int]]:
    """What runs, by first and number, leave out of `num` things."""
    borders = [0, *(border for first, length in sorted(runs) for border in (first, first + length)), num]
    return [(start, stop - start) for start, stop in zip(borders[::2], borders[1::2], strict=True) if stop > start]


def uploaded(numbers: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device, made without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    if device.type == "cpu":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)


def index_dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel < torch.iinfo(torch.int32).max else torch.int64


class Late(NamedTuple):
    """What the host gets to know of a step once it is over."""

    step: Step
    numbers: Tensor
    blocks: Tensor
    """Where in the support the entries of each block of the vector begin; empty where nobody asks."""
    faults: Tensor
    """The code of each rank, over their number, see `nonfinite`; empty where nobody asks."""
    arrived: torch.cuda.Event | None

    @classmethod
    def sent(cls, step: Step, numbers: Tensor, blocks: Tensor, faults: Tensor) -> Late:
        """Start the way to the host."""
        late = cls(step, _host_copy(numbers), _host_copy(blocks), _host_copy(faults), None)
        if numbers.device.type == "cpu":
            return late
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return late._replace(arrived=arrived)

    def stats(self) -> Numbers:
        record = self.record()
        threshold = float(control.from_bits(np.array([record.threshold_bits]))[0])
        return Numbers(record.support, record.quotas, (threshold,))

    def check_finite(self) -> None:
        """Raise if a gradient of this step was not finite. Waits until it has arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        codes = (self.faults * self.step.world).round().int().tolist()
        if any(codes):
            raise LateNonFiniteError(self.step.index, codes)

    def record(self) -> Record:
        """Waits until it has arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        record = Record.of(self.numbers.tolist(), self.step.world)
        for rank, (found, stated) in enumerate(zip(record.found, record.stated, strict=True)):
            if found != stated:
                raise wire.WireError(
                    f"step {self.step.index}: the indices of rank {rank} were damaged on their way, or are not "
                    "gradsieve's: run the same version on all ranks, and look for a faulty link or memory"
                )
        return record


def _host_copy(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor.clone()
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class Outcome(NamedTuple):
    """The means of a step, on the device; how many there are is in the record."""

    support: Tensor
    """Ascending; behind its end stands `numel`."""
    borders: Tensor
    """Where in the support the entries of each tile begin."""
    mean: Tensor
    dense: Tensor
    rest: Tensor | None
    blocks: Tensor
    faults: Tensor
    """See `Late`."""


class Fused:
    """Rows of one process, one for a rank or one for each of a team, stepping as one.

    A step is `begin`, `feed` for each bucket, `exchange`, `sent`, `write_back` for each bucket, `tell`.
    """

    def __init__(
        self,
        method: Method,
        setup: Setup,
        collectives: Collectives,
        acc: Tensor,
        *,
        wire_dtype: torch.dtype = torch.float32,
        narrow: bool = False,
        checks: bool = False,
    ) -> None:
        from gradsieve.kernels.ladder import group_shape

        assert isinstance(method.criterion, Searched)
        self._method = method
        self._criterion = method.criterion
        self._setup = setup
        self._collectives = collectives
        self._wire = wire_dtype
        self._acc = acc
        device, rows = acc.device, len(acc)
        self._first_rank = 0 if isinstance(collectives, TeamCollectives) else collectives.rank
        self.tiling = Tiling(setup.bounds, device)
        parts = 1 if isinstance(method.region, Whole) else setup.world
        self._group = group_shape(method.density * TILE * (1 if parts > 1 else 1 / setup.world) * EXPECTED)
        num_chunks = min(MOST_CHUNKS, max(1, -(-self.tiling.tiles.num // (self._group[0] * parts))))
        self._found = Found.empty(rows, self.tiling.tiles.num, device)
        self.decision = Decision.empty(rows, setup.world, num_chunks, device)
        self._offsets = uploaded(control.OFFSETS, device)
        self._ladder = uploaded(control.cold_ladder().astype(np.int32), device)
        self._next_ladder = self._ladder.clone()
        self._levels = uploaded(control.LEVELS, device)
        self._table = uploaded(control.rung_table(), device)
        self._edges = self.tiling.edges
        if isinstance(method.region, BalancedBlocks):
            blocks = np.minimum(
                np.arange(method.region.num_blocks + 1) * method.region.block_size(setup.numel), setup.numel
            )
            self._edges = torch.cat([self._edges, uploaded(blocks, device).to(self._edges.dtype)])
        self._first_rung = torch.zeros(1, dtype=torch.int64, device=device)
        self._nothing = torch.empty(0, device=device)
        self._all_ranks = uploaded(np.arange(setup.world), device)
        self._looks: dict[bytes, Tensor] = {}
        self._cold = self._was_cold = True
        self._narrow = narrow
        self._checks = checks
        self._open = False
        """Is a step begun and not finished?"""
        self._fed: list[tuple[int, int]] = []
        """Tiles that this step has taken in, by first and number: of them, what was sent before is cleared."""
        self._late: deque[Late] = deque()
        self._sent: Sent | None = None
        self._region: Any = method.region.start(setup)
        self._recent: tuple[int, ...] = ()

    # --- what was learned -------------------------------------------------------------------------------------------

    def learned(self) -> tuple[Any, SearchState]:
        """The states of region and criterion, as `pipeline` keeps them. Waits for the device."""
        while self._late:
            self._take_in(self._late.popleft())
        threshold, travelled, distinct = self.decision.learned.tolist()
        thresholds = (0.0,) if self._cold else (float(control.from_bits(np.array([threshold]))[0]),)
        return self._region, SearchState(thresholds, travelled, distinct, self._recent)

    def learn(self, region: Any, criterion: SearchState) -> None:
        """Go on from such states."""
        self._late.clear()
        self._open, self._sent, self._fed = False, None, []
        (threshold,) = criterion.thresholds
        self._region, self._recent = region, criterion.recent
        self._cold = self._was_cold = threshold == 0
        bits = control.to_bits(threshold)
        ladder = control.cold_ladder() if self._cold else control.warm_ladder(bits)
        device = self._acc.device
        self._ladder.copy_(uploaded(ladder.astype(np.int32), device))
        self.decision.learned.copy_(uploaded(np.array([bits, criterion.travelled, criterion.distinct]), device))

    def _take_in(self, late: Late) -> None:
        late.check_finite()
        record = late.record()
        self._recent = (*self._recent, max(record.quotas))[-control.RECENT :]
        if isinstance(self._method.region, BalancedBlocks):
            self._region = self._method.region.taken_in(self._region, late.blocks.diff())

    # --- a step -----------------------------------------------------------------------------------------------------

    def begin(self, step: Step, weights: Weights | None = None) -> None:
        """Start a step of all rows; `step` is that of the first."""
        while self._late and self._late[0].step.index <= step.index - control.LAG:
            self._take_in(self._late.popleft())
        self._give_up()
        self._open = True
        self._step = step
        if self._checks:
            self._found.faults.zero_()
        # the newest is what the host cannot know yet, and need not
        recent = (*self._recent, 0) if self._late else self._recent
        self._room = self._criterion.room(SearchState((0.0,), recent=recent), step)
        borders = self._borders()
        self.sight = Sight(
            looks=self._looked(borders),
            ladder=self._ladder,
            last=self.decision.learned,
            table=self._table,
            levels=self._levels,
            weights=self._nothing,
            margins=self._nothing,
            group=self._group,
            many=EXPECTED * step.target / len(step.proposers) > FEW * self.tiling.tiles.num,
        )
        self.extent = max(stop - start for start, stop in pairwise(borders))
        score = self._criterion.score
        if isinstance(score, Importance) and any(rank in step.proposers for rank in self._ranks):
            assert weights is not None
            self.sight.by_importance = True
            self.sight.weights = weights.flat
            self.sight.margins = weights.scales * score.eps

    def _give_up(self) -> None:
        """Leave a step that was begun and not finished: what it fed stays, what it learned does not count."""
        if not self._open:
            return
        self.decision.counts.zero_()
        self._cold = self._was_cold
        if self._cold:
            self._ladder.copy_(uploaded(control.cold_ladder().astype(np.int32), self._acc.device))
        self.settle_residual()

    @property
    def _ranks(self) -> range:
        return range(self._first_rank, self._first_rank + len(self._acc))

    def _borders(self) -> list[int]:
        region: Region = self._method.region
        numel, world = self._setup.numel, self._setup.world
        if isinstance(region, BalancedBlocks):
            # of the last step's yields the borders know nothing, so they need not have arrived
            state = region.ahead(self._region) if self._late else self._region
            return region.borders(state, numel, world)
        return [0, numel] if isinstance(region, Whole) else even_borders(numel, world)

    def _looked(self, borders: Sequence[int]) -> Tensor:
        step, parts = self._step, len(borders) - 1
        rows = []
        for rank in self._ranks:
            part = (step.index + rank) % parts
            start, stop = borders[part], borders[part + 1]
            if rank not in step.proposers:
                stop = start
            rows.append((start, stop, *self.tiling.touched(start, stop)))
        looks = np.array(rows, dtype=np.int64)
        key = looks.tobytes()
        if key not in self._looks:
            if len(self._looks) >= LOOKS:
                self._looks.clear()
            self._looks[key] = uploaded(looks, self._acc.device)
        return self._looks[key]

    def feed(self, gradient: Tensor, runs: Sequence[Run]) -> None:
        """Take in a bucket's gradient, and use it up: what is collected is written over it."""
        from gradsieve.kernels.sieve import sieve

        self._found.narrow = self._narrow or gradient.element_size() < 4
        self._fed += [(run_of_tiles.first, run_of_tiles.num) for run_of_tiles in runs]
        for run_of_tiles in runs:
            sieve(
                gradient,
                self._acc,
                self.tiling.tiles,
                run_of_tiles,
                self.sight,
                self._found,
                self._sent,
                collect=not self._cold,
                check=self._checks,
            )

    @property
    def fault(self) -> Tensor:
        """1 + the number of a parameter of the first row that was not finite in this step; 0 if all were."""
        return self._found.faults[0]

    async def exchange(self, dense: Tensor | None = None) -> Outcome:
        """Agree on a threshold and a support, and average the values at it, and `dense` whole beside them."""
        picked = await self.select()
        support = await self._agree(picked)
        return await self._average(support, dense)

    @property
    def looking(self) -> tuple[Tensor, Tiles, Sight, Found, Decision]:
        """What the kernels of a selection look at."""
        return self._acc, self.tiling.tiles, self.sight, self._found, self.decision

    async def select(self) -> Tensor:
        """What each row proposes, `[rows, capacity]`; how many there are is in the record."""
        from gradsieve.kernels.ladder import count
        from gradsieve.kernels.pick import pick

        decision, looking = self.decision, self.looking
        rungs, rung = None, decision.record[1:2]
        if self._cold:
            for cold_round in range(control.COLD_ROUNDS):
                count(*looking, rungs=self._ladder)
                await self._settle(cold_round)
            count(*looking, rungs=decision.applied)
            decision.counts.zero_()
            rungs, rung = decision.applied, self._first_rung
        else:
            count(*looking, rungs=None)
            await self._settle()
        picked = torch.empty(
            (len(self._acc), self._capacity()), dtype=index_dtype(self._setup.numel), device=self._acc.device
        )
        pick(*looking, picked, rungs=rungs, rung=rung, first_rank=self._first_rank)
        self._was_cold, self._cold = self._cold, False
        return picked

    async def _settle(self, cold_round: int | None = None) -> None:
        own = self.decision.counts
        self.decide(await self._collectives.all_gather(own if self._is_team else own[0], "counts"), cold_round)

    def decide(self, gathered: Tensor, cold_round: int | None = None) -> None:
        """Choose a threshold by the counts of all ranks or, in a cold round but the last, maybe only the next rungs."""
        from gradsieve.kernels.ladder import decide

        lookers = len(self._step.proposers) if self._criterion.overlapping else 1
        decide(
            gathered,
            self._ladder,
            self._next_ladder,
            self._offsets,
            self.decision,
            target=self._step.target,
            most=self._setup.numel * lookers,
            ceiling=int(self._criterion.ceiling * 1000),
            room=self._room,
            cold=cold_round is not None,
            first=cold_round == 0,
            final=cold_round in (None, control.COLD_ROUNDS - 1),
        )

    @property
    def _is_team(self) -> bool:
        return isinstance(self._collectives, TeamCollectives)

    def _capacity(self) -> int:
        """Entries of one rank that there is room for."""
        return max(1, min(self.extent, self._room))

    @property
    def _support_capacity(self) -> int:
        return min(self._setup.numel, self._step.target * (100 + SteeredUnion.tolerance_percent) // 100 + 1)

    async def _agree(self, picked: Tensor) -> Tensor:
        """The support, from the proposals of all ranks."""
        from gradsieve.kernels.merge import merge
        from gradsieve.kernels.packing import unpack

        numel, device, step = self._setup.numel, self._acc.device, self._step
        messages, ranks, shape = await self._messages(picked)
        support = torch.empty(self._support_capacity, dtype=picked.dtype, device=device)
        marks = None
        if isinstance(self._method.exchange, SteeredUnion):
            marks = torch.zeros(-(-numel // 32), dtype=torch.int32, device=device)
        else:
            support.fill_(numel)
        unpack(messages, ranks, self.decision, shape, support, marks, shift=step.index % step.world, numel=numel)
        if marks is not None:
            assert isinstance(self._method.exchange, SteeredUnion)
            percent = self._method.exchange.percent
            merge(marks, self.decision, support, numel=numel, target=step.target, percent=percent)
        return support

    async def _messages(self, picked: Tensor) -> tuple[Tensor, Tensor, wire.Shape]:
        """The messages of all proposers, whose each is, and their shape."""
        from gradsieve.kernels.packing import pack

        step, shape = self._step, wire.Shape.of(picked.shape[1], self.extent)
        message = pack(picked, self.sight, self.decision, shape, self._first_rank)
        if len(step.proposers) == step.world:
            gathered = await self._collectives.all_gather(message if self._is_team else message[0], "indices")
            return gathered, self._all_ranks, shape
        # what comes from others goes to memory of its own
        own = [message[rank - self._first_rank] if rank in self._ranks else torch.empty_like(message[0])
               for rank in step.proposers]  # fmt: skip
        pieces = [
            await self._collectives.broadcast(piece, rank, "indices")
            for piece, rank in zip(own, step.proposers, strict=True)
        ]
        return torch.stack(pieces), uploaded(np.array(step.proposers), picked.device), shape

    async def _average(self, support: Tensor, dense: Tensor | None) -> Outcome:
        from gradsieve.kernels.scatter import gather

        rows, capacity, device = len(self._acc), len(support), self._acc.device
        beside = 0 if dense is None else dense.shape[-1]
        message = torch.empty((rows, capacity + beside), dtype=torch.float32, device=device)
        gather(self._acc, support, self.decision, message)
        if dense is not None:
            message[:, capacity:] = dense
        rest, overshoot = None, self._method.feedback.overshoot
        if self._wire == torch.float32:
            # the sum may be formed where the values lie
            debt = owed(message[:, :capacity], None, overshoot) if overshoot else None
            total = await self._collectives.all_reduce(message if self._is_team else message[0], "values")
            mean = total / self._setup.world
            mean, dense_mean, rest = mean[:capacity], mean[capacity:], debt
        else:
            values, others = message[:, :capacity], message[:, capacity:]
            summed, rest = await rounded_sum(values if self._is_team else values[0], self._wire, self._collectives)
            rest = rest.reshape(rows, capacity)
            rest = owed(values, rest, overshoot) if overshoot else rest
            others = others.contiguous() if self._is_team else others[0]
            dense_total = await self._collectives.all_reduce(others, "dense gradients")
            mean, dense_mean = summed.float() / self._setup.world, dense_total / self._setup.world
        mean = mean * (1 + overshoot) if overshoot else mean
        # where tiles begin in the support and, for regions that learn from it, blocks
        borders = torch.searchsorted(support, self._edges)
        tile_borders, block_borders = borders[: len(self.tiling.edges)], borders[len(self.tiling.edges) :]
        faults = dense_mean[len(dense_mean) - self._setup.world :] if self._checks else dense_mean[:0]
        return Outcome(support, tile_borders, mean, dense_mean, rest, block_borders, faults)

    def sent(self, outcome: Outcome) -> Sent:
        """End the step: what it sent is cleared when the next one reads the residual, or by `settle_residual`."""
        decision = self.decision
        decision.learned, decision.following = decision.following, decision.learned
        self._ladder, self._next_ladder = self._next_ladder, self._ladder
        self._open, self._fed, self._was_cold = False, [], False
        self._sent = Sent(outcome.support, outcome.borders, outcome.rest)
        return self._sent

    def settle_residual(self) -> None:
        """Clear now what was sent: see [Note: clearing late] in `kernels.sieve`."""
        from gradsieve.kernels.sieve import clear

        if self._sent is not None:
            for first, num in _left_out(self._fed, self.tiling.tiles.num):
                clear(self._acc, self._sent, first, num)
        self._sent, self._fed = None, []

    def write_back(self, gradient: Tensor, runs: Sequence[Run], outcome: Outcome, sent: Sent) -> None:
        """Write the means into a bucket's gradient, zeros elsewhere."""
        from gradsieve.kernels.scatter import write_back

        for run_of_tiles in runs:
            write_back(gradient, self.tiling.tiles, run_of_tiles, sent, outcome.mean)

    def tell(self, outcome: Outcome) -> Late:
        """Start the way of a step's numbers to the host, once nothing of the step comes behind it and has to wait."""
        late = Late.sent(self._step, self.decision.record, outcome.blocks, outcome.faults)
        self._late.append(late)
        return late


class FusedWorker(Worker):
    """A rank whose steps go through `Fused`."""

    _fused: Fused | None = None

    def __init__(
        self,
        method: Method,
        setup: Setup,
        collectives: Collectives,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        wire: torch.dtype = torch.float32,
        narrow: bool = False,
        checks: bool = False,
    ) -> None:
        super().__init__(method, setup, collectives, seed=seed, dtype=dtype, wire=wire, checks=checks)
        acc = self._residual.acc.unsqueeze(0)
        self._fused = Fused(method, setup, collectives, acc, wire_dtype=wire, narrow=narrow, checks=checks)
        self._buckets: dict[tuple[tuple[int, int], ...], list[Run]] = {}
        self._known: Recent[list[tuple[Tensor, list[Run]]]] = Recent()
        self._taken: list[tuple[Tensor, list[Run]]] = []

    @property
    def residual(self) -> Residual:
        if self._fused is not None:
            self._fused.settle_residual()
        return self._residual

    @residual.setter
    def residual(self, residual: Residual) -> None:
        self._residual = residual

    @property
    def learned(self) -> Learned:
        assert self._fused is not None
        return Learned(*self._fused.learned())

    @learned.setter
    def learned(self, learned: Learned) -> None:
        if self._fused is not None:
            self._fused.learn(*learned)

    @property
    def fault(self) -> Tensor:
        assert self._fused is not None
        return self._fused.fault

    @property
    def tells_late(self) -> bool:
        return True

    def begin(self, parameters: Callable[[], Tensor] | None = None) -> None:
        assert self._fused is not None
        assert self.scale == 1, "these kernels know no scale of gradients"
        self.collectives.start_step(self.step)
        self._taken = []
        self._known.begin()
        weights = None if parameters is None else Weights(parameters, self.setup.bounds)
        self._fused.begin(self.now(), weights)

    def take(self, arrived: Sequence[tuple[Slot, Tensor]]) -> None:
        assert self._fused is not None
        self.collectives.watch.switch("select")
        places = tuple((slot.place, gradient.data_ptr()) for slot, gradient in arrived)
        taken = self._known.get(places, lambda: self._runs(arrived))
        for buffer, runs in taken:
            self._fused.feed(buffer, runs)
        self._taken += taken
        self.collectives.watch.switch(None)

    def _runs(self, arrived: Sequence[tuple[Slot, Tensor]]) -> list[tuple[Tensor, list[Run]]]:
        """The pieces of memory that gradients lie in, and the runs of tiles in each."""
        assert self._fused is not None
        found = []
        for buffer, slots in _by_buffer(arrived):
            if slots not in self._buckets:
                self._buckets[slots] = self._fused.tiling.bucket(slots)
            found.append((buffer, self._buckets[slots]))
        return found

    async def exchange(self, dense: Tensor | None = None) -> Outcome:
        assert self._fused is not None
        self.collectives.watch.switch("select")
        outcome = await self._fused.exchange(None if dense is None else dense.unsqueeze(0))
        self.collectives.watch.switch(None)
        return outcome

    def finish(
        self, reduced: Outcome, unapplied: Sequence[Span] = (), gradients: Sequence[tuple[Slot, Tensor]] = ()
    ) -> PendingStats:
        assert self._fused is not None
        sent = self._fused.sent(reduced)
        if unapplied:
            with self._residual.keeping(unapplied):
                self._fused.settle_residual()
        for buffer, runs in self._taken:
            self._fused.write_back(buffer, runs, reduced, sent)
        write_dense(reduced.dense, gradients)
        late = self._fused.tell(reduced)
        self._taken = []
        self.step += 1
        return PendingStats(late.step, late.stats, reduced.dense, self.collectives)


def _by_buffer(arrived: Sequence[tuple[Slot, Tensor]]) -> list[tuple[Tensor, tuple[tuple[int, int], ...]]]:
    """The pieces of memory that gradients lie in, whole and flat, and which slot begins where in each."""
    buffers: dict[int, tuple[Tensor, list[tuple[int, int]]]] = {}
    for slot, gradient in arrived:
        if gradient.numel():
            storage = gradient.untyped_storage()
            key = storage.data_ptr()
            if key not in buffers:
                buffers[key] = gradient.new_empty(0).set_(storage), []
            buffers[key][1].append((slot.place, int(gradient.storage_offset())))
    return [(buffer, tuple(slots)) for buffer, slots in buffers.values()]


def make_worker(
    method: Method,
    setup: Setup,
    collectives: Collectives,
    *,
    seed: int,
    dtype: torch.dtype,
    wire: torch.dtype,
    narrow: bool = False,
    on_nonfinite: OnNonfinite = "propagate",
    scaled: bool = False,
) -> Worker:
    """A rank's worker, by the fastest way that method and device allow.

    `narrow`: some gradients have 16 bits; `scaled`: they come multiplied with a scale.
    """
    checks = on_nonfinite != "propagate"
    # kernels know no scale, and overwrite the gradients, so that a step cannot be taken back
    by_kernels = kernels.uses_triton(collectives.device) and on_nonfinite != "skip" and not scaled
    if by_kernels and suits(method, setup, dtype):
        return FusedWorker(method, setup, collectives, seed=seed, dtype=dtype, wire=wire, narrow=narrow, checks=checks)
    return Worker(method, setup, collectives, seed=seed, dtype=dtype, wire=wire, checks=checks)


class FusedTeam:
    """Workers that share a process and step as one, through `Fused`: see `pipeline.Team`."""

    def __init__(self, workers: Sequence[Worker], residual: Residual) -> None:
        first = workers[0]
        self._workers = workers
        self._collectives = TeamCollectives(first.setup.world, first.collectives.device)
        self._fused = Fused(first.method, first.setup, self._collectives, residual.acc, wire_dtype=first.wire)

    def average(
        self,
        gradients: Tensor,
        mean: Tensor,
        parameters: Callable[[], Tensor] | None,
        dense: Tensor | None,
    ) -> tuple[Outcome, Late, PendingStats]:
        """A whole step, with the means written into `mean`. Uses the gradients up."""
        first, collectives, fused = self._workers[0], self._collectives, self._fused
        collectives.start_step()
        collectives.watch.switch("select")
        weights = None if parameters is None else Weights(parameters, first.setup.bounds)
        step = first.now()
        fused.begin(step, weights)
        fused.feed(gradients, fused.tiling.whole)
        outcome = run(fused.exchange(dense))
        fused.write_back(mean, fused.tiling.whole, outcome, fused.sent(outcome))
        collectives.watch.switch(None)
        late = fused.tell(outcome)
        for worker in self._workers:
            worker.step += 1
        return outcome, late, PendingStats(step, late.stats, outcome.dense, collectives)

    def settle(self) -> None:
        """Clear from the residual what was sent."""
        self._fused.settle_residual()

    def bring_up(self) -> None:
        """Bring the workers' states up to where the team is. Waits for the device."""
        self.settle()
        learned = Learned(*self._fused.learned())
        for worker in self._workers:
            worker.learned = learned

    def take_up(self) -> None:
        """Go on from where the workers are."""
        self._fused.learn(*self._workers[0].learned)
