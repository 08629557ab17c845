from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import gradsieve
from gradsieve.bench.given import Noise, shapes_of_model, shapes_of_size
from gradsieve.checks import UsageError
from gradsieve.cost import advice
from gradsieve.cost.check import predict_rows
from gradsieve.cost.machine import CPU, H200, Machine
from gradsieve.cost.messages import Link, Message, goes_directly, link_bytes, rounds, seconds, total_link_bytes
from gradsieve.cost.step import HEADROOM, SPARSE, ZERO_LINE, Load, finished, messages, predict

LINK = Link(bandwidth=1e9, latency=5e-5)
LOAD = Load.of_shapes(shapes_of_model("resnet18"), world=4)
NAMES = [ZERO_LINE, "fp16 hook", "bf16 hook", "PowerSGD rank 1", "PowerSGD rank 4", "dense", *SPARSE]
NUMEL = 60_000


def step_seconds(name: str, load: Load = LOAD, link: Link = LINK, machine: Machine = CPU) -> float:
    return predict(name, load, link, machine).step_seconds


@pytest.mark.parametrize("name", NAMES)
def test_more_bandwidth_or_less_latency_never_costs_time(name: str) -> None:
    by_bandwidth = [step_seconds(name, link=replace(LINK, bandwidth=10.0**power)) for power in range(6, 13)]
    assert by_bandwidth == sorted(by_bandwidth, reverse=True)
    by_latency = [step_seconds(name, link=replace(LINK, latency=latency)) for latency in (0.0, 1e-5, 1e-3)]
    assert by_latency == sorted(by_latency)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scope", ["model", "bucket"])
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float8"])
def test_one_worker_sends_nothing(name: str, scope: str, wire: str) -> None:
    alone = predict(name, replace(LOAD, world=1, scope=scope, wire=wire), LINK, CPU)
    assert alone.link_bytes == alone.exchange_seconds == 0
    assert alone.step_seconds >= alone.select_seconds > 0


@pytest.mark.parametrize("name", NAMES)
def test_compute_adds_no_more_than_itself_and_hides_no_more_than_the_exchange(name: str) -> None:
    idle, busy = step_seconds(name), step_seconds(name, replace(LOAD, compute=0.3))
    assert max(0.3, idle) <= busy <= idle + 0.3 + 1e-12


def test_backward_hides_dense_exchanges_and_those_by_bucket_but_not_those_by_model() -> None:
    load = replace(LOAD, compute=0.3)
    assert step_seconds(ZERO_LINE, load) < step_seconds(ZERO_LINE) + 0.3
    assert step_seconds("union", load) == pytest.approx(step_seconds("union") + 0.3)
    slow = replace(LINK, bandwidth=1e7)
    by_bucket = replace(load, scope="bucket")
    assert step_seconds("union", by_bucket, slow) < step_seconds("union", load, slow)
    assert finished([1.0, 1.0], [2.0, 3.0]) == 6.0


def simulated(name: str, world: int) -> gradsieve.StepStats:
    """The last step of some on gradients such as those that the lab has."""
    shapes = shapes_of_size(NUMEL)
    noises = [Noise(shapes, 0.01, torch.device("cpu"), seed=1 + rank) for rank in range(world)]

    def steps() -> Iterator[Tensor]:
        for _ in range(8):
            yield torch.stack([torch.cat([part.flatten() for part in noise.gradients()]) for noise in noises])

    method = gradsieve.dense() if name == "dense" else gradsieve.method(name, density=0.01)
    return gradsieve.simulate(method, steps()).stats[-1]


@pytest.mark.parametrize("name", ["dense", "topk", "cltk", "micro", "exdyna", "union"])
def test_bytes_are_those_of_real_steps(name: str) -> None:
    load, stats = Load(NUMEL, world=4), simulated(name, world=4)
    found = predict(name, load, LINK, CPU)
    assert found.link_bytes == pytest.approx(stats.link_bytes, rel=0.1)
    assert len(messages(name, load)) == stats.num_messages
    assert found.density == pytest.approx(stats.density, rel=0.1)
    # rank 0 is the source of one broadcast in four
    if name != "cltk":
        assert found.wire_bytes == pytest.approx(stats.wire_bytes, rel=0.1)


@pytest.mark.parametrize(("wire", "saved"), [("bfloat16", 2), ("float8", 3)])
def test_fewer_bits_of_values(wire: str, saved: int) -> None:
    whole, fewer = (predict("micro", replace(LOAD, wire=name), LINK, CPU) for name in ("float32", wire))
    values = saved * LOAD.target * 3 / 2
    assert whole.link_bytes - fewer.link_bytes == pytest.approx(values, rel=0.01)


def test_density_one_sends_everything() -> None:
    everything = replace(LOAD, density=1.0)
    for name in SPARSE:
        found = predict(name, everything, LINK, CPU)
        assert found.density == 1
        assert found.link_bytes >= predict(ZERO_LINE, everything, LINK, CPU).link_bytes


def test_what_grows_with_the_number_of_workers() -> None:
    curves = advice.scaling(NAMES, LOAD, LINK, CPU)
    for row in curves.values():
        volumes = [one.link_bytes for one in row]
        assert volumes == sorted(volumes)
    densities = [one.density for one in curves["topk"]]
    assert densities == sorted(densities)
    assert densities[-1] > 20 * densities[0] / 2
    assert {one.density for one in curves["union"]} == {LOAD.target / LOAD.sparse}
    # an all-gather of everyone's choice outgrows the dense exchange, one leader's choice does not
    dense, topk, cltk = (curves[name][-1].link_bytes for name in (ZERO_LINE, "topk", "cltk"))
    assert cltk < dense < topk
    # a share of the scan becomes nothing, the whole of it stays
    scans = {name: [one.select_seconds for one in curves[name]] for name in ("exdyna", "union")}
    assert scans["exdyna"][-1] < scans["exdyna"][0]
    assert scans["union"][-1] > scans["exdyna"][-1] + 0.9 * LOAD.sparse * CPU.scan


def test_direct_messages_take_fewer_rounds_for_the_same_bytes() -> None:
    direct = replace(LINK, direct_bytes=1 << 20)
    short, long, foreign = (
        Message("all_reduce", 1000),
        Message("all_reduce", 1 << 21),
        Message("all_reduce", 1000, ours=False),
    )
    assert [goes_directly(one, 16, direct) for one in (short, long, foreign)] == [True, False, False]
    # an all-gather is for everyone
    assert not goes_directly(Message("all_gather", 1 << 17), 16, direct)
    assert seconds(short, 16, direct) < seconds(short, 16, LINK)
    assert rounds(short, 1, direct=True) == rounds(short, 1, direct=False) == 0
    assert link_bytes(short, 16) == total_link_bytes([short], 16)


@pytest.mark.parametrize("name", ["topk", "cltk", "micro", "union", "PowerSGD rank 4"])
def test_break_even_is_where_both_take_the_same(name: str) -> None:
    limit = advice.break_even(name, LOAD, LINK, CPU)
    here = replace(LINK, bandwidth=limit)
    assert step_seconds(name, link=here) == pytest.approx(step_seconds(ZERO_LINE, link=here), rel=1e-6)
    for factor, pays in ((0.9, True), (1.1, False)):
        near = replace(LINK, bandwidth=factor * limit)
        assert (step_seconds(name, link=near) < step_seconds(ZERO_LINE, link=near)) is pays


def test_break_even_may_be_nowhere() -> None:
    assert advice.break_even("dense", LOAD, LINK, CPU) == 0
    assert advice.break_even("topk", replace(LOAD, world=4096), replace(LINK, latency=0.0), CPU) == 0


def test_advice() -> None:
    slow = advice.advise(NAMES, LOAD, LINK, CPU)
    assert slow.choice is not None
    assert slow.choice.name in SPARSE
    assert slow.speed_up > 5
    fast = advice.advise(NAMES, replace(LOAD, compute=0.1), replace(LINK, bandwidth=1e12), H200)
    assert fast.choice is None
    assert any("hides" in reason for reason in fast.reasons)
    kept = advice.advise(NAMES, LOAD, LINK, CPU, density=0.001)
    assert kept.choice is not None
    assert kept.choice.density == 0.001
    assert advice.advise([ZERO_LINE, "fp16 hook"], LOAD, LINK, CPU).choice is None


def test_advice_takes_the_density_that_costs_nothing() -> None:
    busy = replace(LOAD, compute=1.0)
    found = advice.advise(NAMES, busy, replace(LINK, bandwidth=5e8), CPU)
    assert found.choice is not None
    assert found.choice.density > 0.01


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"density": 0.0}, "density must lie in"),
        ({"world": 0}, "workers must be at least 1"),
        ({"wire": "int8"}, "wire must be one of"),
        ({"scope": "layer"}, "scope must be one of"),
        ({"compute": -1.0}, "compute must be at least 0"),
    ],
)
def test_bad_loads_are_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        replace(LOAD, **change)


@pytest.mark.parametrize("name", sorted(gradsieve.METHODS.keys() - {"dense", *SPARSE}))
def test_methods_without_a_model_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"no cost model for '{name}'"):
        predict(name, LOAD, LINK, CPU)


def test_unknown_schemes_are_refused() -> None:
    with pytest.raises(UsageError, match="no cost model for 'mikro'; did you mean 'micro'"):
        predict("mikro", LOAD, LINK, CPU)


def test_records_come_back_as_they_were() -> None:
    assert Link.from_record(LINK.as_record()) == LINK
    assert Machine.from_record(H200.as_record()) == H200
    # of a measurement that knew no direct messages
    assert Link.from_record({"bandwidth": 1.0, "latency": 2.0}) == Link(1.0, 2.0)


def lab_record(factor: float = 1.0, names: tuple[str, ...] = (ZERO_LINE, HEADROOM, "micro", "topk")) -> dict[str, Any]:
    """As the lab would tell it if the model were right up to a factor in what micro adds."""
    load = replace(LOAD, compute=0.02, backward_share=1.0)
    rows = []
    for name in names:
        took = 0.02 + (step_seconds(name, load) - 0.02) * (factor if name == "micro" else 1)
        rows.append({"rate": "1gbit", "name": name, "error": None, "seconds": {"median": took}})
    rows.append({"rate": "1gbit", "name": "bf16 hook", "error": "not supported here", "seconds": None})
    setting = {"world": 4, "density": 0.01, "wire": "float32", "scope": "model", "model": "resnet18"}
    network = {"rate": "1gbit", "link": LINK.as_record(), "machine": CPU.as_record()}
    return {"benchmark": "lab", "setting": setting, "rows": rows, "networks": [network]}


def test_a_check_of_what_the_model_itself_says_is_exact() -> None:
    checked = predict_rows(lab_record(), shapes_of_model("resnet18"))
    assert [cell.name for cell in checked.cells] == [ZERO_LINE, "micro", "topk"]
    assert checked.median_error == pytest.approx(0, abs=1e-9)
    assert checked.passed


def test_a_check_knows_rows_with_a_wire_and_a_scope_of_their_own() -> None:
    record = lab_record()
    took = predict("micro", replace(LOAD, wire="bfloat16", scope="bucket", compute=0.02, backward_share=1.0), LINK, CPU)
    record["rows"].append(
        {"rate": "1gbit", "name": "micro, bfloat16, bucket", "error": None, "seconds": {"median": took.step_seconds}}
    )
    cell = predict_rows(record, shapes_of_model("resnet18")).cells[-1]
    assert cell.name == "micro, bfloat16, bucket"
    assert cell.error == pytest.approx(0)


def test_a_check_sees_errors_and_wrong_verdicts() -> None:
    checked = predict_rows(lab_record(factor=60.0), shapes_of_model("resnet18"))
    assert [cell.name for cell in checked.wrong] == ["micro"]
    assert not checked.passed
    cell = checked.wrong[0]
    assert cell.error == pytest.approx(1 / 60 - 1)
    assert cell.margin < -0.2


def test_a_check_says_what_it_leaves_out() -> None:
    unknown = lab_record()
    unknown["rows"].append({"rate": "1gbit", "name": "sidco", "error": None, "seconds": {"median": 1.0}})
    assert predict_rows(unknown, shapes_of_model("resnet18")).left_out == ["1gbit: no cost model for sidco"]
    with pytest.raises(UsageError, match="no cell to check: 1gbit: plain DDP or no-op hook is missing"):
        predict_rows(lab_record(names=("micro",)), shapes_of_model("resnet18"))


def test_a_check_needs_link_and_machine() -> None:
    record = lab_record()
    del record["networks"][0]["machine"]
    with pytest.raises(UsageError, match="tells no machine for the rate 1gbit: measure again"):
        predict_rows(record, shapes_of_model("resnet18"))
    given = predict_rows(record, shapes_of_model("resnet18"), {"1gbit": LINK}, {"1gbit": CPU})
    assert given.passed


def test_buckets_are_ready_one_after_the_other() -> None:
    sizes = [message.num_bytes for message in messages(ZERO_LINE, LOAD)]
    assert sum(sizes) == 4 * LOAD.numel
    assert all(earlier < later for earlier, later in pairwise(sizes[:2]))
    assert not math.isnan(step_seconds(ZERO_LINE, replace(LOAD, numel=1, excluded=0)))
