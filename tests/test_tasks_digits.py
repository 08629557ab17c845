from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor

from gradsieve.tasks import DataError, Task, build_model
from gradsieve.tasks.digits import DEVIATION, MEAN, load


@pytest.fixture(scope="module")
def task() -> Task:
    return load(None)


def rows(inputs: Tensor) -> list[bytes]:
    return sorted(np.asarray(row).tobytes() for row in (inputs * DEVIATION + MEAN).round().to(torch.uint8))


def test_the_examples_are_scaled_and_a_third_is_held_out(task: Task) -> None:
    assert task.train.inputs.shape == (1198, 64)
    assert task.test.inputs.shape == (599, 64)
    assert task.train.inputs.dtype == torch.float32
    assert task.train.targets.dtype == torch.int64
    assert abs(float(task.train.inputs.mean())) < 0.01
    assert abs(float(task.train.inputs.std()) - 1) < 0.01


def test_each_digit_is_in_one_part(task: Task) -> None:
    pixels = torch.from_numpy(load_digits().data)
    assert rows(torch.cat([task.train.inputs, task.test.inputs])) == rows((pixels - MEAN) / DEVIATION)


def test_a_third_of_each_class_is_held_out(task: Task) -> None:
    counts = torch.bincount(torch.cat([task.train.targets, task.test.targets]))
    assert ((torch.bincount(task.test.targets) - counts / 3).abs() < 1).all()


def test_the_split_is_always_the_same(task: Task) -> None:
    torch.manual_seed(1)
    again = load(None)
    assert torch.equal(again.test.inputs, task.test.inputs)
    assert torch.equal(again.train.targets, task.train.targets)
    # a change here makes all earlier figures incomparable
    assert task.test.targets[:16].tolist() == [0, 2, 1, 3, 1, 3, 6, 6, 8, 4, 2, 7, 1, 7, 3, 4]


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_models_take_the_digits(task: Task, name: str) -> None:
    outputs = build_model(task, name)(task.train.inputs[:3])
    assert outputs.shape == (3, 10)
    assert task.loss(outputs, task.train.targets[:3]).isfinite()


def test_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"comes with scikit-learn.*leave out --data"):
        load(tmp_path)


def test_without_scikit_learn_the_way_to_get_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'gradsieve\[digits\]'"):
        load(None)
