from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

import gradsieve
from gradsieve import METHODS, Simulation, StepStats, Trace, simulate


def test_trace_holds_means_residuals_and_one_record_a_step() -> None:
    given = torch.randn(5, 3, 1000)
    trace = simulate(gradsieve.micro(density=0.02), given)
    assert isinstance(trace, Trace)
    assert trace.mean.shape == (5, 1000)
    assert trace.residual.shape == (3, 1000)
    assert [stats.step for stats in trace.stats] == [0, 1, 2, 3, 4]
    assert all(isinstance(stats, StepStats) for stats in trace.stats)


def test_records_describe_the_means() -> None:
    trace = simulate(gradsieve.micro(density=0.02), torch.randn(5, 3, 1000))
    for mean, stats in zip(trace.mean, trace.stats, strict=True):
        assert stats.support == sum(stats.counts) == int((mean != 0).sum())
        assert stats.density == stats.support / 1000
        assert stats.target == 20
        assert stats.numel == 1000
        assert stats.imbalance == pytest.approx(max(stats.counts) * 3 / stats.support - 1)
        assert stats.threshold is not None
        assert stats.select_seconds > 0
        assert stats.exchange_seconds > 0


def test_both_compression_ratios_are_reported() -> None:
    stats = simulate(gradsieve.iwp(density=0.01), torch.randn(1, 4, 10_000), parameters=torch.ones(10_000)).stats[0]
    assert stats.ratio_values == 10_000 / stats.support
    assert stats.ratio_wire == 40_000 / stats.wire_bytes
    assert stats.ratio_wire < stats.ratio_values


@pytest.mark.parametrize("name", METHODS)
def test_tensor_and_iterable_give_the_same(name: str) -> None:
    given = torch.randn(4, 2, 300)
    method = gradsieve.method(name)
    whole = simulate(method, given, parameters=torch.ones(300))
    lazy = simulate(method, (gradient for gradient in given), parameters=(torch.ones(300) for _ in range(4)))
    assert torch.equal(whole.mean, lazy.mean)
    assert torch.equal(whole.residual, lazy.residual)


def test_a_method_holds_no_state() -> None:
    method, given = gradsieve.exdyna(density=0.05), torch.randn(6, 2, 500)
    assert torch.equal(simulate(method, given).mean, simulate(method, given).mean)


def test_simulation_in_pieces_is_simulate() -> None:
    given = torch.randn(4, 2, 300)
    simulation = Simulation(gradsieve.union(), world=2, numel=300)
    means = torch.stack([simulation.step(gradient)[0] for gradient in given])
    trace = simulate(gradsieve.union(), given)
    assert torch.equal(means, trace.mean)
    assert torch.equal(simulation.residual, trace.residual)


def test_gradients_are_left_as_they_were() -> None:
    given = torch.randn(3, 2, 100)
    copy = given.clone()
    for name in METHODS:
        simulate(gradsieve.method(name), given, parameters=torch.ones(100))
    assert torch.equal(given, copy)


def test_seed_decides_random_methods() -> None:
    given = torch.randn(4, 2, 1000)
    first, second = (simulate(gradsieve.randomk(), given, seed=seed).mean for seed in (0, 1))
    assert not torch.equal(first, second)


def test_half_and_double_precision_gradients_are_taken() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        trace = simulate(gradsieve.topk(density=0.1), torch.randn(2, 2, 100).to(dtype))
        assert trace.mean.dtype == trace.residual.dtype == torch.float32


GIVEN = torch.randn(2, 2, 100)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: simulate(gradsieve.iwp(), GIVEN), ValueError, "iwp weighs gradients against parameters: give"),
        (lambda: simulate(gradsieve.topk(), GIVEN[0]), ValueError, "[steps, world, numel], not [2, 100]"),
        (lambda: simulate(gradsieve.topk(), [GIVEN]), ValueError, "tensor [world, numel], not [2, 2, 100]"),
        (lambda: simulate(gradsieve.topk(), cast("Any", [1.0])), ValueError, "tensor [world, numel], not 1.0"),
        (lambda: simulate(gradsieve.topk(), []), ValueError, "gradients hold no step"),
        (lambda: simulate(gradsieve.topk(), torch.ones(2, 0, 5)), ValueError, "not [0, 5]"),
        (lambda: simulate(gradsieve.topk(), GIVEN.long()), TypeError, "floating-point numbers, not torch.int64"),
        (lambda: simulate(gradsieve.topk(), GIVEN, shapes=[50, (7, 7)]), ValueError, "shapes hold 99 numbers"),
        (
            lambda: simulate(gradsieve.iwp(), GIVEN, parameters=torch.ones(9)),
            ValueError,
            "parameters must be flat with 100 numbers, not of the shape [9]",
        ),
        (
            lambda: simulate(gradsieve.iwp(), GIVEN, parameters=[torch.ones(100)]),
            ValueError,
            "parameters ended after 1 of the steps",
        ),
        (
            lambda: simulate(gradsieve.topk(), [GIVEN[0], GIVEN[0, :1]]),
            ValueError,
            "[world, numel] = [2, 100], not [1, 100]",
        ),
        (lambda: simulate(cast("Any", "micro"), GIVEN), TypeError, "made by a gradsieve constructor"),
        (lambda: simulate(gradsieve.iwp(num_broadcasters=3), GIVEN), ValueError, "there are only 2 ranks"),
    ],
)
def test_misuse_gets_an_error_that_says_what_to_do(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("name", METHODS)
def test_cuda_gives_what_the_cpu_gives(name: str) -> None:
    given, parameters = torch.randn(6, 4, 50_000), torch.randn(50_000)
    method = gradsieve.method(name)
    cpu = simulate(method, given, parameters=parameters, shapes=[20_000, (300, 100)])
    cuda = simulate(method, given.cuda(), parameters=parameters.cuda(), shapes=[20_000, (300, 100)])
    assert cuda.mean.is_cuda
    assert cuda.residual.is_cuda
    # a threshold fitted or a norm summed on another device may move by a rounding, and a few entries with it
    differing = ((cuda.mean.cpu() - cpu.mean).abs() > 1e-5).float().mean()
    assert differing < 1e-4
    assert all(stats.select_seconds >= 0 for stats in cuda.stats)
