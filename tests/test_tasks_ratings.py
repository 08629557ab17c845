from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gradsieve.tasks import DataError, Examples, Noise, Task, build_model
from gradsieve.tasks.ratings import WithNegatives, _distinct, hits, load

CPU = torch.device("cpu")
Row = tuple[int, int, int]
"""User, item, time."""


def some_rows(users: int = 30, items: int = 200, count: int = 600) -> list[Row]:
    random = np.random.default_rng(0)
    pairs = random.choice(users * items, count, replace=False).tolist()
    return [(7 + pair // items, 3 * (pair % items), int(random.integers(0, 50))) for pair in pairs]


def write(path: Path, rows: list[Row], separator: str = ",", header: str = "", *, timed: bool = True) -> Path:
    lines = [separator.join(map(str, (user, item, 3.5, time)[: 4 if timed else 3])) for user, item, time in rows]
    path.write_text("\n".join([header] * bool(header) + lines) + "\n")
    return path


HEADER = "userId,movieId,rating,timestamp"


def positives(task: Task) -> set[tuple[int, int]]:
    return {(user, item) for user, item in task.train.inputs.tolist()}


def contests(task: Task) -> dict[int, list[int]]:
    """The items of each test row, by user."""
    assert (task.test.inputs[..., 0] == task.test.inputs[:, :1, 0]).all()
    return {row[0][0]: [item for _, item in row] for row in task.test.inputs.tolist()}


def numbered(rows: list[Row]) -> list[Row]:
    users, items = (sorted({row[column] for row in rows}) for column in (0, 1))
    return [(users.index(user), items.index(item), time) for user, item, time in rows]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return load(write(tmp_path_factory.mktemp("ratings") / "ratings.csv", some_rows(), header=HEADER))


def test_the_parts_are_pairs_and_rows_of_a_hundred(task: Task) -> None:
    assert task.train.inputs.shape == (570, 2)
    assert task.test.inputs.shape == (30, 100, 2)
    assert task.train.inputs.dtype == task.test.inputs.dtype == torch.int64
    assert task.train.targets.tolist() == [1.0] * 570
    assert task.test.targets.tolist() == [[1.0] + [0.0] * 99] * 30


@pytest.mark.parametrize(
    ("name", "separator", "header"),
    [
        ("ratings.csv", ",", ""),
        ("ratings.dat", "::", ""),
        ("u.data", "\t", ""),
        ("mine", "\t", "user_id\titem_id\trating\ttimestamp"),
    ],
)
def test_every_format_says_the_same(tmp_path: Path, task: Task, name: str, separator: str, header: str) -> None:
    path = write(tmp_path / name, some_rows(), separator, header)
    for data in (path, tmp_path) if name != "mine" else (path,):
        same = load(data)
        assert torch.equal(same.train.inputs, task.train.inputs)
        assert torch.equal(same.test.inputs, task.test.inputs)


def test_line_ends_and_empty_lines_do_not_matter(tmp_path: Path, task: Task) -> None:
    path = write(tmp_path / "ratings.csv", some_rows(), header=HEADER)
    path.write_bytes(b"\n" + path.read_bytes().replace(b"\n", b"\r\n") + b"\n\n")
    assert torch.equal(load(path).test.inputs, task.test.inputs)


interactions = st.lists(st.tuples(st.integers(-3, 6), st.integers(0, 12), st.integers(0, 4)), min_size=2, max_size=40)


@given(interactions, st.booleans())
def test_the_last_item_of_each_user_is_held_out_among_items_never_touched(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], timed: bool
) -> None:
    touched: dict[int, list[int]] = {}
    rows = numbered(rows)
    for user, item, _ in sorted(rows, key=lambda row: row[2]) if timed else rows:
        items = touched.setdefault(user, [])
        touched[user] = [*(other for other in items if other != item), item]
    num_items = len({item for _, item, _ in rows})
    tested = {user: items for user, items in touched.items() if len(items) >= 2}
    assume(tested)
    assume(max(map(len, tested.values())) < num_items)
    task = load(write(tmp_path_factory.getbasetemp() / "ratings", rows, timed=timed))
    columns = num_items - max(map(len, tested.values())) + 1
    assert contests(task).keys() == tested.keys()
    for user, items in contests(task).items():
        assert items[0] == tested[user][-1]
        assert len(set(items)) == len(items) == columns
        assert not set(items[1:]) & set(touched[user])
        assert set(items) <= set(range(num_items))
    held_out = {(user, items[-1]) for user, items in tested.items()}
    assert positives(task) == {(user, item) for user, items in touched.items() for item in items} - held_out
    assert len(task.train) == len(positives(task))


def test_numbers_without_repeats_are_drawn_evenly() -> None:
    limits = np.array([5, 8] * 4000)
    drawn = _distinct(limits, 4)
    for limit in (5, 8):
        mine = drawn[limits == limit]
        assert all(len(set(row)) == 4 for row in mine.tolist())
        shares = np.bincount(mine.ravel(), minlength=limit) / len(mine)
        assert len(shares) == limit
        assert np.allclose(shares, 4 / limit, atol=0.04)


def test_each_positive_is_followed_by_its_negatives(task: Task) -> None:
    batch = task.train.rows(torch.arange(100, 300))
    prepared = task.prepare(batch, Noise(100, 200, 9, CPU))
    pairs, targets = prepared.inputs.view(200, 5, 2), prepared.targets.view(200, 5)
    assert torch.equal(pairs[:, 0], batch.inputs)
    assert (pairs[..., 0] == batch.inputs[:, :1]).all()
    assert targets.tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0]] * 200
    drawn = torch.bincount(pairs[:, 1:, 1].flatten(), minlength=190)
    assert (drawn > 0).float().mean() > 0.9


@given(st.integers(1, 2**24))
def test_no_item_is_out_of_range(num_items: int) -> None:
    batch = Examples(torch.zeros(64, 2, dtype=torch.int64), torch.ones(64))
    items = WithNegatives(num_items)(batch, Noise(0, 64, num_items, CPU)).inputs[:, 1]
    assert items.min() >= 0
    assert items.max() < num_items


def test_for_evaluation_nothing_is_drawn(task: Task) -> None:
    assert task.prepare(task.test, None) is task.test


def test_the_model_takes_pairs_and_rows_of_pairs(task: Task) -> None:
    model = build_model(task, None)
    prepared = task.prepare(task.train.rows(torch.arange(4)), Noise(0, 4, 0, CPU))
    assert task.loss(model(prepared.inputs), prepared.targets).isfinite()
    outputs = model(task.test.inputs)
    assert task.loss(outputs, task.test.targets).isfinite()
    assert task.measure.score(outputs, task.test.targets).shape == (30,)


@pytest.mark.parametrize(
    ("first", "ahead", "hit"),
    [(1.0, 9, 1.0), (1.0, 10, 0.0), (1.0, 0, 1.0), (2.0, 9, 1.0), (2.0, 10, 0.0), (math.nan, 0, 0.0)],
)
def test_a_hit_is_among_the_first_ten_and_ties_count_against_it(first: float, ahead: int, hit: float) -> None:
    outputs = torch.tensor([[first, *[2.0] * ahead, *[0.0] * (99 - ahead)]])
    assert hits(outputs, torch.zeros(1, 100)).tolist() == [hit]


def test_equal_scores_for_all_are_no_hit() -> None:
    assert hits(torch.zeros(3, 100), torch.zeros(3, 100)).tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2,3,4\n1,2,x,4\n", r"line 2: '1,2,x,4' has 'x', which is not a number; wanted are user, item, rating"),
        ("1,2,3,4\n\n1,2,,4\n", "line 3: '1,2,,4' has ''"),
        ("1,2,3,4\n1,2,3\n", "line 2: '1,2,3' has 3 fields, and the lines before it have 4"),
        ("1,2\n1,3\n", "line 1: '1,2' has not three or four fields"),
        ("1,2,3,4,5\n", "line 1: '1,2,3,4,5' has not three or four fields"),
        ("1 2 3\n", "line 1: '1 2 3' has not three or four fields"),
        ("1,2,3\n1.5,2,3\n", "line 2: .* not a whole number"),
        ("1,2,3\nnan,2,3\n", "line 2: .* has 'nan'"),
        ("1,2,inf\n", "line 1: .* has 'inf'"),
        (f"{HEADER}\n1,2,3,4\n1,2,3,a\n", "line 3: .* has 'a'"),
        ("movieId,userId,rating\n1,2,3\n", "line 1: .* has 'movieId'"),
        ("1::2::3\n1::2:3\n", "line 2: '1::2:3' has not three or four"),
        ("1,2,3\n1_0,2,3\n", "could not convert string '1_0'"),
        ("", "is empty"),
        (f"{HEADER}\n", "has a header and no ratings"),
        ("1,2,3\n2,3,3\n", "none of its 2 users has two items"),
        ("1,2,3\n1,2,3\n2,3,3\n", "none of its 2 users has two items"),
        ("1,2,3\n1,3,3\n2,3,3\n", "a user touched all of its 2 items"),
        ("1,2,3\n1,\0,3\n", "is a binary file"),
    ],
)
def test_what_is_malformed_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"{path}.*{message}"):
        load(path)


@given(st.text(st.sampled_from('0123456789,:.\t\n -e#x"_'), max_size=30))
def test_any_text_is_a_task_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_text("1,2,3\n" + text)
    message = str(path)
    try:
        load(path)
    except DataError as error:
        message = str(error)
    assert str(path) in message


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the task ratings needs --data: .*u\.data.*https://grouplens\.org"):
        load(None)
    with pytest.raises(DataError, match="nowhere: there is no such file"):
        load(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds none of ratings\.csv, ratings\.dat, u\.data"):
        load(tmp_path)
    for name in ("ratings.csv", "u.data"):
        write(tmp_path / name, some_rows())
    with pytest.raises(DataError, match=r"holds several ratings files \(ratings\.csv, u\.data\)"):
        load(tmp_path)
