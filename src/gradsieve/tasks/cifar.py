"""CIFAR-10 and CIFAR-100, from the pickled files of their authors.

A pickle can run any code it likes. Here it is read by the interpreter written in Python, with stand-ins for the few
names that these files use; numpy itself never sees what the file says about an array.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gradsieve import models
from gradsieve.tasks.augment import cropped, whole_below
from gradsieve.tasks.files import files_in, is_folder, listed, needed, read_bytes
from gradsieve.tasks.task import DataError, Examples, Noise, Recipe, Task

SHAPE = (3, 32, 32)
PIXELS = math.prod(SHAPE)
PADDING = 4
LARGEST_FILE = 400_000_000
"""In bytes; the largest of the standard files has 155 million."""

MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "resnet18": models.resnet18,
    "resnet50": models.resnet50,
    "resnet152": models.resnet152,
    "googlenet": models.googlenet,
    "senet18": models.senet18,
    "alexnet": models.alexnet,
    "vgg16": models.vgg16,
}
RECIPE = Recipe(batch_size=32, epochs=200, lr=0.1, warmup_epochs=5, schedule="step", weight_decay=1e-4)
# without normalisation of its layers it does not bear more
RECIPES = {"alexnet": replace(RECIPE, lr=0.02)}


@dataclass(frozen=True)
class Normalised:
    """Pixels scaled by the mean and deviation of their channel; for training, cropped at random and mirrored."""

    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]

    def __call__(self, batch: Examples, noise: Noise | None) -> Examples:
        images = batch.inputs if noise is None else _augmented(batch.inputs, noise)
        mean, deviation = _channels(self, images.device)
        return Examples(images.float().sub_(mean).div_(deviation), batch.targets)


def _augmented(images: Tensor, noise: Noise) -> Tensor:
    uniform = noise.uniform(3)
    return cropped(images, PADDING, whole_below(uniform[:, :2], 2 * PADDING + 1), mirror=uniform[:, 2] < 0.5)


@functools.cache  # a copy to the device in each step would wait for it
def _channels(scale: Normalised, device: torch.device) -> tuple[Tensor, Tensor]:
    mean, deviation = torch.tensor([scale.mean, scale.deviation], device=device)[..., None, None] * 255
    return mean, deviation


@dataclass(frozen=True)
class Collection:
    """One of the two data sets, as its authors pack it."""

    name: str
    folder: str
    train_files: tuple[str, ...]
    test_file: str
    labels: bytes
    num_classes: int
    prepare: Normalised

    @property
    def wanted(self) -> str:
        files = ", ".join((*self.train_files, self.test_file))
        return (
            f"the folder {self.folder} with the files {files}, or the folder that holds it; "
            "get the python version from https://www.cs.toronto.edu/~kriz/cifar.html and give --data DIR"
        )

    def load(self, data: Path | None) -> Task:
        folder = self.find(needed(self.name, data, self.wanted))
        return Task(
            name=self.name,
            train=self.read([folder / name for name in self.train_files]),
            test=self.read([folder / self.test_file]),
            models={name: functools.partial(make, num_classes=self.num_classes) for name, make in MODELS.items()},
            prepare=self.prepare,
            recipe=RECIPE,
            recipes=RECIPES,
        )

    def find(self, data: Path) -> Path:
        """The folder with the files."""
        if not is_folder(data):
            raise DataError(f"--data {data} is a file: unpack it; {self.name} needs {self.wanted}")
        inner = data / self.folder
        folder = inner if is_folder(inner) else data
        present = files_in(folder)
        missing = [name for name in (*self.train_files, self.test_file) if name not in present]
        if missing:
            raise DataError(f"{folder} has no {listed(missing)}: {self.name} needs {self.wanted}")
        return folder

    def read(self, paths: list[Path]) -> Examples:
        parts = [read_batch(path, self.labels, self.num_classes) for path in paths]
        pixels = np.concatenate([pixels for pixels, _ in parts])
        labels = np.concatenate([labels for _, labels in parts])
        return Examples(torch.from_numpy(pixels).view(-1, *SHAPE), torch.from_numpy(labels))


def load_cifar10(data: Path | None) -> Task:
    return CIFAR10.load(data)


def load_cifar100(data: Path | None) -> Task:
    return CIFAR100.load(data)


CIFAR10 = Collection(
    name="cifar10",
    folder="cifar-10-batches-py",
    train_files=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test_file="test_batch",
    labels=b"labels",
    num_classes=10,
    prepare=Normalised((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
)
CIFAR100 = Collection(
    name="cifar100",
    folder="cifar-100-python",
    train_files=("train",),
    test_file="test",
    labels=b"fine_labels",
    num_classes=100,
    prepare=Normalised((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
)


def read_batch(path: Path, labels: bytes, num_classes: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The rows of pixels and the labels of one file."""
    content = read_bytes(path, LARGEST_FILE)
    try:
        batch = _Reader(io.BytesIO(content), encoding="bytes").load()
        return _checked(batch, labels, num_classes)
    except Exception as error:  # there is no end to what a damaged pickle can raise
        kind = "" if isinstance(error, _FormatError) else f"{type(error).__name__}: "
        raise DataError(
            f"{path} is no whole CIFAR batch file: {kind}{str(error)[:200] or 'it is cut short'}; fetch it again"
        ) from error


def _checked(batch: Any, key: bytes, num_classes: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    if not isinstance(batch, dict):
        raise _FormatError(f"it holds a {type(batch).__name__}, not a dict")
    data, labels = (batch.get(name) for name in (b"data", key))
    if not isinstance(data, _Array) or not isinstance(labels, list):
        raise _FormatError(f"it needs an array under b'data' and a list under {key!r}")
    if not all(type(label) is int and 0 <= label < num_classes for label in labels):
        raise _FormatError(f"a label is not a whole number from 0 to {num_classes - 1}")
    if not labels:
        raise _FormatError("it holds no examples")
    if data.shape != (len(labels), PIXELS):
        raise _FormatError(
            f"its data have the shape {data.shape} and it has {len(labels)} labels, not (n, {PIXELS}) and n"
        )
    return data.values(), np.array(labels, dtype=np.int64)


class _FormatError(ValueError):
    """Something in the file that is not as it should be."""


class _Kind:
    """Stands in for `numpy.dtype`."""

    def __init__(self, code: bytes | str, *_: Any) -> None:
        self.is_byte = code in (b"u1", "u1")

    def __setstate__(self, state: Any) -> None:
        """Byte order and fields: bytes have neither."""


class _Array:
    """Stands in for `numpy.ndarray` and the function that makes an empty one, to be filled by its state."""

    def __init__(self, *_: Any) -> None:
        self.shape: tuple[int, ...] = ()
        self.content = b""

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, by_column, content = state
        self._fill(content, kind, shape, by_column)

    def _fill(self, content: Any, kind: Any, shape: Any, by_column: Any) -> None:
        if not isinstance(kind, _Kind) or not kind.is_byte:
            raise _FormatError("its array is not of bytes (uint8)")
        if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
            raise _FormatError("its array has no proper shape")
        if not isinstance(content, bytes | bytearray) or len(content) != math.prod(shape) or by_column:
            raise _FormatError(f"its array is not {math.prod(shape):,} bytes, row by row")
        self.shape, self.content = shape, bytes(content)

    def values(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self.content, dtype=np.uint8).reshape(self.shape)


class _Buffer(_Array):
    """Stands in for the function that makes an array from the buffers of pickle protocol 5."""

    def __init__(self, content: Any, kind: Any, shape: Any, order: Any) -> None:
        self._fill(content, kind, shape, order != "C")


class _Latin(bytes):
    """Stands in for `codecs.encode`, by which Python 3 writes bytes in pickle protocol 2."""

    def __new__(cls, text: str, encoding: str) -> _Latin:
        if encoding not in ("latin1", b"latin1"):
            raise _FormatError("its bytes are in an encoding other than latin1")
        return super().__new__(cls, text.encode("latin1"))

    def __setstate__(self, state: Any) -> None:
        raise _FormatError("its bytes have a state")


# Classes with a __setstate__ only: with any other object, a file could set attributes, and so touch later reads.
_STAND_INS: Mapping[tuple[str, str], type] = {
    ("numpy", "dtype"): _Kind,
    ("numpy", "ndarray"): _Array,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _Buffer,
    ("numpy._core.numeric", "_frombuffer"): _Buffer,
    ("_codecs", "encode"): _Latin,
}


# not the one written in C: a single damaged byte can make that allocate and touch 64 GB for its memo
class _Reader(pickle._Unpickler):
    read: Callable[[int], bytes]
    append: Callable[[Any], None]

    def load_bytearray(self) -> None:
        """Reads what is there, where the inherited one first makes room for what the file claims."""
        size = int.from_bytes(self.read(8), "little")
        self.append(bytearray(self.read(min(size, LARGEST_FILE))))

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.BYTEARRAY8[0]: load_bytearray,
    }

    def find_class(self, module: str, name: str) -> type:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise _FormatError(
                f"it asks for {module}.{name}, which no CIFAR file needs and which was not loaded"
            ) from None
