from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.kernels import reference

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])])

# few distinct values, so that scores often equal a threshold and one another
TIED_VALUES = [0.0, 2.0**-140, 2.0**-100, 0.25, 0.5, 1.0, 2.0**100, math.inf]
tied_scores = st.lists(st.sampled_from(TIED_VALUES), max_size=60)
some_scores = st.lists(st.floats(0, 2.0**100, width=32), max_size=60)
score_lists = st.one_of(tied_scores, some_scores)


def exponential(numel: int, scale: float = 1.0) -> Tensor:
    return torch.empty(numel).exponential_() * scale


@given(score_lists, st.sampled_from(TIED_VALUES))
@example([], 0.5)
def test_at_least_finds_what_a_plain_comparison_finds(scores: list[float], threshold: float) -> None:
    found = reference.at_least(torch.tensor(scores), threshold)
    assert found.dtype == torch.int64
    assert found.tolist() == [position for position, score in enumerate(scores) if score >= threshold]


@given(score_lists, st.lists(st.sampled_from(TIED_VALUES), min_size=1, max_size=8, unique=True).map(sorted))
@example([], [0.5])
def test_count_at_least_counts_what_a_plain_comparison_counts(scores: list[float], rungs: list[float]) -> None:
    counted = reference.count_at_least(torch.tensor(scores), torch.tensor(rungs))
    expected = (torch.tensor(scores)[:, None] >= torch.tensor(rungs)).sum(0)
    assert counted.tolist() == expected.tolist()


@given(score_lists, st.sampled_from(TIED_VALUES))
@example([], 0.5)
@example([math.nan, 0.0, math.nan], 0.5)
def test_a_known_count_changes_nothing_in_what_is_found(scores: list[float], threshold: float) -> None:
    found = reference.at_least(torch.tensor(scores), threshold)
    assert torch.equal(reference.at_least(torch.tensor(scores), threshold, len(found)), found)


@on_devices
@pytest.mark.parametrize("threshold", [0.0, 25.0, 49.0, 50.0, math.inf])
def test_a_known_count_changes_nothing_on_any_device(device: str, threshold: float) -> None:
    scores = torch.randint(0, 50, (10_001,)).float()
    scores[::100] = math.nan
    found = reference.at_least(scores, threshold)
    counted = reference.at_least(scores.to(device), threshold, len(found))
    assert (counted.device.type, counted.dtype) == (device, torch.int64)
    assert torch.equal(counted.cpu(), found)


owned_scores = st.lists(st.tuples(st.sampled_from([*TIED_VALUES, 0.3, math.nan]), st.integers(0, 3)), max_size=60)
"""Scores, and whose each is; rank 4 has none."""
some_rungs = st.lists(st.sampled_from(TIED_VALUES), min_size=1, max_size=8, unique=True).map(sorted)


@given(owned_scores, some_rungs)
@example([], [0.5])
@example([(math.nan, 2)], [0.0, math.inf])
@example([(0.5, 1), (0.5, 1), (0.25, 3)], [0.25, 0.5])
def test_counts_by_rank_are_the_counts_of_each_rank(owned: list[tuple[float, int]], rungs: list[float]) -> None:
    scores = torch.tensor([score for score, _ in owned])
    ranks = torch.tensor([rank for _, rank in owned], dtype=torch.int64)
    counted = reference.count_by_rank(scores, torch.tensor(rungs), ranks, world=5)
    assert (counted.shape, counted.dtype) == ((5, len(rungs)), torch.int64)
    each = [reference.count_at_least(scores[ranks == rank], torch.tensor(rungs)) for rank in range(5)]
    assert torch.equal(counted, torch.stack(each))


@on_devices
@pytest.mark.parametrize("numel", [0, 1, 10_001])
def test_counts_by_rank_are_the_same_on_every_device(device: str, numel: int) -> None:
    scores, ranks = torch.randint(0, 50, (numel,)).float(), torch.randint(0, 6, (numel,)).sort().values
    scores[::100] = math.nan
    rungs = torch.arange(0.0, 60.0, 3.0)
    counted = reference.count_by_rank(scores.to(device), rungs.to(device), ranks.to(device), world=7)
    assert counted.device.type == device
    each = [reference.count_at_least(scores[ranks == rank], rungs) for rank in range(7)]
    assert torch.equal(counted.cpu(), torch.stack(each))


@on_devices
@pytest.mark.parametrize("few", [0, 1 << 26])
def test_counting_is_the_same_on_every_device_however_it_is_done(
    device: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "FEW_COMPARISONS", few)
    scores = torch.randint(0, 50, (10_001,)).float()
    scores[::100] = math.nan
    rungs = torch.arange(0.0, 60.0, 3.0)
    expected = reference.count_at_least(scores, rungs)
    assert expected.tolist() == [len(reference.at_least(scores, float(rung))) for rung in rungs]
    assert torch.equal(reference.count_at_least(scores.to(device), rungs.to(device)).cpu(), expected)


def test_counting_and_finding_agree_on_what_is_no_number() -> None:
    scores = torch.tensor([0.5, math.nan, 2.0])
    counted = reference.count_at_least(scores, torch.tensor([0.0, 1.0]))
    found = [len(reference.at_least(scores, rung)) for rung in (0.0, 1.0)]
    assert counted.tolist() == found


@on_devices
def test_counting_and_finding_agree_on_every_device(device: str) -> None:
    scores = torch.randint(0, 50, (10_001,)).float().to(device)
    rungs = torch.arange(0.0, 60.0, 3.0, device=device)
    found = [reference.at_least(scores, float(rung)) for rung in rungs]
    assert reference.count_at_least(scores, rungs).tolist() == [len(indices) for indices in found]
    for indices, rung in zip(found, rungs, strict=True):
        assert torch.equal(indices, torch.arange(len(scores), device=device)[scores >= rung])


@given(score_lists, st.integers(0, 70))
def test_largest_agrees_with_sorting(numbers: list[float], k: int) -> None:
    scores = torch.tensor(numbers)
    positions = reference.largest(scores, k)
    assert positions.tolist() == sorted(set(positions.tolist()))
    taken = sorted(scores[positions].tolist(), reverse=True)
    assert taken == sorted(scores.tolist(), reverse=True)[:k]


def test_the_kth_largest_is_the_last_of_the_k_largest() -> None:
    scores = torch.rand(50)
    for k in (1, 7, 50):
        assert reference.kth_largest(scores, k) == scores[reference.largest(scores, k)].min()
    assert math.isnan(reference.kth_largest(torch.tensor([1.0, torch.nan, torch.inf]), 1))


@pytest.mark.parametrize("k", [5, 6, 1000])
def test_largest_of_no_more_than_there_are_is_everything(k: int) -> None:
    assert reference.largest(torch.rand(5), k).tolist() == [0, 1, 2, 3, 4]


@given(st.lists(st.integers(0, 30), max_size=60))
def test_merged_holds_each_index_once_ascending(indices: list[int]) -> None:
    assert reference.merged(torch.tensor(indices, dtype=torch.int64)).tolist() == sorted(set(indices))


@given(st.integers(0, 200), st.integers(0, 200))
def test_thinned_keeps_a_limit_and_spreads_it_evenly(numel: int, limit: int) -> None:
    indices = torch.arange(numel) * 7 + 3
    kept = reference.thinned(indices, limit)
    assert len(kept) == min(numel, limit)
    places = ((kept - 3) // 7).tolist()
    assert torch.equal(indices[places], kept)
    # from the beginning to the end, and over it
    gaps = torch.tensor([*places, numel]).diff()
    assert len(kept) == 0 or (places[0] == 0 and int(gaps.min()) >= 1 and int(gaps.max() - gaps.min()) <= 1)


def test_thinned_leaves_a_fitting_set_alone() -> None:
    indices = torch.tensor([1, 5, 6])
    assert torch.equal(reference.thinned(indices, 3), indices)


@given(st.integers(0, 2**40), st.lists(st.integers(0, 50), min_size=1, max_size=5), st.integers(-(2**63), 2**63 - 1))
def test_uniform_does_not_depend_on_how_the_range_is_cut(start: int, sizes: list[int], key: int) -> None:
    pieces, position = [], start
    for size in sizes:
        pieces.append(reference.uniform(position, position + size, key, CPU))
        position += size
    assert torch.equal(torch.cat(pieces), reference.uniform(start, position, key, CPU))


@given(st.integers(0, 2**40), st.integers(-(2**63), 2**63 - 1))
@example(0, 0)  # the hash of 0 is 0
@example(3_589_926_852, 0)  # the hash of this one is 2**32 - 1
def test_uniform_is_never_0_or_1(start: int, key: int) -> None:
    drawn = reference.uniform(start, start + 64, key, CPU)
    assert drawn.dtype == torch.float32
    assert float(drawn.min()) > 0
    assert float(drawn.max()) < 1


@pytest.mark.parametrize("key", [0, 1, -1, 123_456_789_012])
@pytest.mark.parametrize("start", [0, 2**33])
def test_uniform_fills_the_interval_evenly(start: int, key: int) -> None:
    drawn = reference.uniform(start, start + 100_000, key, CPU)
    histogram = torch.histc(drawn, bins=20, min=0, max=1)
    expected = len(drawn) / 20
    chi_squared = float(((histogram - expected) ** 2 / expected).sum())
    assert chi_squared < 50  # 19 degrees of freedom: one in ten thousand


@pytest.mark.parametrize(("one", "other"), [(0, 1), (5, -5), (7, 7 + 2**20)])
def test_uniform_draws_of_two_keys_are_unrelated(one: int, other: int) -> None:
    first, second = (reference.uniform(0, 100_000, key, CPU) for key in (one, other))
    correlation = float(torch.corrcoef(torch.stack([first, second]))[0, 1])
    assert abs(correlation) < 0.02


@pytest.mark.parametrize("lag", [1, 2, 64, 2**16])
def test_uniform_draws_of_neighbours_are_unrelated(lag: int) -> None:
    drawn = reference.uniform(0, 200_000, 3, CPU)
    correlation = float(torch.corrcoef(torch.stack([drawn[:-lag], drawn[lag:]]))[0, 1])
    assert abs(correlation) < 0.02


def test_uniform_tells_positions_apart_that_share_their_low_bits() -> None:
    low, high = (reference.uniform(start, start + 1000, 0, CPU) for start in (0, 2**32))
    assert int((low == high).sum()) <= 1


@on_devices
def test_uniform_is_the_same_on_every_device(device: str) -> None:
    drawn = reference.uniform(2**32 - 500, 2**32 + 500, 99, torch.device(device))
    assert drawn.device.type == device
    assert torch.equal(drawn.cpu(), reference.uniform(2**32 - 500, 2**32 + 500, 99, CPU))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_exponential_threshold_lets_the_target_pass_where_scores_are_exponential(stages: int) -> None:
    scores = exponential(200_000, scale=0.01)
    threshold = reference.exponential_threshold(scores, 1000, stages)
    assert int((scores >= threshold).sum()) == pytest.approx(1000, rel=0.15)


def test_more_stages_come_nearer_the_target_where_the_tail_is_heavy() -> None:
    scores = exponential(200_000) ** 2
    passed = [int((scores >= reference.exponential_threshold(scores, 200, stages)).sum()) for stages in (1, 2, 4)]
    errors = [abs(math.log(count / 200)) for count in passed]
    assert errors[0] > errors[1] > errors[2]


@given(st.floats(1e-6, 1e6), st.integers(1, 4))
def test_exponential_threshold_scales_with_the_scores(scale: float, stages: int) -> None:
    scores = torch.arange(1.0, 501.0) ** 1.5
    threshold = reference.exponential_threshold(scores, 10, stages)
    assert reference.exponential_threshold(scores * scale, 10, stages) == pytest.approx(threshold * scale, rel=1e-3)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("numel", [0, 1, 10])
def test_exponential_threshold_takes_all_where_the_target_asks_for_all(numel: int, stages: int) -> None:
    assert reference.exponential_threshold(torch.rand(numel) + 0.1, 10, stages) == 0


@pytest.mark.parametrize("stages", [1, 3])
def test_exponential_threshold_of_nothing_but_zeros_is_zero(stages: int) -> None:
    assert reference.exponential_threshold(torch.zeros(1000), 10, stages) == 0


@pytest.mark.parametrize("offset", [0, 1, 17, 1000])
def test_sampled_threshold_lets_about_the_target_pass(offset: int) -> None:
    scores = exponential(300_000)
    threshold = reference.sampled_threshold(scores, 30_000, 0.01, offset)
    assert int((scores >= threshold).sum()) == pytest.approx(30_000, rel=0.25)


@pytest.mark.parametrize(("target", "fraction"), [(1, 0.01), (19, 0.01), (300, 1.0)])
def test_sampled_threshold_is_exact_where_the_sample_is_everything(target: int, fraction: float) -> None:
    # a sample in which fewer than ten entries pass would only be noise, so a small target reads all
    scores = torch.randperm(1000).float()
    threshold = reference.sampled_threshold(scores, target, fraction, offset=5)
    assert threshold == 1000 - target


@pytest.mark.parametrize("numel", [0, 3, 10])
def test_sampled_threshold_takes_all_where_the_target_asks_for_all(numel: int) -> None:
    assert reference.sampled_threshold(torch.rand(numel), 10, 0.01, offset=0) == 0


def test_sampled_threshold_looks_elsewhere_in_another_step() -> None:
    scores = exponential(100_000)
    thresholds = {reference.sampled_threshold(scores, 1000, 0.01, offset) for offset in range(5)}
    assert len(thresholds) == 5
