"""What stays the same from step to step is made once, and forgotten when it is no longer asked for."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Recent(Generic[Made]):
    """Things that were asked for in this step or in the one before.

    A view of a gradient keeps its memory alive. So what a step did not ask for, such as views of buckets that DDP has
    made anew since, is not kept beyond it.
    """

    def __init__(self) -> None:
        self._before: dict[Hashable, Made] = {}
        self._now: dict[Hashable, Made] = {}

    def begin(self) -> None:
        """Start a step."""
        self._before, self._now = self._now, {}

    def get(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` made for this key when it was first asked for."""
        if key not in self._now:
            self._now[key] = self._before[key] if key in self._before else make()
        return self._now[key]
