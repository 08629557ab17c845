"""Forward and backward for virtual workers: one model, a row of gradients for each worker.

[Note: as DDP does it]
Every worker starts a step from the buffers of rank 0 (running statistics of batch normalisation), and only what rank 0
makes of them stays: that is what DDP's broadcast of buffers comes to.

[Note: twins]
Passes run on the model itself, or on a twin of it that is brought up before they do: one in bfloat16, or one for each
stream where every worker looks ahead from a place of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gradsieve.clock import Stopwatch
from gradsieve.layout import Layout, shaped
from gradsieve.tasks import Examples
from gradsieve.training.engine import seed_of
from gradsieve.training.plan import Plan

NUM_STREAMS = 8
"""On an H200 sixteen passes of ResNet-18 at batch 32 in bfloat16 take 13.9 ms over four streams, 12.9 over eight and
no less over sixteen."""
WARMUP_PASSES = 3
"""Before a capture, so that libraries have chosen their algorithms and allocated what they keep."""


_UNTIMED = Stopwatch(torch.device("cpu"))
"""What is captured cannot be timed one by one."""


class Passes:
    """The passes of all workers, one after the other.

    With `residual`, `[world, numel]`, each looks ahead by its own row: see [Note: looking ahead] in `ahead`.
    """

    _num_streams = 1

    def __init__(
        self, plan: Plan, model: nn.Module, layout: Layout, device: torch.device, residual: Tensor | None = None
    ) -> None:
        self._plan = plan
        self._device = device
        self._model = model
        self._layout = layout
        self._residual = residual
        self._reach = torch.zeros((), device=device)
        self._twins = self._made_twins()
        self._watches: list[Stopwatch] = []
        self.losses = torch.zeros(plan.world, device=device)
        self.gradients = torch.zeros(plan.world, layout.numel, device=device, dtype=self._gradient_dtype(layout))
        self.dense = torch.zeros(plan.world, layout.dense_numel, device=device)
        self._rows = [self._row(layout, rank) for rank in range(plan.world)]
        own = dict(model.named_buffers())
        self._buffers = [own] + [{name: b.clone() for name, b in own.items()} for _ in range(plan.world - 1)]

    def _gradient_dtype(self, layout: Layout) -> torch.dtype:
        """The one that the gradients come in."""
        twins = zip(trainable(self._model), trainable(self._twins[0]), strict=True)
        dtypes = {twin.dtype for parameter, twin in twins if layout.slot(parameter).sparse}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def _made_twins(self) -> list[nn.Module]:
        if self._residual is not None:
            return [_twin(self._model, self._plan) for _ in range(min(self._num_streams, self._plan.world))]
        return [_twin(self._model, self._plan) if self._plan.config.precision == "bfloat16" else self._model]

    def run(self, step: int, batch: Examples, reach: float = 0.0) -> None:
        """Fill the rows and the losses for a step. `batch` holds all workers' examples, in turn.

        Looking ahead goes as far as `reach` times the residual.
        """
        self._reach.fill_(reach)
        self._refresh()
        self._watches = [Stopwatch(self._device) for _ in self._rows]
        for rank, part in enumerate(self._shared_out(batch)):
            torch.manual_seed(seed_of(self._plan.config.seed, step, rank))
            self._pass(rank, part, self._watches[rank])

    def seconds(self) -> list[dict[str, float]]:
        """Of the last step, by phase, for each worker."""
        return [watch.seconds() for watch in self._watches]

    def _row(self, layout: Layout, rank: int) -> list[Tensor]:
        """The places of one worker's gradients, in the order and the shapes of the parameters."""
        places = []
        for parameter in trainable(self._model):
            slot = layout.slot(parameter)
            row = (self.gradients if slot.sparse else self.dense)[rank]
            places.append(shaped(row[slot.start : slot.stop], parameter))
        return places

    def _shared_out(self, batch: Examples) -> list[Examples]:
        world = self._plan.world
        return [Examples(*parts) for parts in zip(batch.inputs.chunk(world), batch.targets.chunk(world), strict=True)]

    def _refresh(self) -> None:
        """Bring the model's parameters and rank 0's buffers to where the passes look for them."""
        if self._residual is not None:
            self._flat = self._layout.flat_parameters()
        elif self._twins[0] is not self._model:
            _copy(list(self._twins[0].parameters()), list(self._model.parameters()))
        own = list(self._buffers[0].values())
        others = [buffer for buffers in self._buffers[1:] for buffer in buffers.values()]
        _copy(others, own * (len(self._buffers) - 1))

    def _look_ahead(self, rank: int, twin: nn.Module) -> None:
        """Bring a twin to where the parameters would be, had this worker's residual been applied."""
        assert self._residual is not None
        ahead = torch.addcmul(self._flat, self._residual[rank], self._reach, value=-1)
        slots = map(self._layout.slot, trainable(self._model))
        sources = [
            shaped(ahead[slot.start : slot.stop], slot.parameter) if slot.sparse else slot.parameter for slot in slots
        ]
        _copy(trainable(twin), sources)

    def _pass(self, rank: int, batch: Examples, watch: Stopwatch) -> None:
        twin = self._twins[rank % len(self._twins)]
        with _wearing(twin, self._buffers[rank]):
            watch.switch("forward")
            if self._residual is not None:
                self._look_ahead(rank, twin)
            with self._autocast():
                loss = self._plan.task.loss(twin(batch.inputs), batch.targets)
            watch.switch("backward")
            gradients = torch.autograd.grad(loss, trainable(twin), allow_unused=True, materialize_grads=True)
            _copy(self._rows[rank], gradients)
            self.losses[rank] = loss.detach()
            watch.switch(None)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._plan.config.precision == "float32":
            return nullcontext()
        # nothing to cache: the twin's matrices are bfloat16 already
        return torch.autocast(self._device.type, torch.bfloat16, cache_enabled=False)


class GraphedPasses(Passes):
    """The same on CUDA: captured once as a graph that forks over several streams, then replayed."""

    _num_streams = NUM_STREAMS
    _graph: torch.cuda.CUDAGraph | None = None
    _batch: Examples

    def run(self, step: int, batch: Examples, reach: float = 0.0) -> None:
        self._reach.fill_(reach)
        if self._graph is None:
            self._batch = Examples(batch.inputs.clone(), batch.targets.clone())
            self._capture()
        assert self._graph is not None
        self._batch.inputs.copy_(batch.inputs)
        self._batch.targets.copy_(batch.targets)
        torch.manual_seed(seed_of(self._plan.config.seed, step, 0))
        self._watches = [Stopwatch(self._device)]
        self._watches[0].switch("compute")
        self._graph.replay()
        self._watches[0].switch(None)

    def seconds(self) -> list[dict[str, float]]:
        # forward and backward of all workers run beside one another: to each its share
        share = self._watches[0].seconds()["compute"] / self._plan.world
        return [{"compute": share}] * self._plan.world

    def _capture(self) -> None:
        kept = {name: buffer.clone() for name, buffer in self._buffers[0].items()}
        side = _stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(WARMUP_PASSES):
                self._refresh()
                self._pass(0, self._shared_out(self._batch)[0], _UNTIMED)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._refresh()
            self._fork()
        _copy(list(self._buffers[0].values()), list(kept.values()))
        self._graph = graph

    def _fork(self) -> None:
        main = torch.cuda.current_stream(self._device)
        streams = [_stream(self._device) for _ in range(min(self._num_streams, self._plan.world))]
        for stream in streams:
            stream.wait_stream(main)
        for rank, part in enumerate(self._shared_out(self._batch)):
            with torch.cuda.stream(streams[rank % len(streams)]):
                self._pass(rank, part, _UNTIMED)
        for stream in streams:
            main.wait_stream(stream)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _twin(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy. For passes in bfloat16 its matrices are: so they are cast once a step and not once a worker."""
    twin = copy.deepcopy(model)
    for module in twin.modules() if plan.config.precision == "bfloat16" else ():
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding)):
            module.weight.data = module.weight.data.bfloat16()
    return twin


@contextmanager
def _wearing(model: nn.Module, buffers: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with these buffers in place of its own."""
    own = dict(model.named_buffers())
    _put_on(model, buffers)
    try:
        yield
    finally:
        _put_on(model, own)


def _put_on(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._buffers[leaf] = buffer


def _copy(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """One launch for many tensors that are alike: one that is not would have each copied by itself."""
    alike: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for destination, source in zip(destinations, sources, strict=True):
        kind = destination.dtype, source.dtype, destination.stride() == source.stride()
        group = alike.setdefault(kind, ([], []))
        group[0].append(destination)
        group[1].append(source)
    with torch.no_grad():
        for group in alike.values():
            torch._foreach_copy_(*group)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
