"""Looking ahead: gradients of where the parameters would be, had this rank's residual been applied.

[Note: looking ahead]
What ranks have not sent yet is missing from the parameters: they lag behind those of dense training, by the learning
rate times the mean of the residuals, and gradients are of a place that training should have left. No rank knows that
mean, but each knows its own share of it. So before a forward pass each rank takes its own residual for the mean, and
computes at `parameters - reach * rate * residual`; when backward has ended, the parameters are again what all ranks
agree on, bit for bit. (Step-ahead error feedback: Xu, Huo and Huang, AAAI 2021, arXiv 2008.05823.) It costs a pass over
the parameters and memory for a second copy of them.

[Note: residuals follow the learning rate]
A gradient is worth the learning rate of its own step, also if it is sent only later. So when the rate changes, what
waits is multiplied by the old rate over the new one: then the step that applies it multiplies it with the old one. Were
it left as it is, a rate that falls to a tenth would throw away nine tenths of all that waits.

[Note: glasses]
A parameter that looks ahead lies in memory of its own for so long, and goes back to where it was. Whatever reads it
meanwhile sees the values ahead, so it goes back before anything but training reads it: a pass without gradients, the
optimizer's step, a `state_dict`. What somebody wrote into it meanwhile is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradsieve.layout import Slot
from gradsieve.residual import Feedback

WHOLE = 1.0
"""The reach where nobody asks for another. See docs/methods.md for what was tried."""


def reach_of(feedback: Feedback, optimizer: torch.optim.Optimizer | None) -> float:
    """How much of its residual a rank looks ahead by: 0 is none of it."""
    if feedback.ahead is None:
        return WHOLE if _is_known(optimizer) else 0.0
    if feedback.ahead and not _is_known(optimizer):
        came = "no optimizer" if optimizer is None else f"a {type(optimizer).__name__}"
        raise ValueError(
            f"ahead={feedback.ahead:g} needs the learning rate by which torch.optim.SGD will apply a gradient, and "
            f"{came} came: give sparsify(..., optimizer=optimizer), or ahead=0"
        )
    return feedback.ahead


def _is_known(optimizer: torch.optim.Optimizer | None) -> bool:
    """Does the optimizer move parameters by its rate times the gradient? Others, such as Adam, divide by its size."""
    return isinstance(optimizer, torch.optim.SGD) and not any(group["maximize"] for group in optimizer.param_groups)


class _Away(NamedTuple):
    """A parameter that looks ahead."""

    parameter: nn.Parameter
    home: Tensor
    """Where it lies otherwise."""
    version: int
    """Grows when somebody writes into it."""


class Lookahead:
    """The parameters of a model that a rank moves ahead for its passes: see [Note: looking ahead]."""

    def __init__(self, reach: float, optimizer: torch.optim.Optimizer, slots: Sequence[Slot]) -> None:
        self.reach = reach
        self._optimizer = optimizer
        self._slots = slots
        self._rooms: dict[str, Tensor] = {}
        """Where parameters lie while they look ahead, by name."""
        self._away: list[_Away] = []
        self._check_rates()

    def _check_rates(self) -> None:
        rates = self._rates()
        if not any(id(slot.parameter) in rates for slot in self._slots):
            raise ValueError(
                "the optimizer that was given holds no sparsified parameter of this model: give the one that steps it"
            )

    def _rates(self) -> dict[int, float]:
        """The learning rates, by the identity of the parameter."""
        groups = self._optimizer.param_groups
        return {
            id(parameter): rate for group in groups for rate in [float(group["lr"])] for parameter in group["params"]
        }

    @property
    def rate(self) -> float:
        """The learning rate of the first sparsified parameter that has one: schedules move all of them alike."""
        for slot in self._slots:
            for group in self._optimizer.param_groups:
                if any(parameter is slot.parameter for parameter in group["params"]):
                    return float(group["lr"])
        raise AssertionError("the optimizer held a sparsified parameter when this was made")

    @property
    def is_ahead(self) -> bool:
        return bool(self._away)

    @torch.no_grad()
    def look(self, residuals: Mapping[str, Tensor]) -> None:
        """Move the parameters ahead; `residuals` are by name, in the parameters' shapes."""
        rates = self._rates()
        by_rate: dict[float, list[Slot]] = {}
        for slot in self._slots:
            rate = rates.get(id(slot.parameter), 0.0)
            if rate and slot.name in residuals:
                by_rate.setdefault(rate, []).append(slot)
        for rate, slots in by_rate.items():
            self._move(slots, [residuals[slot.name] for slot in slots], self.reach * rate)

    def _move(self, slots: Sequence[Slot], residuals: Sequence[Tensor], reach: float) -> None:
        homes = [slot.parameter.data for slot in slots]
        rooms = [self._room(slot.name, home) for slot, home in zip(slots, homes, strict=True)]
        _subtract(homes, residuals, reach, rooms)
        for slot, home, room in zip(slots, homes, rooms, strict=True):
            slot.parameter.data = room
            self._away.append(_Away(slot.parameter, home, slot.parameter._version))

    def _room(self, name: str, home: Tensor) -> Tensor:
        """Memory for a parameter that looks ahead."""
        room = self._rooms.get(name)
        if room is None or room.shape != home.shape or room.stride() != home.stride() or room.device != home.device:
            room = self._rooms[name] = torch.empty_like(home)
        return room

    @torch.no_grad()
    def back(self) -> None:
        """Move them back to where they were."""
        for parameter, home, version in self._away:
            if parameter._version != version:
                home.copy_(parameter.data)  # somebody wrote something else into it
            parameter.data = home
        self._away = []


def _subtract(homes: Sequence[Tensor], residuals: Sequence[Tensor], reach: float, rooms: Sequence[Tensor]) -> None:
    """Write `homes - reach * residuals` into the rooms: on CPU in one pass, elsewhere in few launches for all."""
    if rooms[0].device.type == "cpu":
        for home, residual, room in zip(homes, residuals, rooms, strict=True):
            torch.sub(home, residual, alpha=reach, out=room)
    else:
        torch._foreach_copy_(list(rooms), list(homes))
        torch._foreach_sub_(list(rooms), list(residuals), alpha=reach)


class _Guard:
    """Brings parameters back before something reads or moves them. A model that is copied or pickled loses it."""

    def __init__(self, lookahead: Lookahead) -> None:
        self._lookahead = lookahead

    def __call__(self, *_: Any) -> None:
        self._lookahead.back()

    def __reduce__(self) -> tuple[Any, ...]:
        return _NoGuard, ()


class _NoGuard:
    """What a `_Guard` is in a copy of its model, which never looks ahead."""

    def __call__(self, *_: Any) -> None:
        pass


def watch(lookahead: Lookahead, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Bring parameters back before the optimizer moves them and before they are saved: see [Note: glasses]."""
    optimizer.register_step_pre_hook(_Guard(lookahead))
    model.register_state_dict_pre_hook(_Guard(lookahead))  # type: ignore[no-untyped-call]
