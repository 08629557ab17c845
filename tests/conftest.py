from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec

# before torch is imported: several processes share few cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from fleet import Fleet

if find_spec("triton") is not None and not torch.cuda.is_available():
    # before anything imports Triton: its kernels are then run on the CPU, entry by entry
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("gradsieve", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("gradsieve")


COMPARED = {"randomk", "cltk", "hard_threshold", "sidco", "deft", "gtopk", "oktopk"}
"""Methods that ours are held against. Their laws are always tested in one process; over real processes with two ranks
where a test is for several numbers of them, and all else where the slow tests are."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        method = str(parameters.get("name", parameters.get("variant", ""))).partition("-")[0]
        over_processes = not {"fleets", "fleet2", "fleet3"}.isdisjoint(getattr(item, "fixturenames", ()))
        if method in COMPARED and over_processes and parameters.get("world") != 2:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def fleets() -> Iterator[Callable[[int], Fleet]]:
    """Real processes by number of ranks, started on first use."""
    started: dict[int, Fleet] = {}
    yield lambda world: started.setdefault(world, Fleet(world))
    for fleet in started.values():
        fleet.stop()


@pytest.fixture(scope="session")
def fleet2(fleets: Callable[[int], Fleet]) -> Fleet:
    return fleets(2)


@pytest.fixture(scope="session")
def fleet3(fleets: Callable[[int], Fleet]) -> Fleet:
    return fleets(3)
