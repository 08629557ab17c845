"""Where a rank may look: the first axis of a method.

A region is a frozen rule; what it learns from step to step is a state of its own, built by `start` and replaced by
`observe`, from numbers that all ranks share.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from gradsieve.collectives import Collectives
from gradsieve.types import Reduced, Setup, Span, Step, Territory, View

T = TypeVar("T")


class NoState(NamedTuple):
    """The state of a part that learns nothing."""


class Region:
    """A rule for where each rank looks."""

    def start(self, setup: Setup) -> Any:
        return NoState()

    def known(self, state: Any, step: Step) -> Territory | None:
        """The territory, if it is known before the gradient is."""
        return None

    async def settle(self, state: Any, view: View, collectives: Collectives) -> Territory:
        """The territory, once the whole vector is there."""
        known = self.known(state, view.step)
        assert known is not None, "a region that does not know its territory early must settle it"
        return known

    def observe(self, state: Any, step: Step, reduced: Reduced) -> Any:
        """The state after a step."""
        return state

    def check(self, state: Any, setup: Setup) -> None:
        """Refuse a state that this rule never has. Its fields are of the right types."""

    def resized(self, state: Any, old_world: int, new_world: int) -> Any:
        """The state for another number of ranks."""
        return state


@dataclass(frozen=True)
class Whole(Region):
    """Every proposer looks at the whole vector."""

    def known(self, state: Any, step: Step) -> Territory:
        quotas = tuple(step.target if rank in step.proposers else 0 for rank in range(step.world))
        return Territory((Span(0, step.numel, step.target),), quotas, extent=step.numel)


def rotated(parts: Sequence[T], step: Step) -> list[T]:
    """Parts by the rank that owns them: at each step `rank` owns part `(step + rank) % world`."""
    return [parts[(step.index + rank) % step.world] for rank in range(step.world)]


def exclusive(borders: Sequence[int], step: Step) -> Territory:
    """The partitions between `borders`, each with its even share of the target, owned in rotation."""
    worth = [step.target * border // max(step.numel, 1) for border in borders]
    parts = [Span(borders[p], borders[p + 1], worth[p + 1] - worth[p]) for p in range(step.world)]
    owned = rotated(parts, step)
    own, widest = owned[step.rank], max(part.stop - part.start for part in parts)
    return Territory((own,), tuple(span.quota for span in owned), own.start, widest)


def even_borders(numel: int, world: int) -> list[int]:
    """`world` slices, the first `numel % world` one element longer."""
    size, longer = divmod(numel, world)
    return [rank * size + min(rank, longer) for rank in range(world + 1)]


@dataclass(frozen=True)
class RotatingSlices(Region):
    """Exclusive, equal, contiguous slices."""

    def known(self, state: Any, step: Step) -> Territory:
        return exclusive(even_borders(step.numel, step.world), step)


class Blocks(NamedTuple):
    """How many blocks each partition holds."""

    num_blocks: tuple[int, ...]


@dataclass(frozen=True)
class SteppingBlocks(Region):
    """Exclusive partitions of whole blocks; over each border one block a step moves to the lighter side.

    ExDyna's rule, with its constants.
    """

    num_blocks: int = 1024
    alignment: int = 32
    overload: float = 1.05
    underload: float = 0.95238
    smallest_share: float = 0.25
    """A partition keeps at least this share of an even one."""

    def block_size(self, numel: int) -> int:
        aligned = numel // self.num_blocks // self.alignment * self.alignment
        return aligned or max(1, numel // self.num_blocks)

    def start(self, setup: Setup) -> Blocks:
        total = min(self.num_blocks, setup.numel // self.block_size(setup.numel))
        size, more = divmod(total, setup.world)
        return Blocks(tuple(size + (partition < more) for partition in range(setup.world)))

    def known(self, state: Blocks, step: Step) -> Territory:
        size = self.block_size(step.numel)
        borders = [size * blocks for blocks in accumulate(state.num_blocks, initial=0)]
        # what whole blocks leave over goes with the last partition
        return exclusive([*borders[:-1], step.numel], step)

    def observe(self, state: Blocks, step: Step, reduced: Reduced) -> Blocks:
        world, total = step.world, sum(reduced.counts)
        mean = total // world
        if mean == 0:
            return state
        blocks = list(state.num_blocks)
        counts = [reduced.counts[(partition - step.index) % world] for partition in range(world)]
        carried = self.block_size(step.numel) * total // step.numel
        fewest = self.smallest_share * sum(blocks) / world
        for left in range(world - 1):
            move = self._move(counts, left, mean)
            if move is not None and blocks[move[0]] - 1 >= fewest:
                giver, taker = move
                blocks[giver], blocks[taker] = blocks[giver] - 1, blocks[taker] + 1
                counts[giver], counts[taker] = counts[giver] - carried, counts[taker] + carried
        return Blocks(tuple(blocks))

    def check(self, state: Blocks, setup: Setup) -> None:
        blocks, total = state.num_blocks, sum(self.start(setup).num_blocks)
        if len(blocks) != setup.world or sum(blocks) != total or min(blocks) < self._fewest(total, setup.world):
            raise ValueError(
                f"num_blocks must be {setup.world} numbers of at least {self._fewest(total, setup.world)} that add up "
                f"to {total}, not {blocks}"
            )

    def resized(self, state: Blocks, old_world: int, new_world: int) -> Blocks:
        """Borders where the old ones were, as near as the number of partitions allows."""
        old, total = list(accumulate(state.num_blocks, initial=0)), sum(state.num_blocks)
        least = self._fewest(total, new_world)
        borders = stretched(old, new_world)
        for left in range(new_world):
            borders[left + 1] = max(borders[left + 1], borders[left] + least)
        borders[-1] = total
        for left in reversed(range(new_world)):
            borders[left] = min(borders[left], borders[left + 1] - least)
        return Blocks(tuple(right - left for left, right in pairwise(borders)))

    def _fewest(self, total: int, world: int) -> int:
        """The blocks that a partition always has."""
        return min(total // world, math.ceil(self.smallest_share * total / world))

    def _move(self, counts: Sequence[int], left: int, mean: int) -> tuple[int, int] | None:
        """Which partition gives a block to which, over the border `left | left + 1`."""
        for giver, taker in ((left, left + 1), (left + 1, left)):
            if counts[giver] / mean > self.overload and counts[taker] / mean < self.underload:
                return giver, taker
        return None


def stretched(borders: Sequence[int], parts: int) -> list[int]:
    """The borders of another number of parts: where these are, as near as that number allows."""
    return [_between(borders, part * (len(borders) - 1), parts) for part in range(parts + 1)]


def _between(borders: Sequence[int], numerator: int, denominator: int) -> int:
    """The border number `numerator / denominator`, on the line between those on either side of it."""
    place, beyond = divmod(numerator, denominator)
    if beyond == 0:
        return borders[place]
    return borders[place] + (borders[place + 1] - borders[place]) * beyond // denominator


class Loads(NamedTuple):
    """How many entries each block lately yielded, in fixed point; all zero at the start."""

    loads: Tensor
    """A running mean."""
    waiting: Tensor
    """Of the last step: not in the mean yet, because a device's numbers reach the host late (`control.LAG`)."""


@dataclass(frozen=True)
class BalancedBlocks(Region):
    """Exclusive partitions of equal load: the borders split what the blocks lately yielded into equal parts.

    Every rank learns the whole support in each step, so the load of a block costs no message. Borders may fall
    inside a block. The arithmetic is on integers, because ranks must agree on every border. A step's borders know the
    yields of all steps but the last one.
    """

    num_blocks: int = 1024
    memory: int = 3
    """The running mean forgets over about this many steps."""
    fixed_point: int = 1 << 16
    uniform_share: int = 64
    """One part in so many of the load is spread evenly, so that stretches without any are shared out too."""

    def block_size(self, numel: int) -> int:
        return max(1, -(-numel // self.num_blocks))

    def start(self, setup: Setup) -> Loads:
        return Loads(*torch.zeros(2, self.num_blocks, dtype=torch.int64))

    def known(self, state: Loads, step: Step) -> Territory:
        return exclusive(self.borders(state, step.numel, step.world), step)

    def borders(self, state: Loads, numel: int, world: int) -> list[int]:
        edges = np.minimum(np.arange(self.num_blocks + 1) * self.block_size(numel), numel)
        widths = np.diff(edges)
        learned = state.loads.numpy()
        uniform = 1 + int(learned.sum()) // (self.uniform_share * max(numel, 1))
        loads = learned + uniform * widths
        below = np.concatenate([[0], loads.cumsum()])
        # the place in the vector below which each partition's share of the load lies
        shares = below[-1] * np.arange(world) // world
        blocks = np.minimum(np.searchsorted(below, shares, side="right") - 1, self.num_blocks - 1)
        places = edges[blocks] + (shares - below[blocks]) * widths[blocks] // np.maximum(loads[blocks], 1)
        return [*places.tolist(), numel]

    def observe(self, state: Loads, step: Step, reduced: Reduced) -> Loads:
        if not isinstance(reduced.indices, Tensor):
            return state
        blocks = reduced.indices // self.block_size(step.numel)
        return self.taken_in(state, torch.bincount(blocks, minlength=self.num_blocks).to(state.loads.device))

    def taken_in(self, state: Loads, yields: Tensor) -> Loads:
        """The state after a step in which the blocks had these yields."""
        return self.ahead(state)._replace(waiting=yields.long() * self.fixed_point)

    def ahead(self, state: Loads) -> Loads:
        """The state after a further step, as far as borders go: they do not depend on that step's yields."""
        if not state.loads.any():
            return Loads(state.waiting, state.waiting)
        return Loads(state.loads + (state.waiting - state.loads) // self.memory, state.waiting)

    def check(self, state: Loads, setup: Setup) -> None:
        most = self.block_size(setup.numel) * self.fixed_point
        for name, yields in state._asdict().items():
            if yields.dtype != torch.int64 or yields.shape != (self.num_blocks,):
                raise ValueError(
                    f"{name} must be a tensor of {self.num_blocks} whole numbers (torch.int64), "
                    f"not {list(yields.shape)} of {yields.dtype}"
                )
            if not bool(((yields >= 0) & (yields <= most)).all()):
                raise ValueError(f"{name} must lie in 0 to {most}, but some of it does not")


@dataclass(frozen=True)
class LayerBins(Region):
    """Tensors, or pieces of large ones, packed into one bin per rank so that sorting costs each rank the same.

    DEFT's rule. A piece is worth a part of the target in proportion to its norm, which the ranks add up so that
    all of them make the same plan. Bins rotate, so that no entry depends for ever on one rank's accumulator.
    """

    async def settle(self, state: Any, view: View, collectives: Collectives) -> Territory:
        step = view.step
        pieces = layer_pieces(step.setup)
        norms = [view.acc[start:stop].float().norm() for start, stop in pieces]
        summed = await collectives.sum_numbers(torch.stack(norms), "norms") if pieces else []
        sizes = [stop - start for start, stop in pieces]
        shares = norm_shares(sizes, summed, step.target)
        spans = [Span(*piece, share) for piece, share in zip(pieces, shares, strict=True)]
        bins = rotated(packed(spans, step.world), step)
        quotas = tuple(sum(span.quota for span in spans) for spans in bins)
        return Territory(tuple(bins[step.rank]), quotas, extent=step.numel)


def layer_pieces(setup: Setup) -> list[tuple[int, int]]:
    """The tensors as ranges; one larger than an even slice is cut into `world` pieces. No empty ones."""
    pieces = []
    for start, stop in pairwise(setup.bounds):
        size = stop - start
        cuts = even_borders(size, setup.world) if size * setup.world > setup.numel else [0, size]
        pieces += [(start + low, start + high) for low, high in pairwise(cuts) if high > low]
    return pieces


def norm_shares(sizes: Sequence[int], norms: Sequence[float], target: int) -> list[int]:
    """Shares of the target in proportion to the norms, largest first; at least 1 each while the target lasts.

    What a piece cannot take for its size goes to the smaller ones; what those cannot take, to whoever has room.
    """
    # an overflow in one piece must not stop the step
    norms = [min(torch.finfo(torch.float32).max, norm) for norm in norms]
    shares = [0] * len(sizes)
    order = sorted(range(len(sizes)), key=lambda piece: (-norms[piece], piece))
    room, norm_left = target, sum(norms)
    for place, piece in enumerate(order):
        waiting = len(order) - place - 1
        fair = int(room * norms[piece] / norm_left) if norm_left > 0 else 0
        shares[piece] = max(min(fair, sizes[piece], room - waiting), min(1, room))
        room -= shares[piece]
        norm_left -= norms[piece]
    for piece in order:
        more = min(room, sizes[piece] - shares[piece])
        shares[piece] += more
        room -= more
    return shares


def packed(spans: Sequence[Span], world: int) -> list[list[Span]]:
    """Spans in `world` bins of about equal sorting cost: the costliest first, each into the lightest bin."""
    bins: list[list[Span]] = [[] for _ in range(world)]
    lightest = [(0.0, place) for place in range(world)]
    for span in sorted(spans, key=lambda span: (-_sorting_cost(span), span.start)):
        cost, place = heapq.heappop(lightest)
        bins[place].append(span)
        heapq.heappush(lightest, (cost + _sorting_cost(span), place))
    return [sorted(spans) for spans in bins]


def _sorting_cost(span: Span) -> float:
    return (span.stop - span.start) * math.log2(max(span.quota, 2))
