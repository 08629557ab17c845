"""The registry of tasks, and laws of all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradsieve import tasks
from gradsieve.tasks import TASKS, DataError, Examples, Noise, Task, build_model, load_task
from gradsieve.tasks.augment import whole_below
from gradsieve.tasks.cifar import CIFAR10
from gradsieve.tasks.ratings import WithNegatives
from gradsieve.tasks.task import Prepare

CPU = torch.device("cpu")

OWN = """
from torch import nn
from gradsieve.tasks import DataError, Examples, Task
import torch

examples = Examples(torch.zeros(4, 2), torch.zeros(4).long())
ready = Task("ready", examples, examples, {"line": lambda: nn.Linear(2, 2)})
number = 7
network = nn.Linear(2, 2)

def made(data):
    return Task(f"made from {data}", examples, examples, {})

def broken(data):
    raise KeyError("the column")

def picky(data):
    raise DataError("not this file")

def empty(data):
    return None

def model():
    return nn.Linear(2, 2)

def broken_model():
    return 1 / 0
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a user's modules, importable."""
    (tmp_path / "own_tasks.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("raise RuntimeError('half done')")
    (tmp_path / "own_exit.py").write_text("raise SystemExit(3)")
    (tmp_path / "own_needy.py").write_text("import not_installed_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]


def task_of(**models: Callable[[], nn.Module]) -> Task:
    examples = Examples(torch.zeros(2, 2), torch.zeros(2).long())
    return Task("toy", examples, examples, models)


def test_the_tasks_are_these() -> None:
    assert list(TASKS) == ["digits", "cifar10", "cifar100", "characters", "words", "ratings"]
    types = {"Task", "Recipe", "Measure", "Examples", "Noise", "DataError"}
    assert set(tasks.__all__) == types | {"TASKS", "accuracy", "load_task", "base_model", "build_model"}


def test_a_task_is_loaded_by_name() -> None:
    task = load_task("digits", None)
    assert task.name == "digits"
    assert build_model(task, None)(task.train.inputs[:2]).shape == (2, 10)


@pytest.mark.parametrize("name", sorted(TASKS.keys() - {"digits"}))
def test_every_task_with_data_says_that_there_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=f"the task {name} needs --data: "):
        load_task(name, None)
    with pytest.raises(DataError, match="nowhere: there is no such file or folder"):
        load_task(name, tmp_path / "nowhere")
    with pytest.raises(DataError, match="cannot be read: File name too long"):
        load_task(name, tmp_path / ("x" * 300))


def test_an_unknown_task_is_refused_with_near_names() -> None:
    message = r"unknown task 'cifar'; did you mean .*'cifar10'.*valid are: digits, cifar10.*package\.module:object"
    with pytest.raises(DataError, match=message):
        load_task("cifar", None)
    with pytest.raises(DataError, match="unknown task ''; valid are: digits"):
        load_task("", None)


@pytest.mark.usefixtures("own")
def test_a_task_of_the_users_own_is_found(tmp_path: Path) -> None:
    assert load_task("own_tasks:ready", None).name == "ready"
    assert load_task("own_tasks:made", None).name == "made from None"
    assert load_task("own_tasks:made", tmp_path).name == f"made from {tmp_path}"


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_tasks:", "is not of the form package.module:object"),
        (":made", "is not of the form package.module:object"),
        ("own_tasks:made:twice", "is not of the form package.module:object"),
        ("own_nothing:made", "there is no module 'own_nothing': it must be installed, in the current folder or on PY"),
        ("own_tasks.below:made", "there is no module 'own_tasks.below'"),
        ("own_nothing.below:made", "there is no module 'own_nothing'"),
        ("own_needy:made", "importing own_needy raised ModuleNotFoundError: No module named 'not_installed_at_all'"),
        ("own_broken:made", "importing own_broken raised RuntimeError: half done"),
        ("own_exit:made", "importing own_exit raised SystemExit: 3"),
        ("..own:made", "importing ..own raised TypeError"),
        ("own_tasks:mode", "the module own_tasks has no 'mode'; did you mean 'model' or 'made'"),
        ("own_tasks:number", "is a int: a Task is needed, or a function that makes one from `data`"),
        ("own_tasks:empty", "own_tasks:empty returned a NoneType, not a Task"),
        ("own_tasks:broken", "own_tasks:broken raised KeyError: 'the column'"),
        ("own_tasks:model", r"own_tasks:model raised TypeError: model\(\) takes 0"),
        ("own_tasks:picky", "^not this file$"),
    ],
)
def test_what_is_no_task_is_refused(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_task(name, None)


@pytest.mark.usefixtures("own")
def test_data_for_a_users_own_task_must_be_there_and_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: there is no such file"):
        load_task("own_tasks:made", tmp_path / "nowhere")
    with pytest.raises(DataError, match="is a Task as it stands and reads no file: leave out --data"):
        load_task("own_tasks:ready", tmp_path)


@pytest.mark.usefixtures("own")
def test_a_model_is_the_first_or_the_one_named_or_the_users_own() -> None:
    task = task_of(first=lambda: nn.Linear(2, 3), second=lambda: nn.Linear(2, 4))
    for name, width in ((None, 3), ("first", 3), ("second", 4), ("own_tasks:model", 2)):
        model = build_model(task, name)
        assert isinstance(model, nn.Linear)
        assert model.out_features == width


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet", r"the task toy has no model 'resnet'; did you mean 'resnet18'\? valid are: resnet18, mlp, or your"),
        ("own_tasks:number", "is a int: a function without arguments that makes a model is needed"),
        ("own_tasks:network", "is a Linear: a function without arguments"),
        ("own_tasks:broken_model", "own_tasks:broken_model raised ZeroDivisionError: division by zero"),
        ("own_tasks:empty", "own_tasks:empty raised TypeError"),
        ("own_tasks:Examples", "own_tasks:Examples raised TypeError"),
        ("builtins:dict", "builtins:dict returned a dict, not a torch.nn.Module"),
        ("own_tasks:modle", "did you mean 'model'"),
    ],
)
def test_what_is_no_model_is_refused(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_model(task_of(resnet18=lambda: nn.Linear(2, 2), mlp=lambda: nn.Linear(2, 2)), name)


def test_a_task_without_models_says_so() -> None:
    with pytest.raises(DataError, match=r"there are none, or your own as package\.module:callable"):
        build_model(task_of(), None)


PREPARES: dict[str, tuple[Prepare, Callable[[int], Any]]] = {
    "cifar10": (CIFAR10.prepare, lambda count: torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8)),
    "ratings": (WithNegatives(50), lambda count: torch.randint(0, 50, (count, 2))),
}
each_prepare = pytest.mark.parametrize("name", PREPARES)


def batch_of(name: str, count: int) -> Examples:
    torch.manual_seed(count)
    return Examples(PREPARES[name][1](count), torch.ones(count))


def same(left: Examples, right: Examples) -> bool:
    return torch.equal(left.inputs.cpu(), right.inputs.cpu()) and torch.equal(left.targets.cpu(), right.targets.cpu())


@each_prepare
@given(start=st.integers(0, 100_000), count=st.integers(2, 16), key=st.integers(0, 2**32 - 1), data=st.data())
def test_what_an_example_becomes_depends_on_its_place_alone(
    name: str, start: int, count: int, key: int, data: st.DataObject
) -> None:
    prepare, batch, cut = PREPARES[name][0], batch_of(name, count), data.draw(st.integers(1, count - 1))
    whole = prepare(batch, Noise(start, count, key, CPU))
    first = prepare(batch.rows(torch.arange(cut)), Noise(start, cut, key, CPU))
    second = prepare(batch.rows(torch.arange(cut, count)), Noise(start + cut, count - cut, key, CPU))
    parts = Examples(torch.cat([first.inputs, second.inputs]), torch.cat([first.targets, second.targets]))
    assert same(whole, parts)


@each_prepare
def test_another_key_makes_something_else_of_it(name: str) -> None:
    prepare, batch = PREPARES[name][0], batch_of(name, 50)
    first, second = (prepare(batch, Noise(0, 50, key, CPU)) for key in (1 << 20, 1 << 21))
    assert not same(first, second)


@each_prepare
def test_a_batch_is_left_as_it_was(name: str) -> None:
    batch, untouched = batch_of(name, 20), batch_of(name, 20)
    for noise in (Noise(0, 20, 0, CPU), None):
        PREPARES[name][0](batch, noise)
        assert same(batch, untouched)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@each_prepare
def test_on_cuda_nothing_waits_for_the_host_and_all_is_the_same(name: str) -> None:
    prepare, batch, cuda = PREPARES[name][0], batch_of(name, 64), torch.device("cuda", 0)
    moved = batch.to(cuda)
    prepare(moved, Noise(0, 64, 0, cuda))
    torch.cuda.set_sync_debug_mode("error")
    try:
        prepared = prepare(moved, Noise(640, 64, 5, cuda))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = prepare(batch, Noise(640, 64, 5, CPU))
    torch.testing.assert_close(prepared.inputs.cpu(), expected.inputs)
    assert torch.equal(prepared.targets.cpu(), expected.targets)


@given(st.integers(1, 2**24))
def test_the_limit_itself_never_comes_up(limit: int) -> None:
    extremes = torch.tensor([0.5 / 2**23, 1 - 0.5 / 2**23])
    assert whole_below(extremes, limit).tolist() == [0 if limit < 2**24 else 1, limit - 1]
