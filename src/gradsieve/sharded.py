"""A sieve in checkpoints of torch.distributed.checkpoint (DCP).

[Note: a key for each rank]
DCP takes what all ranks hold under one key for copies of one thing, and keeps that of one rank. So each rank's state
has a key of its own, which also says how many ranks there were. All of it is tensors: plain numbers are JSON in bytes,
for what is no tensor DCP pickles. DCP fills tensors that are there before it reads, so sizes must be known before:
those of the model are, and that of the numbers, rounded up to whole blocks, stands in the checkpoint's metadata.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gradsieve import states
from gradsieve.hook import Sieve

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import StorageReader

BLOCK = 1 << 16
"""Bytes: the numbers of a state take up whole blocks."""
_NUMBERS = "numbers"
_KEY = re.compile(r"(?P<prefix>.*\.)?rank (?P<rank>\d+) of (?P<world>\d+)\." + _NUMBERS)


class Sharded:
    """A sieve as torch.distributed.checkpoint saves and loads it: every rank's state, at any number of ranks.

    To load, say where the checkpoint is, by its path or a reader of it: it tells how many ranks there were. Where they
    were as many, the run goes on bit for bit; where not, states are converted as by `reshard`, and each rank reads what
    it needs.

        dcp.save({"model": model, "sieve": gradsieve.Sharded(sieve)}, checkpoint_id=path)
        dcp.load({"model": model, "sieve": gradsieve.Sharded(sieve, checkpoint=path)}, checkpoint_id=path)
    """

    def __init__(self, sieve: Sieve, checkpoint: str | os.PathLike[str] | StorageReader | None = None) -> None:
        if not isinstance(sieve, Sieve):
            raise TypeError(f"Sharded takes what gradsieve.sparsify returned, not {type(sieve).__name__}")
        self._sieve = sieve
        self._checkpoint = checkpoint

    def state_dict(self) -> dict[str, Any]:
        """This rank's state as tensors or, with a checkpoint to load, room for what this rank will take from it."""
        if self._checkpoint is None:
            state = self._sieve.state_dict()
            return {_key(state["rank"], state["world"]): _as_tensors(state)}
        here = self._sieve.origin
        stored = _stored(_read_metadata(self._checkpoint), here, self._checkpoint)
        needed = states.weights(here.rank, stored.world, here.world)
        return {_key(rank, stored.world): _room(here, stored, rank) for rank in needed}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what DCP has put into the tensors of `state_dict`."""
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"Sharded loads what its state_dict() returned, not {type(state_dict).__name__}")
        here = self._sieve.origin
        run = states.of_one_run([_as_state(key, held) for key, held in state_dict.items()], whole=False, here=here)
        missing = sorted(states.weights(here.rank, run.origin.world, here.world).keys() - run.vectors.keys())
        if missing:
            raise ValueError(
                f"rank {here.rank} of {here.world} needs the states of ranks {missing} of {run.origin.world}, which "
                "did not come: give Sharded(sieve, checkpoint=path) to dcp.load"
            )
        self._sieve.load_state_dict(states.share(run, here))


def _key(rank: int, world: int) -> str:
    return f"rank {rank} of {world}"


def _as_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {key: value for key, value in state.items() if key not in states.KINDS}
    text = states.encoded(numbers).encode()
    padded = text.ljust(-(-len(text) // BLOCK) * BLOCK)
    held = {kind: dict(state[kind]) for kind in states.KINDS if state[kind]}
    return {_NUMBERS: torch.frombuffer(bytearray(padded), dtype=torch.uint8), **held}


def _as_state(key: Any, held: Any) -> dict[str, Any]:
    """The inverse of `_as_tensors`."""
    numbers = held.get(_NUMBERS) if isinstance(held, Mapping) else None
    if not isinstance(numbers, Tensor) or numbers.dtype != torch.uint8 or numbers.dim() != 1:
        raise ValueError(f"{key!r} holds no state of a sieve: save it with gradsieve.Sharded(sieve)")
    try:
        state = states.decoded(numbers.cpu().numpy().tobytes().decode())
    except (ValueError, TypeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"the numbers of {key!r} are damaged: {error}; go on from another checkpoint") from error
    if not isinstance(state, dict) or key != f"rank {state.get('rank')} of {state.get('world')}":
        raise ValueError(f"the numbers of {key!r} are damaged, or another rank's; go on from another checkpoint")
    return state | {kind: held.get(kind, {}) for kind in states.KINDS}


class _Stored(NamedTuple):
    """What a checkpoint holds of a sieve."""

    world: int
    sizes: Mapping[int, int]
    """Of the numbers of each rank, in bytes."""
    dtypes: Mapping[str, torch.dtype]
    """Of the vectors, by kind."""


def _read_metadata(checkpoint: str | os.PathLike[str] | StorageReader) -> Metadata:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.storage import StorageReader

    if not isinstance(checkpoint, (str, os.PathLike, StorageReader)):
        raise TypeError(f"checkpoint must be a path or a reader of DCP, not {type(checkpoint).__name__}")
    reader = checkpoint if isinstance(checkpoint, StorageReader) else FileSystemReader(checkpoint)
    try:
        return reader.read_metadata()
    except Exception as error:  # a file that is no metadata fails in many ways
        raise ValueError(
            f"{_place(checkpoint)} is no whole checkpoint of torch.distributed.checkpoint: its metadata cannot be read "
            f"({type(error).__name__}: {error}); give the path that dcp.save was given as checkpoint_id"
        ) from error


def _stored(metadata: Metadata, here: states.Origin, checkpoint: Any) -> _Stored:
    """What the checkpoint holds of this sieve, whatever the key that it was saved under."""
    tensors = dict(_tensors_in(metadata))
    prefixes = {found["prefix"] or "" for key in tensors if (found := _KEY.fullmatch(key))}
    if not prefixes:
        raise ValueError(
            f"{_place(checkpoint)} holds no sieve: it was saved without one, or not as gradsieve.Sharded(sieve)"
        )
    fitting = [stored for prefix in sorted(prefixes) if (stored := _under(prefix, tensors, here)) is not None]
    if not fitting:
        raise ValueError(
            f"{_place(checkpoint)} holds a sieve of another model, method or exclude=: load it into such as it was "
            "saved with"
        )
    if any(other != fitting[0] for other in fitting[1:]):
        raise ValueError(
            f"{_place(checkpoint)} holds several sieves of such a model, and which is meant cannot be told: save each "
            "into a checkpoint of its own"
        )
    return fitting[0]


class _Held(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


def _tensors_in(metadata: Metadata) -> Iterator[tuple[str, _Held]]:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    for key, value in metadata.state_dict_metadata.items():
        if isinstance(value, TensorStorageMetadata):
            yield key, _Held(tuple(value.size), value.properties.dtype)


def _under(prefix: str, tensors: Mapping[str, _Held], here: states.Origin) -> _Stored | None:
    """What stands under a prefix, if that is a sieve of this model, of all ranks."""
    ranks = [found for key in tensors if (found := _KEY.fullmatch(key)) and (found["prefix"] or "") == prefix]
    world = int(ranks[0]["world"])
    if sorted((int(found["rank"]), int(found["world"])) for found in ranks) != [(rank, world) for rank in range(world)]:
        raise ValueError(
            f"the checkpoint holds ranks {[found[0] for found in ranks]}, which is not each rank of a run once"
        )
    dtypes = {}
    for rank in range(world):
        for kind in states.kinds(here):
            shapes = _shapes_under(f"{prefix}{_key(rank, world)}.{kind}.", tensors)
            if {name: held.shape for name, held in shapes.items()} != here.shapes:
                return None
            dtypes[kind] = next(iter(shapes.values())).dtype
    sizes = {rank: tensors[f"{prefix}{_key(rank, world)}.{_NUMBERS}"].shape[0] for rank in range(world)}
    return _Stored(world, sizes, dtypes)


def _shapes_under(prefix: str, tensors: Mapping[str, _Held]) -> dict[str, _Held]:
    return {key.removeprefix(prefix): held for key, held in tensors.items() if key.startswith(prefix)}


def _room(here: states.Origin, stored: _Stored, rank: int) -> dict[str, Any]:
    """Tensors for DCP to fill; on the host, as there may be several ranks' of them."""
    vectors = {
        kind: {name: torch.empty(shape, dtype=stored.dtypes[kind]) for name, shape in here.shapes.items()}
        for kind in states.kinds(here)
    }
    return {_NUMBERS: torch.empty(stored.sizes[rank], dtype=torch.uint8), **vectors}


def _place(checkpoint: Any) -> str:
    return str(checkpoint) if isinstance(checkpoint, (str, os.PathLike)) else "the checkpoint"
