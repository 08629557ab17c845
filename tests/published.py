"""The published step of MiCRO and ExDyna, restated in plain NumPy: the yardstick for `control="paper"`.

Written from the published rules, not from the library, and as literally as possible. All ranks are held at once.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]

BLOCKS = 1024


class Outcome(NamedTuple):
    """What a step shows to everyone."""

    mean: Floats
    """`[numel]`: the averaged gradient, zero outside the support."""
    counts: tuple[int, ...]
    """Proposed entries by rank; slices are exclusive, so they add up to the support."""
    threshold: float
    """What an entry had to reach in this step."""


class PublishedMicro:
    """MiCRO: one fixed slice per rank, owned in rotation, and one threshold for all."""

    def __init__(self, world: int, numel: int, density: float) -> None:
        self.world, self.numel = world, numel
        self.target = int(density * numel)
        self.threshold = 1 / (2 * math.sqrt(self.target))
        self.residual: Floats = np.zeros((world, numel), np.float32)
        self.index = 0
        self.counts: tuple[int, ...] = ()

    def step(self, gradients: Floats) -> Outcome:
        """One step on `[world, numel]` gradients."""
        if self.index > 0:
            self._prepare()
        acc = self.residual + gradients
        proposed = [self._proposed(rank, acc[rank]) for rank in range(self.world)]
        support = np.concatenate(proposed)
        mean = np.zeros(self.numel, np.float32)
        mean[support] = acc[:, support].sum(axis=0) / np.float32(self.world)
        acc[:, support] = 0
        self.residual = acc
        self.counts = tuple(len(indices) for indices in proposed)
        self.index += 1
        return Outcome(mean, self.counts, self.threshold)

    def sizes(self) -> list[int]:
        """How many elements each slice holds, from left to right."""
        return _shared_out(self.numel, self.world)

    def _prepare(self) -> None:
        """What changes before every step but the first, from the counts of the step before."""
        ratio = sum(self.counts) / self.target
        if ratio > 1.1:
            self.threshold *= 1.005
        elif ratio > 0.909:
            self.threshold *= 1.00125
        else:
            self.threshold *= 0.995

    def _proposed(self, rank: int, acc: Floats) -> npt.NDArray[np.intp]:
        owned = (self.index + rank) % self.world
        start, stop = [0, *accumulate(self.sizes())][owned : owned + 2]
        # a Python float, so that NumPy compares in float32, as torch does
        found = start + np.flatnonzero(np.abs(acc[start:stop]) >= self.threshold)
        if len(found) == 0 and start < stop:
            found = np.array([start + self.index % (stop - start)])
        return found


class PublishedExDyna(PublishedMicro):
    """ExDyna: MiCRO, with slices made of blocks that move across the borders one at a time."""

    def __init__(self, world: int, numel: int, density: float) -> None:
        super().__init__(world, numel, density)
        # The published rule ends at 32 * 1024 elements; below, blocks of any size, and as many as fit.
        self.block = numel // BLOCKS // 32 * 32 or max(1, numel // BLOCKS)
        self.blocks = _shared_out(min(BLOCKS, numel // self.block), world)
        self.floor = BLOCKS / (4 * world)

    def sizes(self) -> list[int]:
        sizes = [blocks * self.block for blocks in self.blocks]
        return [*sizes[:-1], self.numel - sum(sizes[:-1])]

    def _prepare(self) -> None:
        super()._prepare()
        self._move(self._counts_by_slice())

    def _counts_by_slice(self) -> list[int]:
        counts = [0] * self.world
        for rank, count in enumerate(self.counts):
            counts[(self.index - 1 + rank) % self.world] = count
        return counts

    def _move(self, counts: list[int]) -> None:
        mean = int(sum(counts) / self.world)
        worth = int(self.block * sum(counts) / self.numel)
        for left in range(self.world - 1):
            for giver, taker in ((left, left + 1), (left + 1, left)):
                if self._moves(counts[giver], counts[taker], mean) and self.blocks[giver] - 1 >= self.floor:
                    self.blocks[giver] -= 1
                    self.blocks[taker] += 1
                    counts[giver] -= worth
                    counts[taker] += worth
                    break

    @staticmethod
    def _moves(giver: int, taker: int, mean: int) -> bool:
        return mean > 0 and giver / mean > 1.05 and taker / mean < 0.95238


def _shared_out(total: int, world: int) -> list[int]:
    """`total` things for `world` slices, the first ones one more where it does not come out even."""
    return [total // world + (part < total % world) for part in range(world)]
