from __future__ import annotations

from pathlib import Path

import pytest

import small_runs
from gradsieve.baselines import BASELINES, baseline, link_bytes
from gradsieve.checks import UsageError
from gradsieve.runs import read_run
from gradsieve.training import runner
from gradsieve.training.config import TrainConfig
from small_runs import plan, started


def test_names_and_expressions() -> None:
    assert {name: BASELINES[name]({}).name for name in BASELINES} == {
        "ddp": "plain DDP",
        "fp16": "fp16 hook",
        "bf16": "bf16 hook",
        "powersgd": "PowerSGD rank 1",
    }
    assert baseline("powersgd", {"rank": 4}).expression == "powersgd(rank=4)"
    assert link_bytes(100, world=4) == 150


def test_one_bucket_where_callbacks_would_meet_in_any_order() -> None:
    assert baseline("powersgd", {}).bucket_megabytes(1 << 20, "gloo") == 10
    assert baseline("powersgd", {}).bucket_megabytes(1 << 20, "nccl") is None
    assert baseline("ddp", {}).bucket_megabytes(1 << 20, "gloo") is None


def test_plans_of_baselines() -> None:
    asked = plan(method="powersgd", workers=2, density=None)
    assert (asked.label, asked.config.method) == ("PowerSGD rank 1", "powersgd(rank=1)")
    assert (asked.config.density, asked.config.checkpoint_every) == (None, 0)


@pytest.mark.parametrize(
    "options",
    [{"density": 0.1}, {"virtual": 2}, {"checkpoint_every": 5}, {"wire": "bfloat16"}, {"scope": "bucket"}],
    ids=lambda options: next(iter(options)),
)
def test_what_a_baseline_does_not_do_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=f"ddp is PyTorch's own and takes no {next(iter(options))}"):
        TrainConfig(method="ddp", **options)  # type: ignore[arg-type]


def test_virtual_workers_use_no_network() -> None:
    for options in ({"interface": "eth0"}, {"passes_alone": 2}, {"uplink": "1:eth0"}):
        with pytest.raises(UsageError, match="virtual workers use no network"):
            TrainConfig(virtual=2, **options)


def test_plain_ddp_trains_as_dense_does_and_stops_when_good(tmp_path: Path) -> None:
    counted = {"interface": "lo", "passes_alone": 2, "workers": 2, "density": None}
    dense = started(tmp_path / "dense", method="dense", workers=2, density=None)
    plain = started(tmp_path / "ddp", method="ddp", stop_at=0.5, eval_every=0.5, **counted)
    assert len(plain.steps) < len(dense.steps)
    assert plain.status == "finished"
    assert float(plain.evaluations[-1]["eval/accuracy"] or 0) >= 0.5
    assert all(float(record["eval/accuracy"] or 0) < 0.5 for record in plain.evaluations[:-1])
    for own, other in zip(plain.steps, dense.steps, strict=False):
        assert own["train/loss"] == pytest.approx(other["train/loss"], rel=1e-4)
        assert own["comm/wire_bytes"] == 4 * plain.header["model"]["parameters"]
        # both workers are on this machine, so its loopback sees the bytes of both
        assert float(own["comm/sent_bytes"] or 0) > float(own["comm/wire_bytes"] or 0)
    assert plain.header["seconds_alone"] > 0
    assert dense.header["seconds_alone"] is None
    with pytest.raises(UsageError, match="ddp is PyTorch's own, and its runs cannot be resumed"):
        runner.resume(tmp_path / "ddp", {})
    with pytest.raises(UsageError, match="cannot be resumed"):
        runner.train_or_resume({"method": "ddp", "output": str(tmp_path / "new")}, "here")


def test_powersgd_trains(tmp_path: Path) -> None:
    run = started(tmp_path / "run", method="powersgd(rank=1)", workers=2, density=None, steps=5)
    assert (run.method, run.density) == ("PowerSGD rank 1", 1.0)
    everything = 4 * run.header["model"]["parameters"]
    assert [record["comm/wire_bytes"] == everything for record in run.steps] == [True, True, False, False, False]
    assert read_run(run.folder).summary["train/loss"] < 3
    assert small_runs.workers_alive() == []
