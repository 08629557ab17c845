from __future__ import annotations

import io
import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from gradsieve.tasks import DataError, Noise, Task, build_model
from gradsieve.tasks.cifar import CIFAR10, LARGEST_FILE, MODELS, load_cifar10, load_cifar100, read_batch

CPU = torch.device("cpu")
ROWS = 4
FILES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")


def pixels(rows: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (rows, 3072), dtype=np.uint8)


def batch(rows: int = ROWS, seed: int = 0, labels: str = "labels", classes: int = 10) -> dict[bytes, Any]:
    numbers = np.random.default_rng(seed).integers(0, classes, rows).tolist()
    names = [b"a.png"] * rows
    return {b"batch_label": b"a batch", labels.encode(): numbers, b"data": pixels(rows, seed), b"filenames": names}


class Python2(pickle._Pickler):
    """Writes as the authors did: bytes are the strings of Python 2."""

    def save(self, value: Any, *arguments: Any, **options: Any) -> None:
        if isinstance(value, bytes):
            self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)  # type: ignore[attr-defined]
        else:
            super().save(value, *arguments, **options)  # type: ignore[misc]


def as_python2(value: Any) -> bytes:
    stream = io.BytesIO()
    Python2(stream, protocol=2).dump(value)
    return stream.getvalue().replace(b"numpy._core.", b"numpy.core.")


def in_protocol(protocol: int) -> Callable[[Any], bytes]:
    return lambda value: pickle.dumps(value, protocol)


WRITERS = {"python 2": as_python2, **{f"protocol {number}": in_protocol(number) for number in (2, 3, 4, 5)}}


def write_cifar10(folder: Path, dumps: Callable[[Any], bytes] = as_python2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(FILES):
        (folder / name).write_bytes(dumps(batch(ROWS + seed, seed)))
    return folder


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return load_cifar10(write_cifar10(tmp_path_factory.mktemp("cifar")))


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("below", [".", "cifar-10-batches-py"])
def test_the_standard_files_are_read_from_their_folder_or_the_one_above(
    tmp_path: Path, writer: str, below: str
) -> None:
    write_cifar10(tmp_path / below, WRITERS[writer])
    task = load_cifar10(tmp_path)
    batches = [batch(ROWS + seed, seed) for seed in range(6)]
    assert task.train.inputs.dtype == torch.uint8
    assert task.train.inputs.shape[1:] == (3, 32, 32)
    assert np.array_equal(task.train.inputs.flatten(1), np.concatenate([part[b"data"] for part in batches[:5]]))
    assert task.train.targets.tolist() == [label for part in batches[:5] for label in part[b"labels"]]
    assert np.array_equal(task.test.inputs.flatten(1), batches[5][b"data"])
    assert task.test.targets.tolist() == batches[5][b"labels"]


@pytest.mark.parametrize("below", [".", "cifar-100-python"])
def test_cifar100_has_fine_labels(tmp_path: Path, below: str) -> None:
    folder = tmp_path / below
    folder.mkdir(exist_ok=True)
    parts = [batch(20, seed, "fine_labels", classes=100) for seed in (0, 1)]
    for name, part in zip(("train", "test"), parts, strict=True):
        (folder / name).write_bytes(as_python2(part))
    task = load_cifar100(tmp_path)
    assert task.train.targets.tolist() == parts[0][b"fine_labels"]
    assert task.test.targets.tolist() == parts[1][b"fine_labels"]
    with torch.device("meta"):
        assert build_model(task, None)(torch.empty(2, 3, 32, 32)).shape == (2, 100)


@pytest.mark.parametrize("name", MODELS)
def test_models_take_the_images(task: Task, name: str) -> None:
    with torch.device("meta"):
        assert build_model(task, name)(torch.empty(2, 3, 32, 32)).shape == (2, 10)


def test_the_default_is_resnet18(task: Task) -> None:
    assert next(iter(task.models)) == "resnet18"


def normalised(images: torch.Tensor) -> torch.Tensor:
    mean, deviation = (torch.tensor(of).view(3, 1, 1) for of in (CIFAR10.prepare.mean, CIFAR10.prepare.deviation))
    return (images / 255 - mean) / deviation


def test_for_evaluation_pixels_are_scaled_by_channel(task: Task) -> None:
    prepared = task.prepare(task.test, None)
    assert torch.equal(prepared.targets, task.test.targets)
    torch.testing.assert_close(prepared.inputs, normalised(task.test.inputs))


def test_for_training_each_image_is_a_window_of_the_padded_one_perhaps_mirrored(task: Task) -> None:
    count = 600
    examples = task.train.rows(torch.arange(count) % len(task.train))
    prepared = task.prepare(examples, Noise(0, count, 3, CPU))
    assert prepared.inputs.is_contiguous()
    padded = functional.pad(examples.inputs, (4, 4, 4, 4))
    found = torch.zeros(2, 9, 9, count, dtype=torch.bool)
    for row in range(9):
        for column in range(9):
            window = normalised(padded[:, :, row : row + 32, column : column + 32])
            for mirrored, expected in enumerate((window, window.flip(3))):
                found[mirrored, row, column] = torch.isclose(prepared.inputs, expected, atol=1e-4).all((1, 2, 3))
    assert (found.sum((0, 1, 2)) == 1).all()
    assert found.any(3).sum() > 150
    assert 0.4 < found[1].any(0).any(0).float().mean() < 0.6


def test_without_data_it_is_said_what_is_needed_and_where_it_is() -> None:
    for load, names in ((load_cifar10, "data_batch_1.*test_batch"), (load_cifar100, "train, test")):
        with pytest.raises(DataError, match=rf"needs --data: .*{names}.*python version from https://www\.cs\.toronto"):
            load(None)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        load_cifar10(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"has no data_batch_1, data_batch_2.*toronto"):
        load_cifar10(tmp_path)
    (write_cifar10(tmp_path / "cifar-10-batches-py") / "data_batch_4").unlink()
    with pytest.raises(DataError, match=r"cifar-10-batches-py has no data_batch_4: "):
        load_cifar10(tmp_path)


def test_an_archive_is_to_be_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "cifar-10-python.tar.gz"
    archive.touch()
    with pytest.raises(DataError, match="is a file: unpack it"):
        load_cifar10(archive)


def read(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    return read_batch(path, b"labels", 10)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    damaged = write_cifar10(tmp_path) / "data_batch_3"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"data_batch_3 is no whole CIFAR batch file: .*fetch it again"):
        load_cifar10(tmp_path)


GOOD = {name: dumps(batch()) for name, dumps in WRITERS.items()}


@given(st.sampled_from(list(GOOD)), st.data())
def test_a_file_cut_short_is_refused(
    tmp_path_factory: pytest.TempPathFactory, writer: str, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut"
    path.write_bytes(GOOD[writer][: data.draw(st.integers(0, len(GOOD[writer]) - 1))])
    with pytest.raises(DataError, match="cut is no whole CIFAR batch file"):
        read(path)


def is_data_or_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    message = path.name
    try:
        rows, labels = read(path)
        assert rows.shape == (len(labels), 3072)
    except DataError as error:
        message = str(error)
    assert path.name in message


places = st.one_of(st.integers(0, 200), st.integers(-300, -1), st.integers(0, 13_000))
"""Opcodes are at the beginning and at the end."""


@given(st.sampled_from(list(GOOD)), st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=4))
def test_a_file_with_wrong_bytes_is_data_or_refused(
    tmp_path_factory: pytest.TempPathFactory, writer: str, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(GOOD[writer])
    for place, value in changes:
        content[place % len(content)] = value
    is_data_or_refused(tmp_path_factory.getbasetemp() / "wrong", bytes(content))


@given(
    st.one_of(st.binary(max_size=80), st.lists(st.sampled_from(b"\x80\x02c.()RbtdsuNq]a}\x81\x85\x93\n")).map(bytes))
)
def test_garbage_is_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    is_data_or_refused(tmp_path_factory.getbasetemp() / "garbage", content)


class Calls:
    """Pickled, it asks for a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("inside", [False, True])
def test_a_file_cannot_run_code(tmp_path: Path, protocol: int, inside: bool) -> None:
    trace, path = tmp_path / "trace", tmp_path / "evil"
    evil: Any = Calls(os.system, f"touch {trace}")
    path.write_bytes(pickle.dumps({**batch(), b"evil": evil} if inside else evil, protocol))
    with pytest.raises(DataError, match=r"it asks for posix\.system, which no CIFAR file needs"):
        read(path)
    assert not trace.exists()


@pytest.mark.parametrize(
    "asked", ["builtins eval", "numpy load", "numpy.core.multiarray os", "_codecs decode", "numpy fromfile"]
)
def test_other_names_are_refused(tmp_path: Path, asked: str) -> None:
    path = tmp_path / "evil"
    module, name = asked.split()
    path.write_bytes(b"\x80\x02c" + f"{module}\n{name}\n".encode() + b".")
    with pytest.raises(DataError, match=f"it asks for {module}.{name}, "):
        read(path)


@pytest.mark.parametrize("name", ["numpy dtype", "numpy ndarray", "_codecs encode", "numpy._core.numeric _frombuffer"])
@pytest.mark.parametrize(
    "state", [b"}X\x01\x00\x00\x00aK\x01s", b"N}X\x0b\x00\x00\x00__setstate__NsX\x01\x00\x00\x00a\x86"]
)
def test_a_file_cannot_change_how_later_ones_are_read(tmp_path: Path, name: str, state: bytes) -> None:
    path = tmp_path / "evil"
    path.write_bytes(b"\x80\x02c" + name.replace(" ", "\n").encode() + b"\n" + state + b"b.")
    with pytest.raises(DataError):
        read(path)
    for content in GOOD.values():
        path.write_bytes(content)
        assert np.array_equal(read(path)[0], pixels(ROWS))


@pytest.mark.parametrize("claim", [b"}r\0\0\0\2", b"\x96\0\0\0\x20\0\0\0\0", b"\x8e\0\0\0\x20\0\0\0\0"])
def test_what_a_file_claims_takes_no_memory(tmp_path: Path, claim: bytes) -> None:
    path = tmp_path / "far"
    path.write_bytes(b"\x80\x05" + claim + b".")
    tracemalloc.start()
    with pytest.raises(DataError):
        read(path)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(LARGEST_FILE + 1)
    with pytest.raises(DataError, match=r"large is too large: 400,000,001 bytes"):
        read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "it holds a list, not a dict"),
        ({b"labels": [1]}, "it needs an array under b'data' and a list under b'labels'"),
        ({**batch(), b"data": b"abc"}, "it needs an array"),
        ({**batch(), b"labels": None}, "a list under b'labels'"),
        ({**batch(), b"labels": [1, 2, 3, 10]}, "a label is not a whole number from 0 to 9"),
        ({**batch(), b"labels": [1, 2, 3, -1]}, "a label is not a whole number"),
        ({**batch(), b"labels": [1, 2, 3, True]}, "a label is not a whole number"),
        ({**batch(), b"labels": [1, 2, 3, 1.0]}, "a label is not a whole number"),
        ({**batch(), b"labels": [1, 2, 3]}, r"shape \(4, 3072\) and it has 3 labels"),
        ({**batch(), b"data": pixels(ROWS)[:, :3071].copy()}, r"shape \(4, 3071\) and it has 4 labels"),
        ({**batch(), b"data": pixels(ROWS).reshape(-1)}, r"shape \(12288,\) and"),
        ({**batch(), b"data": pixels(ROWS).astype(np.int64)}, "not of bytes"),
        ({**batch(), b"data": pixels(ROWS).astype(np.int8)}, "not of bytes"),
        ({**batch(), b"data": np.asfortranarray(pixels(ROWS))}, "row by row"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 5])
def test_content_of_another_kind_is_refused(tmp_path: Path, content: Any, message: str, protocol: int) -> None:
    path = tmp_path / "other"
    path.write_bytes(pickle.dumps(content, protocol))
    with pytest.raises(DataError, match=f"other is no whole CIFAR batch file: .*{message}"):
        read(path)


@pytest.mark.parametrize("writer", ["python 2", "protocol 4", "protocol 5"])
def test_a_file_without_examples_is_refused(tmp_path: Path, writer: str) -> None:
    path = tmp_path / "empty"
    path.write_bytes(WRITERS[writer](batch(0)))
    with pytest.raises(DataError, match="it holds no examples"):
        read(path)
