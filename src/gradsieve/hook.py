"""`sparsify`: a method on a DistributedDataParallel model, as its communication hook.

[Note: one exchange a step]
DDP calls the hook for each bucket, in the same order on every rank, while backward goes on. Each call accumulates and
scans its bucket and returns a finished future that holds the bucket's own buffer. The call for the last bucket does
the exchange for the whole model and writes the means into all buffers in place; DDP reads them only afterwards. So all
collectives start from one place in one order, and the state never depends on what is in which bucket.
"""

# No `from __future__ import annotations` here: DDP reads the hook's annotations and refuses strings.

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gradsieve.collectives import GroupCollectives, run
from gradsieve.layout import (
    Exclude,
    Layout,
    Slot,
    excluded_names,
    fewer_than_two_dimensions,
    flattened,
    write_back,
)
from gradsieve.methods import Method
from gradsieve.pipeline import PendingStats, Worker
from gradsieve.types import Setup, Span, StepStats

STATE_VERSION = 1
_GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_RESIDUAL_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def sparsify(
    ddp_model: DistributedDataParallel,
    method: Method,
    *,
    exclude: Exclude = fewer_than_two_dimensions,
    residual_dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> "Sieve":
    """Average the gradients of a DDP model by `method` from now on.

    Call it once, after wrapping the model and before the first backward, alike on every rank. Parameters that
    `exclude` names (shell patterns such as `"*.bias"`, or a predicate of name and parameter) travel whole in the same
    step, outside the density; by default those of fewer than two dimensions, `()` for none. `residual_dtype` is how
    the unsent part is kept; `seed` feeds methods that draw at random.

        sieve = gradsieve.sparsify(ddp_model, gradsieve.micro(density=0.01))
    """
    _check_arguments(ddp_model, method, residual_dtype)
    named = [
        (name, parameter)
        for name, parameter in ddp_model.module.named_parameters()
        if parameter.requires_grad and name not in ddp_model.parameters_to_ignore
    ]
    _check_dtypes(named, residual_dtype)
    layout = Layout(named, excluded_names(named, exclude))
    if layout.numel == 0:
        raise ValueError(
            f"all {len(named)} trainable parameters are excluded or empty, so nothing is left to sparsify: "
            "give a narrower exclude=, or exclude=() to exclude none"
        )
    sieve = Sieve(ddp_model, method, layout, residual_dtype, seed)
    ddp_model.register_comm_hook(sieve, _hook)
    return sieve


def _hook(sieve: "Sieve", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return sieve._on_bucket(bucket)


class Sieve:
    """The sparsifier of one model on one rank. Made by `sparsify`."""

    def __init__(
        self,
        ddp_model: DistributedDataParallel,
        method: Method,
        layout: Layout,
        residual_dtype: torch.dtype,
        seed: int,
    ) -> None:
        group, device = ddp_model.process_group, layout.sparse[0].parameter.device
        collectives = GroupCollectives(group, device)
        setup = Setup(collectives.world, layout.numel, layout.bounds)
        self.method = method
        self._group = group
        self._layout = layout
        self._worker = Worker(method, setup, collectives, seed=seed, dtype=residual_dtype)
        self._gradients: list[tuple[Slot, Tensor]] = []
        self._pending: PendingStats | None = None
        self._paused = False
        self._dense_step = False
        self._used: set[Tensor] | None = None
        if ddp_model.find_unused_parameters or ddp_model.static_graph:
            self._watch_use()

    @property
    def stats(self) -> StepStats | None:
        """The record of the last sparsified step; None before the first. On CUDA, waits for that step to end."""
        if self._pending is None:
            return None
        return replace(self._pending.read(), dense_numel=self._layout.dense_numel)

    @property
    def paused(self) -> bool:
        """Are gradients averaged densely for now?"""
        return self._paused

    def pause(self) -> None:
        """Average densely from the next backward on, and keep the residual. Call it alike on every rank."""
        self._paused = True

    def resume(self) -> None:
        """Sparsify again, going on with the residual as it was."""
        self._paused = False

    def residuals(self) -> dict[str, Tensor]:
        """A copy of what this rank has not sent yet, by the name of each sparsified parameter."""
        return self._layout.by_name(self._worker.residual.acc)

    def residual_norm(self) -> float:
        """The L2 norm of what this rank has not sent yet. On CUDA, waits for the last step to end."""
        return self._worker.residual.norm()

    def state_dict(self) -> dict[str, Any]:
        """A copy of this rank's state. Every rank has its own: save and load all of them."""
        velocity = self._worker.residual.velocity
        return {
            "version": STATE_VERSION,
            "rank": self._worker.collectives.rank,
            "world": self._worker.setup.world,
            "method": repr(self.method),
            "learned": self._worker.state_dict(),
            "residuals": self.residuals(),
            "velocities": {} if velocity is None else self._layout.by_name(velocity),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that the same rank of an equal run saved."""
        self._check_state(state)
        self._worker.load_state_dict(state["learned"])
        self._layout.fill(self._worker.residual.acc, state["residuals"])
        if self._worker.residual.velocity is not None:
            self._layout.fill(self._worker.residual.velocity, state["velocities"])

    def __repr__(self) -> str:
        layout, rank = self._layout, self._worker.collectives.rank
        return (
            f"Sieve({self.method!r}, rank {rank} of {self._worker.setup.world}, {layout.numel} entries sparsified, "
            f"{layout.dense_numel} dense{', paused' if self._paused else ''})"
        )

    def _on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            self._begin()
        if self._dense_step:
            if bucket.is_last() and self._used is not None:
                self._used.clear()
            return allreduce_hook(self._group, bucket)
        self._take(bucket)
        if bucket.is_last():
            self._finish()
        return _finished(bucket.buffer())

    def _begin(self) -> None:
        # a step is dense or sparse as a whole, even if pause() is called while it runs
        self._dense_step = self._paused
        self._gradients = []
        if not self._dense_step:
            self._worker.begin(self._layout.flat_parameters)

    def _take(self, bucket: GradBucket) -> None:
        if bucket.buffer().is_sparse:
            raise TypeError(
                "gradsieve cannot take sparse gradients (nn.Embedding(sparse=True)): use sparse=False, "
                "or leave the layer out of DDP"
            )
        arrived = [
            (self._layout.slot(parameter), flattened(gradient))
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        self._gradients += arrived
        if self.method.feedback.clip is None:
            self._feed(arrived)

    def _feed(self, arrived: list[tuple[Slot, Tensor]], factor: Tensor | None = None) -> None:
        for slot, gradient in arrived:
            if factor is not None:
                gradient.mul_(factor)
            if slot.sparse:
                self._worker.feed(slot.start, gradient)

    def _finish(self) -> None:
        if self.method.feedback.clip is not None:
            # the norm is that of the whole gradient, so nothing could be fed before it was there
            gradients = [gradient for _, gradient in self._gradients]
            self._feed(self._gradients, self.method.feedback.clip_factor(gradients, self._worker.setup.world))
        reduced = run(self._worker.exchange(self._dense_message()))
        self._pending = self._worker.finish(reduced, self._unapplied(reduced.dense))
        write_back(reduced, self._gradients, self._layout)
        self._gradients = []

    def _dense_message(self) -> Tensor:
        """The excluded gradients and, where parameters may go unused, a flag for each sparsified one."""
        acc = self._worker.residual.acc
        message = acc.new_zeros(self._layout.dense_numel, dtype=torch.promote_types(acc.dtype, torch.float32))
        for slot, gradient in self._gradients:
            if not slot.sparse:
                message[slot.start : slot.stop] = gradient
        if self._used is None:
            return message
        flags = [float(slot.parameter in self._used) for slot in self._layout.sparse]
        return torch.cat([message, message.new_tensor(flags)])

    def _unapplied(self, dense: Tensor) -> list[Span]:
        """Parameters that no rank used: DDP leaves their gradients alone, so what was sent for them is not lost."""
        if self._used is None:
            return []
        self._used.clear()
        flags = dense[self._layout.dense_numel :].tolist()
        return [slot.span for slot, flag in zip(self._layout.sparse, flags, strict=True) if flag == 0]

    def _watch_use(self) -> None:
        used = self._used = set()
        for slot in self._layout.sparse:
            slot.parameter.register_hook(_noting(used, slot.parameter))  # type: ignore[no-untyped-call]

    def _check_state(self, state: Mapping[str, Any]) -> None:
        missing = sorted({"learned", "residuals", "velocities"} - state.keys())
        if missing:
            raise ValueError(f"this state lacks {', '.join(missing)}: give what Sieve.state_dict() returned, whole")
        expected = {
            "version": STATE_VERSION,
            "rank": self._worker.collectives.rank,
            "world": self._worker.setup.world,
            "method": repr(self.method),
        }
        for key, value in expected.items():
            if state.get(key) != value:
                raise ValueError(
                    f"this state was saved with {key} {state.get(key)!r}, but here {key} is {value!r}: "
                    "load each rank's own state, into the same method and world"
                )
        ours = {slot.name: tuple(slot.parameter.shape) for slot in self._layout.sparse}
        theirs = {name: tuple(tensor.shape) for name, tensor in state["residuals"].items()}
        if ours != theirs:
            differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
            raise ValueError(
                f"this state belongs to another model or another exclude=: {len(differing)} parameters differ, "
                f"the first is {differing[0]!r} (saved {theirs.get(differing[0])}, here {ours.get(differing[0])})"
            )


def _noting(used: set[Tensor], parameter: Tensor) -> Callable[[Tensor], None]:
    def note(gradient: Tensor) -> None:  # noqa: ARG001 - the signature of a tensor hook
        used.add(parameter)

    return note


def _finished(buffer: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future(
        devices=[buffer.device] if buffer.device.type == "cuda" else None
    )
    future.set_result(buffer)
    return future


def _check_arguments(ddp_model: Any, method: Any, residual_dtype: torch.dtype) -> None:
    if not isinstance(ddp_model, DistributedDataParallel):
        hint = "wrap it first: DistributedDataParallel(model)"
        if isinstance(getattr(ddp_model, "_orig_mod", None), DistributedDataParallel):
            hint = "call sparsify on the DDP model before torch.compile"
        raise TypeError(f"sparsify needs a DistributedDataParallel model, not {type(ddp_model).__name__}: {hint}")
    if not isinstance(method, Method):
        hint = f"gradsieve.method({method!r})" if isinstance(method, str) else "gradsieve.micro(density=0.01)"
        raise TypeError(f"method must be made by a gradsieve constructor, not {type(method).__name__}: try {hint}")
    if residual_dtype not in _RESIDUAL_DTYPES:
        raise ValueError(f"residual_dtype must be one of {_listed(_RESIDUAL_DTYPES)}, not {residual_dtype}")
    if ddp_model._comm_hooks:
        raise RuntimeError(
            "this model has a communication hook already, and DDP takes one: make one sieve per model, and use "
            "sieve.pause() to go dense for a while"
        )


def _check_dtypes(named: list[tuple[str, nn.Parameter]], residual_dtype: torch.dtype) -> None:
    allowed = (*_GRADIENT_DTYPES, residual_dtype)
    for name, parameter in named:
        if parameter.dtype not in allowed:
            raise TypeError(
                f"parameter {name!r} is {parameter.dtype}; gradients may be {_listed(allowed)}"
                + ("; give residual_dtype=torch.float64 to keep its precision" if parameter.dtype.itemsize == 8 else "")
            )


def _listed(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(sorted({str(dtype) for dtype in dtypes}))
