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

from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gradsieve import states
from gradsieve.agreement import AgreementError, check_alike, check_same_model, digest, disagreement, tell_failure
from gradsieve.ahead import Lookahead, reach_of, watch
from gradsieve.checks import check_choice, check_whole
from gradsieve.collectives import Collectives, GroupCollectives, OverlappedCollectives, run
from gradsieve.ddp import Bound, Watch, check_wrapping, note_use, trainable
from gradsieve.fused import make_worker
from gradsieve.layout import Exclude, Layout, excluded_names, fewer_than_two_dimensions
from gradsieve.methods import Method
from gradsieve.nonfinite import NonFiniteError, OnNonfinite, described
from gradsieve.part import Part, Parts
from gradsieve.pipeline import PendingStats, summed
from gradsieve.rounding import wire_dtype
from gradsieve.types import Setup, StepStats
from gradsieve.version import __version__

Scope = Literal["model", "bucket"]

_GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sparsify(
    ddp_model: DistributedDataParallel,
    method: Method,
    *,
    scope: Scope = "model",
    exclude: Exclude = fewer_than_two_dimensions,
    residual_dtype: torch.dtype = torch.float32,
    wire: str = "float32",
    seed: int = 0,
    on_nonfinite: OnNonfinite | None = None,
    scaler: torch.amp.GradScaler | None = None,
    check_agreement: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
) -> "Sieve":
    """Average the gradients of a DDP model by `method` from now on.

    Call it once, after wrapping the model and before the first backward, alike on every rank. With `scope="model"` the
    whole model is exchanged as one at the end of backward; with `scope="bucket"` each of DDP's buckets by itself, with
    its own budget, while backward goes on. Parameters that `exclude` names (shell patterns such as `"*.bias"`, or a
    predicate of name and parameter) travel whole in the same step, outside the density; by default those of fewer than
    two dimensions, `()` for none. `residual_dtype` is how the unsent part is kept; `wire="bfloat16"` sends values in
    half the bits, `"float8"` in a quarter, and what rounding leaves out stays in the residual; `seed` feeds methods
    that draw at random.

    A gradient that is not finite on any rank makes all ranks raise `NonFiniteError` (`on_nonfinite="raise"`), leave the
    step out, with the residual as it was (`"skip"`: gradients are zero then, and `Sieve.skipped` is true), or send what
    there is (`"propagate"`). With a `GradScaler`, give it as `scaler`: such steps are then left out by scaler and sieve
    alike, and the residual is free of the scale. `check_agreement=N` compares the averaged gradients of all ranks every
    N steps.

    With `optimizer`, the torch.optim.SGD that steps the model, methods that look `ahead` do: `union` of itself, others
    where they are asked to. It brings accuracy, and costs memory for a second copy of the parameters.

        sieve = gradsieve.sparsify(ddp_model, gradsieve.union(density=0.01), optimizer=optimizer)
    """
    _check_is_ddp(ddp_model)
    collectives = GroupCollectives(ddp_model.process_group, ddp_model.device)
    try:
        policy = _policy(on_nonfinite, scaler)
        options = Options(scope, residual_dtype, wire_dtype(wire), seed, policy, scaler, check_agreement)
        sieve = _made(ddp_model, method, exclude, options, optimizer)
    except Exception as error:
        # or the others would wait for this rank
        run(tell_failure(error, collectives))
        raise
    run(check_alike(sieve._told(), collectives))
    run(check_same_model(sieve._layout.words(), collectives))
    ddp_model.register_comm_hook(sieve, _hook)
    sieve._watch.start()
    if sieve._lookahead is not None:
        assert optimizer is not None
        watch(sieve._lookahead, ddp_model.module, optimizer)
        # were it compiled with the model, parameters would not be where autograd looks for them
        look = torch.compiler.disable(sieve._before_forward)  # type: ignore[no-untyped-call]
        ddp_model.register_forward_pre_hook(look)
    return sieve


@dataclass(frozen=True)
class Options:
    """What `sparsify` was given beside model and method."""

    scope: Scope
    residual_dtype: torch.dtype
    wire: torch.dtype
    seed: int
    on_nonfinite: OnNonfinite
    scaler: torch.amp.GradScaler | None
    check_agreement: int

    def told(self) -> dict[str, Any]:
        """In words that ranks can compare."""
        words = {field.name: str(getattr(self, field.name)) for field in fields(self)}
        return words | {"scaler": "given" if self.scaler is not None else "not given"}


def _made(
    ddp_model: DistributedDataParallel,
    method: Method,
    exclude: Exclude,
    options: Options,
    optimizer: torch.optim.Optimizer | None,
) -> "Sieve":
    check_wrapping(ddp_model)
    _check_arguments(ddp_model, method, options)
    named = trainable(ddp_model)
    _check_dtypes(named, options.residual_dtype)
    layout = Layout(named, excluded_names(named, exclude))
    if layout.numel == 0:
        raise ValueError(
            f"all {len(named)} trainable parameters are excluded or empty, so nothing is left to sparsify: "
            "give a narrower exclude=, or exclude=() to exclude none"
        )
    reach = reach_of(method.feedback, optimizer)
    lookahead = Lookahead(reach, optimizer, layout.sparse) if reach and optimizer is not None else None
    return Sieve(ddp_model, method, layout, options, lookahead)


def _hook(sieve: "Sieve", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return sieve._on_bucket(bucket)


class Sieve(Bound):
    """The sparsifier of one model on one rank. Made by `sparsify`."""

    def __init__(
        self,
        ddp_model: DistributedDataParallel,
        method: Method,
        layout: Layout,
        options: Options,
        lookahead: Lookahead | None,
    ) -> None:
        self.method = method
        self.scope = options.scope
        self._options = options
        self._lookahead = lookahead
        self._averaged: list[Tensor] = []
        """The buckets of a step whose means are to be compared."""
        self._group = ddp_model.process_group
        self._layout = layout
        self._used: set[Tensor] | None = None
        if ddp_model.find_unused_parameters or ddp_model.static_graph:
            self._used = note_use([slot.parameter for slot in layout.sparse])
        self._watch = Watch(ddp_model)
        self._parts = Parts(layout, self._part, options.seed)
        self._running: list[Coroutine[Any, Any, Part]] = []
        """Exchanges under way, the oldest first."""
        self._ended: list[Part] = []
        """Parts whose exchange in this step has ended."""
        self._pending: list[PendingStats] = []
        """Of all of the last step."""
        self._paused = False
        self._dense_step = False
        self._skipped = False

    @property
    def skipped(self) -> bool:
        """Was the last step left out, because a gradient was not finite on some rank?"""
        return self._skipped

    @property
    def stats(self) -> StepStats | None:
        """The record of the last sparsified step; None before the first. On CUDA, waits for that step to end."""
        if not self._pending:
            return None
        return summed([pending.read() for pending in self._pending])

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
        """A copy of this rank's state. Every rank has its own: save and load all of them.

        `reshard` makes those of another number of ranks from them, and `Sharded` is for torch.distributed.checkpoint.
        """
        return states.saved(self.origin, self._vectors())

    def consolidated_state_dict(self) -> dict[str, Any]:
        """One state for all ranks, which loads on every rank of any world: of each residual the mean over ranks.

        Every rank calls it, at the same step, and gets the same, so one of them may save it.
        """
        vectors, collectives = self._vectors(), GroupCollectives(self._group, self._device)
        steps = [row[0] for row in run(collectives.gather_numbers([vectors.learned["step"]], "steps"))]
        if len(set(steps)) > 1:
            raise RuntimeError(f"ranks have done different numbers of steps ({steps}): call this alike on every rank")
        means = [
            {name: run(_mean(tensor, collectives)) for name, tensor in kind.items()}
            for kind in (vectors.residuals, vectors.velocities)
        ]
        return states.saved_consolidated(self.origin, states.Vectors(vectors.learned, *means))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that the same rank of an equal run saved, or from a consolidated one of any world.

        By bucket, what was learned is taken up where DDP makes the same buckets as then; what was not sent yet, always.
        A state that is damaged or another's is refused, and then nothing has changed.
        """
        self._parts.load(*states.loadable(state, self.origin))

    def __repr__(self) -> str:
        rank, world = self._group.rank(), self._group.size()
        return (
            f"Sieve({self.method!r}, rank {rank} of {world}, {self._layout.numel} entries sparsified, "
            f"{self._layout.dense_numel} dense, by {self.scope}{', paused' if self._paused else ''})"
        )

    def _told(self) -> dict[str, Any]:
        """What all ranks must have been given alike."""
        reach = 0.0 if self._lookahead is None else self._lookahead.reach
        return {"gradsieve version": __version__, "method": repr(self.method), "ahead": reach} | self._options.told()

    def _part(self, layout: Layout, seed: int) -> Part:
        kind = OverlappedCollectives if self.scope == "bucket" else GroupCollectives
        collectives = kind(self._group, self._layout.sparse[0].parameter.device)
        setup = Setup(collectives.world, layout.numel, layout.bounds)
        worker = make_worker(
            self.method,
            setup,
            collectives,
            seed=seed,
            dtype=self._options.residual_dtype,
            wire=self._options.wire,
            narrow=any(slot.parameter.dtype.itemsize < 4 for slot in layout.sparse),
            on_nonfinite=self._options.on_nonfinite,
            scaled=self._options.scaler is not None,
        )
        return Part(layout, worker, self._used)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:  # noqa: ARG002 - the signature of a hook
        assert self._lookahead is not None
        if not module.training or not torch.is_grad_enabled() or self._paused:
            self._lookahead.back()
        elif not self._lookahead.is_ahead:
            self._parts.follow(self._lookahead.rate)
            self._lookahead.look(self._parts.residual_views())

    def _on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            self._begin()
        if not self._dense_step:
            self._take(bucket)
        if self._compares:
            self._averaged.append(bucket.buffer())
        if bucket.is_last():
            self._end()
        return allreduce_hook(self._group, bucket) if self._dense_step else _finished(bucket.buffer())

    def _begin(self) -> None:
        self._watch.before_step(self._gather)
        # a step is dense or sparse as a whole, even if pause() is called while it runs
        self._dense_step = self._paused
        # of a step that an error in backward ended
        for exchange in self._running:
            exchange.close()
        self._running, self._ended = [], []
        self._skipped, self._averaged = False, []
        if not self._dense_step:
            if self._lookahead is not None:
                self._parts.follow(self._lookahead.rate)
            scaler = self._options.scaler
            self._parts.begin(1.0 if scaler is None else scaler.get_scale())

    def _take(self, bucket: GradBucket) -> None:
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
        if self._lookahead is not None:
            self._lookahead.back()
        if not self._dense_step:
            while self._running:
                self._advance()
            self._finish()
        if self._used is not None:
            self._used.clear()

    def _finish(self) -> None:
        """Write the means back, or leave the step out as a whole if a gradient was not finite anywhere."""
        faults = {rank: name for part in self._ended for rank, name in part.faults().items()}
        if faults:
            self._skip(faults)
            return
        self._pending = [part.finish() for part in self._ended]
        if self._compares:
            self._compare()
        for part in self._ended:
            part.put_back()
        self._parts.step += 1

    def _skip(self, faults: Mapping[int, str]) -> None:
        # a scaler looks at the gradients of each optimizer by itself
        scaled = self._options.scaler is not None
        for part in self._ended:
            part.give_up(filling=float("inf") if scaled else 0.0)
        if self._options.on_nonfinite == "raise":
            raise NonFiniteError(described(self._parts.step, faults, late=False, scaled=scaled))
        self._skipped = True

    @property
    def _compares(self) -> bool:
        """Are the means of this step compared between ranks?"""
        every = self._options.check_agreement
        return every > 0 and not self._dense_step and (self._parts.step + 1) % every == 0

    def _gather(self, number: int, what: str) -> list[int]:
        """The numbers of all ranks."""
        collectives = GroupCollectives(self._group, self._device)
        collectives.start_step(self._parts.step)
        return [row[0] for row in run(collectives.gather_numbers([number], what))]

    def _compare(self) -> None:
        digests = self._gather(digest(self._averaged), "digests")
        self._averaged = []
        if len(set(digests)) > 1:
            raise AgreementError(disagreement(self._parts.step, digests))

    @property
    def _device(self) -> torch.device:
        return self._layout.sparse[0].parameter.device

    def _vectors(self) -> states.Vectors:
        return states.Vectors(self._parts.learned(), self._parts.residuals(), self._parts.velocities())

    @property
    def origin(self) -> states.Origin:
        """Where this rank's states come from."""
        return states.Origin(
            self._group.rank(),
            self._group.size(),
            self.method,
            self.scope,
            {slot.name: tuple(slot.parameter.shape) for slot in self._layout.sparse},
            self._layout.names,
            self._options.residual_dtype,
            finite=self._options.on_nonfinite != "propagate",
        )


async def _mean(tensor: Tensor, collectives: Collectives) -> Tensor:
    """Over ranks, in the tensor's own precision, from a sum that does not round."""
    total = await collectives.all_reduce(tensor.double().contiguous(), "residuals")
    return (total / collectives.world).to(tensor.dtype)


def _policy(on_nonfinite: Any, scaler: Any) -> OnNonfinite:
    """What happens to a step whose gradient is not finite."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, not {type(scaler).__name__}")
    if on_nonfinite is None:
        return "raise" if scaler is None else "skip"
    check_choice("on_nonfinite", on_nonfinite, get_args(OnNonfinite))
    policy: OnNonfinite = on_nonfinite
    return policy


def _finished(buffer: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future(
        devices=[buffer.device] if buffer.device.type == "cuda" else None
    )
    future.set_result(buffer)
    return future


def _check_is_ddp(ddp_model: Any) -> None:
    if not isinstance(ddp_model, DistributedDataParallel):
        hint = "wrap it first: DistributedDataParallel(model)"
        if isinstance(getattr(ddp_model, "_orig_mod", None), DistributedDataParallel):
            hint = "call sparsify on the DDP model before torch.compile"
        raise TypeError(f"sparsify needs a DistributedDataParallel model, not {type(ddp_model).__name__}: {hint}")


def _check_arguments(ddp_model: DistributedDataParallel, method: Any, options: Options) -> None:
    if not isinstance(method, Method):
        hint = f"gradsieve.method({method!r})" if isinstance(method, str) else "gradsieve.micro(density=0.01)"
        raise TypeError(f"method must be made by a gradsieve constructor, not {type(method).__name__}: try {hint}")
    residual_dtype = options.residual_dtype
    if residual_dtype not in states.DTYPES:
        raise ValueError(f"residual_dtype must be one of {_listed(states.DTYPES)}, not {residual_dtype}")
    if ddp_model._comm_hooks:
        raise RuntimeError(
            "this model has a communication hook already, and DDP takes one: make one sieve per model, and use "
            "sieve.pause() to go dense for a while"
        )
    check_whole("check_agreement", options.check_agreement, at_least=0)
    _check_scope(options.scope, method)


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
