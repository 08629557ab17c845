"""Recommendation from implicit feedback, on the ratings files of MovieLens: a user who rated an item touched it.

The evaluation of neural collaborative filtering (He et al., 2017): each user's last item is held out and must rank
high among items that the user never touched.
"""

from __future__ import annotations

import functools
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from gradsieve import kernels, models
from gradsieve.tasks.augment import whole_below
from gradsieve.tasks.files import files_in, is_folder, listed, needed, read_text
from gradsieve.tasks.task import DataError, Examples, Measure, Noise, Recipe, Task

Whole = npt.NDArray[np.int64]
Table = npt.NDArray[np.float64]

FILES = ("ratings.csv", "ratings.dat", "u.data")
SEPARATORS = ("::", "\t", ",")
FIELDS = "user, item, rating and perhaps a timestamp"
WANTED = (
    f"a ratings file of MovieLens ({', '.join(FILES)}) or its folder; "
    "get one from https://grouplens.org/datasets/movielens and give --data PATH"
)
TEST_NEGATIVES = 99
TEST_KEY = 100
TRAIN_NEGATIVES = 4
TOP = 10

RECIPE = Recipe(
    batch_size=256, epochs=20, lr=1e-3, warmup_epochs=1, schedule="cosine", optimizer="adamw", weight_decay=0
)


def load(data: Path | None) -> Task:
    path = _found(needed("ratings", data, WANTED))
    touches = _touches(_table(path))
    held_out = touches.last_of_each_user()
    train = touches.pairs()[~held_out]
    return Task(
        name="ratings",
        train=Examples(torch.from_numpy(train), torch.ones(len(train))),
        test=_contests(touches, held_out, path),
        models={"ncf": functools.partial(models.ncf, touches.num_users, touches.num_items)},
        loss=functional.binary_cross_entropy_with_logits,
        measure=Measure("hit_rate", hits, percent=True),
        prepare=WithNegatives(touches.num_items),
        recipe=RECIPE,
    )


@dataclass(frozen=True)
class WithNegatives:
    """For training, each pair of user and item is followed by pairs of the user with random items."""

    num_items: int

    def __call__(self, batch: Examples, noise: Noise | None) -> Examples:
        if noise is None:
            return batch
        users, items = batch.inputs[:, :1], batch.inputs[:, 1:]
        drawn = whole_below(noise.uniform(TRAIN_NEGATIVES), self.num_items)
        candidates = torch.cat([items, drawn], dim=1)
        pairs = torch.stack([users.expand_as(candidates), candidates], dim=-1)
        targets = functional.pad(batch.targets[:, None], (0, TRAIN_NEGATIVES))
        return Examples(pairs.flatten(0, 1), targets.flatten())


def hits(outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG001 - the first column is the positive
    """Does the first of each row rank among the highest ten? A tie counts against it, and so does no number."""
    ahead = ~(outputs[:, :1] > outputs[:, 1:])
    return (ahead.sum(1) < TOP).float()


def _found(data: Path) -> Path:
    if not is_folder(data):
        return data
    present = [name for name in FILES if name in files_in(data)]
    if len(present) != 1:
        what = f"several ratings files ({listed(present)})" if present else f"none of {', '.join(FILES)}"
        raise DataError(f"{data} holds {what}: give {WANTED}")
    return data / present[0]


def _table(path: Path) -> Table:
    """The numbers of a file: users, items, ratings and perhaps timestamps, in columns."""
    text = read_text(path)
    head = text.lstrip().partition("\n")[0]
    separator = next((mark for mark in SEPARATORS if mark in head), ",")
    if head.lower().startswith("user"):
        # the line stays, empty, so that those after it keep their numbers
        text = text.replace(head, "", 1)
    if not text.strip():
        raise DataError(f"{path} has a header and no ratings")
    try:
        # a delimiter is one character for numpy: one that no text has
        lines = io.StringIO(text.replace(separator, "\x01"))
        table = np.loadtxt(lines, delimiter="\x01", comments=None, ndmin=2)
    except ValueError as error:
        raise DataError(f"{path}{_fault(text, separator) or f': {error}'}") from error
    if not _is_sound(table):
        raise DataError(f"{path}{_fault(text, separator)}")
    return table


def _is_sound(table: Table) -> bool:
    known = table.shape[1] in (3, 4) and np.isfinite(table).all()
    return bool(known and (table[:, :2] == np.floor(table[:, :2])).all())


def _fault(text: str, separator: str) -> str:
    """The first line that is not as it should be, and why."""
    columns = None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            fields = line.split(separator)
            columns = columns or len(fields)
            why = _line_fault(fields, columns)
            if why:
                return f", line {number}: {line[:80]!r} {why}"
    return ""


def _line_fault(fields: list[str], columns: int) -> str:
    if len(fields) not in (3, 4):
        return f"has not three or four fields: {FIELDS}, between commas, tabs or double colons"
    if len(fields) != columns:
        return f"has {len(fields)} fields, and the lines before it have {columns}"
    for field in fields:
        if not _is_number(field):
            return f"has {field!r}, which is not a number; wanted are {FIELDS}"
    if any(float(field) % 1 for field in fields[:2]):
        return "has a user or item that is not a whole number"
    return ""


def _is_number(field: str) -> bool:
    try:
        return bool(np.isfinite(float(field)))
    except ValueError:
        return False


@dataclass(frozen=True)
class Touches:
    """Which user touched which item, each pair once, by user and then by time. Both are numbered from 0."""

    users: Whole
    items: Whole
    num_users: int
    num_items: int

    def pairs(self) -> Whole:
        return np.stack([self.users, self.items], axis=1)

    def counts(self) -> Whole:
        """How many items each user touched."""
        return np.bincount(self.users, minlength=self.num_users)

    def last_of_each_user(self) -> npt.NDArray[np.bool_]:
        """Where the last item of a user is, of those with at least two."""
        is_last = np.append(self.users[1:] != self.users[:-1], True)
        return is_last & (self.counts()[self.users] >= 2)


def _touches(table: Table) -> Touches:
    user_names, users = np.unique(table[:, 0], return_inverse=True)
    item_names, items = np.unique(table[:, 1], return_inverse=True)
    time = table[:, 3] if table.shape[1] == 4 else np.zeros(len(table))
    order = np.lexsort((time, users))
    users, items = users[order], items[order]
    # of an item that a user touched twice the later time counts, or it could be in both parts
    _, from_the_end = np.unique((users * len(item_names) + items)[::-1], return_index=True)
    kept = np.sort(len(users) - 1 - from_the_end)
    return Touches(users[kept], items[kept], len(user_names), len(item_names))


def _contests(touches: Touches, held_out: npt.NDArray[np.bool_], path: Path) -> Examples:
    """A row for each user: the item held out, then others that the user never touched."""
    users = touches.users[held_out]
    if not len(users):
        raise DataError(f"{path}: none of its {touches.num_users} users has two items, one to train on and one to test")
    untouched = touches.num_items - touches.counts()[users]
    negatives = min(TEST_NEGATIVES, int(untouched.min()))
    if negatives < 1:
        raise DataError(f"{path}: a user touched all of its {touches.num_items} items, so that there is none to rank")
    others = _untouched_items(touches, users, _distinct(untouched, negatives))
    items = np.concatenate([touches.items[held_out][:, None], others], axis=1)
    pairs = np.stack([np.broadcast_to(users[:, None], items.shape), items], axis=-1)
    targets = torch.zeros(items.shape)
    targets[:, 0] = 1
    return Examples(torch.from_numpy(pairs), targets)


def _distinct(limits: Whole, count: int) -> Whole:
    """For each limit, `count` distinct numbers below it; each choice is as likely as any other (Floyd's algorithm)."""
    lots = kernels.uniform(0, len(limits) * count, TEST_KEY, torch.device("cpu")).double().view(-1, count).numpy()
    chosen = np.empty((len(limits), count), dtype=np.int64)
    for column in range(count):
        last = limits - count + column
        drawn = (lots[:, column] * (last + 1)).astype(np.int64)
        taken = (chosen[:, :column] == drawn[:, None]).any(axis=1)
        chosen[:, column] = np.where(taken, last, drawn)
    return chosen


def _untouched_items(touches: Touches, users: Whole, ranks: Whole) -> Whole:
    """For each user, the items at these ranks among those that the user never touched."""
    touched = np.sort(touches.users * touches.num_items + touches.items)
    owners, items = np.divmod(touched, touches.num_items)
    starts = np.cumsum(touches.counts()) - touches.counts()
    # how many untouched items lie below each touched one; apart from one user to the next
    below = items - (np.arange(len(items)) - starts[owners])
    spacing = touches.num_items + 1
    reached = np.searchsorted(owners * spacing + below, users[:, None] * spacing + ranks, side="right")
    return ranks + reached - starts[users][:, None]
