"""N workers in one process, through the same pipeline as the DDP hook."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradsieve import kernels
from gradsieve.collectives import LocalCollectives, lockstep
from gradsieve.fused import FusedTeam, suits
from gradsieve.methods import Method
from gradsieve.pipeline import PendingStats, Team, Worker
from gradsieve.residual import Residual
from gradsieve.rounding import wire_dtype
from gradsieve.states import checked_learned, encoded, mixed, resized_learned, weights
from gradsieve.types import Reduced, Setup, StepStats

Shapes = Sequence[int | Sequence[int]]


class Trace(NamedTuple):
    """What `simulate` saw."""

    mean: Tensor
    """`[steps, numel]`: the averaged gradient of each step."""
    residual: Tensor
    """`[world, numel]`: every worker's residual after the last step."""
    stats: list[StepStats]
    """One per step, as rank 0 sees it."""


class Simulation:
    """N workers that step together; `simulate` in pieces, for loops that make gradients as they go.

    `as_team` says whether they step as one where the method allows it: the same outcome in fewer operations. By
    default they do on CUDA.
    """

    def __init__(
        self,
        method: Method,
        world: int,
        numel: int,
        *,
        shapes: Shapes | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        residual_dtype: torch.dtype = torch.float32,
        wire: str = "float32",
        as_team: bool | None = None,
    ) -> None:
        if not isinstance(method, Method):
            raise TypeError(
                f"method must be made by a gradsieve constructor such as micro(density=0.01), not {method!r}"
            )
        setup = Setup(world, numel, bounds_of(shapes, numel))
        self.method = method
        self._with_workers = partial(
            Simulation,
            method,
            numel=numel,
            shapes=shapes,
            seed=seed,
            device=device,
            residual_dtype=residual_dtype,
            wire=wire,
            as_team=as_team,
        )
        """Makes one like this of any number of workers."""
        self._residual = Residual.zeros((world, numel), method.feedback, torch.device(device), residual_dtype)
        self.workers = [
            Worker(
                method,
                setup,
                LocalCollectives(rank, world, torch.device(device)),
                seed=seed,
                wire=wire_dtype(wire),
                residual=row,
            )
            for rank, row in enumerate(self._residual.rows())
        ]
        # on CUDA a launch costs more than what it does
        as_team = torch.device(device).type == "cuda" if as_team is None else as_team
        self._fused: FusedTeam | None = None
        self._team: Team | None = None
        if as_team and kernels.uses_triton(torch.device(device)) and suits(method, setup, residual_dtype):
            self._fused = FusedTeam(self.workers, self._residual)
        elif as_team and Team.suits(method):
            self._team = Team(self.workers, self._residual)

    @property
    def residual(self) -> Tensor:
        """`[world, numel]`: a copy of every worker's residual."""
        return self._settled().acc.clone()

    def residual_norms(self) -> Tensor:
        """`[world]`: the L2 norm of every worker's residual."""
        norms: Tensor = self._settled().acc.float().norm(dim=1)
        return norms

    def residual_rows(self) -> Tensor:
        """`[world, numel]`: every worker's residual, to be read only.

        The memory is the same in every step, but what was sent is cleared from it by this call alone.
        """
        return self._settled().acc

    def rescale(self, factor: float) -> None:
        """Multiply every worker's residual: see [Note: residuals follow the learning rate] in `ahead`."""
        self._settled().rescale(factor)

    def _settled(self) -> Residual:
        """The residual, with nothing in it that was sent."""
        if self._fused is not None:
            self._fused.settle()
        return self._residual

    def step(self, gradients: Tensor, parameters: Tensor | None = None) -> tuple[Tensor, StepStats]:
        """Average one gradient per worker, `[world, numel]`; returns the mean, `[numel]`, and rank 0's record."""
        self._check_parameters(parameters)
        dtype = torch.promote_types(self._residual.acc.dtype, torch.float32)
        mean = torch.zeros(gradients.shape[-1], dtype=dtype, device=gradients.device)
        flat = None if parameters is None else parameters.reshape(-1)
        _, pending = self.average(gradients, mean, None if flat is None else lambda: flat)
        return mean, pending[0].read()

    def average(
        self,
        gradients: Tensor,
        mean: Tensor,
        parameters: Callable[[], Tensor] | None = None,
        dense: Tensor | None = None,
        *,
        use_up: bool = False,
    ) -> tuple[Tensor, list[PendingStats]]:
        """`step` into a `mean` of one's own, and without a wait: returns the mean of `dense` and the workers' records.

        `parameters` makes the flat parameters, for methods that ask. `dense`, `[world, any]`, travels whole beside.
        With `use_up` the gradients may be overwritten, which spares a copy where kernels do that.
        """
        if self._fused is not None:
            self._check_gradients(gradients, dense)
            fed = gradients if use_up and gradients.is_contiguous() else _copied(gradients)
            outcome, _, pending = self._fused.average(fed, mean, parameters, dense)
            return outcome.dense, [pending]
        reduced, records = self.reduce(gradients, parameters, dense)
        mean.zero_()
        mean[reduced.indices] = reduced.mean.to(mean.dtype)
        return reduced.dense, records

    def reduce(
        self, gradients: Tensor, parameters: Callable[[], Tensor] | None = None, dense: Tensor | None = None
    ) -> tuple[Reduced, list[PendingStats]]:
        """`average` without the zeros: the mean at the support, and the workers' records, rank 0's first."""
        self._check_gradients(gradients, dense)
        if self._fused is not None:
            return self._reduced_by_kernels(gradients, parameters, dense)
        if self.method.feedback.clip is not None:
            gradients, dense = self._clipped(gradients, dense)
        if self._team is not None:
            together, pending = self._team.reduce(gradients, parameters, dense)
            return together, [pending]
        for worker, gradient in zip(self.workers, gradients, strict=True):
            worker.begin(parameters)
            worker.feed(0, gradient)
        beside = [None] * len(self.workers) if dense is None else list(dense)
        outcomes = lockstep([worker.exchange(part) for worker, part in zip(self.workers, beside, strict=True)])
        finished = [worker.finish(reduced) for worker, reduced in zip(self.workers, outcomes, strict=True)]
        return outcomes[0], finished

    def _reduced_by_kernels(
        self, gradients: Tensor, parameters: Callable[[], Tensor] | None, dense: Tensor | None
    ) -> tuple[Reduced, list[PendingStats]]:
        """Waits for the step to end: how many entries there are is known only then."""
        assert self._fused is not None
        mean = torch.empty(gradients.shape[1], device=gradients.device)
        outcome, late, pending = self._fused.average(_copied(gradients), mean, parameters, dense)
        record = late.record()
        support, thresholds = outcome.support[: record.support].long(), late.stats().thresholds
        return Reduced(
            indices=support,
            mean=outcome.mean[: record.support],
            dense=outcome.dense,
            sent=support,
            counts=record.quotas,
            thresholds=thresholds,
            distinct=record.distinct,
            rest=None if outcome.rest is None else outcome.rest[:, : record.support],
        ), [pending]

    def state_dict(self) -> list[dict[str, Any]]:
        """A copy of every worker's state, by rank."""
        if self._fused is not None:
            self._fused.bring_up()
        return [
            {"learned": worker.state_dict()} | {name: vector.clone() for name, vector in worker.residual.named()}
            for worker in self.workers
        ]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the states that an equal simulation saved."""
        if len(states) != len(self.workers):
            raise ValueError(
                f"{len(states)} states came for {len(self.workers)} workers: give one of each, by rank; load them into "
                f"a simulation of {len(states)} workers, whose resized({len(self.workers)}) is one of as many as here"
            )
        for worker, state in zip(self.workers, self.checked(states), strict=True):
            worker.load_state_dict(state["learned"])
            for name, vector in worker.residual.named():
                vector.copy_(state[name])
        if self._fused is not None:
            self._fused.take_up()

    def checked(self, states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The states of all workers, be they as many as here or not; refused if they are damaged, or not of one run."""
        setup = replace(self.workers[0].setup, world=len(states))
        checked = [self._checked(setup, state) for state in states]
        told = [encoded(state["learned"]) for state in checked]
        for rank, own in enumerate(told):
            if own != told[0]:
                raise ValueError(f"workers 0 and {rank} learned different things: give states that were saved together")
        return checked

    def _checked(self, setup: Setup, state: Mapping[str, Any]) -> dict[str, Any]:
        vectors = dict(self.workers[0].residual.named())
        if not isinstance(state, Mapping) or state.keys() != {"learned", *vectors}:
            came = ", ".join(map(str, state)) if isinstance(state, Mapping) else repr(state)
            raise ValueError(f"a worker's state must have learned, {', '.join(vectors)}, not {came}")
        for name, vector in vectors.items():
            given = state[name]
            if not _is_like(given, vector):
                raise ValueError(f"a worker's {name} must be a flat tensor of {len(vector)} numbers of {vector.dtype}")
        return {**state, "learned": checked_learned(self.method, setup, state["learned"])}

    def resized(self, world: int) -> Simulation:
        """The same simulation with another number of workers: it goes on from here as `reshard` makes a sieve go on."""
        other = self._with_workers(world)
        other.load_state_dict(self.converted(self.state_dict(), world))
        return other

    def converted(self, states: Sequence[Mapping[str, Any]], world: int) -> list[dict[str, Any]]:
        """The states of any number of workers of such a simulation, for another number of them."""
        old = self.checked(states)
        setup = replace(self.workers[0].setup, world=len(old))
        learned = resized_learned(self.method, setup, old[0]["learned"], world)
        vectors = {name: [state[name] for state in old] for name in old[0] if name != "learned"}
        return [
            {"learned": learned}
            | {name: mixed(of_all, weights(rank, len(old), world)) for name, of_all in vectors.items()}
            for rank in range(world)
        ]

    def _clipped(self, gradients: Tensor, dense: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Every worker's gradient within the method's largest norm."""
        kinds = [gradients] if dense is None else [gradients, dense]
        factors = [self.method.feedback.clip_factor(parts, len(self.workers)) for parts in zip(*kinds, strict=True)]
        factor = torch.stack([factor for factor in factors if factor is not None]).unsqueeze(1)
        return gradients * factor, None if dense is None else dense * factor

    def _check_gradients(self, gradients: Tensor, dense: Tensor | None) -> None:
        world, numel = len(self.workers), self.workers[0].setup.numel
        if tuple(gradients.shape) != (world, numel):
            raise ValueError(
                f"gradients of a step must have the shape [world, numel] = [{world}, {numel}], "
                f"not {list(gradients.shape)}"
            )
        if dense is not None and (dense.dim() != 2 or len(dense) != world):
            raise ValueError(f"dense must have a row for each of {world} workers, not the shape {list(dense.shape)}")

    def _check_parameters(self, parameters: Tensor | None) -> None:
        numel = self.workers[0].setup.numel
        if self.method.criterion.needs_weights and parameters is None:
            raise ValueError(
                f"{self.method.name} weighs gradients against parameters: give parameters=, "
                f"a flat tensor of {numel} numbers or one per step"
            )
        if parameters is not None and tuple(parameters.shape) != (numel,):
            raise ValueError(f"parameters must be flat with {numel} numbers, not of the shape {list(parameters.shape)}")


def simulate(
    method: Method,
    gradients: Tensor | Iterable[Tensor],
    *,
    parameters: Tensor | Iterable[Tensor] | None = None,
    shapes: Shapes | None = None,
    seed: int = 0,
    residual_dtype: torch.dtype = torch.float32,
    wire: str = "float32",
) -> Trace:
    """Run a method on given gradients with N workers in this process.

    `gradients` is a tensor `[steps, world, numel]` or an iterable of `[world, numel]`, on CPU or CUDA. `parameters`,
    for methods that look at them, is a flat tensor or an iterable with one per step. `shapes` are the shapes (or
    sizes) of the model's tensors, in order, for methods that know layers. `wire="bfloat16"` sends values in half the
    bits, `"float8"` in a quarter, and what rounding leaves out stays in the residual.

        >>> import torch, gradsieve
        >>> trace = gradsieve.simulate(gradsieve.micro(density=0.01), torch.randn(5, 4, 1000))
        >>> [stats.support for stats in trace.stats]
        [10, 10, 10, 10, 10]
    """
    simulation: Simulation | None = None
    means, stats = [], []
    weights = _each(parameters)
    for index, gradient in enumerate(_steps(gradients)):
        if simulation is None:
            world, numel = gradient.shape
            simulation = Simulation(
                method,
                world,
                numel,
                shapes=shapes,
                seed=seed,
                device=gradient.device,
                residual_dtype=residual_dtype,
                wire=wire,
            )
        weight = next(weights, None)
        if weight is None and parameters is not None:
            raise ValueError(f"parameters ended after {index} of the steps: give one tensor per step, or one for all")
        mean, record = simulation.step(gradient, weight)
        means.append(mean)
        stats.append(record)
    if simulation is None:
        raise ValueError("gradients hold no step: give at least one [world, numel] tensor")
    return Trace(torch.stack(means), simulation.residual, stats)


def _steps(gradients: Tensor | Iterable[Tensor]) -> Iterator[Tensor]:
    if isinstance(gradients, Tensor) and gradients.dim() != 3:
        raise ValueError(f"gradients must have the shape [steps, world, numel], not {list(gradients.shape)}")
    for gradient in gradients:
        if not isinstance(gradient, Tensor) or gradient.dim() != 2 or len(gradient) == 0:
            came = list(gradient.shape) if isinstance(gradient, Tensor) else repr(gradient)
            raise ValueError(f"the gradients of a step must be a tensor [world, numel], not {came}")
        if not gradient.is_floating_point():
            raise TypeError(f"gradients must be floating-point numbers, not {gradient.dtype}")
        yield gradient


def _each(parameters: Tensor | Iterable[Tensor] | None) -> Iterator[Tensor]:
    """The parameters of each step; the same for ever if one tensor was given."""
    if parameters is None:
        return
    if not isinstance(parameters, Tensor):
        yield from parameters
        return
    while True:
        yield parameters


def _copied(gradients: Tensor) -> Tensor:
    """Row by row."""
    return gradients.clone(memory_format=torch.contiguous_format)


def _is_like(given: Any, vector: Tensor) -> bool:
    if not isinstance(given, Tensor) or given.layout != torch.strided or given.is_meta:
        return False
    return (given.shape, given.dtype) == (vector.shape, vector.dtype)


def bounds_of(shapes: Shapes | None, numel: int) -> tuple[int, ...]:
    """Where each tensor begins in the flat vector, then `numel`; one tensor if no shapes are given."""
    if shapes is None:
        return (0, numel)
    sizes = [shape if isinstance(shape, int) else math.prod(shape) for shape in shapes]
    if sum(sizes) != numel:
        raise ValueError(f"shapes hold {sum(sizes)} numbers in all, but gradients have {numel}")
    return tuple(accumulate(sizes, initial=0))
