"""Looking ahead: where gradients are computed, that nobody else sees it, and that residuals follow the rate."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradsieve
from fleet import Fleet
from gradsieve.ahead import Lookahead, _subtract, reach_of
from gradsieve.layout import Layout
from gradsieve.residual import Feedback

DENSITY = 0.1


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def examples(step: int, rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 6, generator=draw), torch.randn(8, 3, generator=draw)


class Run:
    """A small regression of this rank, under a method that may look ahead."""

    def __init__(
        self,
        method: gradsieve.Method,
        *,
        lr: float = 0.1,
        device: str = "cpu",
        ddp: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.device = device
        self.network = network().to(device)
        self.ddp = DistributedDataParallel(self.network, **(ddp or {}))
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=lr, momentum=0.9)
        self.sieve = gradsieve.sparsify(self.ddp, method, **({"optimizer": self.optimizer} | options))

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def backward(self, step: int) -> None:
        inputs, targets = (part.to(self.device) for part in examples(step, dist.get_rank()))
        self.optimizer.zero_grad()
        functional.mse_loss(self.ddp(inputs), targets).backward()  # type: ignore[no-untyped-call]

    def train(self, steps: range) -> Tensor:
        for step in steps:
            self.backward(step)
            self.optimizer.step()
        return self.parameters()

    def parameters(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.network.parameters()])


def _computed_where() -> tuple[bool, bool]:
    """Is the gradient that enters the residual that at the parameters less rate times residual?"""
    run = Run(gradsieve.union(density=DENSITY))
    run.train(range(3))
    before, twin = run.sieve.residuals(), copy.deepcopy(run.network)
    kept = run.parameters()
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if name in before:
                parameter.sub_(before[name], alpha=0.1)
    inputs, targets = examples(3, dist.get_rank())
    functional.mse_loss(twin(inputs), targets).backward()  # type: ignore[no-untyped-call]
    run.backward(3)
    after = run.sieve.residuals()
    entered = True
    for name, parameter in twin.named_parameters():
        if name in before:
            assert parameter.grad is not None
            waiting = after[name] != 0
            expected = (before[name] + parameter.grad)[waiting]
            entered &= torch.allclose(after[name][waiting], expected, rtol=1e-5, atol=1e-7)
    return entered, torch.equal(run.parameters(), kept)


def test_gradients_are_of_the_place_ahead_and_parameters_are_back_after_backward(fleet2: Fleet) -> None:
    assert fleet2.run(_computed_where) == [(True, True)] * 2


def _trained(expression: dict[str, Any], options: dict[str, Any]) -> Tensor:
    return Run(gradsieve.method(**expression), **options).train(range(12))


@pytest.mark.parametrize("name", ["union", "micro", "exdyna", "topk", "cltk", "iwp"])
@pytest.mark.parametrize("scope", ["model", "bucket"])
def test_ranks_stay_alike_bit_for_bit(name: str, scope: str, fleet2: Fleet) -> None:
    ours = fleet2.run(_trained, {"name": name, "density": DENSITY, "ahead": 1.0}, {"scope": scope})
    assert torch.equal(ours[0], ours[1])
    plain = fleet2.run(_trained, {"name": name, "density": DENSITY, "ahead": 0.0}, {"scope": scope})
    assert not torch.equal(ours[0], plain[0])


def _trained_on(name: str, device: str) -> Tensor:
    return Run(gradsieve.method(name, density=DENSITY, ahead=1.0), device=device).train(range(6)).cpu()


@pytest.mark.gpu
@pytest.mark.parametrize(("world", "backend"), [(1, "nccl"), (2, "gloo")])
@pytest.mark.parametrize("name", ["union", "micro", "exdyna", "topk", "cltk", "iwp"])
def test_cuda_looks_ahead_as_the_cpu_does(name: str, world: int, backend: str, fleets: Callable[[int], Fleet]) -> None:
    first, *others = fleets(world).run(_trained_on, name, "cuda", backend=backend)
    assert all(torch.equal(first, other) for other in others)
    torch.testing.assert_close(first, fleets(world).run(_trained_on, name, "cpu")[0], rtol=1e-3, atol=1e-4)


def test_at_density_one_it_is_dense(fleet2: Fleet) -> None:
    ours = fleet2.run(_trained, {"name": "union", "density": 1.0}, {})
    dense = fleet2.run(_trained, {"name": "dense"}, {})
    torch.testing.assert_close(ours[0], dense[0], rtol=1e-5, atol=1e-6)


def _guarded() -> dict[str, bool]:
    run = Run(gradsieve.union(density=DENSITY))
    run.train(range(3))
    true = run.parameters()
    inputs, _ = examples(9, dist.get_rank())
    seen = {}

    run.ddp(inputs)
    seen["a pass that trains looks ahead"] = not torch.equal(run.parameters(), true)
    saved = run.network.state_dict()
    seen["what is saved is not ahead"] = torch.equal(torch.cat([saved[name].flatten() for name in saved]), true)

    run.ddp(inputs)
    with torch.no_grad():
        run.ddp(inputs)
    seen["a pass without gradients is not ahead"] = torch.equal(run.parameters(), true)

    run.ddp(inputs)
    run.ddp.eval()(inputs)
    seen["nor is one that only judges"] = torch.equal(run.parameters(), true)
    run.ddp.training = True

    run.ddp(inputs)
    run.optimizer.zero_grad()
    run.optimizer.step()
    seen["nor is the optimizer"] = torch.equal(run.parameters(), true)

    run.ddp(inputs)
    with torch.no_grad():
        run.network.get_parameter("0.weight").fill_(0.5)
    run.ddp.eval()(inputs)
    seen["what was written meanwhile stays"] = bool(run.network.get_parameter("0.weight").eq(0.5).all())
    run.ddp.training = True

    run.sieve.pause()
    true = run.parameters()
    run.ddp(inputs)
    seen["nobody looks ahead in a pause"] = torch.equal(run.parameters(), true)
    return seen


def test_nothing_but_training_sees_parameters_ahead(fleet2: Fleet) -> None:
    for seen in fleet2.run(_guarded):
        assert seen == dict.fromkeys(seen, True)


def _accumulated() -> bool:
    """Two passes before an exchange, both from the same place ahead."""
    run = Run(gradsieve.union(density=DENSITY))
    run.train(range(3))
    true = run.parameters()
    with run.ddp.no_sync():
        run.backward(3)
    ahead = run.parameters()
    inputs, targets = examples(4, dist.get_rank())
    loss = functional.mse_loss(run.ddp(inputs), targets)
    same = torch.equal(run.parameters(), ahead) and not torch.equal(ahead, true)
    loss.backward()  # type: ignore[no-untyped-call]
    return same and torch.equal(run.parameters(), true)


def test_passes_that_add_up_look_from_one_place(fleet2: Fleet) -> None:
    assert fleet2.run(_accumulated) == [True, True]


def _with_habit(habit: str) -> Tensor:
    options = {"static graph": {"static_graph": True}, "unused parameters": {"find_unused_parameters": True}}
    run = Run(gradsieve.union(density=DENSITY), ddp=options.get(habit))
    model: Any = run.ddp
    if habit == "compiled outside":
        model = torch.compile(run.ddp, backend="eager")
    elif habit == "compiled inside":
        run.network.compile(backend="eager")
    for step in range(6):
        inputs, targets = examples(step, dist.get_rank())
        run.optimizer.zero_grad()
        outputs = checkpoint(model, inputs, use_reentrant=False) if habit == "activation checkpoints" else model(inputs)
        functional.mse_loss(outputs, targets).backward()  # type: ignore[no-untyped-call]
        run.optimizer.step()
        with torch.no_grad():
            model(inputs)
    return run.parameters()


HABITS = ["static graph", "unused parameters", "activation checkpoints", "compiled outside", "compiled inside"]


@pytest.mark.parametrize("habit", HABITS)
def test_habits_change_nothing(habit: str, fleet2: Fleet) -> None:
    ours, plain = fleet2.run(_with_habit, habit), fleet2.run(_with_habit, "none")
    assert torch.equal(ours[0], ours[1])
    torch.testing.assert_close(ours[0], plain[0], rtol=1e-5, atol=1e-6)


def _rescaled() -> tuple[float | None, bool]:
    run = Run(gradsieve.union(density=DENSITY), lr=0.4)
    run.train(range(3))
    before = run.sieve.residuals()
    run.set_rate(0.04)
    run.ddp(examples(3, dist.get_rank())[0])
    after = run.sieve.residuals()
    state = run.sieve.state_dict()
    again = Run(gradsieve.union(density=DENSITY), lr=0.04)
    again.sieve.load_state_dict(state)
    again.ddp(examples(3, dist.get_rank())[0])
    resumed = again.sieve.residuals()
    tenfold = all(torch.allclose(after[name], 10 * before[name], rtol=1e-5) for name in before)
    return state["learned"]["rate"], tenfold and all(torch.equal(resumed[name], after[name]) for name in after)


def test_residuals_follow_the_rate_also_after_a_resume(fleet2: Fleet) -> None:
    assert fleet2.run(_rescaled) == [(0.04, True)] * 2


def _frozen_rate() -> bool:
    run = Run(gradsieve.union(density=DENSITY), lr=0.4)
    run.train(range(3))
    before = run.sieve.residuals()
    run.set_rate(0.0)
    run.ddp(examples(3, dist.get_rank())[0])
    return all(torch.equal(before[name], residual) for name, residual in run.sieve.residuals().items())


def test_a_rate_of_zero_changes_nothing(fleet2: Fleet) -> None:
    assert fleet2.run(_frozen_rate) == [True, True]


def _copies() -> bool:
    run = Run(gradsieve.union(density=DENSITY))
    run.train(range(2))
    stream = io.BytesIO()
    torch.save(run.network, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    both = (copy.deepcopy(run.network), loaded)
    return all(torch.equal(one.state_dict()["0.weight"], run.network.state_dict()["0.weight"]) for one in both)


def test_the_model_inside_can_be_copied_and_saved_whole(fleet2: Fleet) -> None:
    assert fleet2.run(_copies) == [True, True]


def _refused() -> list[str]:
    messages = []
    model = DistributedDataParallel(network())
    adam, other = torch.optim.Adam(model.parameters()), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    for method, optimizer in (
        (gradsieve.micro(ahead=1.0), None),
        (gradsieve.union(ahead=0.5), adam),
        (gradsieve.union(), other),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller looks at it
            gradsieve.sparsify(model, method, optimizer=optimizer)
        messages.append(str(caught.value))
    sieve = gradsieve.sparsify(model, gradsieve.union(), optimizer=adam)
    return [*messages, str(sieve._lookahead)]


def test_what_cannot_be_is_refused_and_what_is_not_asked_for_is_left_out(fleet2: Fleet) -> None:
    for without, adam, other, left_out in fleet2.run(_refused):
        assert "ahead=1 needs the learning rate by which torch.optim.SGD" in without
        assert "no optimizer came: give sparsify(..., optimizer=optimizer), or ahead=0" in without
        assert "a Adam came" in adam
        assert "holds no sparsified parameter of this model" in other
        assert left_out == "None"


def test_how_far() -> None:
    parameters = [nn.Parameter(torch.zeros(2, 2))]
    sgd, upwards = torch.optim.SGD(parameters, lr=0.1), torch.optim.SGD(parameters, lr=0.1, maximize=True)
    assert reach_of(Feedback(ahead=None), sgd) == 1.0
    assert reach_of(Feedback(ahead=None), None) == 0.0
    assert reach_of(Feedback(ahead=None), upwards) == 0.0
    assert reach_of(Feedback(ahead=0.3), sgd) == 0.3
    assert reach_of(Feedback(), None) == 0.0
    for bad in (-1, float("nan"), "far"):
        with pytest.raises((ValueError, TypeError), match="ahead"):
            gradsieve.union(ahead=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_parameters_move_ahead_at_once_elsewhere(
    dtype: torch.dtype, residual_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the operations of other devices than the CPU."""
    homes = [torch.randn(5, 3, 2, 2).to(dtype, memory_format=torch.channels_last), torch.randn(7, 3).to(dtype)]
    residuals = [torch.randn_like(home).to(residual_dtype) for home in homes]
    one_by_one, at_once = ([torch.empty_like(home) for home in homes] for _ in range(2))
    _subtract(homes, residuals, 0.25, one_by_one)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "device", torch.device("meta"))
        _subtract(homes, residuals, 0.25, at_once)
    for one, other in zip(one_by_one, at_once, strict=True):
        torch.testing.assert_close(one, other)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_every_group_has_its_own_rate(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    one, two = (nn.Parameter(torch.ones(2, 3, 2, 2, dtype=dtype).to(memory_format=memory_format)) for _ in range(2))
    still = nn.Parameter(torch.ones(2, 2))
    layout = Layout([("one", one), ("two", two), ("still", still)], set())
    groups = [{"params": [one], "lr": 0.5}, {"params": [two], "lr": 0.25}]
    lookahead = Lookahead(1.0, torch.optim.SGD(groups), layout.sparse)
    residuals = layout.cut(torch.ones(layout.numel))
    homes = [one.data_ptr(), two.data_ptr()]
    lookahead.look(residuals)
    assert [sorted(set(parameter.flatten().tolist())) for parameter in (one, two, still)] == [[0.5], [0.75], [1.0]]
    assert one.is_contiguous(memory_format=memory_format)
    lookahead.back()
    assert [one.data_ptr(), two.data_ptr()] == homes
    assert set(one.flatten().tolist()) == {1.0}
    assert lookahead.rate == 0.5
