"""What a step is measured with: this library's methods, PyTorch's own hooks, and the published way."""

# No `from __future__ import annotations` here: DDP reads a hook's annotations and refuses strings.

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from gradsieve.baselines import BASELINES, Baseline, baseline, link_bytes
from gradsieve.bench.published import PublishedMicro
from gradsieve.checks import UsageError, check_choice, nearest
from gradsieve.cost import step as cost
from gradsieve.hook import sparsify
from gradsieve.methods import METHODS, Method, method
from gradsieve.training.config import method_label, parse_method
from gradsieve.types import WAYS

ZERO_LINE, HEADROOM = cost.ZERO_LINE, cost.HEADROOM
"""The first rows of every table: what there is without this library, and what no communication would leave."""
DEFAULT = (
    "dense,topk,cltk,hard_threshold,micro,exdyna,union,iwp,fp16,bf16,powersgd(rank=1),powersgd(rank=4),published_micro"
)


class Seen(NamedTuple):
    """What is known of a step beside its time."""

    wire_bytes: float
    density: float | None = None
    select_seconds: float | None = None
    exchange_seconds: float | None = None
    link_bytes: float | None = None
    """As in `StepStats`: through this rank's link, each way, if collectives run in rings."""


Probe: TypeAlias = Callable[[], Seen]
"""Asked after each step."""
Attach: TypeAlias = Callable[[DistributedDataParallel], Probe]
"""Puts a contender on a fresh model."""


@dataclass(frozen=True)
class Contender:
    """One row."""

    name: str
    attach: Attach
    one_bucket_on_gloo: bool = False
    """Its collectives start from callbacks, whose order gloo does not keep from bucket to bucket."""
    settle: int = 0
    """Steps before it does what it is named for."""


def contenders(expressions: list[str], density: float, options: Mapping[str, Any]) -> list[Contender]:
    """The rows of a table: those that every table has, and what was asked for.

    `options` go to `sparsify`.
    """
    wanted = [_contender(expression, density, options) for expression in expressions]
    names = [contender.name for contender in wanted]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UsageError(f"--methods names {', '.join(repeated)} twice: once is enough")
    return [_of_baseline(baseline("ddp", {})), Contender(HEADROOM, _idle), *wanted]


def _contender(expression: str, density: float, options: Mapping[str, Any]) -> Contender:
    name, given = parse_method(expression)
    if name in METHODS:
        try:
            return _of_method(name, given, density, options)
        except (TypeError, ValueError) as error:
            raise UsageError(f"--methods: {error}") from error
    if name in BASELINES:
        try:
            return _of_baseline(baseline(name, given))
        except UsageError as error:
            raise UsageError(f"--methods: {error}") from error
    if name not in OTHERS:
        raise UsageError(f"--methods: unknown {name!r}; {nearest(name, [*METHODS, *BASELINES, *OTHERS])}")
    return OTHERS[name](given, density)


def _of_method(name: str, given: Mapping[str, Any], density: float, options: Mapping[str, Any]) -> Contender:
    """What stands in an expression goes before what was given for all rows."""
    ways = {option: given[option] for option in WAYS if option in given}
    for option, value in ways.items():
        check_choice(option, value, WAYS[option])
    own = {option: value for option, value in given.items() if option not in WAYS}
    made = method(name, **({} if name == "dense" else {"density": density}) | own)
    label = method_label(made) + (f" at {made.density:g}" if "density" in given else "")
    return Contender(
        ", ".join([label, *(str(ways[way]) for way in WAYS if way in ways)]),
        partial(_sparsified, made, {**options, **ways}),
    )


def _of_baseline(other: Baseline) -> Contender:
    return Contender(other.name, partial(_attached, other), other.one_bucket_on_gloo, other.settle)


def _attached(other: Baseline, model: DistributedDataParallel) -> Probe:
    sent, world = other.attach(model), dist.get_world_size(model.process_group)

    def seen() -> Seen:
        num_bytes = sent()
        return Seen(num_bytes, link_bytes=link_bytes(num_bytes, world))

    return seen


def _idle(model: DistributedDataParallel) -> Probe:
    model.register_comm_hook(model.process_group, noop_hook)
    return lambda: Seen(0, link_bytes=0)


def _sparsified(method: Method, options: Mapping[str, Any], model: DistributedDataParallel) -> Probe:
    sieve = sparsify(model, method, **options)

    def seen() -> Seen:
        stats = sieve.stats
        assert stats is not None
        return Seen(stats.wire_bytes, stats.density, stats.select_seconds, stats.exchange_seconds, stats.link_bytes)

    return seen


def _published(given: Mapping[str, Any], density: float) -> Contender:
    _only(given, ())
    return Contender("published micro", partial(_with_published, density))


def _only(given: Mapping[str, Any], valid: tuple[str, ...]) -> None:
    for option in given:
        if option not in valid:
            raise UsageError(f"--methods: there is no option {option!r} here; {nearest(option, valid)}")


class _PublishedStep:
    """The published step over a process group, for the gradients of all buckets."""

    def __init__(self, model: DistributedDataParallel, density: float) -> None:
        self._group = model.process_group
        self._world, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        self._order = {parameter: place for place, parameter in enumerate(model.parameters())}
        self._local = PublishedMicro([parameter.detach() for parameter in self._order], density, self._world, rank)
        self._arrived: dict[int, Tensor] = {}
        self.seen = Seen(0)

    def take(self, bucket: GradBucket) -> None:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._arrived[self._order[parameter]] = gradient  # type: ignore[index]

    def finish(self) -> None:
        gradients = [gradient for _, gradient in sorted(self._arrived.items())]
        self._arrived = {}
        acc = self._local.accumulate(gradients)
        support, index_bytes = self._gathered(self._local.select(acc))
        values = acc[support]
        dist.all_reduce(values, group=self._group)
        mean = values / self._world
        for gradient, averaged in zip(gradients, self._local.scatter(acc, support, mean), strict=True):
            gradient.copy_(averaged)
        value_bytes = 4 * len(support)
        link_bytes = (index_bytes + value_bytes * 2 / self._world) * (self._world - 1)
        self.seen = Seen(index_bytes + value_bytes, len(support) / len(acc), link_bytes=link_bytes)

    def _gathered(self, proposed: Tensor) -> tuple[Tensor, int]:
        """Everyone's indices, padded to the longest on their way, and the bytes that it took."""
        own = torch.tensor([len(proposed)], device=proposed.device)
        everyones = [torch.zeros_like(own) for _ in range(self._world)]
        dist.all_gather(everyones, own, group=self._group)
        counts = [int(count.item()) for count in everyones]
        padded = proposed.new_zeros(max(counts))
        padded[: len(proposed)] = proposed
        rows = [torch.empty_like(padded) for _ in range(self._world)]
        dist.all_gather(rows, padded, group=self._group)
        return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)]), 8 + 8 * max(counts)


def _published_hook(step: _PublishedStep, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    step.take(bucket)
    if bucket.is_last():
        step.finish()
    buffer = bucket.buffer()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
    future.set_result(buffer)
    return future


def _with_published(density: float, model: DistributedDataParallel) -> Probe:
    step = _PublishedStep(model, density)
    model.register_comm_hook(step, _published_hook)
    return lambda: step.seen


OTHERS: Mapping[str, Callable[[Mapping[str, Any], float], Contender]] = MappingProxyType(
    {
        "published_micro": _published,
    }
)
"""Contenders that are neither methods of this library nor baselines."""
