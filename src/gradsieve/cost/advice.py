"""Where sparsification pays, and what to take: from predictions to advice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from gradsieve.cost.machine import Machine
from gradsieve.cost.messages import Link
from gradsieve.cost.step import SPARSE, ZERO_LINE, Load, Prediction, predict

MARGIN = 0.1
"""The least part of plain DDP's time that a method must save to be worth its trouble."""
PREFERENCE = 0.1
"""By so much another method must be faster than `union`, which keeps most of the accuracy (docs/methods.md)."""
PREFERRED = "union"
DENSITIES = (0.1, 0.03, 0.01)
"""Tried from the densest on: what costs nothing is not left out."""
FREE = 0.05
"""A density, or a plainer way, costs nothing that makes a step longer by no more than this."""
SLOWEST, FASTEST = 1e5, 1e14
"""Bits a second between which a break-even is looked for."""
HALVINGS, POINTS_OF_A_DECADE = 30, 2
WORKERS = tuple(2**exponent for exponent in range(1, 13))
"""2 to 4096."""


def break_even(name: str, load: Load, link: Link, machine: Machine) -> float:
    """The bandwidth, in bits a second, below which a method is faster than plain DDP.

    0 where it is nowhere, infinity where it is everywhere.
    """

    def saves(bandwidth: float) -> bool:
        here = replace(link, bandwidth=bandwidth)
        sparse, dense = (predict(one, load, here, machine).step_seconds for one in (name, ZERO_LINE))
        return sparse < dense

    decades = round(math.log10(FASTEST / SLOWEST))
    grid = [FASTEST / 10 ** (place / POINTS_OF_A_DECADE) for place in range(decades * POINTS_OF_A_DECADE + 1)]
    first = next((place for place, bandwidth in enumerate(grid) if saves(bandwidth)), None)
    if first is None:
        return 0.0
    if first == 0:
        return math.inf
    low, high = grid[first], grid[first - 1]
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if saves(middle) else (low, middle)
    return low


def scaling(
    names: Sequence[str], load: Load, link: Link, machine: Machine, workers: Sequence[int] = WORKERS
) -> dict[str, list[Prediction]]:
    """Every scheme at every number of workers, each with the same work to compute."""
    return {name: [predict(name, replace(load, world=world), link, machine) for world in workers] for name in names}


class Choice(NamedTuple):
    """One way to take a step."""

    name: str
    density: float
    wire: str
    scope: str
    step_seconds: float


class Advice(NamedTuple):
    """What to do, and why."""

    choice: Choice | None
    """None: stay dense."""
    speed_up: float
    """Of the choice, or of the best there was, over plain DDP."""
    reasons: tuple[str, ...]


def advise(names: Sequence[str], load: Load, link: Link, machine: Machine, *, density: float | None = None) -> Advice:
    """The method, density, wire and scope to take; a given density is kept."""
    dense = predict(ZERO_LINE, load, link, machine)
    methods = [name for name in names if name in SPARSE]
    asked = load.density if density is None else density
    at_asked = _choices(methods, replace(load, density=asked), link, machine)
    if not at_asked:
        return Advice(None, 1.0, ("none of this library's methods is among those to choose from",))
    best = _preferred(at_asked)
    speed_up = dense.step_seconds / best.step_seconds
    if best.step_seconds > (1 - MARGIN) * dense.step_seconds:
        return Advice(None, speed_up, _why_dense(best, dense, load))
    if density is None:
        best = _denser(best, load, link, machine)
        speed_up = dense.step_seconds / best.step_seconds
    return Advice(best, speed_up, _why(best, dense, load, link, machine))


def _choices(methods: Sequence[str], load: Load, link: Link, machine: Machine) -> list[Choice]:
    kinds = product(methods, ("float32", "bfloat16"), ("model", "bucket"))
    return [_choice(name, replace(load, wire=wire, scope=scope), link, machine) for name, wire, scope in kinds]


def _choice(name: str, load: Load, link: Link, machine: Machine) -> Choice:
    seconds = predict(name, load, link, machine).step_seconds
    return Choice(name, load.density, load.wire, load.scope, seconds)


def _preferred(choices: Sequence[Choice]) -> Choice:
    """The fastest method, or the one that keeps more accuracy if it is nearly as fast; as plainly as costs nothing."""
    fastest = min(choices, key=lambda choice: choice.step_seconds)
    limit = (1 + PREFERENCE) * fastest.step_seconds
    is_near = any(choice.name == PREFERRED and choice.step_seconds <= limit for choice in choices)
    same = [choice for choice in choices if choice.name == (PREFERRED if is_near else fastest.name)]
    best = min(same, key=lambda choice: choice.step_seconds)
    plain = next(choice for choice in same if (choice.wire, choice.scope) == ("float32", "model"))
    return plain if plain.step_seconds <= (1 + FREE) * best.step_seconds else best


def _denser(best: Choice, load: Load, link: Link, machine: Machine) -> Choice:
    """The same at the highest density that costs nothing."""
    for density in DENSITIES:
        tried = replace(load, density=density, wire=best.wire, scope=best.scope)
        choice = _choice(best.name, tried, link, machine)
        if density > best.density and choice.step_seconds <= (1 + FREE) * best.step_seconds:
            return choice
    return best


def _why_dense(best: Choice, dense: Prediction, load: Load) -> tuple[str, ...]:
    hidden = max(0.0, load.compute + dense.select_seconds + dense.exchange_seconds - dense.step_seconds)
    times = f"{_ms(best.step_seconds)} against {_ms(dense.step_seconds)}"
    return (
        f"the best of the methods, {best.name}, would take {times}: it would have to save {100 * MARGIN:.0f} %",
        f"the dense exchange takes {_ms(dense.exchange_seconds)}, of which backward hides {_ms(hidden)}",
    )


def _why(best: Choice, dense: Prediction, load: Load, link: Link, machine: Machine) -> tuple[str, ...]:
    chosen = replace(load, density=best.density, wire=best.wire, scope=best.scope)
    found = predict(best.name, chosen, link, machine)
    limit = break_even(best.name, chosen, link, machine)
    pays = "at any bandwidth" if math.isinf(limit) else f"below {rate_text(limit)}"
    parts = f"{_ms(found.exchange_seconds)} of messages and {_ms(found.select_seconds)} of its own work"
    return (
        f"a step takes {_ms(found.step_seconds)} against {_ms(dense.step_seconds)}",
        f"{parts} take the place of {_ms(dense.exchange_seconds)} of messages",
        f"{found.link_bytes:,.0f} bytes pass a link in place of {dense.link_bytes:,.0f}",
        f"it pays {pays}",
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.3g} ms"


def rate_text(bits: float) -> str:
    """
    >>> rate_text(2.5e9), rate_text(1e8), rate_text(0.0), rate_text(math.inf)
    ('2.5gbit', '100mbit', 'never', 'always')
    """
    if bits == 0 or math.isinf(bits):
        return "always" if bits else "never"
    factor, unit = (1e9, "gbit") if bits >= 1e9 else (1e6, "mbit") if bits >= 1e6 else (1e3, "kbit")
    return f"{bits / factor:.3g}{unit}"
