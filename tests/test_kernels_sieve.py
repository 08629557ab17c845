"""`kernels.sieve` against `Residual.clear`, `Residual.add` and `score.collect`, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gradsieve import control
from gradsieve.kernels.tiling import Sent
from gradsieve.residual import Residual
from gradsieve.score import collect
from gradsieve.types import Candidates, Span
from kernel_place import DEVICE, MARKS, SIZES, Place, assert_same_bits, awkward, clear, level_of, sieve

pytestmark = MARKS

GRADIENTS = [torch.float32, torch.bfloat16, torch.float16]
LARGEST = torch.finfo(torch.float32).max
RESIDUALS = [torch.float32, torch.bfloat16]


def accumulated(acc: Tensor, gradient: Tensor, support: Tensor | None = None, rest: Tensor | None = None) -> Tensor:
    """By the plain twin: clear what was sent, then add."""
    residual = Residual(acc.clone(), None, 0.0)
    if support is not None:
        residual.clear(support.long(), rest)
    residual.add(0, gradient)
    return residual.acc


def expected(place: Place, row: int) -> Candidates:
    """What a row collects, by the plain twin, out of what was accumulated."""
    return collect(place.score, place.view(row), [Span(*place.stretches[row])], place.lowest)


def words_of(gradient: Tensor, address: int, number: int) -> Tensor:
    """What stands in a gradient from an address on: entries of four bytes or, under 16 bits, of two."""
    words = gradient.flatten().view(torch.int32 if gradient.element_size() == 4 else torch.int16)
    first = (address - gradient.data_ptr()) // gradient.element_size()
    return words[first : first + number].long() & (0xFFFF_FFFF if gradient.element_size() == 4 else 0xFFFF)


def assert_collected(place: Place, row: int, sources: Sequence[tuple[Tensor, int]]) -> None:
    """That each tile of a row's collection stands where it lay in its gradient, and is what the plain twin finds."""
    counts, addresses = place.found.tile_counts[row].tolist(), place.found.tile_places[row].tolist()
    starts = place.tiling.tiles.starts.tolist()
    positions, levels = [], []
    for start, number, address, (gradient, source) in zip(starts, counts, addresses, sources, strict=False):
        assert address == gradient.data_ptr() + source * gradient.element_size()
        words = words_of(gradient, address, number)
        positions.append(start + (words & 0xFFFF))
        levels.append(words >> 16)
    found = expected(place, row)
    assert_same_bits(torch.cat(positions), found.indices)
    if not place.found.narrow:
        assert_same_bits(torch.cat(levels), level_of(found.scores, place.last))


def tiles_in_place(place: Place, gradient: Tensor, row: int) -> list[tuple[Tensor, int]]:
    """Where each tile of a row lies in a gradient that is laid out like the vector."""
    return [(gradient, row * place.numel + start) for start in place.tiling.tiles.starts.tolist()[:-1]]


def assert_sieved(place: Place, gradient: Tensor) -> None:
    """That a gradient of all rows is added, and what is large collected."""
    place.acc.copy_(awkward(*place.acc.shape, seed=1))
    total = accumulated(place.acc, gradient)
    fed = gradient.clone()
    place.feed(fed)
    assert_same_bits(place.acc, total)
    for row in range(place.rows):
        assert_collected(place, row, tiles_in_place(place, fed, row))


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("residual", RESIDUALS, ids=str)
@pytest.mark.parametrize("gradient", GRADIENTS, ids=str)
def test_gradients_are_added_and_large_sums_collected(gradient: torch.dtype, residual: torch.dtype, many: bool) -> None:
    place = Place(rows=2, dtype=residual)
    place.look([(0, place.numel), (1000, 5003)], many=many)
    assert_sieved(place, awkward(2, place.numel).to(gradient))


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("weights", RESIDUALS, ids=str)
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16], ids=str)
def test_they_are_collected_by_importance_too(gradient: torch.dtype, weights: torch.dtype, many: bool) -> None:
    place = Place()
    parameters = torch.randn(place.numel, device=DEVICE)
    parameters[::7] = 0
    place.look([(100, place.numel - 1)], last=2.0, weights=parameters.to(weights), many=many)
    assert_sieved(place, awkward(1, place.numel).to(gradient))


def test_places_alone_may_be_collected_where_there_is_room_for_more() -> None:
    """Other gradients of the same step may have 16 bits."""
    place = Place()
    fed = awkward(1, place.numel)
    place.found.narrow = True
    sieve(fed, place.acc, place.tiling.tiles, place.whole, place.sight, place.found, None, collect=True)
    starts, counts = place.tiling.tiles.starts.tolist(), place.found.tile_counts[0].tolist()
    words = [fed[0, start:].view(torch.int16)[:number].long() for start, number in zip(starts, counts, strict=False)]
    positions = [start + word for start, word in zip(starts, words, strict=False)]
    assert_same_bits(torch.cat(positions), expected(place, 0).indices)


def test_a_row_collects_in_its_own_stretch_alone() -> None:
    stretches = [(0, 0), (4096, 4097), (0, 1), (4095, 4131), (4130, 8629), (8600, 8631), (8631, 8631)]
    place = Place(rows=len(stretches))
    place.look(stretches)
    assert_sieved(place, awkward(len(stretches), place.numel))


@pytest.mark.parametrize("last", [control.TINY, 1e-30, 1e-3, 1e30, LARGEST])
def test_a_threshold_may_be_of_any_scale(last: float) -> None:
    place = Place([3000])
    place.look([(0, place.numel)], last=last)
    assert_sieved(place, awkward(1, place.numel) * last)


def test_what_begins_at_multiples_of_8_may_be_read_in_wide_pieces() -> None:
    place = Place([4096, 8, 4200, 1024], rows=2)
    assert place.whole.aligned
    assert not Place().whole.aligned
    assert_sieved(place, awkward(2, place.numel))


def test_where_nothing_is_known_nothing_is_collected_and_the_gradient_stays() -> None:
    place = Place(rows=2)
    gradient = awkward(2, place.numel)
    fed, total = gradient.clone(), accumulated(place.acc, gradient)
    place.feed(fed, collect=False)
    assert_same_bits(place.acc, total)
    assert_same_bits(fed, gradient)
    assert not place.found.tile_counts.any()


BUCKETS = [[4, 3], [1, 0, 2]]
"""Parameters, in the order in which they lie in each of two buckets: DDP's is from the last to the first."""


def in_buckets(place: Place, gradient: Tensor) -> list[tuple[Tensor, list[tuple[int, int]]]]:
    """The gradient of one row in buckets, and which slot begins where; before each lies something else."""
    buckets = []
    for slots in BUCKETS:
        pieces: list[Tensor] = []
        begins = []
        for slot in slots:
            pieces.append(torch.full((3,), 77.0, dtype=gradient.dtype, device=DEVICE))
            begins.append((slot, sum(map(len, pieces))))
            pieces.append(gradient[place.bounds[slot] : place.bounds[slot + 1]])
        buckets.append((torch.cat(pieces), begins))
    return buckets


@pytest.mark.parametrize("dtype", GRADIENTS, ids=str)
def test_a_gradient_may_come_in_buckets(dtype: torch.dtype) -> None:
    place = Place()
    place.look([(33, place.numel - 40)])
    gradient = awkward(place.numel).to(dtype)
    place.found.narrow = dtype != torch.float32
    total = accumulated(place.acc, gradient.unsqueeze(0))
    sources: dict[int, tuple[Tensor, int]] = {}
    for bucket, begins in in_buckets(place, gradient):
        for run in place.tiling.bucket(begins):
            sieve(bucket, place.acc, place.tiling.tiles, run, place.sight, place.found, None, collect=True)
        sources |= {place.bounds[slot]: (bucket, begin) for slot, begin in begins}
        for _, begin in begins:
            assert (bucket[begin - 3 : begin] == 77).all()
    assert_same_bits(place.acc, total)
    assert_collected(place, 0, tiles_in_buckets(place, sources))


def tiles_in_buckets(place: Place, sources: dict[int, tuple[Tensor, int]]) -> list[tuple[Tensor, int]]:
    """Where each tile lies, from where each parameter does, by its place in the vector."""
    tiles = []
    for start in place.tiling.tiles.starts.tolist()[:-1]:
        parameter = max(first for first in sources if first <= start)
        bucket, begin = sources[parameter]
        tiles.append((bucket, begin + start - parameter))
    return tiles


def sent_by(place: Place, dtype: torch.dtype, *, rest: bool) -> Sent:
    """A support with more entries of one tile than are cleared at a time, none of some, and room behind its end."""
    entries = torch.cat([torch.arange(3900, 4090), torch.arange(4097, 4140, 2), torch.tensor([place.numel - 1])])
    behind = torch.full((40,), place.numel)
    support = torch.cat([entries, behind]).to(DEVICE, dtype)
    left = awkward(place.rows, len(support), seed=3) if rest else None
    return place.sent(support, left)


def cleared_entries(place: Place, sent: Sent) -> tuple[Tensor, Tensor | None]:
    number = int((sent.support < place.numel).sum())
    return sent.support[:number], None if sent.rest is None else sent.rest[:, :number]


@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("residual", RESIDUALS, ids=str)
def test_what_was_sent_is_cleared_before(residual: torch.dtype, dtype: torch.dtype, rest: bool) -> None:
    place = Place(rows=2, dtype=residual)
    gradient = awkward(2, place.numel)
    place.acc.copy_(awkward(2, place.numel, seed=1))
    sent = sent_by(place, dtype, rest=rest)
    total, at_once = accumulated(place.acc, gradient, *cleared_entries(place, sent)), place.acc.clone()
    clear(at_once, sent, 0, len(sent.borders) - 1)
    fed = gradient.clone()
    place.feed(fed, sent=sent)
    assert_same_bits(place.acc, total)
    assert_same_bits(accumulated(at_once, gradient), total)
    assert_collected(place, 1, tiles_in_place(place, fed, 1))


def test_clearing_touches_no_tile_but_those_that_are_fed() -> None:
    place = Place()
    place.acc.copy_(awkward(1, place.numel, seed=1))
    before, sent = place.acc.clone(), sent_by(place, torch.int32, rest=False)
    nothing = torch.zeros(place.numel, device=DEVICE)
    (run,) = place.tiling.bucket([(0, 0)])
    sieve(nothing, place.acc, place.tiling.tiles, run, place.sight, place.found, sent, collect=False)
    support, _ = cleared_entries(place, sent)
    total = accumulated(before, nothing.unsqueeze(0), support[support < place.bounds[1]])
    total[:, place.bounds[1] :] = before[:, place.bounds[1] :]
    assert_same_bits(place.acc, total)


def test_tiles_end_where_parameters_do() -> None:
    place = Place()
    starts, slots = place.tiling.tiles.starts.tolist(), place.tiling.tiles.slots.tolist()
    assert starts[-1] == place.numel
    assert set(place.bounds) <= set(starts)
    assert all(0 < stop - start <= 4096 for start, stop in pairwise(starts))
    assert all(place.bounds[slot] <= start < place.bounds[slot + 1] for start, slot in zip(starts, slots, strict=False))


@pytest.mark.parametrize("residual", RESIDUALS, ids=str)
@pytest.mark.parametrize("gradient", GRADIENTS, ids=str)
def test_what_is_not_finite_is_left_out_and_noted(gradient: torch.dtype, residual: torch.dtype) -> None:
    place = Place(rows=3, dtype=residual)
    place.look([(0, place.numel)] * 3)
    place.acc.copy_(torch.randn(place.acc.shape, device=DEVICE))
    fed = torch.randn(place.acc.shape, device=DEVICE).to(gradient)
    bad = {(0, 5): float("inf"), (0, 4096): float("nan"), (2, place.numel - 1): float("-inf")}
    clean = fed.clone()
    for where, value in bad.items():
        fed[where], clean[where] = value, 0
    total = accumulated(place.acc, clean)
    place.feed(fed, check=True)
    assert_same_bits(place.acc, total)
    # 1 + the number of a parameter: the first two are of the first, the last is of the last
    assert place.found.faults.tolist() == [1, 0, len(SIZES)]


def test_the_largest_numbers_are_finite() -> None:
    place = Place()
    gradient = torch.full((1, place.numel), torch.finfo(torch.float32).max, device=DEVICE)
    place.feed(gradient, check=True)
    assert place.found.faults.tolist() == [0]
