"""The methods: one expression each.

A method is a choice on four axes (where a rank looks, what it takes, whose indices count, how values travel), with a
budget and a way for gradients to enter the residual. It is frozen and holds no state: one may serve many models.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, ParamSpec

from gradsieve.checks import check_choice, check_flag, check_fraction, check_number, check_whole, nearest
from gradsieve.criterion import (
    Above,
    Criterion,
    Everything,
    ExponentialFit,
    Fixed,
    Largest,
    Remeasured,
    Sampled,
    SharedRandom,
    Stepped,
)
from gradsieve.exchange import Agreed, Disjoint, Exchange, SteeredUnion, Union
from gradsieve.merge_tree import MergeTree
from gradsieve.owner_sums import OwnerSums
from gradsieve.proposers import Everyone, Proposers, RandomRanks, RotatingLeader
from gradsieve.region import BalancedBlocks, LayerBins, Region, RotatingSlices, SteppingBlocks, Whole
from gradsieve.residual import Feedback
from gradsieve.score import Importance
from gradsieve.search import Searched

P = ParamSpec("P")
Control = Literal["adaptive", "paper"]

DEFAULT_DENSITY = 0.01
DEFAULT_CEILING = 2.0
DEFAULT_WARMUP_DENSITY = 0.25


@dataclass(frozen=True)
class Budget:
    """How many entries a step may send."""

    density: float
    warmup_steps: int = 0
    """Steps over which the density falls exponentially from `warmup_density` to `density`."""
    warmup_density: float = DEFAULT_WARMUP_DENSITY

    def __post_init__(self) -> None:
        check_fraction("density", self.density)
        check_whole("warmup_steps", self.warmup_steps, at_least=0)
        check_fraction("warmup_density", self.warmup_density)

    def target(self, step: int, numel: int) -> int:
        """Entries of this step, over all ranks: at least one, for a budget of nothing would train nothing."""
        return min(numel, max(1, int(self._density(step) * numel)))

    def _density(self, step: int) -> float:
        if step >= self.warmup_steps or self.density >= self.warmup_density:
            return self.density
        return self.warmup_density * float((self.density / self.warmup_density) ** (step / self.warmup_steps))


@dataclass(frozen=True)
class Method:
    """A sparsification method. Made by the constructors of this module, or by `method(name, **options)`."""

    budget: Budget
    region: Region
    criterion: Criterion
    exchange: Exchange
    proposers: Proposers = Everyone()
    feedback: Feedback = Feedback()
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def density(self) -> float:
        """The density asked for."""
        return self.budget.density

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.options.items())})"


_registered: dict[str, Callable[..., Method]] = {}
METHODS: Mapping[str, Callable[..., Method]] = MappingProxyType(_registered)
"""Every method's constructor, by name."""


def method(name: str, **options: Any) -> Method:
    """Make a method by name: `method("micro", density=0.001)` is `micro(density=0.001)`."""
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; {nearest(name, METHODS)}")
    return METHODS[name](**options)


def method_of(text: str) -> Method:
    """The method whose `repr` this is."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("a method is written as a call")
        options = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        found = method(call.func.id, **options)
    except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"{text!r:.200} is no method of this version of gradsieve: {error}") from error
    if repr(found) != text:
        raise ValueError(f"{text!r:.200} is no method of this version of gradsieve: it would be {found!r}")
    return found


def _constructor(make: Callable[P, Method]) -> Callable[P, Method]:
    """Register a constructor, give its methods their name and options, and name valid options in errors."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def constructor(*args: P.args, **options: P.kwargs) -> Method:
        if args:
            raise TypeError(f"{make.__name__}() takes options by name only; {nearest('', signature.parameters)}")
        for option in options:
            if option not in signature.parameters:
                raise TypeError(f"{make.__name__}() has no option {option!r}; {nearest(option, signature.parameters)}")
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        return replace(make(*args, **options), name=make.__name__, options=dict(bound.arguments))

    _registered[make.__name__] = constructor
    return constructor


@_constructor
def dense() -> Method:
    """All-reduce of everything: the zero line of each table."""
    return Method(budget=Budget(1.0), region=Whole(), criterion=Everything(), exchange=Agreed())


@_constructor
def topk(*, density: float = DEFAULT_DENSITY, ahead: float = 0.0, overshoot: float = 0.0) -> Method:
    """Every rank sends its largest entries; the support is the union, up to `world` times the target."""
    return Method(
        budget=Budget(density),
        region=Whole(),
        criterion=Largest(),
        exchange=Union(),
        feedback=_feedback(ahead, overshoot),
    )


def _feedback(ahead: float | None, overshoot: float, momentum: float = 0.0) -> Feedback:
    """Error feedback whose ranks look ahead, and apply more than what waited, by these shares of it."""
    if ahead is not None:
        check_number("ahead", ahead, at_least=0)
    check_number("overshoot", overshoot, at_least=0, below=1)
    return Feedback(momentum, ahead=ahead, overshoot=overshoot)


@_constructor
def randomk(*, density: float = DEFAULT_DENSITY) -> Method:
    """Random entries, the same on every rank: no index travels."""
    return Method(budget=Budget(density), region=Whole(), criterion=SharedRandom(), exchange=Agreed())


@_constructor
def cltk(*, density: float = DEFAULT_DENSITY, ahead: float = 0.0, overshoot: float = 0.0) -> Method:
    """CLT-k of ScaleCom (NeurIPS 2020): a leader, in turn, sends its largest entries, the others follow.

    Differences from the paper: no low-pass filter on the residual.
    """
    return Method(
        budget=Budget(density),
        region=Whole(),
        criterion=Largest(),
        proposers=RotatingLeader(),
        exchange=Union(),
        feedback=_feedback(ahead, overshoot),
    )


@_constructor
def hard_threshold(*, density: float = DEFAULT_DENSITY, threshold: float | None = None) -> Method:
    """Entries above a threshold that never moves; by default `1 / (2 * sqrt(target))`."""
    if threshold is not None:
        check_number("threshold", threshold, at_least=0)
    return Method(budget=Budget(density), region=Whole(), criterion=Above(Fixed(threshold)), exchange=Union())


@_constructor
def sidco(*, density: float = DEFAULT_DENSITY) -> Method:
    """SIDCo (MLSys 2021): each rank's threshold from an exponential fitted in stages.

    Differences from the paper: the number of stages adapts to the mean count over ranks, so it is the same on all.
    """
    return Method(budget=Budget(density), region=Whole(), criterion=Above(ExponentialFit()), exchange=Union())


@_constructor
def deft(*, density: float = DEFAULT_DENSITY) -> Method:
    """DEFT (ICPP 2023): layers share the target by their norms and the ranks by the cost of sorting.

    Differences from the paper: the ranks add up their norms, so that all make the same plan, and bins rotate.
    """
    return Method(
        budget=Budget(density),
        region=LayerBins(),
        criterion=Largest(),
        exchange=Disjoint(in_rotation=False),
    )


@_constructor
def gtopk(*, density: float = DEFAULT_DENSITY) -> Method:
    """gTop-k (ICDCS 2019): the ranks' largest entries are added up in a tree, and at each node the largest sums go on.

    Differences from the paper: a node takes what it drops into its own residual, so that nothing is lost.
    """
    return Method(budget=Budget(density), region=Whole(), criterion=Largest(), exchange=MergeTree())


@_constructor
def oktopk(*, density: float = DEFAULT_DENSITY, ceiling: float | None = None) -> Method:
    """Ok-Topk (PPoPP 2022): each rank adds up what all ranks picked in a stretch that it owns; the largest sums go on.

    Differences from the paper: no rank picks more than `ceiling` times the target, and no more sums are kept.
    """
    return Method(
        budget=Budget(density),
        region=Whole(),
        criterion=Above(Remeasured(), at_most=_ceiling(ceiling)),
        exchange=OwnerSums(_ceiling(ceiling)),
    )


@_constructor
def dgc(
    *,
    density: float = DEFAULT_DENSITY,
    momentum: float = 0.9,
    warmup_steps: int = 0,
    warmup_density: float = DEFAULT_WARMUP_DENSITY,
    sample: float = 0.01,
    clip: float | None = None,
) -> Method:
    """Deep Gradient Compression (ICLR 2018): momentum correction, sampled threshold, density warm-up.

    The momentum lives in here: give the optimizer none. The paper warms up over five epochs, which is
    `warmup_steps=5 * len(loader)`, from a `warmup_density` of 0.25. `clip` bounds the gradient's norm before it is
    taken in.

    Differences from the paper: one threshold for the model, not one per layer. Parameters of one dimension go dense
    by the default `exclude` of `sparsify`.
    """
    check_number("momentum", momentum, at_least=0, below=1)
    check_fraction("sample", sample)
    if clip is not None:
        check_number("clip", clip, above=0)
    return Method(
        budget=Budget(density, warmup_steps, warmup_density),
        region=Whole(),
        criterion=Above(Sampled(sample), at_most=1),
        exchange=Union(),
        feedback=Feedback(momentum, clip),
    )


@_constructor
def micro(
    *,
    density: float = DEFAULT_DENSITY,
    control: Control = "adaptive",
    ceiling: float | None = None,
    warmup_steps: int = 0,
    warmup_density: float = DEFAULT_WARMUP_DENSITY,
    ahead: float = 0.0,
    overshoot: float = 0.0,
) -> Method:
    """MiCRO (HiPC 2023): exclusive slices in rotation, one threshold for all.

    Differences from the paper: with `control="adaptive"` the ranks agree on the threshold within the step, so that
    the target is met from the first one on; `control="paper"` steps it as the published code does.
    """
    return Method(
        budget=Budget(density, warmup_steps, warmup_density),
        region=RotatingSlices(),
        criterion=_steered(control, ceiling),
        exchange=Disjoint(),
        feedback=_feedback(ahead, overshoot),
    )


@_constructor
def exdyna(
    *,
    density: float = DEFAULT_DENSITY,
    control: Control = "adaptive",
    blocks: Control | None = None,
    ceiling: float | None = None,
    warmup_steps: int = 0,
    warmup_density: float = DEFAULT_WARMUP_DENSITY,
    ahead: float = 0.0,
    overshoot: float = 0.0,
) -> Method:
    """ExDyna (CCGrid 2024): MiCRO with partitions that rebalance. `blocks` follows `control` unless given.

    Differences from the paper: `control="adaptive"` as in `micro`; with `blocks="adaptive"` the borders split the
    load that was seen into equal parts, in place of moving one block a step.
    """
    blocks = control if blocks is None else blocks
    check_choice("blocks", blocks, ("adaptive", "paper"))
    return Method(
        budget=Budget(density, warmup_steps, warmup_density),
        region=BalancedBlocks() if blocks == "adaptive" else SteppingBlocks(),
        criterion=_steered(control, ceiling),
        exchange=Disjoint(),
        feedback=_feedback(ahead, overshoot),
    )


def _steered(control: Control, ceiling: float | None) -> Criterion:
    """Threshold selection in exclusive partitions, by our law or by MiCRO's."""
    check_choice("control", control, ("adaptive", "paper"))
    if control == "adaptive":
        return Searched(ceiling=_ceiling(ceiling))
    if ceiling is not None:
        raise ValueError("ceiling has no meaning with control='paper', which bounds nothing: leave it out")
    return Above(Stepped(), at_least_one=True)


def _ceiling(ceiling: float | None) -> float:
    if ceiling is None:
        return DEFAULT_CEILING
    check_number("ceiling", ceiling, at_least=1)
    return ceiling


@_constructor
def iwp(
    *,
    density: float = DEFAULT_DENSITY,
    num_broadcasters: int = 1,
    eps: float = 0.1,
    per_layer: bool = False,
    momentum: float = 0.0,
    stochastic: bool = False,
    warmup_steps: int = 0,
    warmup_density: float = DEFAULT_WARMUP_DENSITY,
    ceiling: float | None = None,
    ahead: float = 0.0,
    overshoot: float = 0.0,
) -> Method:
    """Importance-weighted pruning (arXiv 1901.01544): entries large beside their parameters, picked by random ranks.

    `eps` is relative to the RMS of the parameter's tensor. With `momentum` the residual takes in a velocity, as in
    `dgc`. With `stochastic` an entry below the threshold passes with probability importance / threshold. Over
    `warmup_steps` the density falls from `warmup_density`.

    Differences from the paper, whose text leaves the details open: the threshold is agreed on within the step, so
    that the density is the asked one, over the model or, with `per_layer`, in each tensor.
    """
    check_whole("num_broadcasters", num_broadcasters, at_least=1)
    check_number("eps", eps, at_least=0)
    check_number("momentum", momentum, at_least=0, below=1)
    check_flag("per_layer", per_layer)
    check_flag("stochastic", stochastic)
    return Method(
        budget=Budget(density, warmup_steps, warmup_density),
        region=Whole(),
        criterion=Searched(Importance(eps, stochastic), _ceiling(ceiling), overlapping=True, per_layer=per_layer),
        proposers=RandomRanks(num_broadcasters),
        exchange=SteeredUnion(_ceiling(ceiling)),
        feedback=_feedback(ahead, overshoot, momentum),
    )


@_constructor
def union(
    *,
    density: float = DEFAULT_DENSITY,
    ceiling: float | None = None,
    warmup_steps: int = 0,
    warmup_density: float = DEFAULT_WARMUP_DENSITY,
    ahead: float | None = None,
    overshoot: float = 0.0,
) -> Method:
    """Our own: every rank proposes over the whole vector, by a threshold that gives the union the target's size.

    No build-up, by control in place of exclusive partitions: no entry waits for its owner's turn, and no single
    rank's noise decides alone. Where the learning rate is known, which `sparsify(..., optimizer=optimizer)` sees to,
    ranks compute gradients where the parameters would be if what they have not sent had been applied (`ahead`: how much
    of it; 0 is none). With `overshoot` entries that are sent go further than what waited, by this share of it, and the
    residual owes that. Over `warmup_steps` the density falls from `warmup_density` to the asked one, as in `dgc`, which
    in long training brings accuracy nearer to that of dense training.
    """
    return Method(
        budget=Budget(density, warmup_steps, warmup_density),
        region=Whole(),
        criterion=Searched(ceiling=_ceiling(ceiling), overlapping=True),
        exchange=SteeredUnion(_ceiling(ceiling)),
        feedback=_feedback(ahead, overshoot),
    )
