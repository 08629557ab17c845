from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradsieve
import toys
from fleet import Fleet
from gradsieve import NonFiniteError
from gradsieve.collectives import LocalCollectives
from gradsieve.layout import Layout
from gradsieve.nonfinite import PIECE, are_finite, is_finite, pieces
from gradsieve.pipeline import Worker
from gradsieve.residual import Feedback, Residual
from gradsieve.types import Setup
from toys import SHAPES, Chosen, backward, flat, gradients_of, sparsified

STEPS, FAULT, WORLD = 12, 7, 4
INF, NAN = float("inf"), float("nan")


def exact_gradients(rank: int, step: int) -> list[Tensor]:
    """Gradients in steps of 1/64, so that float32 adds and subtracts them without rounding."""
    return [(gradient * 64).round() / 64 for gradient in gradients_of(rank, step)]


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_what_is_not_finite_is_seen_wherever_it_stands(dtype: torch.dtype, bad: float) -> None:
    gradient = torch.full((PIECE + 100,), torch.finfo(dtype).max, dtype=dtype)
    gradient[::2].neg_()
    assert all(map(is_finite, pieces(gradient)))
    for place in (0, PIECE - 1, PIECE, PIECE + 99):
        damaged = gradient.clone()
        damaged[place] = bad
        assert [is_finite(piece) for piece in pieces(damaged)] == [place >= PIECE, place < PIECE]
        several = [gradient, gradient[:0], damaged, torch.ones(3), *pieces(damaged)]
        assert are_finite(several) == [True, True, False, True, place >= PIECE, place < PIECE]


def test_nothing_is_finite() -> None:
    assert is_finite(torch.empty(0))
    assert are_finite([]) == []
    assert are_finite([torch.empty(0)]) == [True]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_faults_are_found_by_slot_wherever_gradients_lie(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by the way of other devices, on which a bucket is looked at in one go."""
    layout = Layout([(name, torch.nn.Parameter(torch.zeros(3))) for name in "abc"], set())
    collectives = LocalCollectives(0, 1, torch.device(device))
    worker = Worker(gradsieve.topk(density=0.5), Setup(1, 9, layout.bounds), collectives, checks=True)
    if device == "cpu":
        monkeypatch.setattr(Worker, "device", torch.device("meta"))
    gradients = [torch.full((3,), value, device=device) for value in (1.0, NAN, 2.0)]
    worker.begin()
    worker.take(list(zip(layout.sparse, gradients, strict=True)))
    assert int(worker.fault) == 2
    assert worker.residual.acc.tolist() == [1.0] * 3 + [0.0] * 3 + [2.0] * 3


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_what_was_added_can_be_taken_back(momentum: float) -> None:
    residual = Residual.zeros((8,), Feedback(momentum=momentum), torch.device("cpu"), torch.float32)
    residual.add(0, torch.arange(8.0))
    before = [vector.clone() for _, vector in residual.named()]
    residual.add(2, torch.full((4,), 6.0), 0.25)
    assert not torch.equal(residual.acc, before[0])
    residual.take_back(2, torch.full((4,), 6.0), 0.25)
    assert all(torch.equal(vector, was) for (_, vector), was in zip(residual.named(), before, strict=True))


def _stepped(
    variant: str, faulty: bool, bad: float, options: dict[str, Any], dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], Tensor, list[bool]]:
    """Means of the steps, the residual at the end, and which steps were skipped; FAULT is met, or never happens."""
    model = DistributedDataParallel(Chosen(dtype=dtype), bucket_cap_mb=0.003)
    sieve = gradsieve.sparsify(model, toys.make(variant, 0.05), **({"exclude": ()} | options))
    rank, means, skipped = dist.get_rank(), [], []
    for step in range(STEPS):
        if step == FAULT and not faulty:
            continue
        gradients = exact_gradients(rank, step)
        if step == FAULT and rank == 2:
            gradients[5][3, 4] = bad
        means.append(flat([mean for mean in backward(model, gradients) if mean is not None]))
        skipped.append(sieve.skipped)
    return means, flat(list(sieve.residuals().values())), skipped


def assert_skipped(faulty: list[Any], without: list[Any], tolerance: float = 0.0) -> None:
    """That a step was as if it never happened: afterwards all ranks stand where they stand without it."""
    for rank, ((means, residual, skipped), (expected, expected_residual, _)) in enumerate(
        zip(faulty, without, strict=True)
    ):
        assert skipped == [step == FAULT for step in range(STEPS)]
        assert not means.pop(FAULT).any()
        for mean, other, first in zip(means, expected, faulty[0][0], strict=True):
            torch.testing.assert_close(mean, other, rtol=tolerance, atol=tolerance)
            assert torch.equal(mean, first) or rank == 0
        torch.testing.assert_close(residual, expected_residual, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scope", ["model", "bucket"])
@pytest.mark.parametrize(
    "variant",
    [
        *("micro", "union", "topk", "dense", "oktopk"),
        *(pytest.param(variant, marks=pytest.mark.slow) for variant in ("exdyna", "iwp", "cltk", "gtopk")),
    ],
)
def test_a_fault_on_one_rank_makes_all_leave_the_step_out(
    variant: str, scope: str, fleets: Callable[[int], Fleet]
) -> None:
    fleet, options = fleets(WORLD), {"on_nonfinite": "skip", "scope": scope}
    faulty = fleet.run(_stepped, variant, True, INF, options)
    assert_skipped(faulty, fleet.run(_stepped, variant, False, INF, options))


@pytest.mark.parametrize("variant", ["dgc", "dgc-clipped", "iwp-momentum"])
def test_with_momentum_it_is_left_out_to_rounding(variant: str, fleets: Callable[[int], Fleet]) -> None:
    fleet, options = fleets(WORLD), {"on_nonfinite": "skip"}
    faulty = fleet.run(_stepped, variant, True, NAN, options)
    assert_skipped(faulty, fleet.run(_stepped, variant, False, NAN, options), tolerance=2e-5)


@pytest.mark.parametrize("variant", ["micro", "union"])
def test_so_it_is_with_gradients_of_16_bits(variant: str, fleets: Callable[[int], Fleet]) -> None:
    fleet, options = fleets(WORLD), {"on_nonfinite": "skip"}
    faulty = fleet.run(_stepped, variant, True, INF, options, torch.float16)
    assert_skipped(faulty, fleet.run(_stepped, variant, False, INF, options, torch.float16))


def _raised(options: dict[str, Any], layer: int) -> tuple[str, bool]:
    """The error, and whether the residual is as it was."""
    model, sieve = sparsified(gradsieve.micro(density=0.05), **options)
    rank = dist.get_rank()
    backward(model, exact_gradients(rank, 0))
    before = flat(list(sieve.residuals().values()))
    gradients = exact_gradients(rank, 1)
    if rank == 1:
        gradients[layer].view(-1)[-1] = NAN
    text = "nothing was raised"
    try:
        backward(model, gradients)
    except NonFiniteError as error:
        text = str(error)
    return text, torch.equal(flat(list(sieve.residuals().values())), before)


@pytest.mark.parametrize("options", [{}, {"scope": "bucket"}, {"on_nonfinite": "raise"}], ids=str)
@pytest.mark.parametrize("layer", [0, 5])
def test_by_default_every_rank_raises_and_names_parameter_and_rank(
    layer: int, options: dict[str, Any], fleets: Callable[[int], Fleet]
) -> None:
    for text, unchanged in fleets(3).run(_raised, options, layer):
        assert f"step 1: the gradient is not finite: 'weights.{layer}' on rank 1;" in text
        assert "scaler=scaler" in text
        assert unchanged


def test_an_excluded_parameter_is_named_too(fleets: Callable[[int], Fleet]) -> None:
    for text, unchanged in fleets(2).run(_raised, {"exclude": ["weights.1", "weights.6"]}, 6):
        assert "'weights.6' on rank 1" in text
        assert unchanged


def _propagated() -> list[Tensor | None]:
    model, _ = sparsified(gradsieve.topk(density=0.05), on_nonfinite="propagate")
    gradients = exact_gradients(dist.get_rank(), 0)
    gradients[5][3, 4] = NAN
    return backward(model, gradients)


def test_what_is_not_finite_may_travel_as_in_plain_ddp(fleets: Callable[[int], Fleet]) -> None:
    for means in fleets(2).run(_propagated):
        assert means[5] is not None
        assert math.isnan(means[5][3, 4])


def _scaled(scaled: bool, faulty: bool, variant: str, options: dict[str, Any]) -> tuple[Tensor, Tensor, list[float]]:
    """Parameters and residual after some steps of SGD with or without a scaler, and the scales."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, enabled=scaled)
    model = DistributedDataParallel(Chosen(), bucket_cap_mb=0.003)
    given: dict[str, Any] = {"scaler": scaler} if scaled else {}
    sieve = gradsieve.sparsify(model, toys.make(variant, 0.05), exclude=("weights.1",), **given, **options)
    optimizers = [
        torch.optim.SGD(list(model.parameters())[:3], lr=0.125),
        torch.optim.SGD(list(model.parameters())[3:], 1),
    ]
    rank, scales = dist.get_rank(), []
    for step in range(STEPS):
        if step == FAULT and not faulty:
            continue
        gradients = exact_gradients(rank, step)
        if step == FAULT and rank == 2:
            gradients[5][3, 4] = INF
        model.zero_grad()
        loss: Tensor = scaler.scale(model(gradients))
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        assert sieve.skipped == (step == FAULT)
    return flat([p.detach() for p in model.parameters()]), flat(list(sieve.residuals().values())), scales


@pytest.mark.parametrize("scope", ["model", "bucket"])
@pytest.mark.parametrize("variant", ["micro", "union", "gtopk", "oktopk"])
def test_a_scaler_changes_nothing_but_the_scale(variant: str, scope: str, fleets: Callable[[int], Fleet]) -> None:
    """It grows every three steps, and the residual goes on as if there were none, bit for bit: it is kept unscaled."""
    fleet = fleets(WORLD)
    with_scaler = fleet.run(_scaled, True, False, variant, {"scope": scope})
    for (parameters, residual, scales), (expected, expected_residual, _) in zip(
        with_scaler, fleet.run(_scaled, False, False, variant, {"scope": scope}), strict=True
    ):
        assert scales[-1] > scales[0]
        assert torch.equal(parameters, expected)
        assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("variant", ["micro", "union", "topk"])
def test_a_scaler_leaves_out_the_step_that_one_rank_overflowed_in(variant: str, fleets: Callable[[int], Fleet]) -> None:
    fleet = fleets(WORLD)
    faulty = fleet.run(_scaled, True, True, variant, {})
    for (parameters, residual, scales), (expected, expected_residual, _) in zip(
        faulty, fleet.run(_scaled, True, False, variant, {}), strict=True
    ):
        assert scales[FAULT] == scales[FAULT - 1] / 2
        assert torch.equal(parameters, expected)
        assert torch.equal(residual, expected_residual)
        assert torch.equal(parameters, faulty[0][0])


def _refused(options: dict[str, Any]) -> str:
    model = DistributedDataParallel(Chosen())
    with pytest.raises((TypeError, ValueError)) as refused:
        gradsieve.sparsify(model, gradsieve.micro(density=0.1), **options)
    return str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be one of 'raise', 'skip', 'propagate', not 'ignore'"),
        ({"scaler": 1024}, "scaler must be a torch.amp.GradScaler, not int"),
    ],
    ids=str,
)
def test_wrong_use_is_refused(options: dict[str, Any], message: str, fleets: Callable[[int], Fleet]) -> None:
    (text,) = fleets(1).run(_refused, options)
    assert message in text


def test_shapes_are_as_these_tests_take_them() -> None:
    assert SHAPES[5] == (90, 11)
