"""Where each parameter lies in the flat vectors, whatever buckets DDP makes.

State is keyed by parameter and laid out in the order of the model's parameters: DDP rebuilds its buckets after the
first iterations, and nothing here notices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from gradsieve.types import Reduced, Span

Exclude: TypeAlias = str | Sequence[str] | Callable[[str, nn.Parameter], bool]


def fewer_than_two_dimensions(name: str, parameter: nn.Parameter) -> bool:  # noqa: ARG001 - an `exclude` predicate
    """Biases and normalisation: a thousandth of a model, and the part that suffers most from waiting."""
    return parameter.dim() < 2


def excluded_names(named: Sequence[tuple[str, nn.Parameter]], exclude: Exclude) -> set[str]:
    """The names of the parameters that go dense. A pattern that matches none is refused."""
    if callable(exclude):
        return {name for name, parameter in named if exclude(name, parameter)}
    patterns = [exclude] if isinstance(exclude, str) else list(exclude)
    matched: set[str] = set()
    for pattern in patterns:
        names = {name for name, _ in named if fnmatchcase(name, pattern)}
        if not names:
            known = ", ".join(name for name, _ in named[:8])
            raise ValueError(f"exclude: no parameter matches {pattern!r}; the model's are named like {known}")
        matched |= names
    return matched


class Slot(NamedTuple):
    """A parameter's place in the flat vector of its kind."""

    name: str
    parameter: nn.Parameter
    place: int
    """Its number among the slots of its kind."""
    start: int
    stop: int
    sparse: bool

    @property
    def span(self) -> Span:
        return Span(self.start, self.stop)


class Layout:
    """The slots of all parameters: sparsified ones in one flat vector, excluded ones in another."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], excluded: set[str]) -> None:
        self.sparse = _placed(((name, p) for name, p in named if name not in excluded), sparse=True)
        self.dense = _placed(((name, p) for name, p in named if name in excluded), sparse=False)
        self.numel = self.sparse[-1].stop if self.sparse else 0
        self.dense_numel = self.dense[-1].stop if self.dense else 0
        self.bounds = (0, *(slot.stop for slot in self.sparse))
        self.names = tuple(name for name, _ in named)
        self._named = dict(named)
        self._excluded = excluded
        self._slots = {slot.parameter: slot for slot in (*self.sparse, *self.dense)}
        self._places: dict[Tensor, int] = {parameter: place for place, (_, parameter) in enumerate(named)}

    def names_of(self, parameters: Iterable[Tensor]) -> tuple[str, ...]:
        """The names of some of the parameters, in the order of the model."""
        return tuple(self.names[place] for place in sorted(self._places[parameter] for parameter in parameters))

    def words(self) -> list[str]:
        """The parameters in words that ranks can compare."""
        return [
            f"{name} {list(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}"
            + (" (excluded)" if name in self._excluded else "")
            for name, parameter in self._named.items()
        ]

    def part(self, names: Sequence[str]) -> Layout:
        """The layout of some of the parameters by themselves."""
        return Layout([(name, self._named[name]) for name in names], self._excluded)

    def slot(self, parameter: Tensor) -> Slot:
        assert isinstance(parameter, nn.Parameter)
        return self._slots[parameter]

    def flat_parameters(self) -> Tensor:
        """The sparsified parameters, in a new flat vector."""
        return torch.cat([flattened(slot.parameter.detach()) for slot in self.sparse])

    def cut(self, vector: Tensor) -> dict[str, Tensor]:
        """A flat vector of the sparsified kind in the parameters' shapes, by name, in the same memory."""
        return {slot.name: shaped(vector[slot.start : slot.stop], slot.parameter) for slot in self.sparse}

    def split_dense(self, vector: Tensor) -> Sequence[Tensor]:
        """A flat vector of the excluded kind in pieces, by the places of their slots, in the same memory."""
        return torch.split(vector, [slot.stop - slot.start for slot in self.dense])

    def by_name(self, vector: Tensor) -> dict[str, Tensor]:
        """The same as a copy."""
        return {name: stretch.clone() for name, stretch in self.cut(vector).items()}

    def fill(self, vector: Tensor, named: Mapping[str, Tensor]) -> None:
        """The inverse of `by_name`."""
        for name, stretch in self.cut(vector).items():
            stretch.copy_(named[name])


def _placed(named: Iterable[tuple[str, nn.Parameter]], *, sparse: bool) -> list[Slot]:
    slots: list[Slot] = []
    for name, parameter in named:
        start = slots[-1].stop if slots else 0
        slots.append(Slot(name, parameter, len(slots), start, start + parameter.numel(), sparse))
    return slots


def flattened(tensor: Tensor) -> Tensor:
    """A flat view in the order of memory, which channels-last tensors share with their gradients in DDP's buckets."""
    if _is_compact(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)


def shaped(flat: Tensor, like: Tensor) -> Tensor:
    """The inverse of `flattened`."""
    if _is_compact(like):
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset())
    return flat.view(like.shape)


def _is_compact(tensor: Tensor) -> bool:
    """Do the elements fill their stretch of memory, each once?"""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def write_back(reduced: Reduced, gradients: Sequence[tuple[Slot, Tensor]], bounds: Sequence[int]) -> None:
    """Write the means into the flat gradients of DDP's buckets; `bounds` are those of the sparsified parameters."""
    support = reduced.indices
    borders: list[int] = []
    if isinstance(support, Tensor) and gradients:
        # one synchronisation on CUDA: how many entries of the support each parameter has
        borders = torch.searchsorted(support, support.new_tensor(bounds)).tolist()
    for slot, gradient in gradients:
        if not slot.sparse:
            continue
        if isinstance(support, slice):
            gradient.copy_(reduced.mean[slot.start : slot.stop])
        else:
            first, last = borders[slot.place], borders[slot.place + 1]
            gradient.zero_()
            gradient.scatter_(0, support[first:last] - slot.start, reduced.mean[first:last].to(gradient.dtype))
    write_dense(reduced.dense, gradients)


def write_dense(dense: Tensor, gradients: Sequence[tuple[Slot, Tensor]]) -> None:
    """Write the means of excluded parameters into their gradients."""
    places = [(gradient, dense[slot.start : slot.stop]) for slot, gradient in gradients if not slot.sparse]
    copy_all(places)


def copy_all(places: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy into the first of each pair the second: on CUDA in one launch for many."""
    if places:
        torch._foreach_copy_([destination for destination, _ in places], [source for _, source in places])
