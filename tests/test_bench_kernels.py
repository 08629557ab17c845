from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradsieve import kernels as library
from gradsieve.bench import kernels, timing
from gradsieve.bench.kernels import KernelRow, KernelSetting
from gradsieve.bench.local import local_steps, stand_in
from gradsieve.bench.timing import Case, Timer
from gradsieve.checks import UsageError

CPU = torch.device("cpu")
FIXED = ["copy", "add_ + zero_", "topk", "published micro"]


@pytest.fixture(autouse=True)
def _small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "FLUSH_BYTES", 1 << 20)


def measured(*numels: int) -> list[KernelRow]:
    setting = KernelSetting(numels, density=0.05, partitions=4, repeats=2)
    return list(kernels.measure(setting, CPU, Timer(CPU, setting.repeats)))


def test_every_size_has_every_row() -> None:
    rows = measured(20_000, 1023)
    steps = [f"{name}, local step" for name in ("micro", "exdyna", "union", "iwp")]
    assert [row.name for row in rows] == [*FIXED, *steps] * 2
    assert [row.numel for row in rows] == [20_000] * 8 + [1023] * 8
    for row in rows:
        assert row.error is None, row
        assert row.seconds is not None
        assert row.seconds.repeats == 2
        assert row.host_seconds is None
        assert row.extra_bytes is None
        assert (row.ratio or 0) > 0


def test_the_floor_is_two_copies() -> None:
    copy, *others = measured(20_000)
    assert copy.seconds is not None
    assert {row.floor_seconds for row in (copy, *others)} == {2 * copy.seconds.median}
    assert copy.ratio == 0.5


def test_a_call_that_fails_says_why_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Case:
        raise RuntimeError("out of\norder")

    steps: Callable[..., object] = lambda *_: {"broken": broken, "idle": lambda: Case(lambda: None)}  # noqa: E731
    monkeypatch.setattr(kernels, "local_steps", steps)
    rows = {row.name: row for row in measured(1000)}
    assert list(rows) == [*FIXED, "broken, local step", "idle, local step"]
    assert rows["broken, local step"].error == "failed: RuntimeError: out of order"
    assert rows["broken, local step"].as_record()["ratio_to_floor"] is None
    assert rows["idle, local step"].seconds is not None


def test_every_call_is_prepared() -> None:
    order: list[str] = []
    found = Timer(CPU, 3)(Case(lambda: order.append("call"), lambda: order.append("prepare")))
    assert len(found.device) == 3
    assert order == ["prepare", "call"] * (3 + timing.WARMUP)


def test_local_steps_run_again_and_again() -> None:
    for make in local_steps(5000, 0.05, 4, CPU).values():
        call, prepare = make()
        for _ in range(6):
            prepare()
            call()


@pytest.mark.parametrize(("world", "count"), [(1, 0), (2, 50), (4, 75)])
def test_the_others_send_all_but_this_ranks_share(world: int, count: int) -> None:
    others = stand_in(1000, 0.1, world, CPU)
    assert len(others) == count
    assert bool((others.diff() >= 0).all())


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"numels": (0,)}, "numel must be at least 1, not 0"),
        ({"density": 2.0}, "density must lie in"),
        ({"partitions": 0}, "partitions must be at least 1, not 0"),
        ({"repeats": 0}, "repeats must be at least 1, not 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(setting: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError) as refused:
        KernelSetting(**setting)  # type: ignore[arg-type]
    assert told in str(refused.value)


def test_the_path_is_told_in_words() -> None:
    assert "cpu" in library.path(CPU).lower()


@pytest.mark.gpu
def test_on_cuda_host_time_and_memory_are_told_too() -> None:
    cuda = torch.device("cuda")
    vector = torch.ones(1 << 20, device=cuda)

    def call() -> None:
        torch.add(vector, 1)

    found = Timer(cuda, 3)(Case(call))
    assert len(found.device) == 3
    assert min(found.device) > 0
    assert found.host is not None
    assert found.extra_bytes == 4 << 20
