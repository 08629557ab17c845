"""`sparsify`: a method on a DistributedDataParallel model, as its communication hook.

[Note: one part or many]
DDP calls the hook for each bucket, in the same order on every rank, while backward goes on. Each call accumulates and
scans its bucket and returns a finished future that holds the bucket's own buffer; DDP reads the buffers only after the
last call, which returns once the means are in all of them.

With scope="model" the last call does one exchange for the whole model, and the state never depends on what is in which
bucket. With scope="bucket" each call starts the exchange of its bucket, which is suspended whenever a collective is
under way, and takes those of earlier buckets on to their next collective; the last call takes all to their end. Either
way collectives start from the hook only, in an order that follows from the numbers of buckets and of collectives, which
all ranks share.
"""

# No `from __future__ import annotations` here: DDP reads the hook's annotations and refuses strings.

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gradsieve.checks import check_choice
from gradsieve.collectives import GroupCollectives, OverlappedCollectives
from gradsieve.fused import make_worker
from gradsieve.layout import Exclude, Layout, excluded_names, fewer_than_two_dimensions
from gradsieve.methods import Method
from gradsieve.part import Part, Parts
from gradsieve.pipeline import PendingStats, summed
from gradsieve.rounding import wire_dtype
from gradsieve.types import Setup, StepStats

Scope = Literal["model", "bucket"]

STATE_VERSION = 2
_GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_RESIDUAL_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def sparsify(
    ddp_model: DistributedDataParallel,
    method: Method,
    *,
    scope: Scope = "model",
    exclude: Exclude = fewer_than_two_dimensions,
    residual_dtype: torch.dtype = torch.float32,
    wire: str = "float32",
    seed: int = 0,
) -> "Sieve":
    """Average the gradients of a DDP model by `method` from now on.

    Call it once, after wrapping the model and before the first backward, alike on every rank. With `scope="model"` the
    whole model is exchanged as one at the end of backward; with `scope="bucket"` each of DDP's buckets by itself, with
    its own budget, while backward goes on. Parameters that `exclude` names (shell patterns such as `"*.bias"`, or a
    predicate of name and parameter) travel whole in the same step, outside the density; by default those of fewer than
    two dimensions, `()` for none. `residual_dtype` is how the unsent part is kept; `wire="bfloat16"` sends values in
    half the bits, and what rounding leaves out stays in the residual; `seed` feeds methods that draw at random.

        sieve = gradsieve.sparsify(ddp_model, gradsieve.micro(density=0.01))
    """
    _check_arguments(ddp_model, method, residual_dtype)
    _check_scope(scope, method)
    travels_as = wire_dtype(wire)
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
    sieve = Sieve(ddp_model, method, layout, scope, residual_dtype, travels_as, seed)
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
        scope: Scope,
        residual_dtype: torch.dtype,
        wire: torch.dtype,
        seed: int,
    ) -> None:
        self.method = method
        self.scope = scope
        self._group = ddp_model.process_group
        self._layout = layout
        self._residual_dtype = residual_dtype
        self._wire = wire
        self._used: set[Tensor] | None = None
        if ddp_model.find_unused_parameters or ddp_model.static_graph:
            self._watch_use()
        self._parts = Parts(layout, self._part, seed)
        self._running: list[Coroutine[Any, Any, PendingStats]] = []
        """Exchanges under way, the oldest first."""
        self._ended: list[PendingStats] = []
        """Of those of this step that have ended."""
        self._pending: list[PendingStats] = []
        """Of all of the last step."""
        self._paused = False
        self._dense_step = False

    @property
    def stats(self) -> StepStats | None:
        """The record of the last sparsified step; None before the first. On CUDA, waits for that step to end."""
        if not self._pending:
            return None
        record = summed([pending.read() for pending in self._pending])
        return replace(record, dense_numel=self._layout.dense_numel)

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
        return self._parts.residuals()

    def residual_norm(self) -> float:
        """The L2 norm of what this rank has not sent yet. On CUDA, waits for the last step to end."""
        return self._parts.residual_norm()

    def state_dict(self) -> dict[str, Any]:
        """A copy of this rank's state. Every rank has its own: save and load all of them."""
        return self._origin() | {
            "learned": self._parts.learned(),
            "residuals": self._parts.residuals(),
            "velocities": self._parts.velocities(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that the same rank of an equal run saved.

        By bucket, what was learned is taken up where DDP makes the same buckets as then; what was not sent yet, always.
        """
        self._check_state(state)
        self._parts.load(state["learned"], state["residuals"], state["velocities"])

    def __repr__(self) -> str:
        rank, world = self._group.rank(), self._group.size()
        return (
            f"Sieve({self.method!r}, rank {rank} of {world}, {self._layout.numel} entries sparsified, "
            f"{self._layout.dense_numel} dense, by {self.scope}{', paused' if self._paused else ''})"
        )

    def _part(self, layout: Layout, seed: int) -> Part:
        kind = OverlappedCollectives if self.scope == "bucket" else GroupCollectives
        collectives = kind(self._group, self._layout.sparse[0].parameter.device)
        setup = Setup(collectives.world, layout.numel, layout.bounds)
        worker = make_worker(
            self.method,
            setup,
            collectives,
            seed=seed,
            dtype=self._residual_dtype,
            wire=self._wire,
            narrow=any(slot.parameter.dtype.itemsize < 4 for slot in layout.sparse),
        )
        return Part(layout, worker, self._used)

    def _on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            self._begin()
        if not self._dense_step:
            self._take(bucket)
        if bucket.is_last():
            self._end()
        return allreduce_hook(self._group, bucket) if self._dense_step else _finished(bucket.buffer())

    def _begin(self) -> None:
        # a step is dense or sparse as a whole, even if pause() is called while it runs
        self._dense_step = self._paused
        # of a step that an error in backward ended
        for exchange in self._running:
            exchange.close()
        self._running, self._ended = [], []
        if not self._dense_step:
            self._parts.begin()

    def _take(self, bucket: GradBucket) -> None:
        if bucket.buffer().is_sparse:
            raise TypeError(
                "gradsieve cannot take sparse gradients (nn.Embedding(sparse=True)): use sparse=False, "
                "or leave the layer out of DDP"
            )
        parameters = bucket.parameters()
        by_bucket = self.scope == "bucket"
        part = self._parts.of(self._layout.names_of(parameters) if by_bucket else self._layout.names)
        part.take(parameters, bucket.gradients())
        if by_bucket or bucket.is_last():
            self._running.append(part.exchange())
            self._advance()

    def _advance(self) -> None:
        """Take each exchange on to its next collective, the oldest first."""
        for exchange in list(self._running):
            try:
                exchange.send(None)
            except StopIteration as stop:
                self._running.remove(exchange)
                self._ended.append(stop.value)

    def _end(self) -> None:
        if not self._dense_step:
            while self._running:
                self._advance()
            self._pending = self._ended
            self._parts.step += 1
        if self._used is not None:
            self._used.clear()

    def _watch_use(self) -> None:
        used = self._used = set()
        for slot in self._layout.sparse:
            slot.parameter.register_hook(_noting(used, slot.parameter))  # type: ignore[no-untyped-call]

    def _origin(self) -> dict[str, Any]:
        """Where a state comes from: what must be the same where it is loaded."""
        return {
            "version": STATE_VERSION,
            "rank": self._group.rank(),
            "world": self._group.size(),
            "method": repr(self.method),
            "scope": self.scope,
        }

    def _check_state(self, state: Mapping[str, Any]) -> None:
        missing = sorted({"learned", "residuals", "velocities"} - state.keys())
        if missing:
            raise ValueError(f"this state lacks {', '.join(missing)}: give what Sieve.state_dict() returned, whole")
        for key, value in self._origin().items():
            if state.get(key) != value:
                raise ValueError(
                    f"this state was saved with {key} {state.get(key)!r}, but here {key} is {value!r}: "
                    "load each rank's own state, into the same method, world and scope"
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


def _check_scope(scope: Any, method: Method) -> None:
    check_choice("scope", scope, get_args(Scope))
    if scope == "bucket" and method.feedback.clip is not None:
        raise ValueError(
            f"clip={method.feedback.clip} bounds the norm of the whole gradient, which no bucket knows: "
            'use scope="model", or clip the averaged gradient in place of it'
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
