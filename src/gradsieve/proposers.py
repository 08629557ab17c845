"""Whose indices count in a step. A function of numbers that all ranks share."""

from __future__ import annotations

import random
from dataclasses import dataclass


class Proposers:
    """Everyone proposes."""

    def check(self, world: int) -> None:
        """Refuse a world that this choice does not fit."""

    def ranks(self, index: int, world: int, seed: int) -> tuple[int, ...]:
        return tuple(range(world))


@dataclass(frozen=True)
class Everyone(Proposers):
    """Every rank proposes in every step."""


@dataclass(frozen=True)
class RotatingLeader(Proposers):
    """One rank a step, in turn."""

    def ranks(self, index: int, world: int, seed: int) -> tuple[int, ...]:
        return (index % world,)


@dataclass(frozen=True)
class RandomRanks(Proposers):
    """A few ranks a step, drawn alike on every rank from `(seed, step)`."""

    num_ranks: int

    def check(self, world: int) -> None:
        if self.num_ranks > world:
            raise ValueError(
                f"num_broadcasters={self.num_ranks}, but there are only {world} ranks: "
                f"give at most {world}, or start more workers"
            )

    def ranks(self, index: int, world: int, seed: int) -> tuple[int, ...]:
        # a string seed is hashed whole, so neighbouring seeds and steps give unrelated draws
        draw = random.Random(f"{seed}/{index}")
        return tuple(sorted(draw.sample(range(world), self.num_ranks)))
