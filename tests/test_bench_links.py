from __future__ import annotations

import math
from unittest.mock import patch

import torch
import torch.distributed as dist

from fleet import Fleet
from gradsieve.bench import links, step
from gradsieve.bench.links import Circumstances, circumstances, direct_bytes
from gradsieve.bench.step import StepRow, StepSetting
from gradsieve.cost.machine import CPU, Machine
from gradsieve.cost.messages import Link
from gradsieve.cost.step import ZERO_LINE, Load, predict

NUMEL = 50_000


def survey() -> Circumstances:
    """As one rank, by messages of a megabyte."""
    assert dist.group.WORLD is not None
    with patch.object(links, "MOST_BYTES", links.FIRST_BYTES):
        return circumstances(NUMEL, dist.group.WORLD, torch.device("cpu"))


def heard_names() -> list[str]:
    heard: list[StepRow | Circumstances] = []
    setting = StepSetting(parameters=NUMEL, steps=1, warmup=0, methods=(), links=True)
    with patch.object(step, "circumstances", lambda *_: Circumstances(Link(1.0, 1.0), CPU)):
        step.measure(setting, torch.device("cpu"), heard.append)
    return [type(one).__name__ for one in heard]


def test_all_ranks_find_the_same_link_and_machine(fleet2: Fleet) -> None:
    first, second = fleet2.run(survey)
    assert first == second
    link, machine = first
    assert 1e6 < link.bandwidth < 1e13
    assert 1e-7 < link.latency < 1
    times = machine.as_record()
    assert all(math.isfinite(value) and value >= 0 for value in times.values())
    assert all(times[name] > 0 for name in ("add", "sweep", "scan", "weigh", "sort", "index", "value", "step"))
    assert machine.crowding >= 1
    assert machine.sort > machine.sweep
    record = first.as_record()
    assert (Link.from_record(record["link"]), Machine.from_record(record["machine"])) == first
    assert predict(ZERO_LINE, Load(NUMEL, world=2), *first).step_seconds > 0


def test_bench_step_tells_them_before_its_rows(fleet2: Fleet) -> None:
    assert fleet2.run(heard_names)[0] == ["Circumstances", "StepRow", "StepRow"]


def test_only_gloo_on_the_cpu_needs_direct_messages() -> None:
    assert direct_bytes("nccl", "cuda") == direct_bytes("gloo", "cuda") == 0
    assert direct_bytes("gloo", "cpu") >= 0
