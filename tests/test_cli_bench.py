from __future__ import annotations

import json
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import Done, call, complaint, spawn
from gradsieve.bench import start, timing
from gradsieve.bench.start import Crew, make_crew
from gradsieve.bench.step import StepRow
from gradsieve.checks import UsageError
from gradsieve.training.place import Place

STEP = ["bench", "step", "--parameters", 20_000, "--steps", 2, "--warmup", 1, "--device", "cpu"]
KERNELS = ["bench", "kernels", "--numel", "2000,1000", "--repeats", 2, "--device", "cpu"]
PROVENANCE = {"commit", "torch", "python", "cpu", "cores", "host", "started", "command"}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timing, "FLUSH_BYTES", 1 << 20)


def printed(done: Done) -> Any:
    """The JSON that is all of what a command printed."""
    assert done.code == 0, done
    assert done.err == ""
    return json.loads(done.out)


def test_steps_are_shown_and_written() -> None:
    done = call(*STEP, "--methods", "micro,powersgd(rank=2)", "--json", "steps.json")
    assert done.code == 0, done
    assert done.err == ""
    assert done.out.startswith("20,000 parameters, density 0.01, 2 ranks, gloo on cpu")
    for told in ("plain DDP", "no-op hook", "micro", "PowerSGD rank 2", "of dense", "measured: "):
        assert told in done.out
    assert done.last == "steps.json"
    found = json.loads(Path("steps.json").read_text())
    assert found["benchmark"] == "step"
    assert "cpu" in found["path"].lower()
    assert found["failure"] is None
    assert found["provenance"].keys() >= PROVENANCE
    asked = {
        "parameters": 20_000,
        "model": None,
        "density": 0.01,
        "world": 2,
        "backend": "gloo",
        "steps": 2,
        "warmup": 1,
    }
    assert found["setting"].items() >= asked.items()
    assert [row["name"] for row in found["rows"]] == ["plain DDP", "no-op hook", "micro", "PowerSGD rank 2"]
    for row in found["rows"]:
        assert row["seconds"].keys() == {"median", "percentile_10", "percentile_90", "repeats"}
        assert row["ratio_to_dense"] > 0
        assert row["error"] is None


def test_steps_as_json_alone() -> None:
    found = printed(call(*STEP, "--methods", "dense", "--workers", 1, "--json", "-"))
    assert found["setting"]["world"] == 1
    assert [row["name"] for row in found["rows"]] == ["plain DDP", "no-op hook", "dense"]


def test_bytes_by_counter_are_shown_where_an_interface_is_named() -> None:
    order = [*STEP, "--methods", "micro", "--interface", "lo", "--threads", 1]
    done = call(*order, "--json", "steps.json")
    assert done.code == 0, done
    for told in ("by counter", "by formula", "ratio"):
        assert told in done.out
    found = json.loads(Path("steps.json").read_text())
    assert found["setting"].items() >= {"interface": "lo", "threads": 1}.items()
    assert all(row["counted_bytes"] > 0 for row in found["rows"])


def test_kernels_are_shown_and_written() -> None:
    done = call(*KERNELS, "--json", "kernels.json")
    assert done.code == 0, done
    for told in ("2,000 entries", "1,000 entries", "copy", "of floor", "published micro", "cold caches: 1 MiB"):
        assert told in done.out
    found = json.loads(Path("kernels.json").read_text())
    assert found["benchmark"] == "kernels"
    assert found["setting"]["numels"] == [2000, 1000]
    assert found["setting"]["caches"].startswith("cold caches")
    assert found["provenance"].keys() >= PROVENANCE
    assert {row["name"] for row in found["rows"]} >= {"copy", "add_ + zero_", "topk", "micro, local step"}
    assert all(row["ratio_to_floor"] > 0 for row in found["rows"])


def test_kernels_as_json_alone() -> None:
    assert len(printed(call(*KERNELS, "--numel", "1_000", "--json", "-"))["rows"]) >= 4


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("step --density 0", "density must lie in (0, 1], not 0.0"),
        ("step --steps 0", "steps must be at least 1, not 0"),
        ("step --workers 0", "workers must be at least 1, not 0"),
        ("step --threads 0", "threads must be at least 1, not 0"),
        ("step --interface eht7", "--interface: there is no 'eht7' on this machine"),
        ("step --parameters 5 --model resnet18", "--parameters and --model exclude one another"),
        ("step --parameters many", "Invalid value for '--parameters'"),
        ("step --model resnet", "unknown model 'resnet'"),
        ("step --methods nope", "--methods: unknown 'nope'"),
        ("step --wire int8", "wire must be one of 'float32', 'bfloat16', 'float8', not 'int8'"),
        ("step --scope all", "scope must be one of 'model', 'bucket', not 'all'"),
        ("step --device tpu", "device must be cpu, cuda or cuda:N, not 'tpu'"),
        ("step --device cuda", "device cuda is not here"),
        ("step --json folder", "--json folder is a folder"),
        ("step --json file/below", "cannot write to the folder file"),
        ("kernels --numel many", "--numel takes whole numbers separated by commas, not 'many'"),
        ("kernels --numel 0", "numel must be at least 1, not 0"),
        ("kernels --numel ,", "--numel names no length"),
        ("kernels --repeats 0", "repeats must be at least 1, not 0"),
        ("kernels --partitions 0", "partitions must be at least 1, not 0"),
        ("kernels --device cuda:7", "device cuda:7 is not here"),
        ("nothing", "No such command 'nothing'"),
    ],
)
def test_what_the_user_can_mend_ends_with_one_line(arguments: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    Path("folder").mkdir()
    Path("file").write_text("something")
    assert told in complaint(call("bench", *arguments.split()))


def dying(rank: int, *order: Any) -> None:
    """A worker that tells one row and dies."""
    pipe: Connection = order[-1]
    if rank == 0:
        pipe.send(StepRow("plain DDP", error="failed: for a test"))
        pipe.close()
        os._exit(3)


def test_a_worker_that_dies_is_told_and_rows_before_it_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_work", dying)
    done = call(*STEP, "--methods", "micro")
    assert done.code == 1
    assert "plain DDP: failed: for a test" in done.out
    assert "failed: worker 0: process 0 terminated with exit code 3" in done.out


@pytest.mark.slow
def test_a_launchers_workers_measure_together(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "-m", "gradsieve"]
    found = printed(spawn(*launcher, *STEP, "--methods", "micro", "--json", "-", cwd=tmp_path)._replace(err=""))
    assert found["setting"]["world"] == 2
    assert [row["name"] for row in found["rows"]] == ["plain DDP", "no-op hook", "micro"]


def test_who_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place("torchrun", 0, 4, 0, 4, "here", 1234)
    assert make_crew(None, None, "cpu") == Crew(2, "cpu", "gloo")
    assert make_crew(None, 3, "cpu") == Crew(3, "cpu", "gloo")
    assert make_crew(place, None, "cpu") == Crew(4, "cpu", "gloo")
    assert make_crew(place, None, "cpu", 2) == Crew(4, "cpu", "gloo", threads=2)
    with pytest.raises(UsageError, match="torchrun started 4 workers, but 3 are asked for"):
        make_crew(place, 3, "cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert make_crew(None, None, "cuda") == Crew(1, "cuda", "nccl")
    assert make_crew(None, 2, "cuda") == Crew(2, "cuda", "gloo")
