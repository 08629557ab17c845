from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fleet import Fleet
from gradsieve.bench import step
from gradsieve.bench.contenders import HEADROOM, ZERO_LINE, Contender, Probe, Seen, contenders
from gradsieve.bench.figures import as_text, spread
from gradsieve.bench.links import Circumstances
from gradsieve.bench.step import StepRow, StepSetting
from gradsieve.checks import UsageError

NUMEL = 20_000
SMALL: dict[str, Any] = {"parameters": NUMEL, "steps": 2, "warmup": 1}


def measured(setting: StepSetting) -> list[StepRow]:
    """As one rank."""
    heard: list[StepRow | Circumstances] = []
    step.measure(setting, torch.device("cpu"), heard.append)
    return [row for row in heard if isinstance(row, StepRow)]


@pytest.fixture(scope="module")
def rows(fleet2: Fleet) -> dict[str, StepRow]:
    of_ranks = fleet2.run(measured, StepSetting(**SMALL))
    assert of_ranks[0] == of_ranks[1]
    return {row.name: row for row in of_ranks[0]}


def test_every_contender_has_a_row(rows: dict[str, StepRow]) -> None:
    ours = ["dense", "topk", "cltk", "hard_threshold", "micro", "exdyna", "union", "iwp"]
    others = ["fp16 hook", "bf16 hook", "PowerSGD rank 1", "PowerSGD rank 4", "published micro"]
    assert list(rows) == [ZERO_LINE, HEADROOM, *ours, *others]
    assert {name for name, row in rows.items() if row.error is not None} <= {"bf16 hook"}
    for row in rows.values():
        if row.seconds is not None:
            assert 0 < row.seconds.low <= row.seconds.median <= row.seconds.high
            assert row.seconds.repeats == 2


def test_bytes_are_those_handed_over(rows: dict[str, StepRow]) -> None:
    sizes = {name: row.wire_bytes for name, row in rows.items()}
    assert sizes[ZERO_LINE] == 4 * NUMEL
    # beside the gradient, a code for each rank
    assert sizes["dense"] == 4 * NUMEL + 4 * 2
    assert sizes[HEADROOM] == 0
    assert sizes["fp16 hook"] == 2 * NUMEL
    assert 0 < (sizes["PowerSGD rank 1"] or 0) < (sizes["PowerSGD rank 4"] or 0) < 2 * NUMEL
    assert 0 < (sizes["micro"] or 0) < 0.2 * NUMEL
    # 64 bits an index, and at least one entry
    assert (sizes["published micro"] or 0) >= 8 + 8 + 4


def test_bytes_through_a_link_follow_the_formula_for_rings(rows: dict[str, StepRow]) -> None:
    world = 2
    for name in (ZERO_LINE, "dense", "fp16 hook", "PowerSGD rank 1"):
        assert rows[name].link_bytes == round((rows[name].wire_bytes or 0) * 2 * (world - 1) / world)
    assert rows[HEADROOM].link_bytes == 0
    # of two ranks, both collectives send on what was handed over once
    for name in ("published micro", "micro", "union"):
        assert rows[name].link_bytes == pytest.approx(rows[name].wire_bytes or 0, abs=1)
    assert all(row.counted_bytes is None for row in rows.values())


def test_bytes_that_an_interface_sent_are_counted(fleet2: Fleet) -> None:
    setting = StepSetting(**SMALL, methods=("micro",), interface="lo")
    of_ranks = fleet2.run(measured, setting)
    assert of_ranks[0] == of_ranks[1]
    found = {row.name: row for row in of_ranks[0]}
    # both ranks send through it, and other tests may
    assert (found[ZERO_LINE].counted_bytes or 0) >= 2 * (found[ZERO_LINE].link_bytes or 0) == 2 * 4 * NUMEL
    assert found[ZERO_LINE].as_record()["ratio_to_formula"] >= 2
    assert (found["micro"].counted_bytes or 0) > 0
    assert found[HEADROOM].as_record()["ratio_to_formula"] is None
    assert setting.as_record()["interface"] == "lo"


def test_methods_of_ours_say_where_the_time_went(rows: dict[str, StepRow]) -> None:
    for name in ("dense", "micro", "union"):
        assert (rows[name].select_seconds or 0) > 0
        assert (rows[name].exchange_seconds or 0) > 0
    assert rows["micro"].density == pytest.approx(0.01, rel=0.1)
    assert rows["dense"].density == 1
    assert rows[ZERO_LINE].select_seconds is None


def test_ratios_are_to_plain_ddp(rows: dict[str, StepRow]) -> None:
    table = list(rows.values())
    assert rows[ZERO_LINE].as_record(table)["ratio_to_dense"] == 1
    assert rows["micro"].as_record(table)["ratio_to_dense"] > 0
    assert rows["micro"].as_record()["ratio_to_dense"] is None
    assert rows[HEADROOM].as_record(table)["added_seconds"] == 0
    assert rows["micro"].as_record()["added_seconds"] is None


def test_a_row_may_have_a_wire_and_a_scope_of_its_own() -> None:
    methods = ("micro", "micro(wire=bfloat16)", "union(scope=bucket, wire=float32, density=0.1)")
    names = [contender.name for contender in StepSetting(**SMALL | {"methods": methods}).contenders()]
    assert names[2:] == ["micro", "micro, bfloat16", "union at 0.1, float32, bucket"]
    with pytest.raises(UsageError, match="wire must be one of 'float32', 'bfloat16', 'float8', not 'int8'"):
        StepSetting(**SMALL | {"methods": ("micro(wire=int8)",)})


def refused(model: DistributedDataParallel) -> Probe:  # noqa: ARG001 - an `Attach`
    raise TypeError("not\nhere")


def broken(model: DistributedDataParallel) -> Probe:  # noqa: ARG001
    """Breaks down on one rank, while the other waits for it."""
    asked = 0

    def probe() -> Seen:
        nonlocal asked
        asked += 1
        if asked == 2 and dist.get_rank() == 1:
            raise RuntimeError("out of order")
        return Seen(0)

    return probe


def with_trouble(*arguments: Any) -> list[Contender]:
    zero_line, *others = contenders(*arguments)
    return [zero_line, Contender("refused", refused), Contender("broken", broken), *others]


def measured_with_trouble(setting: StepSetting) -> list[StepRow]:
    with patch.object(step, "contenders", with_trouble), patch.object(step, "ROW_SECONDS", 1.0):
        return measured(setting)


def test_a_row_that_fails_says_why_and_the_rest_goes_on(fleet2: Fleet) -> None:
    for found in fleet2.run(measured_with_trouble, StepSetting(**SMALL, methods=("micro",))):
        rows = {row.name: row for row in found}
        assert list(rows) == [ZERO_LINE, "refused", "broken", HEADROOM, "micro"]
        assert rows["refused"].error == "not supported here: TypeError: not here"
        assert (rows["broken"].error or "").startswith("failed: ")
        assert "(on rank " in (rows["broken"].error or "")
        for name in (ZERO_LINE, HEADROOM, "micro"):
            assert rows[name].error is None
            assert rows[name].seconds is not None


def test_expressions_make_contenders() -> None:
    found = contenders(["micro(control=paper)", "topk(density=0.1)", "powersgd(rank=2)", "powersgd"], 0.01, {})
    names = ["micro(control='paper')", "topk at 0.1", "PowerSGD rank 2", "PowerSGD rank 1"]
    assert [contender.name for contender in found] == [ZERO_LINE, HEADROOM, *names]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"density": 0.0}, "density must lie in"),
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"warmup": -1}, "warmup must be at least 0, not -1"),
        ({"parameters": 0}, "parameters must be at least 1, not 0"),
        ({"model": "resnet18"}, "--parameters and --model exclude one another"),
        ({"wire": "int8"}, "wire must be one of 'float32', 'bfloat16', 'float8', not 'int8'"),
        ({"scope": "layer"}, "scope must be one of 'model', 'bucket', not 'layer'"),
        ({"methods": ("micron",)}, "unknown 'micron'; did you mean 'micro'"),
        ({"methods": ("micro(colour=1)",)}, "micro() has no option 'colour'"),
        ({"methods": ("micro", "micro")}, "names micro twice"),
        ({"methods": ("powersgd(rank=0)",)}, "the rank of powersgd must be at least 1, not 0"),
        ({"methods": ("powersgd(size=1)",)}, "powersgd has no option 'size'; valid are: rank"),
        ({"methods": ("fp16(rank=1)",)}, "fp16 has no option 'rank'; there are none"),
        ({"methods": ("micro(",)}, "is not a method"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as refused:
        StepSetting(**(SMALL | options))
    assert told in str(refused.value)


def test_options_go_to_sparsify_only_if_they_are_not_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[Any] = []
    monkeypatch.setattr(step, "contenders", lambda *arguments: passed.append(arguments[-1]))
    StepSetting(**SMALL)
    StepSetting(**SMALL, wire="bfloat16", scope="bucket")
    assert passed == [{}, {"wire": "bfloat16", "scope": "bucket"}]


def test_spread_of_one_repeat_and_of_many() -> None:
    assert spread([2.0]) == (2, 2, 2, 1)
    assert spread([float(number) for number in range(101)]) == (50, 10, 90, 101)


def test_json_is_strict() -> None:
    found = json.loads(as_text({"a": [float("nan"), 1.0, {"b": float("inf")}]}))
    assert found == {"a": [None, 1.0, {"b": None}]}
