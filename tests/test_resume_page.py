"""The examples of docs/resume.md run, in their order."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fleet import Fleet
from toys import Chosen

PAGE = Path(__file__).parent.parent / "docs" / "resume.md"


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def _run(folder: str) -> int:
    names: dict[str, Any] = {
        "ddp_model": DistributedDataParallel(Chosen()),
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "folder": Path(folder),
    }
    for example in examples():
        exec(compile(example, str(PAGE), "exec"), names)
        dist.barrier()  # in real life a run ends between saving and loading
    return len(names["fewer"])


@pytest.mark.parametrize("world", [1, 2])
def test_the_examples_run(world: int, fleets: Callable[[int], Fleet], tmp_path: Path) -> None:
    assert len(examples()) == 7
    assert fleets(world).run(_run, str(tmp_path)) == [1] * world
