"""Damage of every kind to all that is read: messages, states, files of checkpoints and configs.

What is damaged is refused with an error of the documented class that says what is wrong, or what it comes to is the
same as without the damage. Every case is drawn from its own number, so that one that fails can be had again.
"""

from __future__ import annotations

import copy
import io
import json
import random
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch
from torch import Tensor

import gradsieve
import toys
from gradsieve import Simulation, sharded, states
from gradsieve.checks import UsageError
from gradsieve.cli.options import read_config
from gradsieve.methods import METHODS
from gradsieve.runs import RunError
from gradsieve.states import Origin, Vectors, loadable
from gradsieve.training import runner
from gradsieve.training.checkpoint import CURRENT, load_checkpoint, save_checkpoint
from gradsieve.training.config import TrainConfig, from_mapping, option_types, to_mapping
from gradsieve.training.virtual import Virtual
from gradsieve.wire import HEADER_BYTES, Shape, WireError, decode, encode
from small_runs import assert_same_state, leaves, plan

REFUSED, HARMLESS = "refused", "harmless"


def cases(quick: int, full: int) -> pytest.MarkDecorator:
    """A few cases in every test run, and with `make test-faults` all of them: 10,000 over this file."""
    return pytest.mark.parametrize(
        "number", [pytest.param(quick, id=f"{quick}"), pytest.param(full, id=f"{full}", marks=pytest.mark.faults)]
    )


def run_cases(number: int, name: str, case: Callable[[random.Random], tuple[str, str]]) -> Counter[tuple[str, str]]:
    """How many of the cases, each by what it was and what became of it, there were."""
    found: Counter[tuple[str, str]] = Counter()
    for index in range(number):
        try:
            found[case(random.Random(f"{name} {index}"))] += 1
        except BaseException as error:
            if sys.version_info >= (3, 11):
                error.add_note(f"case {index} of {name}")
            raise
    assert sum(found.values()) == number
    return found


def refused(error: BaseException, about: str = "", most: int = 1500) -> str:
    """An error has to say something, in a length that can be read."""
    text = str(error)
    assert 20 < len(text) < most, (type(error), text[:most])
    assert about in text
    return REFUSED


# --- messages -------------------------------------------------------------------------------------------------------


class Letter(NamedTuple):
    """A message, and what its receivers know of it."""

    indices: list[int]
    start: int
    shape: Shape
    message: bytes


FLAGS = range(24, 31)
"""The bits of a message that are reserved: no checksum covers them, and they say nothing about indices."""


def letter(draw: random.Random) -> Letter:
    extent = draw.choice([1, 40, 500, 5000, 2**20, 2**40])
    count = draw.randint(0, min(extent, 60))
    indices = sorted(draw.sample(range(extent), count)) if extent < 2**30 else [*range(0, extent, extent // 50)][:count]
    start = draw.choice([0, 7, 2**32 - 3, 2**33])
    shape, found = (
        Shape.of(count + draw.choice([0, 0, 3, 40]), extent),
        torch.tensor(indices, dtype=torch.int64) + start,
    )
    return Letter(found.tolist(), start, shape, bytes(encode(found, start, shape).tolist()))


def plain_sum(message: bytes) -> int:
    """What the checksum of a message ought to be, as the format says it."""
    tag, count, _, low, high, *words = struct.unpack(f"<{len(message) // 4}I", message)
    total = sum((word ^ word >> 16) * (2 * place + 1) for place, word in enumerate(words))
    total += (tag % 2**24) * 0x27D4EB2F + count * 0x9E3779B1 + low * 0x85EBCA6B + high * 0xC2B2AE35
    return int(total % 2**32)


def sealed(message: bytes) -> bytes:
    """The message with a checksum that suits it."""
    return message[:8] + struct.pack("<I", plain_sum(message)) + message[12:]


def flipped(message: bytes, *bits: int) -> bytes:
    changed = bytearray(message)
    for bit in bits:
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def with_word(message: bytes, place: int, word: int) -> bytes:
    return message[: 4 * place] + struct.pack("<I", word) + message[4 * place + 4 :]


def noise(draw: random.Random, sent: Letter) -> bytes:
    return draw.randbytes(draw.choice([len(sent.message), draw.randint(0, 2 * len(sent.message))]))


def one_bit(draw: random.Random, sent: Letter) -> bytes:
    return flipped(sent.message, draw.randrange(8 * len(sent.message)))


def some_bits(draw: random.Random, sent: Letter) -> bytes:
    return flipped(sent.message, *draw.sample(range(8 * len(sent.message)), draw.randint(2, 9)))


def one_word(draw: random.Random, sent: Letter) -> bytes:
    return with_word(
        sent.message, draw.randrange(len(sent.message) // 4), draw.choice([0, 2**32 - 1, draw.getrandbits(32)])
    )


def cut(draw: random.Random, sent: Letter) -> bytes:
    return sent.message[: draw.randrange(len(sent.message))]


def longer(draw: random.Random, sent: Letter) -> bytes:
    return sent.message + draw.choice([b"\0", b"\0\0\0\0", sent.message, draw.randbytes(9)])


def swapped(draw: random.Random, sent: Letter) -> bytes:
    words = [sent.message[place : place + 4] for place in range(0, len(sent.message), 4)]
    left, right = draw.sample(range(len(words)), 2)
    words[left], words[right] = words[right], words[left]
    return b"".join(words)


def shifted(draw: random.Random, sent: Letter) -> bytes:
    """As if the message began elsewhere."""
    by = draw.randrange(1, len(sent.message))
    return sent.message[by:] + sent.message[:by]


def foreign(draw: random.Random, sent: Letter) -> bytes:
    """The header of someone else: a picture, an archive, a pickle, text, numbers, nothing."""
    heads = (b"\x89PNG\r\n\x1a\n", b"PK\x03\x04", b"\x80\x02}q\0", b"GET / HTTP/1.1\r\n", struct.pack("<5f", *range(5)))
    head = draw.choice([*heads, b"\0" * HEADER_BYTES, b"\xff" * HEADER_BYTES])
    return (head + sent.message[len(head) :])[: len(sent.message)]


def another_field(draw: random.Random, sent: Letter) -> bytes:
    """A wrong version, number of low bits, count or start, with a checksum that is right for it."""
    tag, count, _, _, high = struct.unpack_from("<5I", sent.message)
    place, word = draw.choice(
        [
            (0, tag + 256 * draw.randint(1, 200)),
            (0, tag ^ draw.randint(1, 255) << 16),
            (1, sent.shape.most + draw.randint(1, 9)),
            (1, 2**32 - 1),
            (1, count + 1),
            (4, high | 2**31),
        ]
    )
    return sealed(with_word(sent.message, place, word))


def forged(draw: random.Random, sent: Letter) -> bytes:
    """Random parts behind a good header, with a checksum that is right for them."""
    kept = HEADER_BYTES + draw.choice([0, 4 * sent.shape.upper_words])
    return sealed(sent.message[:kept] + draw.randbytes(len(sent.message) - kept))


Spoil = Callable[[random.Random, Letter], bytes]
SPOILS: Sequence[Spoil] = (
    *(noise, one_bit, one_bit, some_bits, one_word, cut, longer, swapped, shifted, foreign, another_field, forged),
)


def message_case(draw: random.Random) -> tuple[str, str]:
    sent, spoil = letter(draw), draw.choice(SPOILS)
    changed = spoil(draw, sent)
    stop = sent.start + sent.shape.extent
    try:
        found = decode(torch.tensor(list(changed), dtype=torch.uint8), sent.shape, start=sent.start, stop=stop)
    except WireError as error:
        return spoil.__name__, refused(error)
    if found.indices.tolist() == sent.indices:
        return spoil.__name__, HARMLESS
    # no reader can tell these from sound ones: someone made the checksum fit
    assert spoil is forged
    assert plain_sum(changed) == struct.unpack_from("<I", changed, 8)[0]
    assert found.indices.diff().gt(0).all()
    assert sent.start <= int(found.indices[0])
    assert int(found.indices[-1]) < stop
    return spoil.__name__, "not to be noticed"


@cases(600, 4500)
def test_damaged_messages(number: int) -> None:
    found = run_cases(number, "messages", message_case)
    by_kind = Counter({kind: sum(n for (name, _), n in found.items() if name == kind.__name__) for kind in SPOILS})
    assert min(by_kind.values()) > number // 40
    # or the sum of this test is not that of the format
    assert found["forged", "not to be noticed"]
    harmless = {kind for kind, outcome in found if outcome == HARMLESS}
    # the reserved bits; words that are alike; a random word that is what it was; other numbers of no indices
    assert harmless <= {"one_bit", "one_word", "some_bits", "swapped", "foreign", "another_field", "forged"}
    print(sorted(found.items()))  # noqa: T201 - shown with -s


def test_every_flipped_bit_of_a_message_is_noticed_but_for_the_reserved_ones() -> None:
    draw = random.Random(5)
    for _ in range(8):
        sent = letter(draw)
        for bit in range(8 * len(sent.message)):
            changed = torch.tensor(list(flipped(sent.message, bit)), dtype=torch.uint8)
            if bit in FLAGS:
                assert decode(changed, sent.shape).indices.tolist() == sent.indices
            else:
                with pytest.raises(WireError):
                    decode(changed, sent.shape)


# --- states ---------------------------------------------------------------------------------------------------------

SHAPES = {"first": (12, 10), "empty": (0, 4), "second": (40,), "third": (5, 3)}
NUMEL = 120 + 40 + 15
STATEFUL = ("union", "micro", "exdyna", "exdyna-paper", "micro-paper", "sidco", "dgc", "iwp-per-layer")
WORLD = 2


def simulated(variant: str) -> Simulation:
    simulation = Simulation(toys.make(variant, 0.05), WORLD, NUMEL, shapes=list(SHAPES.values()), seed=3)
    draw = torch.Generator().manual_seed(1)
    for _ in range(6):
        simulation.step(torch.randn(WORLD, NUMEL, generator=draw), torch.linspace(-1, 1, NUMEL))
    return simulation


def origin(variant: str, rank: int) -> Origin:
    return Origin(rank, WORLD, toys.make(variant, 0.05), "model", SHAPES, tuple(SHAPES), torch.float32)


def by_name(vector: Tensor) -> dict[str, Tensor]:
    sizes = [torch.Size(shape).numel() for shape in SHAPES.values()]
    parts = zip(SHAPES.items(), torch.split(vector, sizes), strict=True)
    return {name: part.reshape(shape).clone() for (name, shape), part in parts}


def saved(variant: str) -> list[dict[str, Any]]:
    """What the ranks of a run save."""
    found = []
    for rank, worker in enumerate(simulated(variant).workers):
        vectors = {name: by_name(vector) for name, vector in worker.residual.named()}
        parts = [{"names": list(SHAPES), "learned": worker.state_dict()}]
        learned = {"step": worker.step, "seed": worker.seed, "rate": None, "parts": parts}
        owed = Vectors(learned, vectors["residual"], vectors.get("velocity", {}))
        found.append(states.saved(origin(variant, rank), owed))
    return found


def plain(value: Any) -> Any:
    """With tensors and rows as lists, so that states can be compared."""
    if isinstance(value, Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


Place = tuple[Any, ...]


def places(value: Any, path: Place = ()) -> Iterator[Place]:
    """Where there is something in a state, from the top down."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


def at(value: Any, path: Place) -> Any:
    return at(value[path[0]], path[1:]) if path else value


def changed_at(value: Any, path: Place, new: Any) -> Any:
    """A copy with something else at one place, or without it if that is REMOVED."""
    if not path:
        return new
    copied: Any = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and new is REMOVED:
        del copied[path[0]]
    else:
        copied[path[0]] = changed_at(copied[path[0]], path[1:], new)
    return copied if isinstance(value, (dict, list)) else tuple(copied)


REMOVED = object()


def garbage(draw: random.Random, depth: int = 3) -> Any:
    """What no field of a state is."""
    flat: list[Any] = [None, -1, -(2**40), 2**63, 2**70, 10**5000, True, float("nan"), float("inf"), -0.25, 1e300 * 10]
    flat += ["", "garbage", "\0", "\ud800", b"\0\xff", object(), complex(1, 1), {1, 2}, torch.tensor(3), torch.zeros(2)]
    if depth and draw.random() < 0.3:
        inner = [garbage(draw, depth - 1) for _ in range(draw.randint(1, 3))]
        return draw.choice([inner, tuple(inner), {f"key {place}": each for place, each in enumerate(inner)}, [inner]])
    return draw.choice(flat)


def other_tensor(draw: random.Random, tensor: Tensor) -> Any:
    """A tensor that is wrong in more than its values."""
    kinds: list[Any] = [
        tensor.to(torch.int32),
        tensor.to(torch.complex64),
        tensor.half(),
        tensor.bool(),
        tensor.unsqueeze(0),
        tensor.to("meta"),
        tensor.to_sparse(),
        tensor.tolist(),
        torch.zeros(*tensor.shape, 1),
        torch.cat([tensor.flatten(), torch.zeros(1, dtype=tensor.dtype)]),
        tensor.double() if tensor.dtype == torch.int64 else tensor.to(torch.float64),
    ]
    if tensor.numel() and tensor.is_floating_point():
        spoiled = tensor.clone()
        spoiled.view(-1)[draw.randrange(tensor.numel())] = draw.choice([float("nan"), float("inf"), -float("inf")])
        kinds += [spoiled] * 3
    elif tensor.numel():
        kinds += [tensor - 2**40, tensor + 2**60]
    return draw.choice(kinds)


def damaged_state(draw: random.Random, state: Any) -> tuple[str, Any]:
    """A state with something wrong in it, and what kind of thing."""
    path = draw.choice(list(places(state)))
    value, kind = at(state, path), draw.random()
    if kind < 0.25 and path[-2:-1] != ("recent",):  # a row of recent counts is a whole one without one of them, too
        return "removed", changed_at(state, path, REMOVED)
    if kind < 0.35:
        inside = [path for path in [(), *places(state)] if isinstance(at(state, path), dict)]
        path = draw.choice(inside)
        return "added", changed_at(state, path, at(state, path) | {draw.choice(["more", "Rank", 7, ""]): 1})
    if kind < 0.45 and isinstance(value, (list, tuple)) and path[-1] != "recent":
        return "lengthened", changed_at(state, path, type(value)([*value, draw.choice([0, 1, 0.5, "more", None])]))
    if isinstance(value, Tensor):
        return "tensor", changed_at(state, path, other_tensor(draw, value))
    return "garbage", changed_at(state, path, garbage(draw))


def hostile_text(draw: random.Random, text: str) -> bytes:
    """JSON that was cut, overwritten, or is none."""
    data = bytearray(text.encode())
    kind = draw.randrange(4)
    if kind == 0:
        return bytes(data[: draw.randrange(len(data))])
    if kind == 1:
        data[draw.randrange(len(data))] = draw.choice(b'{}[]",:\0\xff')
        return bytes(data)
    if kind == 2:
        return draw.choice([b"", b"null", b"[]", b"7", b'"text"', b"[" * 20_000, b"{}", b'{".int64": "x"}', b"NaN"])
    return draw.randbytes(draw.randint(1, 300))


class States:
    """Good states, and those who load damaged ones."""

    def __init__(self) -> None:
        self.good = {variant: saved(variant) for variant in STATEFUL}
        self.expected = {variant: plain(loadable(good[1], origin(variant, 1))) for variant, good in self.good.items()}
        self.simulations = {variant: simulated(variant) for variant in STATEFUL}
        self.simulated = {variant: simulation.state_dict() for variant, simulation in self.simulations.items()}

    def case(self, draw: random.Random) -> tuple[str, str]:
        variant = draw.choice(STATEFUL)
        entrances = (self._one, self._one, self._consolidated, self._another, self._of_a_run, self._simulation)
        entrance = draw.choice([*entrances, self._numbers])
        return entrance(draw, variant)

    def _one(self, draw: random.Random, variant: str) -> tuple[str, str]:
        kind, state = damaged_state(draw, self.good[variant][1])
        if draw.random() < 0.2 and isinstance(state, dict):
            kind, state = "twice", damaged_state(draw, state)[1]
        if draw.random() < 0.03:
            kind, state = "no state", garbage(draw)
        return f"state: {kind}", self._loaded(state, variant, self.expected[variant])

    def _consolidated(self, draw: random.Random, variant: str) -> tuple[str, str]:
        good = gradsieve.consolidated(self.good[variant])
        expected = plain(loadable(good, origin(variant, 1)))
        kind, state = damaged_state(draw, good)
        return f"consolidated: {kind}", self._loaded(state, variant, expected)

    def _another(self, draw: random.Random, variant: str) -> tuple[str, str]:
        """Of another rank, world, method, scope or version; whole, or with a false label."""
        good, other = self.good[variant], draw.choice([name for name in STATEFUL if name != variant])
        foreign = [
            good[0],
            self.good[other][1],
            good[1] | {"world": draw.choice([1, 3, 2**40])},
            good[1] | {"rank": draw.choice([0, 2, 2**40])},
            good[1] | {"method": self.good[other][1]["method"]},
            good[1] | {"learned": self.good[other][1]["learned"]},
            good[1] | {"method": "micro(density=__import__('os').abort())"},
            good[1] | {"method": "micro(" + "(" * 3000},
            good[1] | {"scope": "bucket"},
            good[1] | {"form": "consolidated"},
            good[1] | {"version": draw.choice([0, 1, 2, 4, 2**70])},
            good[1] | {"parameters": good[1]["parameters"] | {"fourth": [2]}},
            good[1] | {"parameters": good[1]["parameters"] | {"first": [10, 12]}},
            good[1] | {"residuals": good[1]["residuals"] | {"fourth": torch.zeros(2)}},
        ]
        return "another's", self._loaded(draw.choice(foreign), variant, self.expected[variant])

    def _loaded(self, state: Any, variant: str, expected: Any) -> str:
        try:
            found = loadable(state, origin(variant, 1))
        except (TypeError, ValueError) as error:
            return refused(error, about="state")
        assert plain(found._replace(**_as_float32(found))) == expected
        return HARMLESS

    def _of_a_run(self, draw: random.Random, variant: str) -> tuple[str, str]:
        """Among the states that `reshard` and `consolidated` take."""
        good = self.good[variant]
        kind, state = damaged_state(draw, good[1])
        convert: Callable[[Any], Any] = draw.choice(
            [gradsieve.consolidated, lambda run: gradsieve.reshard(run, draw.choice([1, 2, 3]))]
        )
        run: Any = draw.choice([[good[0], state], [state, good[0]], [state, state], [state]])
        if draw.random() < 0.1:
            kind, run = "no run", draw.choice([[], None, good[0], [good[0], good[0]], garbage(draw), [*good, None]])
        try:
            made = convert(run)
        except (TypeError, ValueError) as error:
            return f"run: {kind}", refused(error)
        # what is in a residual cannot be known without the sieve, and may be anything but no number of a model
        assert kind in ("tensor", "removed", "added", "garbage", "lengthened")
        wanted = gradsieve.reshard(good, len(made)) if isinstance(made, list) else gradsieve.consolidated(good)
        assert _learned_of(made) == _learned_of(wanted)
        return f"run: {kind}", "taken"

    def _simulation(self, draw: random.Random, variant: str) -> tuple[str, str]:
        simulation, good = self.simulations[variant], self.simulated[variant]
        rank = draw.randrange(WORLD)
        kind, state = damaged_state(draw, good[rank])
        if draw.random() < 0.05:
            kind, state = "no state", garbage(draw)
        try:
            simulation.load_state_dict([state if each == rank else good[each] for each in range(WORLD)])
        except (TypeError, ValueError) as error:
            assert plain(simulation.state_dict()) == plain(good)
            return f"simulation: {kind}", refused(error)
        # numbers of a residual that are not finite may come of gradients, and are values like others
        assert kind == "tensor"
        assert plain(simulation.state_dict()[rank]["learned"]) == plain(good[rank]["learned"])
        simulation.load_state_dict(good)
        return f"simulation: {kind}", "taken"

    def _numbers(self, draw: random.Random, variant: str) -> tuple[str, str]:
        """The numbers of a state in a checkpoint of DCP."""
        good = self.good[variant][1]
        held = sharded._as_tensors(good)
        text = bytes(held["numbers"].tolist()).decode().rstrip()
        spoiled: Any = torch.frombuffer(bytearray(hostile_text(draw, text) or b" "), dtype=torch.uint8)
        if draw.random() < 0.1:
            spoiled = draw.choice([None, 3, spoiled.float(), spoiled.unsqueeze(0), torch.zeros(0, dtype=torch.uint8)])
        try:
            state = sharded._as_state("rank 1 of 2", held | {"numbers": spoiled})
            run = states.of_one_run([state], whole=False, here=origin(variant, 1))
        except (TypeError, ValueError) as error:
            return "numbers", refused(error)
        assert plain(run.vectors[1]) == self.expected[variant]
        return "numbers", HARMLESS


def _as_float32(found: Vectors) -> dict[str, dict[str, Tensor]]:
    """A state may have been kept in narrower numbers."""
    return {kind: {name: each.float() for name, each in getattr(found, kind).items()} for kind in states.KINDS}


def _learned_of(made: Any) -> Any:
    return [plain(state["learned"]) for state in (made if isinstance(made, list) else [made])]


@cases(400, 3000)
def test_damaged_states(number: int) -> None:
    found = run_cases(number, "states", States().case)
    print(sorted(found.items()))  # noqa: T201 - shown with -s


# --- files of checkpoints -------------------------------------------------------------------------------------------

FILES = ("shared.pt", "rank-0.pt", "rank-1.pt")


class Checkpoints:
    """A good checkpoint, and one to damage."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = Virtual(plan(method="exdyna"), torch.device("cpu"))
        for step in range(3):
            self.engine.gradients(step)
        save_checkpoint(folder, self.engine, {"steps_done": 3, "model": self.engine.model.state_dict()})
        self.good = {file.name: file.read_bytes() for file in (folder / CURRENT).iterdir()}
        self.expected = self._loaded()
        other = Virtual(plan(method="exdyna"), torch.device("cpu"))
        other.gradients(0)
        save_checkpoint(folder / "other", other, {"steps_done": 1, "model": other.model.state_dict()})
        self.other = {file.name: file.read_bytes() for file in (folder / "other" / CURRENT).iterdir()}

    def _loaded(self) -> dict[str, Any]:
        shared = load_checkpoint(self.folder, self.engine)
        return dict(leaves({"shared": shared, "workers": self.engine.worker_states()}, ""))

    def case(self, draw: random.Random) -> tuple[str, str]:
        kind, changed = self._damaged(draw)
        for name in self.good.keys() | changed:
            path, data = self.folder / CURRENT / name, (self.good | changed)[name]
            path.write_bytes(data) if data is not None else path.unlink(missing_ok=True)
        try:
            found = self._loaded()
        except RunError as error:
            return kind, refused(error, about="cannot be loaded")
        assert_same_state(found, self.expected)
        return kind, HARMLESS

    def _damaged(self, draw: random.Random) -> tuple[str, dict[str, bytes | None]]:
        name = draw.choice(sorted(self.good))
        data, file = self.good[name], draw.choice(FILES)
        kinds: dict[str, Callable[[], dict[str, bytes | None]]] = {
            "bit": lambda: {name: flipped(data, draw.randrange(8 * len(data)))},
            "bits": lambda: {name: flipped(data, *draw.sample(range(8 * len(data)), 5))},
            "value": lambda: {file: _other_value(draw, self.good[file])},
            "cut": lambda: {name: data[: draw.randrange(len(data))]},
            "empty": lambda: {name: b""},
            "longer": lambda: {name: data + draw.randbytes(draw.randint(1, 50))},
            "missing": lambda: {name: None},
            "noise": lambda: {name: draw.randbytes(draw.randint(1, 3000))},
            "zeros": lambda: {name: _overwritten(draw, data)},
            "another's": lambda: {name: self.good[draw.choice(sorted(self.good.keys() - {name}))]},
            "another time's": lambda: {name: self.other[name]},
            "swapped": lambda: {"rank-0.pt": self.good["rank-1.pt"], "rank-1.pt": self.good["rank-0.pt"]},
            "an object": lambda: {file: _stored(Path("dangerous"))},
            "another object": lambda: {file: _stored(draw.choice([[], 3, None, {}, torch.zeros(3)]))},
        }
        kind = draw.choice(list(kinds))
        return kind, kinds[kind]()


def _stored(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _other_value(draw: random.Random, data: bytes) -> bytes:
    """The file with one number in it changed, and whole: what nothing in the file itself could tell."""
    value = copy.deepcopy(torch.load(io.BytesIO(data), weights_only=True))
    tensors = [each for _, each in leaves(value, "") if isinstance(each, Tensor) and each.is_floating_point()]
    draw.choice(tensors).view(-1)[0] += 1
    return _stored(value)


def _overwritten(draw: random.Random, data: bytes) -> bytes:
    """A block of it was never written."""
    start = draw.randrange(len(data))
    return data[:start] + b"\0" * len(data[start : start + 512]) + data[start + 512 :]


@cases(80, 500)
def test_damaged_files_of_checkpoints(number: int, tmp_path: Path) -> None:
    found = run_cases(number, "files", Checkpoints(tmp_path).case)
    # zeros over zeros, another's file that is the same, a wrong bit that is none: there are hardly any
    assert sum(count for (_, outcome), count in found.items() if outcome == HARMLESS) <= number // 20
    print(sorted(found.items()))  # noqa: T201 - shown with -s


# --- configs --------------------------------------------------------------------------------------------------------

OPTIONS = option_types(TrainConfig)
WORDS = ("digits", "small_runs:task", "micro", "cpu", "cuda:99", "gloo", "step", "float32", "bucket", "runs/x", "plain")
METHOD_TEXTS = (
    *("micro(", "micro()()", "micro(density=2)", "micro(density=nan)", "micro(density=1e999)", "topk(density=-0.1)"),
    *("lambda: 0", "__import__('os')", "micro(control=[1])", "iwp(num_broadcasters=10**9)", "dgc(clip=0)", "micro(*a)"),
    *("(" * 500, "micro(density=" + "[" * 300, "dgc(warmup_steps=" + "9" * 4000 + ")", "µ(density=0.1)", "exdyna(x=1)"),
    *("hard_threshold(threshold=" + "9" * 400 + ")", "dgc(clip=" + "9" * 400 + ")", "union(ceiling=" + "9" * 400 + ")"),
    *("micro(density=0.5, density=0.5)", "dense(density=1)", "micro(density='0.1')", "\0", "micro\n(\n)", "-" * 5000),
)


def number_of(draw: random.Random) -> Any:
    whole: list[Any] = [
        0,
        1,
        2,
        3,
        -1,
        7,
        2**31,
        2**63 - 1,
        2**63,
        2**64,
        10**30,
        -(10**30),
        10**400,
        16**5000,
        -(16**5000),
    ]
    broken: list[Any] = [
        0.0,
        -0.0,
        0.01,
        0.5,
        1.0,
        1.5,
        -0.5,
        1e-320,
        1e300,
        1.8e308,
        float("nan"),
        float("inf"),
        -float("inf"),
    ]
    return draw.choice(whole if draw.random() < 0.5 else broken)


def text_of(draw: random.Random) -> str:
    letters = "aZ0 _-./:()='\"\\\n\t\0\x7fäß語🎲\ud800\u202e"
    noise = "".join(draw.choice(letters) for _ in range(draw.randint(0, 12)))
    return draw.choice([noise, noise, *WORDS, draw.choice(METHOD_TEXTS), *METHODS])


def value_of(draw: random.Random, depth: int = 2) -> Any:
    kind = draw.random()
    if kind < 0.45:
        return number_of(draw)
    if kind < 0.8:
        return text_of(draw)
    if kind < 0.9 and depth:
        inner = [value_of(draw, depth - 1) for _ in range(draw.randint(0, 3))]
        return draw.choice([inner, {text_of(draw): each for each in inner}])
    return draw.choice([None, True, False])


GOOD: Mapping[str, Any] = {"task": "small_runs:task", "virtual": 2, "device": "cpu"}


def mapping_of(draw: random.Random) -> dict[str, Any]:
    """Options as a file may have them, a few of which are not what they have to be."""
    values = dict(GOOD)
    for _ in range(draw.randint(1, 3)):
        key = draw.choice([*OPTIONS, "epochs", "timeout", "eval_every"]) if draw.random() < 0.93 else text_of(draw)
        values[key] = typed_value(draw, OPTIONS[key]) if key in OPTIONS and draw.random() < 0.5 else value_of(draw)
    return values


def typed_value(draw: random.Random, wanted: Any) -> Any:
    """Of the right type, and rather out of range than in it."""
    kinds = [kind for kind in (get_args(wanted) or (wanted,)) if kind is not type(None)]
    if bool in kinds:
        return draw.random() < 0.5
    if int in kinds:
        return draw.choice([1, 2, 3, 5, 100, 2**31, 2**40, 2**63 - 1, 0, -1, 2**63])
    if float in kinds:
        return draw.choice([1e-320, 1e-9, 0.1, 0.5, 1.0, 2, 1e8, 1e9, 1e15, 1e20, 1e300, 1.7e308, 0, -1e-9, 10**310])
    if Path in kinds or str in kinds:
        return text_of(draw)
    return draw.choice(kinds)


TEXTS = {
    ".toml": 'task = "small_runs:task"\nvirtual = 2\ndevice = "cpu"\nlr = 0.1\nmethod = "micro(control=paper)"\n'
    "checkpoint-every = 5\nepochs = 2\ntensorboard = false\n",
    ".yaml": "task: small_runs:task\nvirtual: 2\ndevice: cpu\nlr: 0.1\nmethod: micro(control=paper)\n"
    "checkpoint-every: 5\nepochs: 2\ntensorboard: false\nclip: null\n",
}
SNIPPETS = (
    *("=", ":", "[", "]", "{", "}", '"', "'", "\n", "\t", "- ", "&a ", "*a", "!!python/object:os.system ", "? "),
    *("1979-05-27", "2020-99-99", "1e999", "9" * 5000, "0x" + "f" * 5000, "nan", "-inf", "~", "%", "\0", "é", "\ufeff"),
    *("[" * 2000, "a.b.c = 1\n", "[[task]]\n", "<<: *a\n", "a: &a [*a]\n", "lr = 1\nlr = 2\n", "1:30:00", "0o9"),
    *("| ", "0x", "--- \n", "\ud7ff", "\r", "\\u0000", "True", "1_000", "+1", ".5"),
)


def config_file(draw: random.Random, folder: Path) -> Path:
    """A config file with letters changed, lost and put in."""
    suffix = draw.choice(list(TEXTS))
    data = TEXTS[suffix]
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(data) + 1)
        data = data[:place] + draw.choice(["", draw.choice(SNIPPETS)]) + data[place + draw.choice([0, 1, 1, 20]) :]
    raw = data.encode()
    if draw.random() < 0.1:
        raw = flipped(raw or b"x", draw.randrange(8 * len(raw or b"x")))
    path = folder / f"config{suffix}"
    path.write_bytes(raw)
    return path


def config_case(draw: random.Random, folder: Path) -> tuple[str, str]:
    path = None if draw.random() < 0.65 else config_file(draw, folder)
    kind = "mapping" if path is None else path.suffix
    try:
        values = mapping_of(draw) if path is None else read_config(path)
        config = from_mapping(TrainConfig, values, "the file")
    except UsageError as error:
        return kind, refused_config(error)
    for name, value in values.items():
        assert getattr(config, name) == as_option(name, value)
    stored = json.loads(json.dumps(to_mapping(config)))
    assert from_mapping(TrainConfig, stored, "the file") == config
    return kind, planned(config)


def as_option(name: str, value: Any) -> Any:
    if name in ("data", "output") and value is not None:
        return Path(value)
    return float(value) if type(value) is int and OPTIONS[name] not in (int, int | None) else value


def planned(config: TrainConfig) -> str:
    """What the config comes to: it can be carried out, or it is refused before anything is started."""
    try:
        made = runner.checked_plan(config, runner.num_workers(config))
    except UsageError as error:
        return refused_config(error) + " as a plan"
    for step in (0, 1, 10**6):
        assert made.learning_rate(step) >= 0
        assert made.evaluates_after(step) in (True, False)
        assert made.saves_after(step) in (True, False)
    assert made.total_steps >= 1
    assert 1 <= made.method.budget.target(0, 1000) <= 1000
    return "carried out"


def refused_config(error: UsageError) -> str:
    # which option it is, unless the file cannot be read at all: a number too long to be written is no excuse
    assert "Exceeds the limit" not in str(error) or "the config file" in str(error)
    # names are told as they came
    return refused(error, most=20_000)


@cases(300, 2000)
def test_damaged_configs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = run_cases(number, "configs", lambda draw: config_case(draw, tmp_path))
    print(sorted(found.items()))  # noqa: T201 - shown with -s
