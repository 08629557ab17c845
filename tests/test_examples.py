from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fleet import Fleet
from gradsieve.runs import read_run
from gradsieve.training import runner
from gradsieve.training.config import TrainConfig

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _ddp_lines() -> list[str]:
    example = load("ddp")
    example.NUM_EPOCHS = 2
    data = example.make_data(512, seed=2).shard(dist.get_rank(), dist.get_world_size())
    held_out = example.make_data(256, seed=3)
    return [example.report(method, *example.train(method, data), held_out) for method in example.METHODS]


def test_the_ddp_example_trains_with_every_method_it_names(fleet2: Fleet) -> None:
    first, second = fleet2.run(_ddp_lines)
    assert first == second
    assert [line.split()[0] for line in first] == ["dense", "topk", "micro", "exdyna", "union"]


def _elastic_saved(folder: Path) -> Any:
    training = load("elastic").Training()
    for _ in range(4):
        training.step()
    training.save(folder)
    again = load("elastic").Training()
    again.load(folder)
    assert again.steps_done == 4
    assert all(torch.equal(residual, again.sieve.residuals()[name]) for name, residual in _owed(training).items())
    return _owed(training)


def _elastic_loaded(folder: Path) -> Any:
    training = load("elastic").Training()
    training.load(folder)
    owed = _owed(training)
    training.step()
    training.save(folder)
    return owed


def _owed(training: Any) -> dict[str, torch.Tensor]:
    residuals: dict[str, torch.Tensor] = training.sieve.residuals()
    return residuals


def test_the_elastic_example_goes_on_with_another_number_of_workers(
    tmp_path: Path, fleets: Callable[[int], Fleet]
) -> None:
    before = fleets(2).run(_elastic_saved, tmp_path)
    (after,) = fleets(1).run(_elastic_loaded, tmp_path)
    for name, residual in after.items():
        mean = torch.stack([owed[name] for owed in before]).mean(0)
        assert float(mean.norm()) > 0
        torch.testing.assert_close(residual, mean)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["rank-0.pt", "shared.pt", "step-5"]


def test_the_task_of_the_examples_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    config = TrainConfig(task="own_task:spirals", virtual=2, device="cpu", epochs=4, output=tmp_path / "run", threads=1)
    ended = runner.train(config)
    assert ended.status == "finished"
    assert read_run(ended.folder).summary["eval/accuracy"] > 0.9
