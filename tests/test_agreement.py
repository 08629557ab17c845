from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from fleet import Fleet
from gradsieve import AgreementError, agreement, hook
from gradsieve.agreement import digest
from gradsieve.part import Part
from toys import Chosen, averaged, sparsified


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_digest_tells_every_bit(dtype: torch.dtype) -> None:
    tensors = [torch.randn(1000).to(dtype), torch.randn(3, 5).to(dtype)]
    told = {digest(tensors)}
    for tensor in tensors:
        flat = tensor.view(-1)
        for place in (0, 7, len(flat) - 1):
            kept = flat[place].clone()
            flat[place] = -kept
            told.add(digest(tensors))
            flat[place] = kept
    assert len(told) == 7
    assert digest(tensors) in told


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=40), st.integers(0, 39), st.integers(0, 39))
def test_a_digest_tells_what_stands_where(values: list[float], one: int, other: int) -> None:
    one, other = one % len(values), other % len(values)
    swapped = list(values)
    swapped[one], swapped[other] = swapped[other], swapped[one]
    bits = torch.tensor(values).view(torch.int32)
    same = torch.equal(bits, torch.tensor(swapped).view(torch.int32))
    assert (digest([torch.tensor(values)]) == digest([torch.tensor(swapped)])) == same


def test_a_digest_of_many_is_that_of_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(100), torch.randn(33)]
    whole = digest(tensors)
    monkeypatch.setattr(agreement, "_CHUNK", 7)
    assert digest(tensors) == whole


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "density": ({"density": 0.1}, {"density": 0.2}, "ranks disagree on method: rank 0 has micro(density=0.1"),
    "method": ({}, {"method": "union"}, "ranks disagree on method"),
    "scope": ({}, {"scope": "bucket"}, "ranks disagree on scope: rank 0 has model, rank 1 bucket"),
    "wire": ({}, {"wire": "bfloat16"}, "ranks disagree on wire: rank 0 has torch.float32, rank 1 torch.bfloat16"),
    "seed": ({"seed": 1}, {"seed": 2}, "ranks disagree on seed: rank 0 has 1, rank 1 2"),
    "residual": ({}, {"residual_dtype": torch.bfloat16}, "ranks disagree on residual_dtype"),
    "policy": ({}, {"on_nonfinite": "skip"}, "ranks disagree on on_nonfinite: rank 0 has raise, rank 1 skip"),
    "comparisons": ({}, {"check_agreement": 5}, "ranks disagree on check_agreement: rank 0 has 0, rank 1 5"),
    "exclude": (
        {},
        {"exclude": ()},
        "ranks disagree on the model: at parameter 1 rank 0 has weights.1 [30] float32 (ex",
    ),
}


def _told(options: dict[str, Any]) -> str:
    model = DistributedDataParallel(Chosen())
    given: dict[str, Any] = {"method": "micro", "density": 0.1} | options
    method = gradsieve.method(given.pop("method"), density=given.pop("density"))
    with pytest.raises(AgreementError) as found:
        gradsieve.sparsify(model, method, **given)
    return str(found.value)


def _one_differs(first: dict[str, Any], other: dict[str, Any]) -> str:
    return _told(other if dist.get_rank() == 1 else first)


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_were_given_different_things_are_told_so(what: str, fleet3: Fleet) -> None:
    first, other, message = DIFFERENT[what]
    for text in fleet3.run(_one_differs, first, other):
        assert message in text
        assert "rank 1" in text


def _another_version() -> str:
    if dist.get_rank() == 2:
        hook.__version__ = "0.0.9"  # type: ignore[attr-defined]
    try:
        return _told({})
    finally:
        hook.__version__ = gradsieve.__version__  # type: ignore[attr-defined]


def test_another_version_of_the_package_is_named(fleet3: Fleet) -> None:
    for text in fleet3.run(_another_version):
        assert f"ranks disagree on gradsieve version: rank 0 has {gradsieve.__version__}, rank 2 0.0.9" in text
        assert "install one version everywhere" in text


class Two(nn.Module):
    """Two matrices of one size, so that DDP's own check of sizes finds nothing amiss."""

    def __init__(self, names: tuple[str, str]) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(4, 4)))


def _another_model() -> str:
    model = DistributedDataParallel(Two(("first", "second") if dist.get_rank() != 1 else ("first", "other")))
    with pytest.raises(AgreementError) as found:
        gradsieve.sparsify(model, gradsieve.micro(density=0.1))
    return str(found.value)


def test_another_model_is_found_by_its_first_difference(fleet3: Fleet) -> None:
    for text in fleet3.run(_another_model):
        assert (
            "ranks disagree on the model: at parameter 1 rank 0 has second [4, 4] float32, rank 1 other [4, 4]" in text
        )


def _one_fails() -> str:
    model = DistributedDataParallel(Chosen())
    with pytest.raises((ValueError, AgreementError)) as found:
        gradsieve.sparsify(model, gradsieve.micro(density=0.1), scope="layer" if dist.get_rank() == 1 else "model")  # type: ignore[arg-type]
    return f"{type(found.value).__name__}: {found.value}"


def test_a_rank_that_cannot_go_on_does_not_leave_the_others_waiting(fleet3: Fleet) -> None:
    first, failed, last = fleet3.run(_one_fails)
    assert failed.startswith("ValueError: scope must be one of")
    for text in (first, last):
        assert "AgreementError: sparsify failed on rank 1: no rank can go on; on rank 1: ValueError: scope must" in text


def _compared(every: int, scope: str) -> list[bool]:
    """A run in which all agree, and which steps compared."""
    compared: list[bool] = []
    model, sieve = sparsified(gradsieve.union(density=0.05), check_agreement=every, scope=scope)
    compare = sieve._compare
    sieve._compare = lambda: (compared.append(True), compare())[1]  # type: ignore[method-assign, func-returns-value]
    steps = []
    for step in range(6):
        compared.clear()
        averaged(model, 1, first=step)
        steps.append(bool(compared))
    return steps


@pytest.mark.parametrize("scope", ["model", "bucket"])
def test_ranks_compare_every_so_many_steps(scope: str, fleet3: Fleet) -> None:
    for steps in fleet3.run(_compared, 2, scope):
        assert steps == [False, True] * 3


def _drifting(scope: str) -> tuple[int, str]:
    """One rank writes other means than the rest, from step 2 on; the step that it is found in, and how."""
    model, _ = sparsified(gradsieve.micro(density=0.05), check_agreement=2, scope=scope)
    finish = Part.finish

    def drifted(part: Part) -> Any:
        gradients = [gradient for _, gradient in part._gradients]
        pending = finish(part)
        if dist.get_rank() == 2:
            for gradient in gradients:
                gradient.add_(1e-6)
        return pending

    averaged(model, 2)
    Part.finish = drifted  # type: ignore[assignment, method-assign]
    try:
        for step in range(2, 6):
            averaged(model, 1, first=step)
    except AgreementError as error:
        return step, str(error)
    finally:
        Part.finish = finish  # type: ignore[method-assign]
    return -1, "not found"


@pytest.mark.parametrize("scope", ["model", "bucket"])
def test_means_that_drift_apart_are_found_and_the_rank_named(scope: str, fleet3: Fleet) -> None:
    for step, text in fleet3.run(_drifting, scope):
        assert step == 3
        assert "step 3: the averaged gradients of rank 2 differ from those of the other 2" in text


def _refused(every: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as refused:
        sparsified(gradsieve.micro(density=0.1), check_agreement=every)
    return str(refused.value)


@pytest.mark.parametrize("every", [-1, 1.5, "often"])
def test_wrong_use_is_refused(every: Any, fleets: Callable[[int], Fleet]) -> None:
    (text,) = fleets(1).run(_refused, every)
    assert "check_agreement" in text
