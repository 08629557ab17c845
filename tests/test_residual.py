from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.residual import Feedback, Residual
from gradsieve.types import ALL, Indices, Span

CPU = torch.device("cpu")
NUMEL = 12


def residual_of(momentum: float = 0.0, dtype: torch.dtype = torch.float64) -> Residual:
    return Residual.zeros((NUMEL,), Feedback(momentum), CPU, dtype)


def gradient(*shape: int) -> Tensor:
    return torch.randn(*(shape or (NUMEL,)), dtype=torch.float64)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_fresh_residual_is_zero(momentum: float) -> None:
    assert torch.equal(residual_of(momentum).acc, torch.zeros(NUMEL, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(NUMEL,), (3, NUMEL), (0,), (2, 0)])
def test_residuals_of_one_and_of_several_ranks_begin_as_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    plain, with_momentum = (Residual.zeros(shape, Feedback(momentum), CPU, dtype) for momentum in (0.0, 0.9))
    assert [name for name, _ in plain.named()] == ["residual"]
    assert [name for name, _ in with_momentum.named()] == ["residual", "velocity"]
    assert (plain.momentum, with_momentum.momentum) == (0.0, 0.9)
    for _, vector in (*plain.named(), *with_momentum.named()):
        assert (vector.shape, vector.dtype) == (shape, dtype)
        assert not vector.any()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_named_vectors_are_the_state_itself(momentum: float) -> None:
    residual = residual_of(momentum)
    for name, vector in residual.named():
        vector.fill_(2.0 if name == "residual" else 3.0)
    assert residual.acc.tolist() == [2.0] * NUMEL
    assert residual.velocity is None or residual.velocity.tolist() == [3.0] * NUMEL


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rows_share_memory_with_the_whole(momentum: float) -> None:
    whole = Residual.zeros((3, NUMEL), Feedback(momentum), CPU, torch.float64)
    rows = whole.rows()
    assert [row.momentum for row in rows] == [momentum] * 3
    rows[1].add(2, gradient(5))
    for (name, whole_vector), (own_name, own_vector) in zip(whole.named(), rows[1].named(), strict=True):
        assert name == own_name
        assert own_vector.data_ptr() == whole_vector[1].data_ptr()
        assert torch.equal(whole_vector[1], own_vector)
        assert whole_vector[1, 2:7].all()
        assert not whole_vector[[0, 2]].any()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("gradients", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "sent", [ALL, torch.tensor([0, 4, 5, 11]), torch.empty(0, dtype=torch.int64)], ids=["all", "some", "none"]
)
def test_several_ranks_take_in_and_clear_at_once_what_each_does_alone(
    sent: Indices, kept: torch.dtype, gradients: torch.dtype, momentum: float
) -> None:
    together, apart = (Residual.zeros((3, NUMEL), Feedback(momentum), CPU, kept) for _ in range(2))
    for _ in range(3):
        update, stretch = gradient(3, NUMEL).to(gradients), gradient(3, 4).to(gradients)
        together.add(0, update)
        together.add(5, stretch)
        for rank, row in enumerate(apart.rows()):
            row.add(0, update[rank])
            row.add(5, stretch[rank])
            row.clear(sent)
        together.clear(sent)
        for (_, vector), (_, other) in zip(together.named(), apart.named(), strict=True):
            assert torch.equal(vector, other)


def test_the_norm_is_the_length_of_the_residual() -> None:
    residual = residual_of()
    assert residual.norm() == 0.0
    residual.add(3, torch.tensor([3.0, -4.0]))
    assert residual.norm() == 5.0
    residual.clear(torch.tensor([3]))
    assert residual.norm() == 4.0


def test_the_norm_does_not_take_in_the_velocity() -> None:
    residual = residual_of(momentum=0.9)
    residual.add(0, torch.tensor([3.0, -4.0]))
    residual.add(0, torch.zeros(NUMEL))
    assert residual.norm() == pytest.approx(5 * 1.9)


def test_the_norm_of_a_half_precision_residual_is_summed_in_single_precision() -> None:
    residual = residual_of(dtype=torch.bfloat16)
    residual.add(0, torch.ones(NUMEL))
    assert residual.norm() == pytest.approx(NUMEL**0.5, rel=1e-6)


@given(st.lists(st.sets(st.integers(0, NUMEL - 1)), min_size=1, max_size=6), st.integers(0, 99))
def test_what_was_sent_and_what_is_kept_is_what_was_given(supports: list[set[int]], seed: int) -> None:
    torch.manual_seed(seed)
    residual = residual_of()
    taken_in, sent = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    for support in supports:
        indices = torch.tensor(sorted(support), dtype=torch.int64)
        update = gradient()
        taken_in += update
        residual.add(0, update)
        sent[indices] += residual.acc[indices]
        residual.clear(indices)
        assert not residual.acc[indices].any()
    torch.testing.assert_close(sent + residual.acc, taken_in)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_clearing_everything_leaves_nothing(momentum: float) -> None:
    residual = residual_of(momentum)
    residual.add(0, gradient())
    residual.clear(ALL)
    residual.add(0, torch.zeros(NUMEL, dtype=torch.float64))
    assert not residual.acc.any()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_gradient_in_stretches_enters_like_a_whole_one(momentum: float) -> None:
    whole, pieces = residual_of(momentum), residual_of(momentum)
    for _ in range(3):
        update = gradient()
        whole.add(0, update)
        # backward finishes the last layers first
        for start, stop in ((7, 12), (3, 7), (3, 3), (0, 3)):
            pieces.add(start, update[start:stop])
    assert torch.equal(whole.acc, pieces.acc)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_gradient_itself_is_left_alone(momentum: float) -> None:
    residual, update = residual_of(momentum), gradient()
    before = update.clone()
    residual.add(0, update)
    residual.add(0, update)
    residual.clear(ALL)
    assert torch.equal(update, before)


@pytest.mark.parametrize("shape", [(NUMEL,), (3, 4), (2, 3, 2)])
def test_a_gradient_of_any_shape_enters_flat(shape: tuple[int, ...]) -> None:
    residual, update = residual_of(), gradient(*shape)
    residual.add(0, update)
    assert torch.equal(residual.acc, update.flatten())


def test_momentum_correction_follows_its_recursion_and_masks_both_vectors() -> None:
    residual, momentum = residual_of(0.7), 0.7
    velocity = torch.zeros(NUMEL, dtype=torch.float64)
    acc = torch.zeros(NUMEL, dtype=torch.float64)
    for index in range(5):
        update, sent = gradient(), torch.arange(index, NUMEL, 3)
        velocity = momentum * velocity + update
        acc = acc + velocity
        residual.add(0, update)
        torch.testing.assert_close(residual.acc, acc)
        velocity[sent] = 0
        acc[sent] = 0
        residual.clear(sent)
    torch.testing.assert_close(residual.acc, acc)
    assert residual.velocity is not None
    torch.testing.assert_close(residual.velocity, velocity)


def test_without_momentum_there_is_no_second_vector() -> None:
    assert residual_of(0.0).velocity is None


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("sent", [ALL, torch.arange(NUMEL), torch.tensor([0, 4, 5, 11])], ids=["all", "each", "some"])
def test_kept_spans_come_back_as_they_were_and_the_others_do_not(sent: Indices, momentum: float) -> None:
    kept, cleared = residual_of(momentum), residual_of(momentum)
    update = gradient()
    kept.add(0, update)
    cleared.add(0, update)
    before = kept.acc.clone()
    with kept.keeping([Span(3, 5), Span(9, 9), Span(10, 12)]):
        kept.clear(sent)
    cleared.clear(sent)
    spared = [3, 4, 10, 11]
    others = [entry for entry in range(NUMEL) if entry not in spared]
    assert torch.equal(kept.acc[spared], before[spared])
    assert torch.equal(kept.acc[others], cleared.acc[others])
    if kept.velocity is not None and cleared.velocity is not None:
        assert torch.equal(kept.velocity[spared], before[spared])
        assert torch.equal(kept.velocity[others], cleared.velocity[others])


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("sent", [ALL, torch.tensor([0, 4, 5, 11]), torch.empty(0, dtype=torch.int64)], ids=str)
def test_what_did_not_travel_stays_and_its_velocity_does_not(sent: Indices, momentum: float, kept: torch.dtype) -> None:
    together, apart, cleared = (Residual.zeros((3, NUMEL), Feedback(momentum), CPU, kept) for _ in range(3))
    update = gradient(3, NUMEL)
    for residual in (together, apart, cleared):
        residual.add(0, update)
    rest = torch.randn(3, NUMEL)[..., sent]
    together.clear(sent, rest)
    for rank, row in enumerate(apart.rows()):
        row.clear(sent, rest[rank])
    cleared.clear(sent)
    for (_, vector), (_, other) in zip(together.named(), apart.named(), strict=True):
        assert torch.equal(vector, other)
    assert torch.equal(together.acc[..., sent], rest.to(kept))
    together.acc[..., sent] = 0
    for (_, vector), (_, other) in zip(together.named(), cleared.named(), strict=True):
        assert torch.equal(vector, other)


def test_keeping_nothing_keeps_nothing() -> None:
    residual = residual_of()
    residual.add(0, gradient())
    with residual.keeping([]):
        residual.clear(ALL)
    assert not residual.acc.any()


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("gradients", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32, torch.float64])
def test_gradients_of_any_type_enter_a_residual_of_any_type(
    gradients: torch.dtype, kept: torch.dtype, momentum: float
) -> None:
    residual = residual_of(momentum, kept)
    residual.add(4, torch.tensor([1.0, -2.0, 0.5], dtype=gradients))
    assert residual.acc.dtype == kept
    assert residual.acc.tolist() == [0.0] * 4 + [1.0, -2.0, 0.5] + [0.0] * 5


def test_without_a_clip_there_is_no_factor() -> None:
    assert Feedback().clip_factor([torch.ones(3)], world=2) is None


@given(st.floats(1e-3, 1e3), st.integers(1, 16), st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_clipped_gradients_of_all_ranks_together_stay_within_the_clip(
    clip: float, world: int, sizes: list[int]
) -> None:
    squares = 0.0
    for rank in range(world):
        gradients = [torch.linspace(-1, 1, size) * (rank + 1) for size in sizes]
        norm = math.sqrt(sum(float(part.norm()) ** 2 for part in gradients))
        factor = Feedback(clip=clip).clip_factor(gradients, world)
        assert factor is not None
        limit = clip / math.sqrt(world)
        assert float(factor) * norm == pytest.approx(min(norm, limit), rel=1e-5)
        squares += (float(factor) * norm) ** 2
    assert math.sqrt(squares) <= clip * (1 + 1e-5)


def test_a_small_gradient_is_not_scaled_at_all() -> None:
    factor = Feedback(clip=5.0).clip_factor([torch.tensor([3.0]), torch.tensor([3.9])], world=1)
    assert factor is not None
    assert float(factor) == 1.0


def test_a_gradient_of_zeros_is_no_division_by_zero() -> None:
    factor = Feedback(clip=1.0).clip_factor([torch.zeros(4)], world=3)
    assert factor is not None
    assert float(factor) == 1.0


def test_the_norm_of_half_precision_gradients_does_not_overflow() -> None:
    factor = Feedback(clip=1.0).clip_factor([torch.full((4,), 60_000.0, dtype=torch.float16)], world=1)
    assert factor is not None
    assert float(factor) == pytest.approx(1 / 120_000, rel=1e-3)
