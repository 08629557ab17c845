"""The state of a sieve as it is saved: what belongs in it, what is refused, and how one world's make another's.

[Note: the mean is conserved]
What a run still owes the model is the mean over ranks of what each has not sent. Ranks of an old world and of a new one
share out the same line, each an equal stretch of it, and a new rank takes the mean of the old residuals over its own
stretch: so the mean over the new ranks is that over the old ones. In the consolidated form every rank has the mean
itself, which fits any world.

[Note: a state is one piece]
A state that is put together from several ranks' would lose a part of what was not sent, and look whole. DCP does that
to what all ranks hold under equal keys: it keeps some of one rank, some of another. So a state has a digest of all that
is in it, its rank included.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from gradsieve.checks import LARGEST_WHOLE, shown
from gradsieve.methods import Method, method_of
from gradsieve.pipeline import Learned
from gradsieve.types import Setup
from gradsieve.version import __version__

VERSION = 4
_HIGHEST_RATE = 1e15
"""Learning rates beyond are damage."""
RANK, CONSOLIDATED = "rank", "consolidated"
KINDS = ("residuals", "velocities")

_COMMON = ("version", "form", "package", "world", "method", "scope", "parameters", "learned", *KINDS, "digest")
_KEYS = {RANK: {*_COMMON, "rank"}, CONSOLIDATED: {*_COMMON}}
_SCOPES = ("model", "bucket")
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
"""What residuals may be kept in."""

_CHUNK = 1 << 22
"""Entries that are brought to the host at a time."""

State = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Origin:
    """Where a state comes from: what must be the same where it is loaded."""

    rank: int
    world: int
    method: Method
    scope: str
    shapes: Shapes
    """Of the sparsified parameters, by name, in the order of the model."""
    names: tuple[str, ...] | None = None
    """Of all trainable parameters, in the order of the model; None where that is not known."""
    dtype: torch.dtype | None = None
    """What residuals are kept in; None where that is not known."""
    finite: bool = True
    """Can a residual hold nothing but finite numbers?"""


class Vectors(NamedTuple):
    """What a sieve takes up."""

    learned: dict[str, Any]
    residuals: dict[str, Tensor]
    velocities: dict[str, Tensor]


def kinds(origin: Origin) -> tuple[str, ...]:
    """The vectors that there are."""
    return KINDS if origin.method.feedback.momentum else KINDS[:1]


def saved(origin: Origin, vectors: Vectors) -> dict[str, Any]:
    """The state of one rank."""
    return _sealed({"form": RANK, "rank": origin.rank}, origin, vectors)


def saved_consolidated(origin: Origin, vectors: Vectors) -> dict[str, Any]:
    """The state that stands for all ranks, with the means over them as vectors."""
    return _sealed({"form": CONSOLIDATED}, origin, vectors)


def _sealed(form: dict[str, Any], origin: Origin, vectors: Vectors) -> dict[str, Any]:
    state = {
        "version": VERSION,
        **form,
        "package": __version__,
        "world": origin.world,
        "method": repr(origin.method),
        "scope": origin.scope,
        "parameters": {name: list(shape) for name, shape in origin.shapes.items()},
        **vectors._asdict(),
    }
    return state | {"digest": _digest(state, vectors)}


def _digest(state: State, vectors: Vectors) -> str:
    """Of all that is in a state: see [Note: a state is one piece]."""
    tensors = [vector for kind in KINDS for _, vector in sorted(getattr(vectors, kind).items())]
    plain = {key: value for key, value in state.items() if key not in (*KINDS, "digest")}
    text = encoded([plain | {"learned": vectors.learned}, _checksum(tensors)])
    return hashlib.sha256(text.encode()).hexdigest()


def _checksum(tensors: Sequence[Tensor]) -> int:
    """Of the bits, the same on every device: on the host, where a state goes anyway."""
    checksum = 0
    for tensor in tensors:
        for chunk in torch.split(tensor.detach().reshape(-1), _CHUNK):
            checksum = zlib.crc32(chunk.cpu().view(torch.uint8).numpy().data, checksum)
    return checksum


def loadable(state: State, here: Origin) -> Vectors:
    """What the sieve `here` takes up from a state. Refuses a state that is damaged, or another's."""
    _check_outline(state)
    _check_same(state, here)
    vectors = _checked(state, here)
    if state["form"] == CONSOLIDATED:
        return vectors._replace(learned=_resized(vectors.learned, here, state["world"], here.world))
    return vectors


def reshard(states: Sequence[Mapping[str, Any]], world: int) -> list[dict[str, Any]]:
    """The states of a run for another number of ranks, by rank, from those of all its ranks, in any order.

    The mean over ranks of what was not sent yet stays what it is. Thresholds, partitions, steps and seed go on; how
    many entries each rank lately proposed, and `oktopk`'s thresholds, start anew.

        states = [torch.load(f"rank-{rank}.pt", weights_only=True) for rank in range(4)]
        sieve.load_state_dict(gradsieve.reshard(states, world=2)[rank])
    """
    _check_count("world", world, at_least=1)
    run = of_one_run(states, whole=True)
    run.origin.method.proposers.check(world)
    return [share(run, replace(run.origin, rank=rank, world=world)) for rank in range(world)]


def consolidated(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state for all ranks, from those of all ranks of a run, in any order: `Sieve.consolidated_state_dict` without
    the run. It loads on every rank, at any number of ranks.
    """
    run = of_one_run(states, whole=True)
    everyone = replace(run.origin, rank=0, world=1)
    return saved_consolidated(run.origin, _mixed(run, everyone)._replace(learned=run.vectors[0].learned))


class Run(NamedTuple):
    """States of one run, checked."""

    origin: Origin
    """That of the first of them."""
    vectors: Mapping[int, Vectors]
    """By rank."""


def of_one_run(states: Sequence[State], *, whole: bool, here: Origin | None = None) -> Run:
    """States that belong together, of all ranks of a run if it is to be `whole`; `here` says what they must fit."""
    if isinstance(states, Mapping) or not isinstance(states, Sequence) or not states:
        raise TypeError("states must be a list of what Sieve.state_dict() returned on each rank of a run")
    origin, vectors = None, {}
    for state in states:
        _check_outline(state)
        if state["form"] != RANK:
            raise ValueError("a consolidated state needs no conversion: load it as it is, on every rank of any world")
        if origin is None:
            origin = _origin_of(state, here)
        _check_same(state, replace(origin, rank=state["rank"]), hint="give the states of one run, saved at one step")
        if state["rank"] in vectors:
            raise ValueError(f"rank {state['rank']} of {origin.world} came twice: give the state of each rank once")
        vectors[state["rank"]] = _checked(state, origin)
    assert origin is not None
    missing = sorted({*range(origin.world)} - vectors.keys()) if whole else []
    if missing:
        raise ValueError(f"the states of ranks {missing} of {origin.world} are missing: give those of all ranks")
    _check_alike(vectors)
    return Run(origin, vectors)


def _origin_of(state: State, here: Origin | None) -> Origin:
    shapes = {name: tuple(shape) for name, shape in state["parameters"].items()}
    if here is not None:
        _check_same(state, replace(here, rank=state["rank"], world=state["world"]))
        return replace(here, rank=state["rank"], world=state["world"])
    return Origin(state["rank"], state["world"], method_of(state["method"]), state["scope"], shapes, finite=False)


def _check_alike(vectors: Mapping[int, Vectors]) -> None:
    told = {rank: (encoded(own.learned), _dtypes(own)) for rank, own in vectors.items()}
    first = min(told)
    for rank, own in told.items():
        if own != told[first]:
            steps = vectors[first].learned["step"], vectors[rank].learned["step"]
            raise ValueError(
                f"ranks {first} and {rank} learned different things (after {steps[0]} and {steps[1]} steps), so these "
                "states are not of one run at one step: give those that all ranks saved together"
            )


def _dtypes(vectors: Vectors) -> set[torch.dtype]:
    return {tensor.dtype for kind in (vectors.residuals, vectors.velocities) for tensor in kind.values()}


# --- from one world to another --------------------------------------------------------------------------------------


def weights(rank: int, old_world: int, new_world: int) -> dict[int, float]:
    """What a new rank takes of each old one's residual: [Note: the mean is conserved]."""
    ends = (min((old + 1) * new_world, (rank + 1) * old_world) for old in range(old_world))
    begins = (max(old * new_world, rank * old_world) for old in range(old_world))
    overlaps = enumerate(end - begin for begin, end in zip(begins, ends, strict=True))
    return {old: overlap / old_world for old, overlap in overlaps if overlap > 0}


def mixed(vectors: Mapping[int, Tensor] | Sequence[Tensor], taken: Mapping[int, float]) -> Tensor:
    """The sum of some ranks' tensors, each with its weight, in their own precision."""
    if len(taken) == 1:
        (rank,) = taken
        return vectors[rank].clone()
    total = torch.zeros_like(vectors[next(iter(taken))], dtype=torch.float64)
    for rank, weight in taken.items():
        total.add_(vectors[rank].to(total), alpha=weight)
    return total.to(vectors[next(iter(taken))].dtype)


def share(run: Run, here: Origin) -> dict[str, Any]:
    """The state of the rank `here`, which may be of another world than the run's."""
    return saved(here, _mixed(run, here))


def _mixed(run: Run, here: Origin) -> Vectors:
    taken = weights(here.rank, run.origin.world, here.world)
    first = run.vectors[min(run.vectors)]

    def kind(of: Callable[[Vectors], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {name: mixed({rank: of(own)[name] for rank, own in run.vectors.items()}, taken) for name in of(first)}

    learned = _resized(first.learned, here, run.origin.world, here.world)
    return Vectors(learned, kind(lambda own: own.residuals), kind(lambda own: own.velocities))


def _resized(learned: Mapping[str, Any], here: Origin, old_world: int, new_world: int) -> dict[str, Any]:
    parts = [
        {
            "names": list(part["names"]),
            "learned": resized_learned(
                here.method, _setup_of(part["names"], here.shapes, old_world), part["learned"], new_world
            ),
        }
        for part in learned["parts"]
    ]
    return {**learned, "parts": parts}


def resized_learned(method: Method, setup: Setup, learned: Mapping[str, Any], world: int) -> dict[str, Any]:
    """What a worker of one part learned, for another number of ranks."""
    if world == setup.world:
        return dict(learned)
    was = _templates(method, setup)
    old = Learned(*(type(state)(**learned[name]) for name, state in was._asdict().items()))
    region = method.region.resized(old.region, setup.world, world)
    criterion = method.criterion.resized(old.criterion, setup.world, world)
    return {**learned, "region": region._asdict(), "criterion": criterion._asdict()}


def _setup_of(names: Sequence[str], shapes: Shapes, world: int) -> Setup:
    """Of the part with these parameters; those without a shape are not sparsified."""
    sizes = [math.prod(shapes[name]) for name in names if name in shapes]
    return Setup(world, sum(sizes), tuple(accumulate(sizes, initial=0)))


def _templates(method: Method, setup: Setup) -> Learned:
    return Learned(method.region.start(setup), method.criterion.start(setup))


# --- refusals -------------------------------------------------------------------------------------------------------


def _check_outline(state: Any) -> None:
    """Are all fields there, and those that say where the state comes from of the right types?"""
    whole = "give what Sieve.state_dict() returned, whole"
    if not isinstance(state, Mapping):
        raise TypeError(f"this state is of type {type(state).__name__}: {whole}")
    form = state.get("form", RANK)
    if not isinstance(form, str) or form not in _KEYS:
        raise ValueError(f"this state has the form {_short(form)}; known are {RANK!r} and {CONSOLIDATED!r}: {whole}")
    version = state.get("version", VERSION)
    if not _is_count(version) or version != VERSION:
        raise ValueError(
            f"this state was saved with version {_short(version)}, but here version is {VERSION}: "
            f"load it with the gradsieve that wrote it ({_short(state.get('package', 'an older one'))})"
        )
    missing = sorted(_KEYS[form] - state.keys())
    if missing:
        raise ValueError(f"this state lacks {', '.join(missing)}: {whole}")
    unknown = sorted(map(str, state.keys() - _KEYS[form]))
    if unknown:
        raise ValueError(f"this state holds {', '.join(unknown)}, which is unknown here: {whole}")
    _check_origin(state)


def _check_origin(state: State) -> None:
    _check_count("this state's world", state["world"], at_least=1)
    _check_count("this state's rank", state.get("rank", 0), at_least=0)
    for key, pattern in (
        ("package", r"\d+(\.\w+)+\S*"),
        ("digest", "[0-9a-f]{64}"),
        ("method", r"\w*\(.*\)"),
        ("scope", "|".join(_SCOPES)),
    ):
        if not isinstance(state[key], str) or not re.fullmatch(pattern, state[key], re.ASCII):
            raise ValueError(f"this state's {key} is {_short(state[key])}, which is none: the state is damaged")
    if not isinstance(state["parameters"], Mapping) or not state["parameters"]:
        raise ValueError(f"this state's parameters must be shapes by name, not {_short(state['parameters'])}")
    for name, shape in state["parameters"].items():
        if not isinstance(name, str) or not isinstance(shape, (list, tuple)) or not all(map(_is_count, shape)):
            raise ValueError(
                f"this state's parameters hold {_short(name)}: {_short(shape)}, which is no name and shape"
            )


def _check_same(state: State, here: Origin, hint: str | None = None) -> None:
    """Refuse a state of another method, scope, model, world or rank."""
    ours: dict[str, Any] = {"method": repr(here.method), "scope": here.scope}
    if state["form"] == RANK:
        ours |= {"world": here.world, "rank": here.rank}
    for key, value in ours.items():
        if key == "world":
            _check_model(state, here.shapes)
        if state[key] != value:
            raise ValueError(
                f"this state was saved with {key} {state[key]!r}, but here {key} is {value!r}: "
                + (hint or _conversion(key, state[key], value))
            )
    _check_model(state, here.shapes)


def _conversion(key: str, theirs: Any, ours: Any) -> str:
    """What to do about a state that was saved with `theirs` where there is `ours`."""
    if key == "world":
        return (
            f"convert the states of all ranks with gradsieve.reshard(states, world={ours}), save "
            "Sieve.consolidated_state_dict(), which loads at any world, or give torch.distributed.checkpoint "
            "gradsieve.Sharded(sieve, checkpoint=path)"
        )
    if key == "rank":
        return (
            "every rank has a state of its own, so save and load each rank's, or make one for all with "
            "gradsieve.consolidated(states); torch.distributed.checkpoint keeps that of one rank only unless it is "
            "given gradsieve.Sharded(sieve)"
        )
    if key == "scope":
        return f"make the sieve with scope={theirs!r}, for what was learned about parts says nothing about others"
    return (
        f"make the sieve with {theirs} to go on, or start anew with {ours}: "
        "what one method learned says nothing to another"
    )


def _check_model(state: State, ours: Shapes) -> None:
    theirs = {name: tuple(shape) for name, shape in state["parameters"].items()}
    _check_shapes(theirs, ours, "this state belongs to another model or another exclude=")


def _check_shapes(theirs: Shapes, ours: Shapes, problem: str) -> None:
    differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if differing:
        first = differing[0]
        raise ValueError(
            f"{problem}: {len(differing)} parameters differ, the first is {first!r} (saved {theirs.get(first)}, "
            f"here {ours.get(first)}); load it into the model and exclude= that it was saved with"
        )


def _checked(state: State, origin: Origin) -> Vectors:
    """What is in a state of this origin, or of any world where it is consolidated; refused if it is damaged."""
    if state.get("rank", 0) >= state["world"]:
        raise ValueError(f"this state's rank is {state['rank']}, but ranks of {state['world']} are below that")
    expected = {kind: origin.shapes if kind in kinds(origin) else {} for kind in KINDS}
    vectors = {kind: _checked_tensors(kind, state[kind], shapes, origin) for kind, shapes in expected.items()}
    checked = Vectors(_checked_learned(state["learned"], origin, state["world"]), **vectors)
    if state["digest"] != _digest(state, checked):
        raise ValueError(
            "this state's digest is not that of what is in it: it was damaged, changed, or put together from those of "
            "several ranks, as torch.distributed.checkpoint does unless it is given gradsieve.Sharded(sieve)"
        )
    return checked


def _checked_tensors(kind: str, tensors: Any, shapes: Shapes, origin: Origin) -> dict[str, Tensor]:
    if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
        raise ValueError(f"this state's {kind} must be tensors by the name of a parameter, not {_short(tensors)}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
            raise ValueError(f"this state's {kind} of {name!r} must be a tensor, not {_short(tensor)}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"this state's {kind} of {name!r} must be of one of {DTYPES}, not {tensor.dtype}")
    _check_shapes(
        {name: tuple(tensor.shape) for name, tensor in tensors.items()}, shapes, f"this state's {kind} differ"
    )
    for name, tensor in tensors.items():
        _check_dtype(f"this state's {kind} of {name!r}", tensor.dtype, origin.dtype)
        if origin.finite and not bool(tensor.isfinite().all()):
            raise ValueError(
                f"this state's {kind} of {name!r} are not all finite: go on from an earlier checkpoint, or give "
                "sparsify on_nonfinite='propagate'"
            )
    return {name: tensors[name].detach() for name in shapes}


def _check_dtype(what: str, theirs: torch.dtype, ours: torch.dtype | None) -> None:
    if ours is not None and torch.promote_types(theirs, ours) != ours:
        raise ValueError(
            f"{what} are {theirs}, of which {ours} would lose a part: give sparsify residual_dtype={theirs}, "
            "or convert them yourself"
        )


def _checked_learned(learned: Any, origin: Origin, world: int) -> dict[str, Any]:
    """The same with the types that workers have."""
    _check_fields("learned", learned, {"step", "seed", "rate", "parts"})
    _check_count("this state's step", learned["step"], at_least=0)
    _check_count("this state's seed", learned["seed"], at_least=0)
    rate = _checked_rate(learned["rate"])
    if not isinstance(learned["parts"], (list, tuple)):
        raise ValueError(f"this state's parts must be a list, not {_short(learned['parts'])}")
    parts = [_checked_part(part, origin, world) for part in learned["parts"]]
    _check_parts([tuple(part["names"]) for part in parts], origin)
    for part in parts:
        # a part that an error left half-way may be one step ahead of the model
        if part["learned"]["step"] > learned["step"] + 1 or part["learned"]["seed"] != learned["seed"]:
            raise ValueError(
                f"this state's parts are at step {part['learned']['step']} with seed {part['learned']['seed']}, but "
                f"the model is at step {learned['step']} with seed {learned['seed']}: the state is damaged"
            )
    return {"step": learned["step"], "seed": learned["seed"], "rate": rate, "parts": parts}


def _checked_rate(rate: Any) -> float | None:
    if rate is None or (isinstance(rate, float) and 0 < rate < _HIGHEST_RATE):
        return rate
    raise ValueError(f"this state's rate must be a learning rate, a positive number, or none, not {_short(rate)}")


def _checked_part(part: Any, origin: Origin, world: int) -> dict[str, Any]:
    _check_fields("parts", part, {"names", "learned"})
    names = part["names"]
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"this state's parts have names that are none: {_short(names)}")
    learned = checked_learned(origin.method, _setup_of(names, origin.shapes, world), part["learned"])
    return {"names": list(names), "learned": learned}


def _check_parts(parts: Sequence[tuple[str, ...]], origin: Origin) -> None:
    whole = origin.names or tuple(origin.shapes)
    order = {name: place for place, name in enumerate(whole)}
    for names in parts:
        # where excluded parameters are not known, they cannot be looked at
        places = [order.get(name, -1) for name in names if origin.names is not None or name in order]
        if -1 in places or any(right <= left for left, right in pairwise(places)):
            raise ValueError(
                f"this state's parts are of parameters that this model has not, or not so: {_short(names)}"
            )
    if len(set(parts)) != len(parts) or not parts:
        raise ValueError(f"this state has {len(parts)} parts, {len(set(parts))} of them different: it is damaged")
    left_out = sorted(set(whole).difference(*parts))
    if left_out:
        raise ValueError(f"this state's parts leave out {len(left_out)} parameters, the first is {left_out[0]!r}")
    if origin.scope == "model" and len(parts) != 1:
        raise ValueError(f"this state's scope is 'model', but it has {len(parts)} parts: it is damaged")


def checked_learned(method: Method, setup: Setup, learned: Any) -> dict[str, Any]:
    """What a worker of one part learned, with the types that it has there; refused if it is damaged."""
    _check_fields("learned", learned, {"step", "seed", *Learned._fields})
    _check_count("this state's step", learned["step"], at_least=0)
    _check_count("this state's seed", learned["seed"], at_least=0)
    rules = {"region": method.region, "criterion": method.criterion}
    found = {"step": learned["step"], "seed": learned["seed"]}
    for name, template in _templates(method, setup)._asdict().items():
        state = _like(template, learned[name], f"this state's {name}")
        try:
            rules[name].check(state, setup)  # type: ignore[attr-defined]
        except ValueError as error:
            raise ValueError(f"this state's {name} is damaged: {error}") from error
        found[name] = state._asdict()
    return found


def _like(template: Any, values: Any, what: str) -> Any:
    """Such a NamedTuple as the template, from values by name."""
    hints = get_type_hints(type(template))
    if not isinstance(values, Mapping) or values.keys() != hints.keys():
        raise ValueError(f"{what} must have {', '.join(hints) or 'nothing'}, not {_short(values)}")
    return type(template)(**{name: _typed(kind, values[name], f"{what}: {name}") for name, kind in hints.items()})


def _typed(kind: Any, value: Any, what: str) -> Any:
    if get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{what} must be numbers in a row, not {_short(value)}")
        return tuple(_typed(get_args(kind)[0], each, what) for each in value)
    if kind is Tensor:
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
            raise ValueError(f"{what} must be a tensor, not {_short(value)}")
        # the host works with it, wherever the file was loaded to
        return value.detach().cpu()
    if kind is int:
        _check_count(what, value, at_least=0)
    elif not isinstance(value, float) or not 0 <= value < math.inf:
        raise ValueError(f"{what} must be a finite number of at least 0, not {_short(value)}")
    return value


def _check_fields(what: str, value: Any, fields: set[str]) -> None:
    if not isinstance(value, Mapping) or value.keys() != fields:
        raise ValueError(f"this state's {what} must have {', '.join(sorted(fields))}, not {_short(value)}")


def _check_count(what: str, value: Any, at_least: int) -> None:
    if not _is_count(value) or value < at_least:
        raise ValueError(f"{what} must be a whole number of at least {at_least}, not {_short(value)}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_WHOLE


def _short(value: Any) -> str:
    """Something of what came, for an error."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(sorted(map(str, value))[:8]) or 'nothing'}"
    return shown(value)


# --- numbers as text ------------------------------------------------------------------------------------------------

_INTEGERS = ".int64"
"""Marks a tensor of whole numbers. No parameter's name begins with a dot."""


def encoded(plain: Any) -> str:
    """Plain numbers, texts, and tensors of whole numbers as JSON, which keeps every bit of them."""

    def tensor(value: Any) -> Any:
        assert isinstance(value, Tensor)
        assert value.dtype == torch.int64
        return {_INTEGERS: value.tolist()}

    return json.dumps(plain, default=tensor, sort_keys=True)


def decoded(text: str) -> Any:
    """The inverse of `encoded`; rows come back as lists."""

    def tensor(fields: dict[str, Any]) -> Any:
        return torch.tensor(fields[_INTEGERS], dtype=torch.int64) if fields.keys() == {_INTEGERS} else fields

    return json.loads(text, object_hook=tensor)
