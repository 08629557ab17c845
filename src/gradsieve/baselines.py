"""What DDP averages gradients with where this library has no hand in it: nothing at all, or one of PyTorch's own hooks.

They are measured and trained beside this library's methods. All of them hand what they send to all-reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gradsieve.checks import UsageError, check_whole, nearest

PLAIN = "plain DDP"
"""The zero line of every table."""
POWERSGD_START = 2
"""PowerSGD's first compressed step: the smallest number that its error feedback allows."""

Probe: TypeAlias = Callable[[], int]
"""Asked after each step: the bytes that this rank handed to all-reduces in it."""


@dataclass(frozen=True)
class Baseline:
    """A way to average gradients that is not this library's."""

    expression: str
    """As users write it."""
    name: str
    """As tables show it."""
    attach: Callable[[DistributedDataParallel], Probe]
    """Puts it on a fresh model."""
    one_bucket_on_gloo: bool = False
    """Its collectives start from callbacks, whose order gloo does not keep from bucket to bucket."""
    settle: int = 0
    """Steps before it does what it is named for."""

    def bucket_megabytes(self, num_parameters: int, backend: str) -> int | None:
        """DDP's `bucket_cap_mb`; None is its default, as users have it."""
        return 2 * (4 * num_parameters // (1 << 20) + 1) if self.one_bucket_on_gloo and backend == "gloo" else None


def baseline(name: str, options: Mapping[str, Any]) -> Baseline:
    """One of `BASELINES`, with its options."""
    return BASELINES[name](options)


def link_bytes(wire_bytes: float, world: int) -> float:
    """Through a rank's link, each way, of bytes that all-reduces in rings are handed."""
    return wire_bytes * 2 * (world - 1) / world


def _plain(options: Mapping[str, Any]) -> Baseline:
    _only("ddp", options, ())
    return Baseline("ddp", PLAIN, lambda model: partial(_bytes_of_all, 4, model))


def _half(hook: Any, name: str, options: Mapping[str, Any]) -> Baseline:
    _only(name, options, ())
    return Baseline(name, f"{name} hook", partial(_hooked, hook, 2))


def _hooked(hook: Any, bytes_per_entry: int, model: DistributedDataParallel) -> Probe:
    model.register_comm_hook(model.process_group, hook)
    return partial(_bytes_of_all, bytes_per_entry, model)


def _bytes_of_all(bytes_per_entry: int, model: DistributedDataParallel) -> int:
    return bytes_per_entry * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _powersgd(options: Mapping[str, Any]) -> Baseline:
    _only("powersgd", options, ("rank",))
    rank = options.get("rank", 1)
    try:
        check_whole("the rank of powersgd", rank, at_least=1)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    return Baseline(
        f"powersgd(rank={rank})",
        f"PowerSGD rank {rank}",
        partial(_with_powersgd, rank),
        one_bucket_on_gloo=True,
        settle=POWERSGD_START + 1,  # the first compressed step makes its matrices
    )


def _with_powersgd(rank: int, model: DistributedDataParallel) -> Probe:
    state = PowerSGDState(model.process_group, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_START)
    model.register_comm_hook(state, powerSGD_hook)
    before = 0

    def sent() -> int:
        nonlocal before
        entries, before = state.total_numel_after_compression - before, state.total_numel_after_compression
        # it does not count the steps before it begins, which send everything
        return 4 * entries or _bytes_of_all(4, model)

    return sent


def _only(name: str, options: Mapping[str, Any], valid: tuple[str, ...]) -> None:
    for option in options:
        if option not in valid:
            raise UsageError(f"{name} has no option {option!r}; {nearest(option, valid)}")


BASELINES: Mapping[str, Callable[[Mapping[str, Any]], Baseline]] = MappingProxyType(
    {
        "ddp": _plain,
        "fp16": partial(_half, fp16_compress_hook, "fp16"),
        "bf16": partial(_half, bf16_compress_hook, "bf16"),
        "powersgd": _powersgd,
    }
)
"""By the names that users write."""
