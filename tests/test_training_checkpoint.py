from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch

import small_runs
from gradsieve import METHODS
from gradsieve.runs import RunError
from gradsieve.training.checkpoint import CURRENT, LAST, NEXT, checkpoint_of, load_checkpoint, save_checkpoint
from gradsieve.training.virtual import Virtual
from small_runs import assert_same_state, leaves, plan

CPU = torch.device("cpu")


def engine_after(steps: int, **options: Any) -> Virtual:
    engine = Virtual(plan(**options), CPU)
    for step in range(steps):
        engine.gradients(step)
    return engine


def state_of(engine: Virtual) -> dict[str, Any]:
    return dict(leaves(engine.worker_states(), "rank"))


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_brings_every_worker_back(tmp_path: Path, method: str) -> None:
    engine = engine_after(3, method=method)
    expected, shared = state_of(engine), {"steps_done": 3, "weights": {"a": torch.randn(3)}}
    save_checkpoint(tmp_path, engine, shared)
    files = sorted(file.name for file in (tmp_path / CURRENT).iterdir())
    assert files == [f"{name}.{kind}" for name in ("rank-0", "rank-1", "shared") for kind in ("pt", "sha256")]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [CURRENT]
    engine.gradients(3)
    other = engine_after(0, method=method)
    found = load_checkpoint(tmp_path, other)
    assert_same_state(dict(leaves(found, "")), dict(leaves(shared, "")))
    assert_same_state(state_of(other), expected)


@pytest.mark.parametrize("method", METHODS)
def test_the_files_hold_nothing_but_plain_values_and_tensors(tmp_path: Path, method: str) -> None:
    small_runs.here(tmp_path, method=method, steps=2)
    for name in ("shared.pt", "rank-0.pt", "rank-1.pt"):
        assert torch.load(tmp_path / CURRENT / name, weights_only=True)


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no checkpoint to go on from: start it anew"):
        load_checkpoint(tmp_path, engine_after(0))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-200]),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "nonsense": lambda path: path.write_bytes(b"nonsense" * 100),
    "an object": lambda path: torch.save(Path("dangerous"), path),
}


@pytest.mark.parametrize("name", ["shared.pt", "rank-0.pt", "rank-1.pt"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, name: str, damage: Callable[[Path], object]) -> None:
    engine = engine_after(1)
    save_checkpoint(tmp_path, engine, {"steps_done": 1})
    damage(tmp_path / CURRENT / name)
    with pytest.raises(RunError, match=f"{name} cannot be loaded"):
        load_checkpoint(tmp_path, engine)


def test_a_file_in_which_torch_would_notice_nothing_is_refused(tmp_path: Path) -> None:
    engine = engine_after(1)
    save_checkpoint(tmp_path, engine, {"steps_done": 1})
    path = tmp_path / CURRENT / "rank-1.pt"
    whole = torch.load(path, weights_only=True)
    data = bytearray(path.read_bytes())
    # within the residual, as it stands in the file
    data[data.index(whole["residual"].numpy().tobytes()) + 10] ^= 1
    path.write_bytes(data)
    assert not torch.equal(torch.load(path, weights_only=True)["residual"], whole["residual"])
    with pytest.raises(RunError, match=r"rank-1\.pt cannot be loaded.*SHA-256 is not that in rank-1\.sha256"):
        load_checkpoint(tmp_path, engine)


def test_a_checkpoint_of_before_there_were_sums_is_loaded(tmp_path: Path) -> None:
    engine = engine_after(1)
    save_checkpoint(tmp_path, engine, {"steps_done": 1})
    (tmp_path / CURRENT / "rank-1.sha256").unlink()
    with pytest.raises(RunError, match=r"rank-1\.pt cannot be loaded: FileNotFoundError"):
        load_checkpoint(tmp_path, engine)
    for name in ("rank-0", "shared"):
        (tmp_path / CURRENT / f"{name}.sha256").unlink()
    assert load_checkpoint(tmp_path, engine) == {"steps_done": 1}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("state", [[], {}, {"learned": 1, "residual": torch.zeros(3)}], ids=["list", "empty", "other"])
def test_a_whole_file_that_holds_something_else_is_refused(tmp_path: Path, state: Any, world: int) -> None:
    save_checkpoint(tmp_path, engine_after(1), {"steps_done": 1})
    for path in (tmp_path / CURRENT).glob("*.sha256"):
        path.unlink()
    torch.save(state, tmp_path / CURRENT / "rank-0.pt")
    with pytest.raises(ValueError, match=r"rank-0\.pt cannot be loaded: it holds a list|a worker's \w+ must"):
        load_checkpoint(tmp_path, engine_after(0, virtual=world))


class Killed(BaseException):
    """The process ends here."""


class Reaper:
    """Kills at one of the operations on files, which is done by half where that can be."""

    def __init__(self, operation: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = operation
        self._rmtree, self._save = shutil.rmtree, torch.save
        for name in ("rename", "mkdir"):
            monkeypatch.setattr(Path, name, self._whole(getattr(Path, name)))
        monkeypatch.setattr(shutil, "rmtree", self._remove)
        monkeypatch.setattr(torch, "save", self._write)

    def due(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def _whole(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """Done, or not."""

        def mortal(*arguments: Any, **options: Any) -> Any:
            self.due()
            return operation(*arguments, **options)

        return mortal

    def _remove(self, folder: Path, **options: Any) -> None:
        if self.left == 0 and folder.exists():
            (folder / "rank-1.pt").unlink(missing_ok=True)
        self.due()
        self._rmtree(folder, **options)

    def _write(self, value: Any, file: IO[bytes]) -> None:
        self._save(value, file)
        if self.left == 0:
            file.truncate(100)
        self.due()


def killed_at(operation: int, folder: Path, engine: Virtual, shared: dict[str, Any]) -> bool:
    """Save, and be killed at an operation; was there one so late?"""
    with pytest.MonkeyPatch.context() as monkeypatch:
        Reaper(operation, monkeypatch)
        try:
            save_checkpoint(folder, engine, shared)
        except Killed:
            return True
    return False


FOLDERS = [set(names) for count in range(4) for names in itertools.combinations((CURRENT, LAST, NEXT), count)]


@pytest.mark.parametrize("present", FOLDERS, ids=lambda names: "+".join(sorted(names)) or "none")
def test_a_kill_at_any_time_leaves_a_whole_checkpoint(tmp_path: Path, present: set[str]) -> None:
    """Whatever an earlier kill has left: the last checkpoint, the one before, a new one half done."""
    versions = {number: engine_after(number) for number in (1, 2, 3)}
    states = {number: state_of(engine) for number, engine in versions.items()}
    for operation in itertools.count():
        folder = tmp_path / str(operation)
        folder.mkdir()
        for name, version in ((LAST, 1), (CURRENT, 2)):
            if name in present:
                save_checkpoint(folder / "made", versions[version], {"version": version})
                (folder / "made" / CURRENT).rename(folder / name)
        if NEXT in present:
            (folder / NEXT).mkdir()
            (folder / NEXT / "shared.pt").write_bytes(b"half")
        was_killed = killed_at(operation, folder, versions[3], {"version": 3})
        if present & {CURRENT, LAST} or checkpoint_of(folder) is not None:
            engine = engine_after(0)
            version = load_checkpoint(folder, engine)["version"]
            assert_same_state(state_of(engine), states[version])
            assert version == 3 or was_killed
        save_checkpoint(folder, versions[3], {"version": 3})
        assert load_checkpoint(folder, engine_after(0))["version"] == 3
        if not was_killed:
            return


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        (set(), None),
        ({NEXT}, None),
        ({LAST}, LAST),
        ({LAST, NEXT}, LAST),
        ({CURRENT}, CURRENT),
        ({CURRENT, LAST, NEXT}, CURRENT),
    ],
)
def test_the_last_whole_checkpoint_is_the_one_to_go_on_from(
    tmp_path: Path, present: set[str], expected: str | None
) -> None:
    for name in present:
        (tmp_path / name).mkdir()
    found = checkpoint_of(tmp_path)
    assert (None if found is None else found.name) == expected
