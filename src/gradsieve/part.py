"""The parts of a model that are exchanged each on its own: all of it as one, or a bucket each.

[Note: parts follow the buckets]
DDP makes other buckets after the first iterations, and which ones it made is seen only as they arrive. So a part is
known by its parameters. When a bucket arrives that no part is of, the parts it takes parameters from are given up; what
was not sent yet waits, by parameter, for the bucket that its parameter is in now. What a method learned about one part
says nothing about another, and starts anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradsieve.ddp import is_used
from gradsieve.layout import Layout, Slot, copy_all, flattened
from gradsieve.nonfinite import LateNonFiniteError, NonFiniteError, described
from gradsieve.pipeline import PendingStats, Worker
from gradsieve.recent import Recent
from gradsieve.types import Span

Names: TypeAlias = tuple[str, ...]
Arrived: TypeAlias = list[tuple[Slot, Tensor]]
"""Flat gradients, and where they belong."""


class Part:
    """Parameters that are exchanged as one, and the worker that does it."""

    def __init__(self, layout: Layout, worker: Worker, used: set[Tensor] | None) -> None:
        self.layout = layout
        self.worker = worker
        self._used = used
        """Parameters that this rank used in this step; None where none can go unused."""
        self._gradients: Arrived = []
        self._views: Recent[Arrived] = Recent()
        self._aside: dict[Span, list[tuple[Tensor, Tensor]]] = {}
        """Of parameters that this rank did not use: what taking the gradient changes, and how it was."""
        self._reduced: Any = None
        self._own: Tensor | None = None
        """1 for this rank, 0 for the others."""
        self._cuts: dict[str, dict[str, Tensor]] = {}
        """What `views` told: the memory stays the same."""

    def begin(self, step: int, scale: float) -> None:
        """Start a step with gradients that come multiplied with `scale`. One that was begun and not finished is given
        up."""
        self._gradients, self._aside, self._reduced = [], {}, None
        self._views.begin()
        self.worker.step, self.worker.scale = step, scale
        try:
            self.worker.begin(self.layout.flat_parameters)
        except LateNonFiniteError as fault:
            faults = self._named(fault.codes)
            raise NonFiniteError(described(fault.step, faults, late=True, scaled=False)) from None

    def take(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Take in the gradients of a bucket."""
        # a bucket stays where it is for many steps
        places = tuple((id(one), other.data_ptr()) for one, other in zip(parameters, gradients, strict=True))
        arrived = self._views.get(places, lambda: self._flat(parameters, gradients))
        self._gradients += arrived
        self._set_aside(arrived)
        if self.worker.method.feedback.clip is None:
            self._feed(arrived)

    def _flat(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Arrived:
        return [
            (self.layout.slot(parameter), flattened(gradient))
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]

    async def exchange(self) -> Part:
        """Exchange what was taken."""
        self._feed_clipped()
        self._reduced = await self.worker.exchange(self._message())
        return self

    def views(self) -> dict[str, dict[str, Tensor]]:
        """The worker's residual, and its velocity if it has one, by name, in the memory that is worked with."""
        for kind, vector in self.worker.residual.named():
            if kind not in self._cuts:
                self._cuts[kind] = self.layout.cut(vector)
        return self._cuts

    def faults(self) -> dict[int, str]:
        """Which ranks brought what is not finite, and in which parameter; after the exchange, alike on all ranks."""
        if not self.worker.checks or self.worker.tells_late:
            return {}
        world = self.worker.setup.world
        return self._named((self._reduced.dense[-world:] * world).round().int().tolist())

    def finish(self) -> PendingStats:
        """Write the means into the gradients, and clear what was sent."""
        told = self._reduced.dense
        unapplied = self._unapplied(told)
        reduced = self._reduced._replace(dense=told[: self.layout.dense_numel])
        pending = self.worker.finish(reduced, unapplied, self._gradients)
        self._aside = {span: kept for span, kept in self._aside.items() if span in unapplied}
        self._gradients, self._reduced = [], None
        return pending

    def put_back(self) -> None:
        """After `finish`: make what no rank used what it was, which need not be the same on all ranks."""
        for kept in self._aside.values():
            copy_all(kept)
        self._aside = {}

    def give_up(self, filling: float) -> None:
        """Leave the step out: the residual as it was before, the gradients filled."""
        self.worker.give_back(self._gradients)
        for _, gradient in self._gradients:
            gradient.fill_(filling)
        self._gradients, self._reduced = [], None

    def _set_aside(self, arrived: Arrived) -> None:
        """If no rank used a parameter, DDP leaves its gradient alone. One of an earlier backward pass may still be
        there, and is in the bucket, too: it would count twice."""
        if self._used is None:
            return
        for slot, gradient in arrived:
            # without a gradient DDP brings zeros, and without momentum they change nothing
            changes = slot.parameter.grad is not None or self.worker.method.feedback.momentum
            if slot.sparse and changes and not is_used(slot.parameter, self._used):
                vectors = [vector[slot.start : slot.stop] for _, vector in self.worker.residual.named()]
                self._aside[slot.span] = [(tensor, tensor.clone()) for tensor in (gradient, *vectors)]

    def _named(self, codes: Sequence[int]) -> dict[int, str]:
        """The parameters that codes stand for: 1 + the number of a sparsified one, then 1 + the place of an entry of
        the excluded ones."""
        return {rank: self._slot(code - 1).name for rank, code in enumerate(codes) if code}

    def _slot(self, place: int) -> Slot:
        if place < len(self.layout.sparse):
            return self.layout.sparse[place]
        entry = place - len(self.layout.sparse)
        # a code is a float32, so that of a very far entry is rounded
        return next((slot for slot in self.layout.dense if entry < slot.stop), self.layout.dense[-1])

    def _feed(self, arrived: Arrived) -> None:
        self.worker.take([(slot, gradient) for slot, gradient in arrived if slot.sparse])

    def _feed_clipped(self) -> None:
        gradients = [gradient for _, gradient in self._gradients]
        feedback, world = self.worker.method.feedback, self.worker.setup.world
        factor = feedback.clip_factor(gradients, world, 1 / self.worker.scale)
        if factor is None:
            return
        # the norm is that of the whole gradient, so nothing could be fed before it was there
        for gradient in gradients:
            gradient.mul_(factor)
        self._feed(self._gradients)

    def _message(self) -> Tensor:
        """What travels whole: the excluded gradients; where parameters may go unused, a flag for each sparsified one;
        where what is not finite is looked for, a code for each rank."""
        message = torch.zeros(self.layout.dense_numel, dtype=self.worker.value_dtype, device=self.worker.device)
        pieces = self.layout.split_dense(message)
        copy_all([(pieces[slot.place], gradient) for slot, gradient in self._gradients if not slot.sparse])
        told = [message]
        if self._used is not None:
            told.append(message.new_tensor([float(is_used(slot.parameter, self._used)) for slot in self.layout.sparse]))
        if self.worker.checks:
            told.append(self._codes(message))
        return torch.cat(told)

    def _codes(self, dense: Tensor) -> Tensor:
        """This rank's code among zeros for the others; `dense` is rid of what is not finite."""
        code = self.worker.fault.to(dense)
        if len(dense):
            finite, place = torch.isfinite(dense).int().min(0)
            code = torch.where(code + finite == 0, place + (len(self.layout.sparse) + 1), code)
            dense.nan_to_num_(0.0, 0.0, 0.0)
        if self._own is None:
            self._own = dense.new_zeros(self.worker.setup.world)
            self._own[self.worker.collectives.rank].fill_(1)  # nothing travels from the host
        return self._own * code

    def _unapplied(self, dense: Tensor) -> list[Span]:
        """Parameters that no rank used: DDP leaves their gradients alone, so what was sent for them is not lost."""
        if self._used is None:
            return []
        flags = dense[self.layout.dense_numel :][: len(self.layout.sparse)].tolist()
        return [slot.span for slot, flag in zip(self.layout.sparse, flags, strict=True) if flag == 0]


class Parts:
    """The parts of one model. See [Note: parts follow the buckets]."""

    def __init__(self, layout: Layout, build: Callable[[Layout, int], Part], seed: int) -> None:
        self.step = 0
        """Steps done."""
        self.rate: float | None = None
        """The learning rate that the residual was last fitted to; None: to none."""
        self._scale = 1.0
        self._layout = layout
        self._build = build
        self._seed = seed
        self._parts: dict[Names, Part] = {}
        self._waiting: dict[str, dict[str, Tensor]] = {}
        """Residuals and velocities whose parameters have not arrived yet in a new bucket."""
        self._learned: dict[Names, Mapping[str, Any]] = {}
        """From a loaded state, what was learned about parts that have not arrived yet."""
        # one part of everything, until buckets arrive
        self._add(layout.names)

    def begin(self, scale: float = 1.0) -> None:
        self._scale = scale
        for part in self._parts.values():
            part.begin(self.step, scale)

    def follow(self, rate: float) -> None:
        """Fit the residual to a learning rate: see [Note: residuals follow the learning rate] in `ahead`."""
        if rate <= 0:
            return  # nothing is applied at it, and nothing can be fitted to it
        if self.rate is not None and self.rate != rate:
            factor = self.rate / rate
            for part in self._parts.values():
                part.worker.residual.rescale(factor)
            self._waiting = {
                kind: {name: vector * factor for name, vector in waiting.items()}
                for kind, waiting in self._waiting.items()
            }
        self.rate = rate

    def of(self, names: Names) -> Part:
        """The part of these parameters; a new one, in a step that has begun, if there is none yet."""
        if names not in self._parts:
            for known in [known for known in self._parts if not set(names).isdisjoint(known)]:
                self._give_up(self._parts.pop(known))
            self._add(names)
            self._parts[names].begin(self.step, self._scale)
        return self._parts[names]

    def residuals(self) -> dict[str, Tensor]:
        return self._by_name("residual")

    def residual_views(self) -> dict[str, Tensor]:
        """What is not sent yet, by name, to be read at once and not to be written into."""
        return self._views("residual")

    def residual_norm(self) -> float:
        waiting = self._waiting.get("residual", {}).values()
        norms = [part.worker.residual.norm() for part in self._parts.values()]
        return math.hypot(*norms, *(float(residual.float().norm()) for residual in waiting))

    def velocities(self) -> dict[str, Tensor]:
        """Empty for methods without momentum."""
        return self._by_name("velocity")

    def learned(self) -> dict[str, Any]:
        """What the method learned about each part, as plain numbers and tensors."""
        learned = self._learned | {names: part.worker.state_dict() for names, part in self._parts.items()}
        return {
            "step": self.step,
            "seed": self._seed,
            "rate": self.rate,
            "parts": [{"names": list(names), "learned": state} for names, state in learned.items()],
        }

    def load(
        self, learned: Mapping[str, Any], residuals: Mapping[str, Tensor], velocities: Mapping[str, Tensor]
    ) -> None:
        """Go on from what `learned`, `residuals` and `velocities` returned."""
        self.step, self._seed, self.rate = learned["step"], learned["seed"], learned["rate"]
        # it may wait until after the caller has used the state for something else
        self._learned = {tuple(part["names"]): deepcopy(part["learned"]) for part in learned["parts"]}
        self._waiting = {"residual": dict(residuals), "velocity": dict(velocities)}
        self._parts = {}
        self._add(self._layout.names)

    def _add(self, names: Names) -> None:
        part = self._parts[names] = self._build(self._layout.part(names), self._seed)
        for kind, vectors in part.views().items():
            waiting = self._waiting.get(kind, {})
            for name, stretch in vectors.items():
                if name in waiting:
                    stretch.copy_(waiting.pop(name))
        if names in self._learned:
            part.worker.load_state_dict(self._learned.pop(names))

    def _give_up(self, part: Part) -> None:
        for kind, vectors in part.views().items():
            self._waiting.setdefault(kind, {}).update(vectors)

    def _by_name(self, kind: str) -> dict[str, Tensor]:
        """A copy, in the order of the model."""
        found = self._views(kind)
        return {slot.name: found[slot.name].clone() for slot in self._layout.sparse if slot.name in found}

    def _views(self, kind: str) -> dict[str, Tensor]:
        """The same in the memory that is worked with."""
        found = dict(self._waiting.get(kind, {}))
        for part in self._parts.values():
            found |= part.views().get(kind, {})
        return found
