"""Handwritten digits of 8 x 8 pixels, which scikit-learn carries: seconds to train, nothing to fetch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gradsieve import kernels, models
from gradsieve.tasks.task import DataError, Examples, Recipe, Task

SPLIT_KEY = 1797
MEAN, DEVIATION = 4.884, 6.017
"""Of the pixels, which are 0 to 16."""

# No augmentation, for the digits are centred, and much weight decay: seeds then differ little, so that a difference
# between methods can be seen on 599 test examples.
RECIPE = Recipe(batch_size=32, epochs=30, lr=0.1, warmup_epochs=3, schedule="cosine", weight_decay=5e-3)


def load(data: Path | None) -> Task:
    if data is not None:
        raise DataError(f"the task digits comes with scikit-learn and reads no file: leave out --data {data}")
    pixels, labels = _digits()
    held_out = _held_out(labels)
    return Task(
        name="digits",
        train=_examples(pixels[~held_out], labels[~held_out]),
        test=_examples(pixels[held_out], labels[held_out]),
        models={"mlp": models.mlp, "cnn": models.cnn},
        recipe=RECIPE,
    )


def _digits() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError(f"the task digits needs scikit-learn ({error}): pip install 'gradsieve[digits]'") from error
    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels


def _held_out(labels: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """A third of the examples, and of each class: the same for every run and on every machine."""
    lots = kernels.uniform(0, len(labels), SPLIT_KEY, torch.device("cpu")).numpy()
    chosen = np.zeros(len(labels), dtype=bool)
    chosen[np.lexsort((lots, labels))[::3]] = True
    return chosen


def _examples(pixels: npt.NDArray[np.float64], labels: npt.NDArray[np.int64]) -> Examples:
    return Examples(torch.from_numpy((pixels - MEAN) / DEVIATION).float(), torch.from_numpy(labels).long())
