from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import gradsieve
import toys
from gradsieve import METHODS, Simulation, StepStats, Trace, simulate
from gradsieve.wire import Shape


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


def advanced(simulation: Simulation, given: torch.Tensor) -> list[tuple[list[float], StepStats]]:
    """The mean and the record, without its times, of each step."""
    steps = [simulation.step(gradients, torch.linspace(-1, 1, given.shape[2])) for gradients in given]
    return [(mean.tolist(), replace(stats, select_seconds=0, exchange_seconds=0)) for mean, stats in steps]


@pytest.mark.parametrize("as_team", [False, True])
@pytest.mark.parametrize("variant", toys.VARIANTS)
def test_loading_a_state_continues_bit_exactly(variant: str, as_team: bool, tmp_path: Path) -> None:
    given, method = torch.randn(8, 3, 300), toys.make(variant, 0.05)
    simulation = Simulation(method, 3, 300, shapes=[100, (10, 20)], seed=5, as_team=as_team)
    advanced(simulation, given[:3])
    torch.save(simulation.state_dict(), tmp_path / "state.pt")
    expected = advanced(simulation, given[3:])
    restored = Simulation(method, 3, 300, shapes=[100, (10, 20)], as_team=as_team)
    advanced(restored, -given[:2])
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert advanced(restored, given[3:]) == expected
    assert torch.equal(restored.residual, simulation.residual)


@pytest.mark.parametrize("as_team", [False, True])
@pytest.mark.parametrize("variant", ["micro", "exdyna", "iwp-momentum", "dgc"])
def test_a_saved_state_stays_what_it_was_while_the_simulation_goes_on(variant: str, as_team: bool) -> None:
    given, method = torch.randn(6, 2, 200), toys.make(variant, 0.05)
    simulation, other = (Simulation(method, 2, 200, as_team=as_team) for _ in range(2))
    advanced(simulation, given[:3])
    state = simulation.state_dict()
    expected = advanced(simulation, given[3:])
    other.load_state_dict(state)
    assert advanced(other, given[3:]) == expected
    # nor did loading it tie the two together
    other.load_state_dict(state)
    assert advanced(other, given[3:]) == expected


@pytest.mark.parametrize("as_team", [False, True])
def test_who_writes_into_a_saved_residual_changes_no_simulation(as_team: bool) -> None:
    given, method = torch.randn(2, 2, 200), gradsieve.dgc(density=0.05)
    simulation, loaded = (Simulation(method, 2, 200, as_team=as_team) for _ in range(2))
    advanced(simulation, given)
    residual, state = simulation.residual, simulation.state_dict()
    loaded.load_state_dict(state)
    for own in state:
        own["residual"].zero_()
        own["velocity"].zero_()
    simulation.residual.zero_()
    assert residual.any()
    assert torch.equal(simulation.residual, residual)
    assert torch.equal(loaded.residual, residual)
    for worker in (*simulation.workers, *loaded.workers):
        assert worker.residual.velocity is not None
        assert worker.residual.velocity.any()


def test_a_state_holds_a_velocity_only_where_the_method_has_one() -> None:
    plain, momentum = (Simulation(method, 2, 10).state_dict() for method in (gradsieve.topk(), gradsieve.dgc()))
    assert [state.keys() for state in plain] == [{"learned", "residual"}] * 2
    assert [state.keys() for state in momentum] == [{"learned", "residual", "velocity"}] * 2


@pytest.mark.parametrize("world", [1, 3])
def test_states_of_another_number_of_workers_are_refused(world: int) -> None:
    states = Simulation(gradsieve.topk(), world, 10).state_dict()
    with pytest.raises(ValueError, match=r"states came for 2 workers"):
        Simulation(gradsieve.topk(), 2, 10).load_state_dict(states)


def test_states_that_were_not_saved_together_are_refused() -> None:
    simulation = Simulation(gradsieve.micro(density=0.1), 2, 100)
    early = simulation.state_dict()
    simulation.step(torch.randn(2, 100))
    late = simulation.state_dict()
    with pytest.raises(ValueError, match="workers 0 and 1 learned different things: give states that were saved"):
        simulation.load_state_dict([late[0], early[1]])
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(ValueError, match=r"residual must be a flat tensor of 100 numbers of torch\.float32"):
            simulation.load_state_dict([late[0], late[1] | {"residual": late[1]["residual"].to(dtype)}])


@pytest.mark.parametrize("as_team", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual_norms_are_the_lengths_of_the_residuals(dtype: torch.dtype, as_team: bool) -> None:
    simulation = Simulation(gradsieve.micro(density=0.1), 3, 500, residual_dtype=dtype, as_team=as_team)
    assert simulation.residual_norms().tolist() == [0.0, 0.0, 0.0]
    advanced(simulation, torch.randn(2, 3, 500))
    norms = simulation.residual_norms()
    assert (norms.shape, norms.dtype) == ((3,), torch.float32)
    torch.testing.assert_close(norms, simulation.residual.double().norm(dim=1).float())
    assert norms.tolist() == pytest.approx([worker.residual.norm() for worker in simulation.workers], rel=1e-6)


@pytest.mark.parametrize("as_team", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_reduce_gives_the_step_without_its_zeros(name: str, as_team: bool) -> None:
    given, parameters, method = torch.randn(4, 3, 300), torch.linspace(-1, 1, 300), toys.make(name, 0.05)
    stepping, reducing = (Simulation(method, 3, 300, as_team=as_team) for _ in range(2))
    for gradients in given:
        mean, stats = stepping.step(gradients, parameters)
        reduced, pending = reducing.reduce(gradients, lambda: parameters)
        assert reduced.support == len(reduced.mean) == stats.support
        assert torch.equal(reduced.mean, mean[reduced.indices])
        assert int((mean != 0).sum()) <= reduced.support
        assert len(reduced.dense) == 0
        read = pending[0].read()
        assert replace(read, select_seconds=0, exchange_seconds=0) == replace(
            stats, select_seconds=0, exchange_seconds=0
        )
    assert torch.equal(stepping.residual, reducing.residual)


@pytest.mark.parametrize("as_team", [False, True])
@pytest.mark.parametrize("name", [name for name in METHODS if name != "dgc"])
def test_what_travels_whole_beside_is_averaged_and_changes_nothing_else(name: str, as_team: bool) -> None:
    parameters, method = torch.linspace(-1, 1, 300), toys.make(name, 0.05)
    alone, beside = (Simulation(method, 2, 300, as_team=as_team) for _ in range(2))
    for gradients, dense in zip(torch.randn(3, 2, 300), torch.randn(3, 2, 7), strict=True):
        expected, (without, *_) = alone.reduce(gradients, lambda: parameters)
        reduced, (pending, *_) = beside.reduce(gradients, lambda: parameters, dense)
        assert torch.equal(reduced.mean, expected.mean)
        assert torch.equal(reduced.dense, dense.sum(0) / 2)
        with_dense, stats = pending.read(), without.read()
        assert (with_dense.dense_numel, with_dense.dense_bytes) == (7, 28)
        assert (stats.dense_numel, stats.dense_bytes) == (0, 0)
        assert with_dense.wire_bytes - stats.wire_bytes == 28
        assert with_dense.link_bytes - stats.link_bytes == 28
        assert with_dense.num_messages == stats.num_messages + (name in toys.BY_SUMS)
    assert torch.equal(alone.residual, beside.residual)


@pytest.mark.parametrize("as_team", [False, True])
def test_a_clip_takes_in_what_travels_whole_beside(as_team: bool) -> None:
    simulation = Simulation(gradsieve.dgc(density=1.0, clip=5.0, momentum=0.0), 1, 1, as_team=as_team)
    reduced, _ = simulation.reduce(torch.tensor([[30.0]]), dense=torch.tensor([[40.0]]))
    torch.testing.assert_close(torch.cat([reduced.mean, reduced.dense]), torch.tensor([3.0, 4.0]))


def test_every_worker_has_a_record_of_its_own() -> None:
    simulation = Simulation(gradsieve.cltk(density=0.05), 3, 400, as_team=False)
    for leader in (0, 1, 2, 0):
        records = [pending.read() for pending in simulation.reduce(torch.randn(3, 400))[1]]
        values, indices = 4 * 20, Shape.of(20, 400).num_bytes
        assert [stats.wire_bytes - values for stats in records] == [
            indices if rank == leader else 0 for rank in range(3)
        ]
        assert len({(stats.link_bytes, stats.num_messages, stats.counts) for stats in records}) == 1


@pytest.mark.parametrize("as_team", [False, True])
@pytest.mark.parametrize(
    ("method", "num_messages", "link_bytes"),
    [
        (gradsieve.dense(), 1, lambda support: 1.5 * 4 * support),
        (gradsieve.randomk(density=0.05), 1, lambda support: 1.5 * 4 * support),
        (gradsieve.topk(density=0.05), 2, lambda support: 3 * Shape.of(20, 400).num_bytes + 1.5 * 4 * support),
        (gradsieve.cltk(density=0.05), 2, lambda support: Shape.of(20, 400).num_bytes + 1.5 * 4 * support),
        (gradsieve.hard_threshold(density=0.05, threshold=9.0), 1, lambda support: 3 * 8 + 0 * support),
    ],
    ids=["dense", "randomk", "topk", "cltk", "hard_threshold"],
)
def test_link_bytes_are_those_of_rings(
    method: gradsieve.Method, num_messages: int, link_bytes: Callable[[int], float], as_team: bool
) -> None:
    _, stats = Simulation(method, 4, 400, as_team=as_team).step(torch.randn(4, 400))
    assert stats.num_messages == num_messages
    assert stats.link_bytes == link_bytes(stats.support)


@pytest.mark.parametrize("as_team", [False, True])
@pytest.mark.parametrize("method", [gradsieve.dense(), gradsieve.topk(density=0.05)], ids=["dense", "topk"])
def test_values_in_bfloat16_take_half_of_a_link_and_one_more_message(method: gradsieve.Method, as_team: bool) -> None:
    given, dense = torch.randn(4, 400), torch.randn(4, 6)
    records = {}
    for wire in ("float32", "bfloat16"):
        _, pending = Simulation(method, 4, 400, as_team=as_team, wire=wire).reduce(given, dense=dense)
        records[wire] = pending[0].read()
    whole, half = records["float32"], records["bfloat16"]
    assert half.support == whole.support
    assert half.num_messages == whole.num_messages + 2
    assert half.dense_bytes == whole.dense_bytes == 4 * 6
    padded = -(-half.support // 4) * 4
    assert half.link_bytes == whole.link_bytes - 1.5 * 4 * whole.support + 1.5 * 2 * padded
    assert half.wire_bytes == whole.wire_bytes - 4 * whole.support + 2 * padded * 5 // 4


@pytest.mark.parametrize("as_team", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_nothing_passes_through_the_link_of_a_rank_that_is_alone(name: str, as_team: bool) -> None:
    _, stats = Simulation(gradsieve.method(name), 1, 400, as_team=as_team).step(torch.randn(1, 400), torch.ones(400))
    assert stats.link_bytes == 0
    assert stats.wire_bytes > 0
    assert stats.num_messages > 0


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
        (
            lambda: simulate(gradsieve.topk(), GIVEN, wire="float16"),
            ValueError,
            "wire must be one of 'float32', 'bfloat16', 'float8', not 'float16'",
        ),
        (lambda: simulate(gradsieve.iwp(num_broadcasters=3), GIVEN), ValueError, "there are only 2 ranks"),
    ],
)
def test_misuse_gets_an_error_that_says_what_to_do(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_what_rounding_leaves_out_is_sent_later() -> None:
    """The error of a mean is that of one step, however many there were."""
    given = torch.full((200, 3, 5), 1.003)
    trace = simulate(gradsieve.dense(), given, wire="bfloat16")
    assert trace.mean.sum(0).tolist() == pytest.approx([200 * 1.003] * 5, abs=2**-7)
    assert trace.mean[0].tolist() != pytest.approx([1.003] * 5, rel=1e-4)
    assert trace.residual.abs().max() < 2**-6


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


@pytest.mark.parametrize("as_team", [False, True])
@pytest.mark.parametrize(
    ("gradients", "dense"), [((1, 50), None), ((3, 40), None), ((3, 50), (2, 4)), ((3, 50), (4,)), ((150,), None)]
)
def test_reduce_refuses_other_shapes(gradients: tuple[int, ...], dense: tuple[int, ...] | None, as_team: bool) -> None:
    simulation = Simulation(gradsieve.topk(density=0.1), 3, 50, as_team=as_team)
    with pytest.raises(ValueError, match=r"gradients of a step must have|dense must have a row for each of 3 workers"):
        simulation.reduce(torch.zeros(gradients), dense=None if dense is None else torch.zeros(dense))


def test_a_state_is_a_copy_both_ways() -> None:
    simulation = Simulation(gradsieve.exdyna(density=0.1), 2, 500)
    for _ in range(2):
        simulation.step(torch.randn(2, 500))
    state = simulation.state_dict()
    other = Simulation(gradsieve.exdyna(density=0.1), 2, 500)
    other.load_state_dict(state)
    for own in state:
        for name in ("loads", "waiting"):
            own["learned"]["region"][name].zero_()
    for learned in (simulation.workers[0].learned, other.workers[0].learned):
        assert learned.region.loads.any()
        assert learned.region.waiting.any()
