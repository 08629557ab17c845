from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor

from gradsieve.recent import Recent


def test_what_is_asked_for_in_every_step_is_made_once() -> None:
    recent: Recent[int] = Recent()
    made: list[str] = []

    def make(word: str) -> int:
        made.append(word)
        return len(word)

    for _ in range(4):
        recent.begin()
        assert [recent.get(word, lambda word=word: make(word)) for word in ("a", "bc", "a")] == [1, 2, 1]  # type: ignore[misc]
    assert made == ["a", "bc"]


def test_what_a_step_did_not_ask_for_is_let_go() -> None:
    """Or views of buckets that DDP made anew would keep the old ones' memory."""
    recent: Recent[Tensor] = Recent()
    recent.begin()
    recent.get("old", lambda: torch.zeros(10)[2:5])
    kept = weakref.ref(recent.get("old", lambda: torch.ones(1)))
    lives = []
    for _ in range(2):
        recent.begin()
        recent.get("new", lambda: torch.ones(1))
        gc.collect()
        lives.append(kept() is not None)
    assert lives == [True, False]
    assert float(recent.get("old", lambda: torch.full((1,), 7.0))) == 7
