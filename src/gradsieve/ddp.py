"""What `sparsify` asks of a DistributedDataParallel model, and what it watches afterwards.

[Note: what DDP does without a word]
DDP decides once, when it is made, which parameters it averages. One that is unfrozen later is never averaged; one that
is frozen later is waited for, so no bucket behind it is averaged in that step, and the next forward pass fails. Neither
is said where it happens, so `Watch` looks before each forward pass.

In `join()`, ranks that have run out of inputs call the communication hook with zeros, in the main thread, outside any
backward pass. Whoever averages in a hook divides by all ranks: `divide_by_initial_world_size=False` reaches no hook.
And before its first step, a static graph has collectives of its own that such ranks do not know of.

[Note: used]
With `find_unused_parameters` or `static_graph`, DDP leaves the gradients of parameters alone that no rank used. It
counts a parameter as used when its gradient was accumulated and there is one then. So it must be counted here in the
same place: tensor hooks also run for `torch.autograd.grad`, and where an output of the model was left out of the loss.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def trainable(ddp_model: DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    """The parameters that need a gradient now and that DDP was not told to ignore."""
    return [(name, parameter) for name, parameter in _managed(ddp_model) if parameter.requires_grad]


def _managed(ddp_model: DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    ignored = ddp_model.parameters_to_ignore
    return [named for named in ddp_model.module.named_parameters() if named[0] not in ignored]


def check_wrapping(ddp_model: DistributedDataParallel) -> None:
    """Refuse a model whose gradients a communication hook cannot average, or not all of them."""
    _check_options(ddp_model)
    _check_optimizers(ddp_model)
    _check_sparse_gradients(ddp_model)
    _check_devices(trainable(ddp_model))
    _check_reduced(ddp_model)


def _check_options(ddp_model: DistributedDataParallel) -> None:
    # some options are younger than the oldest torch that is supported
    if getattr(ddp_model, "_use_python_reducer", False):
        raise ValueError(
            'torch._dynamo.config.optimize_ddp is "python_reducer", which hands no buckets to communication hooks: set '
            'it to "ddp_optimizer" before the model is wrapped'
        )
    if getattr(ddp_model, "mixed_precision", None) is not None:
        raise ValueError(
            "DistributedDataParallel(mixed_precision=...) brings a communication hook of its own, and DDP takes one: "
            "leave it out, and use torch.autocast or a model in bfloat16"
        )
    if getattr(ddp_model, "skip_all_reduce_unused_params", False):
        raise ValueError(
            "skip_all_reduce_unused_params=True keeps buckets from communication hooks: leave it out; "
            "find_unused_parameters=True alone is supported"
        )
    if getattr(ddp_model, "_delay_all_reduce_all_params", False):
        raise ValueError(
            "delay_all_reduce_named_params names all trainable parameters, so DDP hands none to communication hooks: "
            "name fewer"
        )


def _check_optimizers(ddp_model: DistributedDataParallel) -> None:
    stepped = [name for name, parameter in _managed(ddp_model) if hasattr(parameter, "_in_backward_optimizers")]
    if stepped:
        raise ValueError(
            f"{len(stepped)} parameters, the first is {stepped[0]!r}, have an optimizer that steps in backward "
            "(_apply_optimizer_in_backward), for which DDP needs the communication hook: step the optimizer after "
            "backward"
        )


def _check_sparse_gradients(ddp_model: DistributedDataParallel) -> None:
    reduced = {parameter for _, parameter in trainable(ddp_model)}
    for name, module in ddp_model.module.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight in reduced:
            raise TypeError(
                f"gradsieve cannot take sparse gradients, and module {name!r} is "
                f"{type(module).__name__}(sparse=True): use sparse=False, or leave the layer out of DDP"
            )


def _check_devices(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    first: dict[torch.device, str] = {}
    for name, parameter in named:
        first.setdefault(parameter.device, name)
    if len(first) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in first.items())
        raise ValueError(
            f"the parameters of a model must be on one device, but here is {places}: gradsieve does not know models "
            "that are spread over several"
        )


def _check_reduced(ddp_model: DistributedDataParallel) -> None:
    """Does DDP average what is to be sparsified, and nothing else?"""
    reduced, wanted = _reduced(ddp_model), trainable(ddp_model)
    late = [name for name, parameter in wanted if parameter not in reduced]
    gone = reduced - {parameter for _, parameter in wanted}
    if late:
        raise ValueError(
            f"DDP does not average {_some(late)}: it takes the parameters that need a gradient when it is made; wrap "
            "the model after the last was added or unfrozen, or have DDP ignore it"
        )
    if gone:
        names = [name for name, parameter in ddp_model.module.named_parameters() if parameter in gone]
        raise ValueError(
            f"DDP waits for gradients of {_some(names) or 'parameters that left the model'}, frozen since it was "
            "made or named among those to ignore: freeze parameters before wrapping the model"
        )


def _reduced(ddp_model: DistributedDataParallel) -> set[Tensor]:
    """The parameters that DDP averages."""
    try:
        # the one way to ask; its buffers are gone before the residual, of the same size, is made
        buckets = ddp_model.reducer._get_zeros_like_grad_buckets()
    except RuntimeError as error:
        raise TypeError(
            "gradsieve cannot take sparse gradients, and a layer of this model had sparse=True when it was wrapped: "
            "wrap it with sparse=False"
        ) from error
    return {parameter for bucket in buckets for parameter in bucket.parameters()}


def _some(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    listed = ", ".join(map(repr, names[:3]))
    return f"{listed} and {len(names) - 3} more" if len(names) > 3 else listed


class Bound:
    """What belongs to a model in this process. A copy of DDP has no communication hook, so it would go dense."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a sparsified model cannot be copied or pickled, for its sieve belongs to this process: copy or save "
            "ddp_model.module or its state_dict(), and the sieve's state_dict()"
        )


class Watch(Bound):
    """Looks at a model before each forward pass and each step: see [Note: what DDP does without a word]."""

    def __init__(self, ddp_model: DistributedDataParallel) -> None:
        # the model holds its hooks, and is to go when its user lets go of it
        self._model = weakref.ref(ddp_model)
        self._needed = [(name, parameter, parameter.requires_grad) for name, parameter in _managed(ddp_model)]
        self._may_freeze = bool(ddp_model.find_unused_parameters and not ddp_model.static_graph)
        self._has_forwarded = False
        self._is_first_step = True

    def start(self) -> None:
        model = self._model()
        assert model is not None
        model.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:  # noqa: ARG002 - the signature of a hook
        self._has_forwarded = True
        if torch.is_grad_enabled():
            self._check_frozen()

    def _check_frozen(self) -> None:
        thawed = [name for name, parameter, needed in self._needed if parameter.requires_grad and not needed]
        frozen = [name for name, parameter, needed in self._needed if needed and not parameter.requires_grad]
        if thawed:
            raise RuntimeError(
                f"{_some(thawed)} needs a gradient since the model was wrapped, and DDP never averages it: ranks would "
                "drift apart; wrap the model anew and sparsify it, load_state_dict() brings the residual of the rest"
            )
        # in a pass that trains nothing of the model (a critic's in the generator's step) DDP waits for nothing
        if frozen and not self._may_freeze and any(parameter.requires_grad for _, parameter, _ in self._needed):
            raise RuntimeError(
                f"{_some(frozen)} was frozen since the model was wrapped, and DDP waits for "
                "its gradient: wrap with find_unused_parameters=True to freeze parameters for a while, or wrap the "
                "model anew and sparsify it"
            )

    def before_step(self, gather: Callable[[int, str], Sequence[int]]) -> None:
        """Called on every rank at once, with the first bucket; `gather` gives the numbers of all ranks."""
        is_first, self._is_first_step = self._is_first_step, False
        model = self._model()
        if model is None or not model._join_config.enable:
            return
        if not model._divide_by_initial_world_size:
            raise ValueError(
                "join(divide_by_initial_world_size=False) is for gradients that DDP itself averages, and a "
                "communication hook divides by all ranks: use join() as it comes"
            )
        if model.static_graph and is_first:
            self._check_all_began(model, gather)

    def _check_all_began(self, model: DistributedDataParallel, gather: Callable[[int, str], Sequence[int]]) -> None:
        if not self._has_forwarded:
            # DDP forgets to, and the others would take the next message for this one
            model._match_unused_params_allreduce()  # type: ignore[no-untyped-call]
        idle = [
            rank
            for rank, has_forwarded in enumerate(gather(int(self._has_forwarded), "beginnings"))
            if not has_forwarded
        ]
        if idle:
            raise RuntimeError(
                f"rank {idle[0]} has no input at all, and with static_graph=True DDP cannot join() a rank before its "
                "first step: give every rank a batch, or leave static_graph out"
            )


def note_use(parameters: Sequence[nn.Parameter]) -> set[Tensor]:
    """A set that parameters come into when backward reaches them: see [Note: used]. The caller empties it."""
    used: set[Tensor] = set()
    for parameter in parameters:
        # DDP keeps the accumulators of its parameters alive, and their hooks with them
        torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(_noting(used, parameter))
    return used


def _noting(used: set[Tensor], parameter: Tensor) -> Callable[[Any], None]:
    def note(gradients: Any) -> None:  # noqa: ARG001 - the signature of a hook of a node
        used.add(parameter)

    return note


def is_used(parameter: Tensor, used: set[Tensor]) -> bool:
    """Does DDP, too, count it as used?"""
    return parameter in used and parameter.grad is not None
