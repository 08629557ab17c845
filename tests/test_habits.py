"""What people do around a training step: it works, with nothing lost, or is refused by name. See docs/habits.md."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import gradsieve
import toys
from fleet import Fleet
from gradsieve import METHODS, Method, Sieve, kernels
from gradsieve.ddp import _check_devices
from toys import Chosen, flat, gradients_of

SMALL = 0.0004
"""A bucket's size, in MiB, that gives the network below several."""
BOTH = ("left", "right")


class Net(nn.Module):
    """A trunk and two heads, of which a forward pass may use one or both."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.left = nn.Linear(width, 4)
        self.right = nn.Linear(width, 4)

    def forward(self, inputs: Tensor, heads: Sequence[str] = BOTH) -> Tensor:
        hidden = self.trunk(inputs)
        return torch.stack([getattr(self, head)(hidden) for head in heads]).sum(0)


Loss = Callable[[nn.Module], Tensor]


def batch(number: int = 0) -> Tensor:
    """Inputs of this rank."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    return torch.randn(6, 8, generator=generator)


def loss_of(number: int = 0, heads: Sequence[str] = BOTH) -> Loss:
    return lambda model: model(batch(number), heads).square().mean()


def rank() -> int:
    return dist.get_rank()


class Audit:
    """A sparsified model whose every step is checked: ranks agree to the bit, and sent plus kept is given."""

    def __init__(self, module: nn.Module, method: Method, scope: str = "model", **ddp: Any) -> None:
        self.model = DistributedDataParallel(module, **({"bucket_cap_mb": SMALL} | ddp))
        dtype = next(module.parameters()).dtype
        self.sieve: Sieve = gradsieve.sparsify(
            self.model,
            method,
            scope=scope,  # type: ignore[arg-type]
            residual_dtype=torch.promote_types(dtype, torch.float32),
        )

    def backward(self, *losses: Loss) -> None:
        """A synchronised pass for each loss, as users write it."""
        for loss in losses:
            loss(self.model).backward()  # type: ignore[no-untyped-call]

    def step(self, *losses: Loss, set_to_none: bool = True) -> None:
        with self.checked(*losses, set_to_none=set_to_none):
            self.backward(*losses)

    @contextmanager
    def checked(self, *losses: Loss, set_to_none: bool = True) -> Iterator[None]:
        """The body leaves in the gradients what a step makes of the sum of these losses."""
        self.model.zero_grad(set_to_none=set_to_none)
        before, given = self.sieve.residuals(), self._local(losses)
        yield
        after = self.sieve.residuals()
        for name, parameter in self.model.module.named_parameters():
            if name not in given:
                continue
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
            self._check_agreement(name, found)
            left = given[name] + before[name] - after[name] if name in before else given[name]
            expected = self._total(left) / self.model.process_group.size()
            tolerance = 1e-6 * max(1.0, float(expected.abs().max())) if expected.numel() else 0.0
            assert (found - expected).abs().sum() == 0 or (found - expected).abs().max() <= tolerance, name

    def _local(self, losses: Sequence[Loss]) -> dict[str, Tensor]:
        """The gradients of this rank, made without DDP's knowledge."""
        named = {n: p for n, p in self.model.module.named_parameters() if n not in self.model.parameters_to_ignore}
        sums = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
        trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        buffers = {name: buffer.clone() for name, buffer in self.model.module.named_buffers()}
        for loss in losses:
            found = torch.autograd.grad(loss(self.model.module), list(trained.values()), allow_unused=True)
            for name, gradient in zip(trained, found, strict=True):
                sums[name] += 0 if gradient is None else gradient
        for name, buffer in self.model.module.named_buffers():
            buffer.copy_(buffers[name])
        return sums

    def _total(self, tensor: Tensor) -> Tensor:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(tensor, group=self.model.process_group)
        return tensor

    def _check_agreement(self, name: str, own: Tensor) -> None:
        own = own.contiguous()
        all_of_them = [torch.empty_like(own) for _ in range(self.model.process_group.size())]
        dist.all_gather(all_of_them, own, group=self.model.process_group)
        assert all(torch.equal(own, other) for other in all_of_them), f"ranks disagree on {name}"


def message_of(call: Callable[[], Any]) -> str:
    """The error that a call raises, with its type."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


CORE = [(name, scope) for scope in ("model", "bucket") for name in ("micro", "union", "topk")]


def every(habit: Callable[[Method, str], None], combinations: Sequence[tuple[str, str]] = CORE) -> None:
    for name, scope in combinations:
        habit(toys.make(name, 0.1), scope)


# each of these is a habit, with a network of its own for each method and scope


def _accumulates(method: Method, scope: str) -> None:
    audit = Audit(Net(), method, scope)
    for number in range(0, 9, 3):
        losses = [loss_of(number + part) for part in range(3)]
        with audit.checked(*losses):
            with audit.model.no_sync():
                audit.backward(*losses[:2])
            audit.backward(losses[2])


def _accumulates_unused(method: Method, scope: str) -> None:
    """What was used within `no_sync` only counts as used."""
    audit = Audit(Net(), method, scope, find_unused_parameters=True)
    for number in range(4):
        head = BOTH[(number + rank()) % 2]
        first, last = loss_of(number, [head]), loss_of(number, ["right"])
        with audit.checked(first, last):
            with audit.model.no_sync():
                audit.backward(first)
            audit.backward(last)


def _clips(method: Method, scope: str) -> None:
    audit = Audit(Net(), method, scope)
    optimizer = torch.optim.SGD(audit.model.parameters(), lr=0.1)
    for number in range(4):
        audit.step(loss_of(number))
        norm = clip_grad_norm_(audit.model.parameters(), 0.01)
        assert norm > 0.01
        audit._check_agreement("norm", norm.reshape(1))
        optimizer.step()
    audit._check_agreement("parameters", flat([p.detach() for p in audit.model.parameters()]))


def _goes_backward_twice(method: Method, scope: str) -> None:
    audit = Audit(Net(), method, scope)
    for number in range(4):
        audit.step(loss_of(number, ["left", "right"]), loss_of(number + 10, ["right", "left"]))


def _adds_up_losses(method: Method, scope: str) -> None:
    """Of two forward passes, one backward pass."""
    audit = Audit(Net(), method, scope)
    for number in range(3):
        first, second = loss_of(number), loss_of(number + 10)
        audit.step(partial(_sum_of, first, second))


def _sum_of(first: Loss, second: Loss, model: nn.Module) -> Tensor:
    return first(model) + second(model)


def _leaves_heads_out(method: Method, scope: str) -> None:
    """A head that no rank uses, one that some do, in turns, however gradients are kept."""
    for views in (False, True):
        for set_to_none in (True, False):
            audit = Audit(Net(), method, scope, find_unused_parameters=True, gradient_as_bucket_view=views)
            audit.step(loss_of(0))
            for number in range(1, 5):
                heads = {0: ["left"], 1: [BOTH[rank() % 2]], 2: ["right"]}[number % 3]
                audit.step(loss_of(number, heads), set_to_none=set_to_none)


def _has_a_backward_for_each_head(method: Method, scope: str) -> None:
    """The second pass leaves the first head unused, with a gradient."""
    for views in (False, True):
        audit = Audit(Net(), method, scope, find_unused_parameters=True, gradient_as_bucket_view=views)
        for number in range(4):
            audit.step(loss_of(number, ["left"]), loss_of(number, ["right"]))


class Pair(Net):
    """Both heads are outputs."""

    def forward(self, inputs: Tensor, heads: Sequence[str] = BOTH) -> Any:
        hidden = self.trunk(inputs)
        return tuple(getattr(self, head)(hidden) for head in heads)


def _leaves_outputs_out(method: Method, scope: str) -> None:
    for set_to_none in (True, False):
        audit = Audit(Pair(), method, scope, find_unused_parameters=True)
        for number in range(4):
            audit.step(
                lambda model, number=number: model(batch(number))[number % 2].square().mean(),  # type: ignore[misc]
                set_to_none=set_to_none,
            )


def _freezes_for_a_while(method: Method, scope: str) -> None:
    audit = Audit(Net(), method, scope, find_unused_parameters=True)
    for number in range(6):
        audit.model.module.left.requires_grad_(number not in (2, 3))
        kept = audit.sieve.residuals()["left.weight"]
        audit.step(loss_of(number))
        assert number not in (2, 3) or torch.equal(kept, audit.sieve.residuals()["left.weight"])


def _has_a_static_graph(method: Method, scope: str) -> None:
    audit = Audit(Net(), method, scope, static_graph=True)
    for number in range(4):
        audit.step(loss_of(number, ["left"]))


class Checkpointed(Net):
    """Its trunk is computed again in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, inputs: Tensor, heads: Sequence[str] = BOTH) -> Tensor:
        inputs = inputs.clone().requires_grad_()
        hidden = checkpoint(self.trunk, inputs, use_reentrant=self.reentrant)
        return torch.stack([getattr(self, head)(hidden) for head in heads]).sum(0)


def _checkpoints_activations(method: Method, scope: str) -> None:
    audit = Audit(Checkpointed(reentrant=False), method, scope)
    for number in range(3):
        audit.step(loss_of(number))


class Tied(Net):
    """The heads share their weight, and the trunk's are transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.right.weight = self.left.weight
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, inputs: Tensor, heads: Sequence[str] = BOTH) -> Tensor:
        return super().forward(inputs, heads) + self.empty.sum()


def _ties_weights(method: Method, scope: str) -> None:
    """And has a parameter of nothing."""
    audit = Audit(Tied(), method, scope)
    assert "right.weight" not in audit.sieve.residuals()
    for number in range(3):
        audit.step(loss_of(number))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.Conv2d(8, 4, 3))

    def forward(self, inputs: Tensor, heads: Sequence[str] = ()) -> Tensor:  # noqa: ARG002 - as the others
        images = inputs.repeat(1, 24).reshape(-1, 3, 8, 8).contiguous(memory_format=torch.channels_last)
        found: Tensor = self.layers(images)
        return found


def _is_channels_last(method: Method, scope: str) -> None:
    for ddp in ({}, {"gradient_as_bucket_view": True}, {"broadcast_buffers": False}):
        module = Convolutions().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        audit = Audit(module, method, scope, **ddp)
        for number in range(2):
            audit.step(loss_of(number))


def _is_in_double_precision(method: Method, scope: str) -> None:
    audit = Audit(Net().double(), method, scope)
    for number in range(2):
        audit.step(lambda model, number=number: model(batch(number).double()).square().mean())  # type: ignore[misc]


def _has_one_bucket_each(method: Method, scope: str) -> None:
    for ddp in ({"bucket_cap_mb": 1e-6}, {"bucket_cap_mb": 1e-6, "gradient_as_bucket_view": True}):
        audit = Audit(Net(), method, scope, **ddp)
        for number in range(3):
            audit.step(loss_of(number))


def _evaluates_in_between(method: Method, scope: str) -> None:
    audit = Audit(Net(), method, scope)
    for number in range(3):
        with audit.checked(loss_of(number)):
            with torch.no_grad():
                audit.model(batch(7))
            audit.model.eval()
            audit.model(batch(8))  # with a graph that nobody uses
            audit.model.train()  # type: ignore[no-untyped-call]
            audit.backward(loss_of(number))
            with torch.inference_mode():
                audit.model(batch(9))


def _has_a_loss_without_the_model(method: Method, scope: str) -> None:
    for unused in (False, True):
        audit = Audit(Net(), method, scope, find_unused_parameters=unused)
        audit.step(loss_of(0))
        other = torch.ones(3, requires_grad=True)
        audit.model(batch(1))
        other.sum().backward()  # type: ignore[no-untyped-call]
        audit.step(loss_of(2))


HABITS: list[Callable[[Method, str], None]] = [
    _accumulates,
    _accumulates_unused,
    _clips,
    _goes_backward_twice,
    _adds_up_losses,
    _leaves_heads_out,
    _has_a_backward_for_each_head,
    _leaves_outputs_out,
    _freezes_for_a_while,
    _has_a_static_graph,
    _checkpoints_activations,
    _ties_weights,
    _is_channels_last,
    _is_in_double_precision,
    _has_one_bucket_each,
    _evaluates_in_between,
    _has_a_loss_without_the_model,
]


SELDOM_BROKEN = (_clips, _adds_up_losses, _has_one_bucket_each, _is_channels_last, _evaluates_in_between)


@pytest.mark.parametrize(
    "habit",
    [pytest.param(habit, marks=[pytest.mark.slow] * (habit in SELDOM_BROKEN)) for habit in HABITS],
    ids=lambda habit: habit.__name__.strip("_"),
)
def test_nothing_is_lost_where_training(habit: Callable[[Method, str], None], fleet2: Fleet) -> None:
    fleet2.run(every, habit)


OTHERS = [(name, scope) for scope in ("model", "bucket") for name in METHODS
          if name not in ("dgc", "micro", "union", "topk")]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__.strip("_"))
def test_so_it_is_with_all_methods(habit: Callable[[Method, str], None], fleet3: Fleet) -> None:
    """But DGC's, whose velocity counts several times."""
    fleet3.run(every, habit, OTHERS)


def _by_kernels(name: str, scope: str) -> None:
    with kernels.using("triton"):
        audit = Audit(Net(), toys.make(name, 0.1), scope, find_unused_parameters=True, gradient_as_bucket_view=True)
        audit.step(loss_of(0, ["left"]), loss_of(0, ["right"]))
        audit.step(loss_of(1, ["left"]), set_to_none=False)
        audit.step(loss_of(2, ["right"]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scope"), [("micro", "model"), ("union", "bucket")])
def test_kernels_know_of_unused_parameters(name: str, scope: str, fleet2: Fleet) -> None:
    pytest.importorskip("triton")
    fleet2.run(_by_kernels, name, scope)


def _joined_and_compared() -> None:
    """Gradients of an earlier pass are left of a head that nobody uses, and a rank without inputs has none."""
    model = DistributedDataParallel(Net(), find_unused_parameters=True, gradient_as_bucket_view=True)
    gradsieve.sparsify(model, gradsieve.topk(density=0.1), check_agreement=1)
    with model.join():
        for number in range(2 + 2 * rank()):
            model.zero_grad()
            for head in BOTH:
                loss_of(number, [head])(model).backward()  # type: ignore[no-untyped-call]


def test_what_no_rank_used_is_not_compared(fleet2: Fleet) -> None:
    fleet2.run(_joined_and_compared)


def _reentrant_checkpoint() -> None:
    for scope in ("model", "bucket"):
        audit = Audit(Checkpointed(reentrant=True), gradsieve.micro(density=0.1), scope, static_graph=True)
        for number in range(4):
            # a reentrant checkpoint knows no torch.autograd.grad, and the other kind gives the same gradient
            audit.model.module.reentrant = False
            with audit.checked(loss_of(number)):
                audit.model.module.reentrant = True
                audit.backward(loss_of(number))
                audit.model.module.reentrant = False


def test_reentrant_checkpoints(fleet2: Fleet) -> None:
    fleet2.run(_reentrant_checkpoint)


DDP_OPTIONS: list[dict[str, Any]] = [
    {"batched_grad_copy": True},
    {"batched_grad_copy": True, "gradient_as_bucket_view": True, "find_unused_parameters": True},
    {"bucket_cap_mb": None, "bucket_cap_mb_list": [1, 2]},
    {"init_sync": False},
    {"forward_sync_buffers": False},
    {"broadcast_buffers": False, "static_graph": True, "gradient_as_bucket_view": True},
]


def _ddp_options() -> None:
    known = DistributedDataParallel.__init__.__code__.co_varnames
    for options in DDP_OPTIONS:
        for scope in ("model", "bucket"):
            if set(options) <= set(known):  # some are younger than the oldest torch that is supported
                audit = Audit(Convolutions(), gradsieve.union(density=0.1), scope, **options)
                for number in range(3):
                    audit.step(loss_of(number))


def test_options_of_ddp(fleet2: Fleet) -> None:
    fleet2.run(_ddp_options)


def _delayed() -> None:
    """DDP averages these parameters by itself."""
    for scope in ("model", "bucket"):
        module = Net()
        audit = Audit(
            module,
            gradsieve.micro(density=0.1),
            scope,
            delay_all_reduce_named_params=[("left.weight", module.left.weight)],
            param_to_hook_all_reduce=module.trunk[0].weight,
        )
        assert "left.weight" not in audit.sieve.residuals()
        for number in range(3):
            audit.step(loss_of(number))


def test_parameters_whose_reduction_is_delayed_are_left_to_ddp(fleet2: Fleet) -> None:
    fleet2.run(_delayed)


def _parameters(model: nn.Module) -> Tensor:
    return flat([parameter.detach().clone() for parameter in model.parameters()])


def _gradients(model: nn.Module) -> Tensor:
    return flat([parameter.grad for parameter in model.parameters() if parameter.grad is not None])


def _with_optimizers(density: float | None, scope: str) -> Tensor:
    """Two optimizers, of which one has parameter groups; without a density, plain DDP."""
    model = DistributedDataParallel(Net(), bucket_cap_mb=SMALL)
    if density is not None:
        gradsieve.sparsify(model, gradsieve.union(density=density), scope=scope)  # type: ignore[arg-type]
    heads = [{"params": model.module.left.parameters(), "lr": 0.3}, {"params": model.module.right.parameters()}]
    optimizers = [
        torch.optim.AdamW(model.module.trunk.parameters(), lr=0.01),
        torch.optim.SGD(heads, lr=0.1, momentum=0.9, weight_decay=0.01),
    ]
    for number in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(number)(model).backward()  # type: ignore[no-untyped-call]
        optimizers[number % 2].step()
        optimizers[0].step()
    return _parameters(model)


def test_several_optimizers_and_parameter_groups(fleet2: Fleet) -> None:
    plain = fleet2.run(_with_optimizers, None, "model")[0]
    for scope in ("model", "bucket"):
        for found in fleet2.run(_with_optimizers, 1.0, scope):
            torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
        first, second = fleet2.run(_with_optimizers, 0.1, scope)
        assert torch.equal(first, second)


def _second_backward() -> dict[str, bool]:
    """Two losses of one forward pass, backward for each: which gradients are averages?"""
    averages = {}
    for kind in ("plain", "sparsified"):
        model = DistributedDataParallel(Net())
        if kind == "sparsified":
            gradsieve.sparsify(model, gradsieve.topk(density=1.0))
        output = model(batch())
        for number, loss in enumerate((output.sum(), output.square().sum())):
            loss.backward(retain_graph=True)
            own = _gradients(model)
            others = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(others, own)
            averages[f"{kind} {number}"] = all(torch.equal(own, other) for other in others)
    return averages


def test_second_backward_of_one_forward_is_not_averaged_as_in_plain_ddp(fleet2: Fleet) -> None:
    for averages in fleet2.run(_second_backward):
        assert averages == {"plain 0": True, "plain 1": False, "sparsified 0": True, "sparsified 1": False}


def _sparsify(model: DistributedDataParallel) -> Sieve:
    return gradsieve.sparsify(model, gradsieve.micro(density=0.1))


def _freezing() -> dict[str, str]:
    messages = {}
    for static in (False, True):
        audit = Audit(Net(), gradsieve.micro(density=0.1), static_graph=static)
        audit.step(loss_of(0))
        audit.step(loss_of(1))
        audit.model.module.left.weight.requires_grad_(False)
        messages[f"frozen later {static}"] = message_of(partial(loss_of(2), audit.model))
        with torch.no_grad():
            loss_of(2)(audit.model)  # evaluation needs no gradient
        audit.model.module.left.weight.requires_grad_()
        audit.step(loss_of(2))
    for unused in (False, True):
        module = Net()
        module.left.requires_grad_(False)
        audit = Audit(module, gradsieve.micro(density=0.1), find_unused_parameters=unused)
        audit.step(loss_of(0))
        module.left.requires_grad_()
        messages[f"unfrozen later {unused}"] = message_of(partial(loss_of(1), audit.model))
        model = DistributedDataParallel(Net(), find_unused_parameters=unused)
        model.module.left.requires_grad_(False)
        messages[f"frozen in between {unused}"] = message_of(partial(_sparsify, model))
        module = Net()
        module.left.requires_grad_(False)
        model = DistributedDataParallel(module, find_unused_parameters=unused)
        module.left.requires_grad_()
        messages[f"unfrozen in between {unused}"] = message_of(partial(_sparsify, model))
    model = DistributedDataParallel(Net())
    model.module.extra = nn.Linear(3, 3)
    messages["added in between"] = message_of(lambda: _sparsify(model))
    return messages


def test_freezing_that_ddp_does_not_notice_is_refused(fleet2: Fleet) -> None:
    starts = {
        "frozen later": "RuntimeError: 'left.weight' was frozen since the model was wrapped, and DDP waits for its",
        "unfrozen later": "RuntimeError: 'left.weight', 'left.bias' needs a gradient since the model was wrapped, and",
        "frozen in": "ValueError: DDP waits for gradients of 'left.weight', 'left.bias', frozen since",
        "unfrozen in": "ValueError: DDP does not average 'left.weight', 'left.bias': it takes the parameters that need",
        "added": "ValueError: DDP does not average 'extra.weight', 'extra.bias'",
    }
    for messages in fleet2.run(_freezing):
        assert len(messages) == 9
        for key, message in messages.items():
            start = next(start for name, start in starts.items() if key.startswith(name))
            assert message.startswith(start), (key, message)


def _rewrapped() -> None:
    """Unfreeze a layer by wrapping anew, and go on with what was not sent."""
    module = Net()
    module.left.requires_grad_(False)
    old = Audit(module, gradsieve.union(density=0.1))
    for number in range(3):
        old.step(loss_of(number))
    kept = old.sieve.residuals()
    del old
    module.left.requires_grad_()
    new = Audit(module, gradsieve.union(density=0.1))
    assert new.sieve.residuals().keys() - kept.keys() == {"left.weight"}
    for number in range(3):
        new.step(loss_of(number))


def test_a_model_can_be_wrapped_anew(fleet2: Fleet) -> None:
    fleet2.run(_rewrapped)


class Interrupted(Net):
    """Backward fails where it is told to, between the heads and the trunk."""

    fails = False

    def forward(self, inputs: Tensor, heads: Sequence[str] = BOTH) -> Tensor:
        hidden = self.trunk(inputs)
        if self.fails:
            hidden.register_hook(_fail)
        return torch.stack([getattr(self, head)(hidden) for head in heads]).sum(0)


def _fail(gradient: Tensor) -> None:  # noqa: ARG001 - the signature of a tensor hook
    raise KeyboardInterrupt


def _interrupted(scope: str) -> str:
    """An interrupt in backward, as in a notebook; then wrapping anew and going on."""
    module = Interrupted()
    audit = Audit(module, gradsieve.union(density=0.1), scope)
    for number in range(3):
        audit.step(loss_of(number))
    before = audit.sieve.residuals()
    module.fails = True
    with pytest.raises(KeyboardInterrupt):
        audit.backward(loss_of(3))
    module.fails = False
    message = message_of(partial(loss_of(3), audit.model))
    state = audit.sieve.state_dict()
    assert any(not torch.equal(before[name], residual) for name, residual in audit.sieve.residuals().items())
    del audit
    again = Audit(module, gradsieve.union(density=0.1), scope)
    again.sieve.load_state_dict(state)
    for number in range(3):
        again.step(loss_of(number))
    return message


@pytest.mark.parametrize("scope", ["model", "bucket"])
def test_after_an_error_in_backward_a_model_is_wrapped_anew(scope: str, fleet2: Fleet) -> None:
    """What was taken of the step stays in the residual; DDP itself refuses to go on."""
    for message in fleet2.run(_interrupted, scope):
        assert message.startswith("RuntimeError: Expected to have finished reduction in the prior iteration"), message


def _compiled(how: str, ddp: dict[str, Any], scope: str, backend: str) -> tuple[float, int, int]:
    """The largest difference from plain DDP, the number of graphs compiled, and of steps."""
    torch._dynamo.reset()
    compiled = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal compiled
        compiled += 1
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    module: Any = Net()
    if how == "module":
        module = torch.compile(module, backend=counting)
    if how == "module in place":
        module.compile(backend=counting)
    model = DistributedDataParallel(module, **ddp)
    called: Any = torch.compile(model, backend=counting) if how == "ddp, then sparsify" else model
    sieve = gradsieve.sparsify(model, gradsieve.topk(density=1.0), scope=scope)  # type: ignore[arg-type]
    if how == "sparsify, then ddp":
        called = torch.compile(model, backend=counting)
    if how == "ddp in place":
        model.compile(backend=counting)
    plain, worst = DistributedDataParallel(Net()), 0.0
    for number in range(4):
        found = []
        for each in (called, plain):
            each.zero_grad()
            loss_of(number)(each).backward()  # type: ignore[no-untyped-call]
            found.append(_gradients(each))
        worst = max(worst, float((found[0] - found[1]).abs().max()))
    assert sieve.stats is not None
    return worst, compiled, sieve.stats.step + 1


COMPILED = ["module", "module in place", "ddp, then sparsify", "sparsify, then ddp", "ddp in place"]


@pytest.mark.parametrize("how", COMPILED)
def test_compiled_models(how: str, fleet2: Fleet) -> None:
    for worst, compiled, steps in fleet2.run(_compiled, how, {}, "model", "aot_eager"):
        assert worst <= 1e-6
        assert compiled > 0
        assert steps == 4


@pytest.mark.slow
@pytest.mark.parametrize("ddp", [{"find_unused_parameters": True}, {"static_graph": True}], ids="+".join)
@pytest.mark.parametrize("how", COMPILED)
def test_compiled_models_with_options(how: str, ddp: dict[str, Any], fleet2: Fleet) -> None:
    for worst, compiled, steps in fleet2.run(_compiled, how, ddp, "bucket", "eager"):
        assert worst <= 1e-6
        assert compiled > 0
        assert steps == 4


@pytest.mark.slow
def test_a_model_compiled_to_machine_code(fleet2: Fleet) -> None:
    for worst, compiled, steps in fleet2.run(_compiled, "module", {}, "bucket", "inductor"):
        assert worst <= 1e-5
        assert compiled > 0
        assert steps == 4


def _joined(name: str, scope: str, ddp: dict[str, Any], batches: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Train on as many batches as this rank has: what was given, what was applied and kept, and the parameters."""
    rate = 2.0**-6  # so that no bits are lost when it is divided out
    model, sieve = toys.sparsified(toys.make(name, 0.05), ddp={"bucket_cap_mb": 0.0001} | ddp, scope=scope)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    start = _parameters(model).double()
    given = torch.zeros_like(start)
    with model.join():
        for step in range(batches[rank()]):
            gradients = gradients_of(rank(), step)
            given += flat(gradients)
            optimizer.zero_grad()
            model(gradients).backward()
            optimizer.step()
    end = _parameters(model)
    assert sieve.stats is not None
    assert sieve.stats.step == max(batches) - 1
    kept = flat(list(sieve.residuals().values())).double()
    dist.all_reduce(given)
    dist.all_reduce(kept)
    return given / 3, (start - end) / rate + kept / 3, end


def check_joined(ranks: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    for given, found, parameters in ranks:
        # parameters of about one are rounded in each step, and the rate is divided out
        torch.testing.assert_close(found, given, rtol=0, atol=5e-5)
        assert torch.equal(parameters, ranks[0][2])


@pytest.mark.parametrize("scope", ["model", "bucket"])
@pytest.mark.parametrize("name", ["micro", "union", "topk"])
def test_ranks_without_inputs_give_zeros_and_what_they_have_not_sent(name: str, scope: str, fleet3: Fleet) -> None:
    check_joined(fleet3.run(_joined, name, scope, {}, (5, 2, 3)))
    check_joined(fleet3.run(_joined, name, scope, {"find_unused_parameters": True}, (0, 4, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["model", "bucket"])
@pytest.mark.parametrize("name", [name for name in METHODS if name != "dgc"])
def test_joins_of_every_kind(name: str, scope: str, fleet3: Fleet) -> None:
    for ddp in ({"static_graph": True}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        check_joined(fleet3.run(_joined, name, scope, ddp, (5, 2, 3)))
        if "static_graph" not in ddp:
            check_joined(fleet3.run(_joined, name, scope, ddp, (0, 4, 2)))


def _join_refused() -> str:
    model, _ = toys.sparsified(gradsieve.micro(density=0.1))
    with model.join(divide_by_initial_world_size=False):
        return message_of(lambda: model(gradients_of(rank(), 0)).backward())


def test_join_by_the_ranks_that_are_left_is_refused(fleet2: Fleet) -> None:
    for message in fleet2.run(_join_refused):
        assert message.startswith("ValueError: join(divide_by_initial_world_size=False) is for gradients that DDP")


def _join_from_the_start() -> str:
    """One rank has no batch at all."""
    model, _ = toys.sparsified(gradsieve.micro(density=0.1), ddp={"static_graph": True})

    def train() -> None:
        with model.join():
            for step in range(3 * rank()):
                model(gradients_of(rank(), step)).backward()

    return message_of(train)


def test_static_graph_where_a_rank_has_no_batch_is_refused_by_all(fleet2: Fleet) -> None:
    """DDP alone would take one message for another."""
    for message in fleet2.run(_join_from_the_start):
        assert message.startswith("RuntimeError: rank 0 has no input at all, and with static_graph=True"), message


def _zero_and_join() -> Tensor:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, _ = toys.sparsified(gradsieve.union(density=0.1))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for step in range(2 + rank()):
            model.zero_grad()
            model(gradients_of(rank(), step)).backward()
            optimizer.step()
    return _parameters(model)


def test_zero_redundancy_optimizer_and_join(fleet2: Fleet) -> None:
    first, second = fleet2.run(_zero_and_join)
    assert torch.equal(first, second)


def _two_models(scope: str) -> None:
    """Interleaved; then in turns, as generator and discriminator, one of them through the other."""
    first = Audit(Net(), gradsieve.micro(density=0.1), scope)
    second = Audit(Net(24), gradsieve.topk(density=0.1), scope)
    plain = DistributedDataParallel(Net())
    for number in range(3):
        with first.checked(loss_of(number)), second.checked(loss_of(number + 10)):
            losses = [loss_of(number)(first.model), loss_of(number + 10)(second.model), loss_of(number)(plain)]
            for loss in losses:
                loss.backward()  # type: ignore[no-untyped-call]


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, noise: Tensor) -> Tensor:
        made: Tensor = self.layers(noise)
        return made


def _adversaries(density: float | None, scope: str) -> Tensor:
    """Without a density, plain DDP."""
    generator = DistributedDataParallel(Generator(), bucket_cap_mb=SMALL)
    critic = DistributedDataParallel(Net(), bucket_cap_mb=SMALL)
    if density is not None:
        for model in (generator, critic):
            gradsieve.sparsify(model, gradsieve.union(density=density), scope=scope)  # type: ignore[arg-type]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
    for number in range(4):
        optimizers[1].zero_grad()
        judged = critic(torch.cat([batch(number), generator(batch(number + 10)).detach()]))
        (judged[:6].mean() - judged[6:].mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        # through the critic: its gradients are averaged, too, and thrown away
        critic(generator(batch(number + 20))).mean().backward()
        optimizers[0].step()
    return torch.cat([_parameters(generator), _parameters(critic)])


def _critic_aside(how: str, ddp: dict[str, Any]) -> None:
    """The generator's step goes through the critic and trains nothing of it."""
    generator = Audit(Generator(), gradsieve.union(density=0.1))
    critic = Audit(Net(), gradsieve.union(density=0.1), **ddp)
    for number in range(4):
        critic.step(loss_of(number))
        kept = critic.sieve.residuals()

        def judged(model: nn.Module, number: int = number) -> Tensor:
            called = critic.model.module if how == "module" else critic.model
            found: Tensor = called(model(batch(number))).square().mean()
            return found

        critic.model.requires_grad_(how != "frozen")
        if how == "no_sync":
            with critic.model.no_sync():
                generator.step(judged)
        else:
            generator.step(judged)
        critic.model.requires_grad_()
        assert all(torch.equal(kept[name], residual) for name, residual in critic.sieve.residuals().items())


@pytest.mark.parametrize("how", ["frozen", "no_sync", "module"])
def test_passes_through_a_model_that_is_not_trained_leave_its_residual_alone(how: str, fleet2: Fleet) -> None:
    for option in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        fleet2.run(_critic_aside, how, option)


@pytest.mark.parametrize("scope", ["model", "bucket"])
def test_two_models_in_a_process(scope: str, fleet2: Fleet) -> None:
    fleet2.run(_two_models, scope)
    plain = fleet2.run(_adversaries, None, scope)[0]
    for found in fleet2.run(_adversaries, 1.0, scope):
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    first, second = fleet2.run(_adversaries, 0.1, scope)
    assert torch.equal(first, second)


def _in_subgroup(members: Sequence[int]) -> None:
    group = dist.new_group(members)
    if rank() in members:
        for name, scope in CORE:
            audit = Audit(Net(), toys.make(name, 0.1), scope, process_group=group)
            for number in range(3):
                audit.step(loss_of(number))
    dist.barrier()


def test_some_of_the_ranks(fleet3: Fleet) -> None:
    fleet3.run(_in_subgroup, (0, 2))


@pytest.mark.slow
def test_some_of_four_ranks(fleets: Callable[[int], Fleet]) -> None:
    fleets(4).run(_in_subgroup, (1, 3))


def _penalised() -> None:
    """A gradient made by `torch.autograd.grad` does not make a parameter used."""
    audit = Audit(Net(), gradsieve.topk(density=0.1), find_unused_parameters=True)
    audit.step(loss_of(0))
    kept = audit.sieve.residuals()["right.weight"]
    bare = loss_of(1, ["right"])(audit.model.module)
    torch.autograd.grad(bare, list(audit.model.module.right.parameters()))
    # with zeros for a gradient, that it was reached is all that would count
    audit.step(loss_of(1, ["left"]), set_to_none=False)
    assert torch.equal(kept, audit.sieve.residuals()["right.weight"])


def test_gradients_made_aside_do_not_count(fleet2: Fleet) -> None:
    fleet2.run(_penalised)


class Words(nn.Module):
    def __init__(self, kind: type[nn.Embedding] | type[nn.EmbeddingBag], *, sparse: bool) -> None:
        super().__init__()
        self.table = kind(10, 4, sparse=sparse)
        self.head = nn.Linear(4, 2)


def _refusals() -> dict[str, str]:
    from torch._C._distributed_c10d import BuiltinCommHookType
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
    from torch.nn.parallel.distributed import _MixedPrecision

    messages = {}

    def note(key: str, model: Any) -> None:
        messages[key] = message_of(lambda: _sparsify(model))

    note("embedding", DistributedDataParallel(Words(nn.Embedding, sparse=True)))
    note("bag", DistributedDataParallel(Words(nn.EmbeddingBag, sparse=True)))
    changed = DistributedDataParallel(Words(nn.Embedding, sparse=True))
    changed.module.table.sparse = False
    note("changed embedding", changed)
    frozen = Words(nn.Embedding, sparse=True)
    frozen.table.requires_grad_(False)
    note("frozen embedding", DistributedDataParallel(frozen))
    note("dense embedding", DistributedDataParallel(Words(nn.Embedding, sparse=False)))
    half = _MixedPrecision(param_dtype=torch.bfloat16)
    note("mixed precision", DistributedDataParallel(Net(), mixed_precision=half))
    stepped = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, stepped.parameters(), {"lr": 0.1})
    note("in backward", DistributedDataParallel(stepped))
    skipping = DistributedDataParallel(Net(), find_unused_parameters=True)
    skipping.skip_all_reduce_unused_params = True
    note("skipping", skipping)
    # set by hand, for the real one changes how torch compiles from then on
    python = DistributedDataParallel(Net())
    python._use_python_reducer = True
    note("python", python)
    module = Net()
    for frozen_layer in (module.trunk, module.right):
        frozen_layer.requires_grad_(False)
    delayed = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    note(
        "delayed",
        DistributedDataParallel(
            module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module.left.weight
        ),
    )
    hooked = DistributedDataParallel(Net())
    hooked.register_comm_hook(None, allreduce_hook)
    note("hooked", hooked)
    builtin = DistributedDataParallel(Net())
    builtin._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)  # type: ignore[no-untyped-call]
    note("builtin", builtin)
    ours = DistributedDataParallel(Net())
    _sparsify(ours)
    messages["hooked later"] = message_of(lambda: ours.register_comm_hook(None, allreduce_hook))
    note("compiled", torch.compile(DistributedDataParallel(Net()), backend="eager"))
    return messages


def test_what_cannot_be_is_refused_by_sparsify(fleet2: Fleet) -> None:
    starts = {
        "embedding": "TypeError: gradsieve cannot take sparse gradients, and module 'table' is Embedding(sparse=True)",
        "bag": "TypeError: gradsieve cannot take sparse gradients, and module 'table' is EmbeddingBag(sparse=True)",
        "changed embedding": "TypeError: gradsieve cannot take sparse gradients, and a layer of this model had sparse",
        "frozen embedding": "no error",
        "dense embedding": "no error",
        "mixed precision": "ValueError: DistributedDataParallel(mixed_precision=...) brings a communication hook",
        "in backward": "ValueError: 8 parameters, the first is 'trunk.0.weight', have an optimizer that steps in",
        "skipping": "ValueError: skip_all_reduce_unused_params=True keeps buckets from communication hooks",
        "python": 'ValueError: torch._dynamo.config.optimize_ddp is "python_reducer"',
        "delayed": "ValueError: delay_all_reduce_named_params names all trainable parameters",
        "hooked": "RuntimeError: this model has a communication hook already",
        "builtin": "RuntimeError: register_comm_hook or register_builtin_comm_hook can only be called once",
        "hooked later": "RuntimeError: register_comm_hook or register_builtin_comm_hook can only be called once",
        "compiled": "TypeError: sparsify needs a DistributedDataParallel model, not OptimizedModule: call sparsify on",
    }
    for messages in fleet2.run(_refusals):
        assert messages.keys() == starts.keys()
        for key, start in starts.items():
            assert messages[key].startswith(start), (key, messages[key])


def test_a_model_on_several_devices_is_refused() -> None:
    here, elsewhere = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))
    _check_devices([("a", here), ("b", here)])
    with pytest.raises(ValueError, match="must be on one device, but here is 'a' on cpu, 'c' on meta"):
        _check_devices([("a", here), ("b", here), ("c", elsewhere)])


def _copies() -> tuple[list[str], bool]:
    audit = Audit(Net(), gradsieve.micro(density=0.1), find_unused_parameters=True)
    audit.step(loss_of(0))
    messages = [
        message_of(partial(copied, what))
        for what in (audit.model, audit.sieve)
        for copied in (copy.deepcopy, pickle.dumps, lambda what: torch.save(what, io.BytesIO()))
    ]
    torch.save([audit.model.state_dict(), audit.sieve.state_dict()], io.BytesIO())
    average = copy.deepcopy(audit.model.module)
    loss_of(1)(average).backward()  # type: ignore[no-untyped-call]
    pickle.loads(pickle.dumps(audit.model.module))
    # the copy's backward is nothing to the sieve
    audit.step(loss_of(1))
    return messages, average is not audit.model.module


def test_a_sparsified_model_is_not_copied_but_its_module_is(fleet2: Fleet) -> None:
    for messages, another in fleet2.run(_copies):
        assert another
        assert len(messages) == 6
        for message in messages:
            assert message.startswith("TypeError: a sparsified model cannot be copied or pickled"), message


def _dropped() -> bool:
    """Does a model go when its user lets go of it and of its sieve?"""
    import gc
    import weakref

    model = DistributedDataParallel(Chosen())
    sieve = gradsieve.sparsify(model, gradsieve.micro(density=0.1))
    model(gradients_of(rank(), 0)).backward()
    gone = weakref.ref(model)
    del model, sieve
    gc.collect()
    return gone() is None


def test_a_model_goes_when_it_is_let_go(fleet2: Fleet) -> None:
    assert all(fleet2.run(_dropped))
