from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.collectives import LocalCollectives, lockstep
from gradsieve.region import (
    BalancedBlocks,
    Blocks,
    LayerBins,
    Loads,
    Region,
    RotatingSlices,
    SteppingBlocks,
    Whole,
    even_borders,
    layer_pieces,
    norm_shares,
    packed,
)
from gradsieve.types import ALL, Indices, Reduced, Setup, Span, Step, Territory, View

CPU = torch.device("cpu")

# fewer and smaller blocks than by default too: borders then meet one another and the end of the vector
PARTITIONS: list[Region] = [
    RotatingSlices(),
    SteppingBlocks(),
    SteppingBlocks(num_blocks=16, alignment=4),
    BalancedBlocks(),
    BalancedBlocks(num_blocks=7),
]
each_partition = pytest.mark.parametrize("region", PARTITIONS, ids=repr)

numels = st.one_of(
    st.integers(0, 12), st.integers(0, 5000), st.sampled_from([1023, 1024, 1025, 32_767, 32_768, 70_001])
)
worlds = st.integers(1, 9)


def step_of(
    numel: int,
    world: int,
    *,
    rank: int = 0,
    index: int = 0,
    target: int | None = None,
    bounds: tuple[int, ...] | None = None,
    proposers: tuple[int, ...] | None = None,
) -> Step:
    return Step(
        index=index,
        rank=rank,
        seed=0,
        target=min(numel, max(1, numel // 10)) if target is None else target,
        proposers=tuple(range(world)) if proposers is None else proposers,
        setup=Setup(world, numel, (0, numel) if bounds is None else bounds),
    )


def reduced_of(indices: Indices, counts: Sequence[int]) -> Reduced:
    nothing = torch.empty(0)
    return Reduced(
        indices=indices,
        mean=nothing,
        dense=nothing,
        sent=indices,
        counts=tuple(counts),
        thresholds=(),
        distinct=sum(counts),
    )


def territories(region: Region, state: Any, numel: int, world: int, index: int = 0) -> list[Territory]:
    """The territory of each rank."""
    known = [region.known(state, step_of(numel, world, rank=rank, index=index)) for rank in range(world)]
    return [territory for territory in known if territory is not None]


def owners(ranks: Sequence[Territory], numel: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Which rank looks at each entry; fails where none or several do."""
    owner = np.full(numel, -1, dtype=np.int64)
    for rank, territory in enumerate(ranks):
        for start, stop, _ in territory.spans:
            assert 0 <= start <= stop <= numel
            assert (owner[start:stop] == -1).all()
            owner[start:stop] = rank
    assert (owner >= 0).all()
    return owner


def experienced(region: Region, numel: int, world: int, seed: int) -> Any:
    """The state after a few steps with a lopsided support."""
    draw = np.random.default_rng(seed)
    state = region.start(Setup(world, numel, (0, numel)))
    for index in range(seed % 5 if numel else 0):
        step = step_of(numel, world, index=index)
        support = np.unique((numel * draw.random(min(numel, 200)) ** 4).astype(np.int64))
        owner = owners(territories(region, state, numel, world, index), numel)
        counts = np.bincount(owner[support], minlength=world).tolist()
        state = region.observe(state, step, reduced_of(torch.from_numpy(support), counts))
    return state


def test_whole_gives_every_proposer_the_whole_vector_and_the_whole_target() -> None:
    step = step_of(100, 4, target=7, proposers=(0, 2))
    assert Whole().known(Whole().start(step.setup), step) == Territory((Span(0, 100, 7),), (7, 0, 7, 0), extent=100)


@each_partition
@given(numels, worlds, st.integers(0, 40), st.integers(0, 99))
@example(0, 3, 1, 0)
@example(2, 5, 1, 3)
@example(1, 9, 0, 4)
def test_partitions_tile_the_vector_exactly_once_in_every_step(
    region: Region, numel: int, world: int, index: int, seed: int
) -> None:
    state = experienced(region, numel, world, seed)
    owners(territories(region, state, numel, world, index), numel)


@each_partition
@given(numels, worlds, st.integers(0, 40), st.integers(0, 99))
def test_every_rank_owns_every_entry_once_in_world_steps(
    region: Region, numel: int, world: int, index: int, seed: int
) -> None:
    state = experienced(region, numel, world, seed)
    turns = [owners(territories(region, state, numel, world, index + turn), numel) for turn in range(world)]
    assert (np.sort(turns, axis=0) == np.arange(world)[:, None]).all()


@each_partition
@given(numels, worlds, st.integers(0, 40), st.integers(0, 99))
def test_all_ranks_know_the_widest_partition_and_each_where_its_own_begins(
    region: Region, numel: int, world: int, index: int, seed: int
) -> None:
    ranks = territories(region, experienced(region, numel, world, seed), numel, world, index)
    widest = max(span.stop - span.start for territory in ranks for span in territory.spans)
    assert {territory.extent for territory in ranks} == {widest}
    assert [territory.origin for territory in ranks] == [territory.spans[0].start for territory in ranks]


@each_partition
@given(numels, worlds, st.integers(0, 40), st.integers(0, 99))
def test_quotas_add_up_to_the_target_and_fit_into_their_spans(
    region: Region, numel: int, world: int, index: int, seed: int
) -> None:
    state = experienced(region, numel, world, seed)
    ranks = territories(region, state, numel, world, index)
    assert {territory.quotas for territory in ranks} == {ranks[0].quotas}
    assert sum(ranks[0].quotas) == step_of(numel, world).target
    for territory, quota in zip(ranks, ranks[0].quotas, strict=True):
        assert sum(span.quota for span in territory.spans) == quota
        assert all(0 <= span.quota <= span.stop - span.start for span in territory.spans)


@each_partition
def test_the_state_survives_a_step_in_which_everything_was_sent(region: Region) -> None:
    state = experienced(region, 1000, 4, seed=9)
    after = region.observe(state, step_of(1000, 4, index=9), reduced_of(ALL, (1000,) * 4))
    assert [territory.spans for territory in territories(region, after, 1000, 4)] == [
        territory.spans for territory in territories(region, state, 1000, 4)
    ]


@given(st.integers(0, 10_000), worlds)
def test_slices_differ_by_one_at_most_and_the_first_are_the_longer(numel: int, world: int) -> None:
    borders = even_borders(numel, world)
    sizes = [stop - start for start, stop in pairwise(borders)]
    assert (borders[0], borders[-1]) == (0, numel)
    assert sizes == [numel // world + 1] * (numel % world) + [numel // world] * (world - numel % world)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_a_rank_owns_slice_step_plus_rank(world: int) -> None:
    borders = even_borders(103, world)
    for index in range(2 * world):
        spans = [territory.spans[0] for territory in territories(RotatingSlices(), None, 103, world, index)]
        assert [span.start for span in spans] == [borders[(index + rank) % world] for rank in range(world)]


class TestSteppingBlocks:
    @pytest.mark.parametrize(
        ("numel", "size", "num_blocks"),
        [
            (11_173_962, 10_912, 1024),  # ResNet-18
            (32_768, 32, 1024),
            (32_767, 31, 1024),  # too small for 32: not aligned, but not empty
            (1024, 1, 1024),
            (1000, 1, 1000),
            (3, 1, 3),
            (0, 1, 0),
        ],
    )
    @pytest.mark.parametrize("world", [1, 3, 16])
    def test_blocks_are_aligned_where_they_can_be_and_never_empty(
        self, numel: int, size: int, num_blocks: int, world: int
    ) -> None:
        region = SteppingBlocks()
        start = region.start(Setup(world, numel, (0, numel)))
        assert region.block_size(numel) == size
        assert sum(start.num_blocks) == num_blocks
        assert max(start.num_blocks) - min(start.num_blocks) <= 1
        assert list(start.num_blocks) == sorted(start.num_blocks, reverse=True)

    def test_what_whole_blocks_leave_over_goes_with_the_last_partition(self) -> None:
        region = SteppingBlocks()
        state = region.start(Setup(4, 40_000, (0, 40_000)))
        spans = [territory.spans[0] for territory in territories(region, state, 40_000, 4)]
        assert [span.stop - span.start for span in spans] == [8192, 8192, 8192, 8192 + 40_000 - 32_768]

    @pytest.mark.parametrize(
        ("counts", "blocks"),
        [
            ((100, 100, 100, 100), (256, 256, 256, 256)),
            ((104, 96, 104, 96), (256, 256, 256, 256)),  # within 5 %
            ((200, 50, 100, 50), (255, 257, 256, 256)),
            ((50, 200, 100, 50), (257, 255, 256, 256)),
            ((50, 100, 50, 200), (256, 256, 257, 255)),
            ((150, 150, 50, 50), (256, 255, 257, 256)),  # only over the border between heavy and light
            ((50, 250, 50, 50), (257, 254, 257, 256)),  # one block over each border
            ((0, 0, 0, 0), (256, 256, 256, 256)),
            ((2, 0, 0, 1), (256, 256, 256, 256)),  # fewer than one each: no mean to compare with
        ],
    )
    @pytest.mark.parametrize("index", [0, 1, 6])
    def test_a_block_moves_from_the_heavy_to_the_light_side_of_a_border(
        self, counts: tuple[int, ...], blocks: tuple[int, ...], index: int
    ) -> None:
        """`counts` are those of partitions; rank i owned partition `(index + i) % world`."""
        by_rank = [counts[(index + rank) % 4] for rank in range(4)]
        state, step = Blocks((256, 256, 256, 256)), step_of(1_000_000, 4, index=index)
        after = SteppingBlocks().observe(state, step, reduced_of(torch.arange(0), by_rank))
        assert after.num_blocks == blocks

    def test_a_moved_block_takes_its_even_load_along(self) -> None:
        # 8 blocks: each carries 1/8 of 400 = 50 entries, so after one move the middle is no longer light
        region, step = SteppingBlocks(num_blocks=8, alignment=1), step_of(80, 4)
        after = region.observe(Blocks((2, 2, 2, 2)), step, reduced_of(torch.arange(0), (150, 60, 150, 40)))
        assert after.num_blocks == (1, 3, 1, 3)

    @given(st.lists(st.integers(0, 1000), min_size=4, max_size=4), st.integers(0, 20))
    def test_blocks_are_conserved_and_no_partition_falls_under_a_quarter_of_its_share(
        self, counts: list[int], index: int
    ) -> None:
        region, blocks = SteppingBlocks(), Blocks((65, 64, 450, 445))
        for later in range(3):
            step = step_of(1_000_000, 4, index=index + later)
            blocks = region.observe(blocks, step, reduced_of(torch.arange(0), counts))
            assert sum(blocks.num_blocks) == 1024
            assert min(blocks.num_blocks) >= 64

    def test_two_partitions_reach_balance_one_block_a_step(self) -> None:
        imbalances = [imbalance_after(SteppingBlocks(), num_steps, world=2) for num_steps in (1, 100, 300)]
        assert imbalances[0] > imbalances[1] > 0.1 > imbalances[2]


def skewed_support(numel: int = 100_000) -> Tensor:
    """Entries whose density falls along the vector."""
    support: Tensor = torch.unique((numel * torch.linspace(0, 1, 2001)[:-1] ** 2).long())
    return support


def imbalance_after(region: Region, num_steps: int, support: Tensor | None = None, world: int = 4) -> float:
    """How uneven the counts of ranks are in the last of some steps with the same support."""
    numel, support = 100_000, skewed_support() if support is None else support
    state = region.start(Setup(world, numel, (0, numel)))
    counts = [0] * world
    for index in range(num_steps):
        owner = owners(territories(region, state, numel, world, index), numel)
        counts = np.bincount(owner[support.numpy()], minlength=world).tolist()
        state = region.observe(state, step_of(numel, world, index=index), reduced_of(support, counts))
    return max(counts) * world / sum(counts) - 1


sparse_loads = st.dictionaries(st.integers(0, 15), st.integers(0, 2**45), max_size=16)


class TestBalancedBlocks:
    @given(numels, worlds, sparse_loads)
    @example(0, 3, {0: 5})
    @example(3, 5, {0: 2**45})
    @example(1000, 4, {15: 2**45})
    def test_borders_rise_from_0_to_numel_for_any_loads(self, numel: int, world: int, loads: dict[int, int]) -> None:
        known = torch.tensor([loads.get(block, 0) for block in range(16)])
        state = Loads(known, torch.zeros_like(known))
        borders = BalancedBlocks(num_blocks=16).borders(state, numel, world)
        assert len(borders) == world + 1
        assert (borders[0], borders[-1]) == (0, numel)
        assert borders == sorted(borders)

    @given(st.integers(0, 100_000), worlds)
    def test_partitions_are_even_before_anything_is_known(self, numel: int, world: int) -> None:
        region = BalancedBlocks()
        borders = region.borders(region.start(Setup(world, numel, (0, numel))), numel, world)
        sizes = [stop - start for start, stop in pairwise(borders)]
        assert max(sizes) - min(sizes) <= 1

    @pytest.mark.parametrize("world", [2, 4, 16])
    def test_a_lopsided_load_is_balanced_after_two_steps(self, world: int) -> None:
        assert imbalance_after(BalancedBlocks(), 2, world=world) > 0.3
        assert imbalance_after(BalancedBlocks(), 3, world=world) < 0.1

    def test_one_dominating_block_is_cut_in_pieces(self) -> None:
        support = torch.arange(300 * 98, 301 * 98)  # a block of 100,000 entries is 98 long
        assert imbalance_after(BalancedBlocks(), 2, support) == 3
        assert imbalance_after(BalancedBlocks(), 3, support) < 0.15

    def test_a_load_that_moves_is_followed_within_a_few_times_the_memory(self) -> None:
        region, numel = BalancedBlocks(), 100_000
        state = region.start(Setup(4, numel, (0, numel)))
        for index in range(60):
            support = skewed_support() if index < 20 else numel - 1 - skewed_support().flip(0)
            state = region.observe(state, step_of(numel, 4, index=index), reduced_of(support, (500,) * 4))
        moved = numel - 1 - skewed_support().flip(0)
        below = torch.searchsorted(moved, torch.tensor(region.borders(state, numel, 4)))
        assert int(below.diff().max()) * 4 / len(moved) < 1.1

    def test_what_a_step_yielded_is_known_two_steps_later(self) -> None:
        region, step = BalancedBlocks(num_blocks=4), step_of(40, 2)
        supports, one = [[0, 1, 15], [39], [0, 20, 21]], region.fixed_point
        state, states = region.start(step.setup), []
        for support in supports:
            state = region.observe(state, step, reduced_of(torch.tensor(support), (len(support), 0)))
            states.append((state.loads.tolist(), state.waiting.tolist()))
        assert states == [
            ([0, 0, 0, 0], [2 * one, one, 0, 0]),
            ([2 * one, one, 0, 0], [0, 0, 0, one]),
            ([2 * one + -2 * one // 3, one + -one // 3, 0, one // 3], [one, 0, 2 * one, 0]),
        ]

    def test_borders_do_not_look_at_what_waits(self) -> None:
        region, waiting = BalancedBlocks(num_blocks=4), torch.tensor([0, 0, 0, 1 << 40])
        known = torch.tensor([1 << 20, 0, 0, 0])
        assert region.borders(Loads(known, waiting), 40, 2) == region.borders(Loads(known, 0 * waiting), 40, 2)

    def test_loads_never_fall_under_zero(self) -> None:
        region, step = BalancedBlocks(num_blocks=4), step_of(40, 2)
        state = region.start(step.setup)
        for support in ([0, 1, 15], *[[39]] * 200):
            state = region.observe(state, step, reduced_of(torch.tensor(support), (len(support), 0)))
            assert min(state.loads.tolist()) >= 0
        assert state.loads.tolist()[:3] == [0, 0, 0]
        assert state.loads.tolist()[3] == pytest.approx(region.fixed_point, rel=0.01)


piece_sizes = st.lists(st.integers(1, 500), min_size=1, max_size=20)


@st.composite
def pieces_with_norms(draw: st.DrawFn) -> tuple[list[int], list[float], int]:
    sizes = draw(piece_sizes)
    norm = st.one_of(st.just(0.0), st.floats(1e-30, 1e30), st.floats(0.5, 2))
    norms = draw(st.lists(norm, min_size=len(sizes), max_size=len(sizes)))
    return sizes, norms, draw(st.integers(0, sum(sizes) + 10))


class TestLayerBins:
    @given(pieces_with_norms())
    @example(([3, 3], [0.0, 0.0], 4))
    @example(([5], [1.0], 0))
    @example(([1, 1000], [1e30, 1e-30], 500))
    def test_norm_shares_hand_out_the_target_and_no_piece_gets_more_than_it_has(
        self, case: tuple[list[int], list[float], int]
    ) -> None:
        sizes, norms, target = case
        shares = norm_shares(sizes, norms, target)
        assert sum(shares) == min(target, sum(sizes))
        assert all(0 <= share <= size for share, size in zip(shares, sizes, strict=True))
        assert target < len(sizes) or min(shares) >= 1

    def test_norm_shares_are_in_proportion_where_there_is_room(self) -> None:
        assert norm_shares([1000] * 4, [1.0, 4.0, 2.0, 3.0], 100) == [10, 40, 20, 30]

    def test_what_a_piece_cannot_take_goes_to_the_others_in_proportion(self) -> None:
        assert norm_shares([10, 1000, 1000], [8.0, 2.0, 2.0], 110) == [10, 50, 50]

    def test_of_a_target_too_small_for_all_the_largest_norms_get_one_each(self) -> None:
        assert norm_shares([9] * 5, [1.0, 5.0, 3.0, 2.0, 4.0], 3) == [0, 1, 1, 0, 1]

    @pytest.mark.parametrize("norm", [math.inf, math.nan])
    def test_a_norm_that_is_no_number_does_not_stop_the_step(self, norm: float) -> None:
        # one overflow under AMP: the step is skipped by the scaler, the run goes on
        assert sum(norm_shares([10, 10, 10], [1.0, norm, 2.0], 12)) == 12

    @given(st.lists(st.integers(0, 200), max_size=12), worlds)
    def test_pieces_tile_the_tensors_and_none_is_larger_than_an_even_slice(self, sizes: list[int], world: int) -> None:
        bounds = tuple(accumulate(sizes, initial=0))
        pieces = layer_pieces(Setup(world, bounds[-1], bounds))
        assert [entry for start, stop in pieces for entry in range(start, stop)] == list(range(bounds[-1]))
        assert all(start < stop for start, stop in pieces)
        assert all(stop - start <= math.ceil(bounds[-1] / world) for start, stop in pieces)
        assert not any(start < bound < stop for start, stop in pieces for bound in bounds)

    @given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 500)), max_size=30), worlds)
    def test_packed_keeps_every_span_and_no_bin_costs_more_than_the_lightest_and_one_span(
        self, sizes: list[tuple[int, int]], world: int
    ) -> None:
        starts = accumulate((size for size, _ in sizes), initial=0)
        spans = [Span(start, start + size, quota) for start, (size, quota) in zip(starts, sizes, strict=False)]
        bins = packed(spans, world)
        assert len(bins) == world
        assert sorted(span for spans_of_bin in bins for span in spans_of_bin) == spans
        assert all(spans_of_bin == sorted(spans_of_bin) for spans_of_bin in bins)
        costs = [sum(_sorting_cost(span) for span in spans_of_bin) for spans_of_bin in bins]
        assert max(costs) - min(costs) <= max((_sorting_cost(span) for span in spans), default=0) * (1 + 1e-9)

    def test_one_costly_span_has_a_bin_to_itself(self) -> None:
        costly, cheap = Span(0, 1000, 2), [Span(start, start + 100, 2) for start in range(1000, 2000, 100)]
        assert packed([costly, *cheap], 2) == [[costly], cheap]

    @given(st.lists(st.integers(0, 60), max_size=8), st.integers(1, 5), st.integers(0, 10), st.integers(0, 99))
    @example([], 2, 0, 0)
    @example([0, 0], 2, 1, 0)
    @example([1], 3, 1, 0)
    def test_bins_tile_the_vector_and_share_out_the_target(
        self, sizes: list[int], world: int, index: int, seed: int
    ) -> None:
        bounds = tuple(accumulate(sizes, initial=0))
        ranks = settled(bounds, world, index, seed)
        owners(ranks, bounds[-1])
        assert {territory.quotas for territory in ranks} == {ranks[0].quotas}
        assert sum(ranks[0].quotas) == step_of(bounds[-1], world).target
        for territory, quota in zip(ranks, ranks[0].quotas, strict=True):
            assert sum(span.quota for span in territory.spans) == quota

    def test_the_bins_of_equal_vectors_rotate_through_all_ranks(self) -> None:
        turns = [owners(settled((0, 50, 55, 90, 130), 3, index, seed=1), 130) for index in range(3)]
        assert (np.sort(turns, axis=0) == np.arange(3)[:, None]).all()

    def test_the_plan_needs_the_whole_vector(self) -> None:
        assert LayerBins().known(None, step_of(10, 2)) is None


def _sorting_cost(span: Span) -> float:
    """DEFT's: the size of a piece times the logarithm of its share."""
    return (span.stop - span.start) * math.log2(max(span.quota, 2))


def settled(bounds: tuple[int, ...], world: int, index: int, seed: int) -> list[Territory]:
    """The territories of ranks with vectors of their own."""
    draw = torch.Generator().manual_seed(seed)
    steps = [step_of(bounds[-1], world, rank=rank, index=index, bounds=bounds) for rank in range(world)]
    views = [View(step, torch.randn(bounds[-1], generator=draw), None) for step in steps]
    return lockstep(
        [LayerBins().settle(None, view, LocalCollectives(view.step.rank, world, CPU)) for view in views],
    )
