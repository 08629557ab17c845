from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
import toys
from fleet import Fleet
from gradsieve import METHODS, Method, Simulation, StepStats
from gradsieve.collectives import GroupCollectives
from gradsieve.rounding import WIRES
from toys import (
    SHAPES,
    Chosen,
    averaged,
    backward,
    flat,
    flat_parameters,
    gradients_of,
    sparsified,
    stacked_gradients,
)

STEPS = 7
DENSITY = 0.05
ERROR_FEEDBACK = [name for name in METHODS if name != "dense"]


def make(variant: str) -> Method:
    return toys.make(variant, DENSITY)


def _trained(
    name: str, ddp: dict[str, Any], device: str = "cpu"
) -> tuple[list[Tensor], dict[str, Tensor], StepStats | None]:
    model, sieve = sparsified(make(name), ddp=ddp, device=device)
    means = [mean.cpu() for mean in averaged(model, STEPS)]
    return means, {key: residual.cpu() for key, residual in sieve.residuals().items()}, sieve.stats


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", toys.VARIANTS)
def test_hook_equals_simulation(name: str, world: int, fleets: Callable[[int], Fleet]) -> None:
    trace = gradsieve.simulate(make(name), stacked_gradients(STEPS, world), parameters=flat_parameters(), shapes=SHAPES)
    ranks = fleets(world).run(_trained, name, {})
    for rank, (means, residuals, stats) in enumerate(ranks):
        torch.testing.assert_close(torch.stack(means), trace.mean, rtol=1e-5, atol=1e-6)
        assert torch.equal(torch.stack(means) != 0, trace.mean != 0)
        # a norm is not summed in the same order, so what is clipped by it agrees to rounding
        rounding = 1e-6 if name == "dgc-clipped" else 0.0
        torch.testing.assert_close(
            flat(list(residuals.values())), trace.residual[rank], rtol=10 * rounding, atol=rounding
        )
        assert stats is not None
        assert stats.counts == trace.stats[-1].counts
        assert stats.support == trace.stats[-1].support


def _trained_in_few_bits(
    variants: list[str], wire: str, device: str = "cpu"
) -> dict[str, tuple[Tensor, Tensor, StepStats | None]]:
    outcomes = {}
    for variant in variants:
        model, sieve = sparsified(make(variant), device=device, wire=wire, on_nonfinite="propagate")
        means = torch.stack(averaged(model, STEPS)).cpu()
        outcomes[variant] = means, flat(list(sieve.residuals().values())).cpu(), sieve.stats
    return outcomes


@pytest.mark.parametrize(
    ("world", "wire"),
    [
        *((1, "bfloat16"), (2, "float8")),
        *(pytest.param(world, "bfloat16", marks=pytest.mark.slow) for world in (2, 3)),
    ],
)
def test_in_few_bits_the_hook_equals_simulation_to_the_bit(
    world: int, wire: str, fleets: Callable[[int], Fleet]
) -> None:
    """Sums are made in one order everywhere."""
    # but a norm is not
    variants = [variant for variant in toys.VARIANTS if variant != "dgc-clipped"]
    ranks, given = fleets(world).run(_trained_in_few_bits, variants, wire), stacked_gradients(STEPS, world)
    for variant in variants:
        trace = gradsieve.simulate(make(variant), given, parameters=flat_parameters(), shapes=SHAPES, wire=wire)
        for rank, outcomes in enumerate(ranks):
            means, residual, stats = outcomes[variant]
            assert torch.equal(means, trace.mean), variant
            assert torch.equal(residual, trace.residual[rank]), variant
            if rank == 0:
                assert _comparable(variant, stats) == _comparable(variant, trace.stats[-1])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("world", "backend", "wire"), [(1, "nccl", "float8"), (2, "gloo", "bfloat16"), (3, "gloo", "float8")]
)
def test_so_it_does_on_cuda(world: int, backend: str, wire: str, fleets: Callable[[int], Fleet]) -> None:
    variants, given = ["dense", "topk", "cltk", "micro"], stacked_gradients(STEPS, world).cuda()
    ranks = fleets(world).run(_trained_in_few_bits, variants, wire, "cuda", backend=backend)
    for variant in variants:
        trace = gradsieve.simulate(make(variant), given, shapes=SHAPES, wire=wire)
        for rank, outcomes in enumerate(ranks):
            means, residual, _ = outcomes[variant]
            assert torch.equal(means, trace.mean.cpu()), variant
            assert torch.equal(residual, trace.residual[rank].cpu()), variant


DENSE = 1
"""The layer that goes dense where records are compared."""


def _comparable(variant: str, stats: StepStats | None) -> StepStats:
    """A record without its times."""
    assert stats is not None
    # a norm is not summed in the same order, so what is clipped by it agrees to rounding
    threshold = None if variant == "dgc-clipped" else stats.threshold
    return replace(stats, select_seconds=0, exchange_seconds=0, threshold=threshold)


def _recorded(variants: list[str]) -> dict[str, list[StepStats]]:
    """The record of each step."""
    records: dict[str, list[StepStats]] = {variant: [] for variant in variants}
    for variant in variants:
        model, sieve = sparsified(make(variant), exclude=f"weights.{DENSE}", on_nonfinite="propagate")
        for step in range(STEPS):
            averaged(model, 1, first=step)
            records[variant].append(_comparable(variant, sieve.stats))
    return records


def _simulated(variant: str, world: int, *, as_team: bool) -> list[list[StepStats]]:
    """The same of a simulation: by step, the records of all ranks, or of rank 0 alone."""
    given, parameters = stacked_gradients(STEPS, world), flat_parameters()
    start, stop = SHAPES[0][0] * SHAPES[0][1], SHAPES[0][0] * SHAPES[0][1] + SHAPES[DENSE][0]
    sparse = [entry for entry in range(len(parameters)) if not start <= entry < stop]
    shapes = [shape for layer, shape in enumerate(SHAPES) if layer != DENSE]
    simulation = Simulation(make(variant), world, len(sparse), shapes=shapes, as_team=as_team)
    records = []
    for gradients in given:
        _, pending = simulation.reduce(gradients[:, sparse], lambda: parameters[sparse], gradients[:, start:stop])
        records.append([_comparable(variant, each.read()) for each in pending])
    return records


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_records_of_the_hook_are_those_of_a_simulation(world: int, fleets: Callable[[int], Fleet]) -> None:
    """Bytes handed over, bytes through the link, messages and all the rest, in every step."""
    ranks = fleets(world).run(_recorded, list(toys.VARIANTS))
    for variant in toys.VARIANTS:
        by_step = [list(records) for records in zip(*(records[variant] for records in ranks), strict=True)]
        assert by_step == _simulated(variant, world, as_team=False), variant
        team = _simulated(variant, world, as_team=True)
        assert [records[0] for records in by_step] == [records[0] for records in team], variant
        assert all((records[0].link_bytes > 0) == (world > 1) for records in by_step)


def _norms(residual_dtype: torch.dtype) -> list[tuple[float, float]]:
    """By `residual_norm`, and of the residuals themselves, before the first step and after each."""
    model, sieve = sparsified(make("iwp-momentum"), exclude="weights.1", residual_dtype=residual_dtype)
    norms = []
    for step in range(3):
        norms.append((sieve.residual_norm(), float(flat(list(sieve.residuals().values())).double().norm())))
        averaged(model, 1, first=step)
    return norms


@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_residual_norm_is_the_length_of_what_this_rank_has_not_sent(residual_dtype: torch.dtype, fleet2: Fleet) -> None:
    ranks = fleet2.run(_norms, residual_dtype)
    for (fresh, _), *later in ranks:
        assert fresh == 0.0
        for norm, expected in later:
            assert norm == pytest.approx(expected, rel=1e-5)
            assert norm > 0
    assert ranks[0][1] != ranks[1][1]


@pytest.mark.gpu
@pytest.mark.parametrize(("world", "backend"), [(1, "nccl"), (2, "gloo"), (3, "gloo")])
@pytest.mark.parametrize("name", METHODS)
def test_cuda_hook_equals_simulation(name: str, world: int, backend: str, fleets: Callable[[int], Fleet]) -> None:
    given = stacked_gradients(STEPS, world).cuda()
    trace = gradsieve.simulate(make(name), given, parameters=flat_parameters().cuda(), shapes=SHAPES)
    for means, _, stats in fleets(world).run(_trained, name, {}, "cuda", backend=backend):
        torch.testing.assert_close(torch.stack(means), trace.mean.cpu(), rtol=1e-5, atol=1e-6)
        assert stats is not None
        assert stats.select_seconds > 0


@pytest.mark.parametrize("name", METHODS)
def test_ranks_hold_the_same_bits(name: str, fleet3: Fleet) -> None:
    first, *others = [means for means, _, _ in fleet3.run(_trained, name, {})]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    "ddp",
    [
        {"bucket_cap_mb": 25},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": True, "static_graph": True, "bucket_cap_mb": 0.001},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    ],
    ids="+".join,
)
@pytest.mark.parametrize("name", ["micro", "union", "iwp", "deft", "dgc", "gtopk", "oktopk"])
def test_buckets_and_ddp_options_change_nothing(name: str, ddp: dict[str, Any], fleet2: Fleet) -> None:
    """Several buckets, their rebuild after the first iterations, one bucket: the same bits."""
    expected = fleet2.run(_trained, name, {})
    found = fleet2.run(_trained, name, ddp)
    for (means, residuals, _), (other_means, other_residuals, _) in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(means, other_means, strict=True))
        assert all(torch.equal(residuals[key], other_residuals[key]) for key in residuals)


def _dense_and_plain(name: str) -> tuple[list[Tensor], list[Tensor]]:
    options = {} if name == "dense" else {"density": 1.0}
    model, _ = sparsified(gradsieve.method(name, **options), exclude="weights.1")
    plain = DistributedDataParallel(Chosen())
    return averaged(model, 3), averaged(plain, 3)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", METHODS)
def test_density_one_is_plain_ddp(name: str, world: int, fleets: Callable[[int], Fleet]) -> None:
    for ours, plain in fleets(world).run(_dense_and_plain, name):
        torch.testing.assert_close(torch.stack(ours), torch.stack(plain), rtol=1e-6, atol=1e-6)


def _conserved(name: str, dtype: torch.dtype, wire: str = "float32") -> list[tuple[Tensor, Tensor]]:
    """Per step, over all ranks: what was there before, and mean plus residual after."""
    model = DistributedDataParallel(Chosen(dtype=dtype), bucket_cap_mb=0.003)
    sieve = gradsieve.sparsify(model, make(name), exclude=(), wire=wire)
    sums = []
    for step in range(STEPS):
        gradients = [gradient.to(dtype) for gradient in gradients_of(dist.get_rank(), step)]
        before = flat(list(sieve.residuals().values())) + flat(gradients).float()
        means = flat([mean for mean in backward(model, gradients) if mean is not None]).float()
        after = flat(list(sieve.residuals().values()))
        for vector in (before, after):
            dist.all_reduce(vector)
        sums.append((before, dist.get_world_size() * means + after))
    return sums


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", [name for name in METHODS if name != "dgc"])
def test_nothing_is_lost(name: str, wire: str, fleet3: Fleet) -> None:
    for sums in fleet3.run(_conserved, name, torch.float32, wire):
        for before, after in sums:
            assert (before - after).abs().max() <= 1e-6 * before.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["micro", "union", "topk"])
def test_half_precision_gradients_keep_a_float32_residual(name: str, dtype: torch.dtype, fleet2: Fleet) -> None:
    """The mean is rounded to the gradient's type when it is applied; nothing else is."""
    rounding = torch.finfo(dtype).eps
    for sums in fleet2.run(_conserved, name, dtype):
        for before, after in sums:
            assert (before - after).abs().max() <= rounding * before.abs().max()


def _accumulated() -> tuple[Tensor, Tensor]:
    model, _ = sparsified(make("micro"))
    model.zero_grad(set_to_none=True)
    with model.no_sync():
        model(gradients_of(dist.get_rank(), 0)).backward()
    model(gradients_of(dist.get_rank(), 1)).backward()
    accumulated = flat([p.grad.clone() for p in model.parameters() if p.grad is not None])
    other, _ = sparsified(make("micro"))
    both = zip(gradients_of(dist.get_rank(), 0), gradients_of(dist.get_rank(), 1), strict=True)
    means = backward(other, [first + second for first, second in both])
    return accumulated, flat([mean for mean in means if mean is not None])


def test_no_sync_accumulates_locally_and_exchanges_once(fleet2: Fleet) -> None:
    for accumulated, expected in fleet2.run(_accumulated):
        torch.testing.assert_close(accumulated, expected)


def _with_unused(ddp: dict[str, Any], used_by: tuple[int, ...], wire: str = "float32") -> dict[str, Any]:
    """Build up a residual, then leave parameter 0 out on all ranks but `used_by`."""
    model, sieve = sparsified(make("micro"), ddp=ddp, wire=wire)
    if not ddp.get("static_graph"):
        averaged(model, 3)
    before = sieve.residuals()["weights.0"]
    gradients: list[Tensor | None] = list(gradients_of(dist.get_rank(), 3))
    given = gradients[0] if dist.get_rank() in used_by else None
    gradients[0] = given
    mean = backward(model, gradients)[0]
    after = sieve.residuals()["weights.0"]
    return {"before": before, "given": given, "mean": mean, "after": after}


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("ddp", [{"find_unused_parameters": True}, {"static_graph": True}], ids="+".join)
def test_residual_of_a_parameter_that_no_rank_used_waits(ddp: dict[str, Any], wire: str, fleet2: Fleet) -> None:
    """DDP applies no gradient to it, so nothing may leave the residual."""
    for rank in fleet2.run(_with_unused, ddp, (), wire):
        assert rank["mean"] is None
        assert torch.equal(rank["before"], rank["after"])


def _unused_after_pause() -> tuple[Tensor, Tensor]:
    """Parameter 0 is used while paused, and by no rank in the first step afterwards."""
    model, sieve = sparsified(make("micro"), ddp={"find_unused_parameters": True})
    averaged(model, 3)
    before = sieve.residuals()["weights.0"]
    sieve.pause()
    averaged(model, 1, first=3)
    sieve.resume()
    backward(model, [None, *gradients_of(dist.get_rank(), 4)[1:]])
    return before, sieve.residuals()["weights.0"]


def test_what_was_used_while_paused_does_not_count_afterwards(fleet2: Fleet) -> None:
    for before, after in fleet2.run(_unused_after_pause):
        assert torch.equal(before, after)


@pytest.mark.parametrize("wire", WIRES)
def test_parameter_used_by_one_rank_is_averaged_over_all(wire: str, fleet2: Fleet) -> None:
    ranks = fleet2.run(_with_unused, {"find_unused_parameters": True}, (1,), wire)
    before = sum(rank["before"] for rank in ranks) + ranks[1]["given"]
    after = 2 * ranks[0]["mean"] + sum(rank["after"] for rank in ranks)
    torch.testing.assert_close(before, after)
    assert torch.equal(ranks[0]["mean"], ranks[1]["mean"])


def _frozen() -> tuple[list[str], bool]:
    module = Chosen()
    module.weights[0].requires_grad_(False)
    model = DistributedDataParallel(module, bucket_cap_mb=0.003)
    sieve = gradsieve.sparsify(model, make("micro"), exclude=())
    means = backward(model, gradients_of(dist.get_rank(), 0))
    return list(sieve.residuals()), means[0] is None


def test_frozen_parameters_are_left_alone(fleet2: Fleet) -> None:
    for names, untouched in fleet2.run(_frozen):
        assert "weights.0" not in names
        assert "weights.2" in names
        assert untouched


def _excluded(exclude: Any) -> tuple[list[str], StepStats | None, list[Tensor | None], list[Tensor]]:
    options = {} if exclude is None else {"exclude": exclude}
    model = DistributedDataParallel(Chosen(), bucket_cap_mb=0.003)
    sieve = gradsieve.sparsify(model, make("micro"), **options)
    means = backward(model, gradients_of(dist.get_rank(), 0))
    ranks = range(dist.get_world_size())
    expected = [torch.stack(layer).mean(0) for layer in zip(*(gradients_of(r, 0) for r in ranks), strict=True)]
    return list(sieve.residuals()), sieve.stats, means, expected


def _is_first(name: str, parameter: nn.Parameter) -> bool:
    return name == "weights.0" and parameter.dim() == 2


@pytest.mark.parametrize(
    ("exclude", "dense_layers"),
    [(None, {1, 6}), ((), set()), ("weights.[01]", {0, 1}), (["weights.5", "*.6"], {5, 6}), (_is_first, {0})],
    ids=["default", "none", "pattern", "patterns", "predicate"],
)
def test_excluded_parameters_go_dense_in_the_same_step(exclude: Any, dense_layers: set[int], fleet2: Fleet) -> None:
    for names, stats, means, expected in fleet2.run(_excluded, exclude):
        assert set(names) == {f"weights.{layer}" for layer in range(len(SHAPES)) if layer not in dense_layers}
        for layer in dense_layers:
            torch.testing.assert_close(means[layer], expected[layer])
        assert stats.dense_numel == sum(expected[layer].numel() for layer in dense_layers)
        assert stats.dense_bytes == 4 * stats.dense_numel
        assert stats.numel + stats.dense_numel == sum(layer.numel() for layer in expected)
        assert stats.target == int(DENSITY * stats.numel)


def _paused() -> dict[str, Any]:
    model, sieve = sparsified(make("union"))
    averaged(model, 2)
    kept, stats = sieve.residuals(), sieve.stats
    sieve.pause()
    while_paused = sieve.paused
    means = averaged(model, 2, first=2)
    plain = averaged(DistributedDataParallel(Chosen()), 2, first=2)
    untouched = all(torch.equal(kept[name], residual) for name, residual in sieve.residuals().items())
    same_stats = sieve.stats == stats
    sieve.resume()
    resumed = averaged(model, 1, first=4)
    other, _ = sparsified(make("union"))
    averaged(other, 2)
    return {
        "dense": all(torch.allclose(a, b) for a, b in zip(means, plain, strict=True)),
        "paused": while_paused and not sieve.paused,
        "untouched": untouched and same_stats,
        "resumed": torch.equal(resumed[0], averaged(other, 1, first=4)[0]),
    }


def test_pause_goes_dense_and_keeps_the_residual(fleet2: Fleet) -> None:
    for findings in fleet2.run(_paused):
        assert all(findings.values()), findings


def _resumed(name: str) -> bool:
    model, sieve = sparsified(make(name))
    averaged(model, 3)
    state = sieve.state_dict()
    expected = averaged(model, 3, first=3)
    other, restored = sparsified(make(name))
    averaged(other, 2)
    restored.load_state_dict(state)
    found = averaged(other, 3, first=3)
    return all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_loading_a_state_continues_bit_exactly(name: str, fleet2: Fleet) -> None:
    assert all(fleet2.run(_resumed, name))


def _state_errors(folder: str) -> list[str]:
    _, sieve = sparsified(make("micro"))
    path = f"{folder}/{dist.get_rank()}.pt"
    torch.save(sieve.state_dict(), path)
    good = torch.load(path, weights_only=True)
    sieve.load_state_dict(good)
    other = {"weights.0": torch.zeros(3, 3)}
    damaged = [{"rank": 9}, {"world": 5}, {"method": "topk(density=0.1)"}, {"version": 0}, {"residuals": other}]
    messages = []
    for state in [*(good | damage for damage in damaged), {"rank": 0}]:
        with pytest.raises(ValueError, match="this state") as caught:
            sieve.load_state_dict(state)
        messages.append(str(caught.value))
    return messages


def test_state_is_saved_safely_and_refused_where_it_does_not_belong(fleet2: Fleet, tmp_path: Any) -> None:
    for rank, messages in enumerate(fleet2.run(_state_errors, str(tmp_path))):
        assert f"rank 9, but here rank is {rank}" in messages[0]
        assert "world 5, but here world is 2" in messages[1]
        assert "topk(density=0.1)" in messages[2]
        assert "version 0" in messages[3]
        assert "'weights.0'" in messages[4]
        assert "lacks digest, form, learned, method, package, parameters, residuals" in messages[5]


def _handed_over(name: str, wire: str) -> tuple[int, int]:
    """Bytes by StepStats, and by watching the tensors that reach torch.distributed."""
    watched = 0

    class Watched(GroupCollectives):
        async def _all_gather(self, tensor: Tensor) -> Tensor:
            self.note(tensor)
            return await super()._all_gather(tensor)

        async def _all_reduce(self, tensor: Tensor) -> Tensor:
            self.note(tensor)
            return await super()._all_reduce(tensor)

        async def _all_to_all(self, tensor: Tensor) -> Tensor:
            self.note(tensor)
            return await super()._all_to_all(tensor)

        async def _all_to_all_pieces(self, pieces: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
            for piece in pieces:
                self.note(piece)
            return await super()._all_to_all_pieces(pieces, lengths)

        async def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
            if source == self.rank:
                self.note(tensor)
            return await super()._broadcast(tensor, source)

        def note(self, tensor: Tensor) -> None:
            nonlocal watched
            watched += tensor.numel() * tensor.element_size()

    model, sieve = sparsified(make(name), exclude="weights.1", wire=wire)
    collectives = sieve._parts.of(sieve._layout.names).worker.collectives
    assert isinstance(collectives, GroupCollectives)
    collectives.__class__ = Watched
    averaged(model, 2)
    watched = 0
    averaged(model, 1, first=2)
    assert sieve.stats is not None
    return sieve.stats.wire_bytes, watched


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", METHODS)
def test_wire_bytes_are_what_collectives_were_handed(name: str, wire: str, fleet3: Fleet) -> None:
    for counted, watched in fleet3.run(_handed_over, name, wire):
        assert counted == watched > 0


def _double_precision() -> tuple[Tensor, Tensor]:
    model = DistributedDataParallel(Chosen(dtype=torch.float64))
    gradsieve.sparsify(model, gradsieve.topk(density=1.0), residual_dtype=torch.float64)
    plain = DistributedDataParallel(Chosen(dtype=torch.float64))
    generator = torch.Generator().manual_seed(dist.get_rank())
    given = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    ours, expected = ([mean for mean in backward(m, given) if mean is not None] for m in (model, plain))
    return flat(ours), flat(expected)


def test_double_precision_is_kept_where_it_is_asked_for(fleet2: Fleet) -> None:
    """Excluded parameters included."""
    for ours, expected in fleet2.run(_double_precision):
        torch.testing.assert_close(ours, expected, rtol=1e-14, atol=1e-15)


def _channels_last() -> tuple[Tensor, Tensor, bool]:
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 8, 3)
    strided = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    strided.load_state_dict(plain.state_dict())
    grads = []
    for module in (plain, strided):
        model = DistributedDataParallel(module, gradient_as_bucket_view=True)
        sieve = gradsieve.sparsify(model, gradsieve.topk(density=0.1))
        torch.manual_seed(dist.get_rank())
        model(torch.randn(2, 3, 6, 6)).square().mean().backward()
        assert module.weight.grad is not None
        grads.append(module.weight.grad.clone().contiguous())
        residual = sieve.residuals()["weight"]
    return grads[0], grads[1], residual.shape == plain.weight.shape


def test_channels_last_gives_the_same_gradient(fleet2: Fleet) -> None:
    for plain, strided, shaped in fleet2.run(_channels_last):
        torch.testing.assert_close(plain, strided)
        assert shaped


def _in_subgroup() -> Tensor | None:
    group = dist.new_group([1, 2])
    dist.barrier()  # an outsider that leaves early would break the connections of the others
    if dist.get_rank() == 0:
        return None
    model = DistributedDataParallel(Chosen(), process_group=group)
    sieve = gradsieve.sparsify(model, make("cltk"), exclude=())
    means = [backward(model, gradients_of(dist.get_rank(), step)) for step in range(3)]
    assert sieve.stats is not None
    assert len(sieve.stats.counts) == 2
    return flat([mean for mean in means[-1] if mean is not None])


def test_process_groups_other_than_the_default_work(fleet3: Fleet) -> None:
    _, first, second = fleet3.run(_in_subgroup)
    assert torch.equal(first, second)


def _misuse() -> dict[str, str]:
    messages: dict[str, str] = {}

    def note(key: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except (TypeError, ValueError, RuntimeError) as error:
            messages[key] = f"{type(error).__name__}: {error}"

    method = make("micro")
    model, _ = sparsified(method)
    fresh = DistributedDataParallel(Chosen())
    vectors = DistributedDataParallel(Chosen(((30,), (11,))))
    double = DistributedDataParallel(Chosen(dtype=torch.float64))
    note("not ddp", lambda: gradsieve.sparsify(Chosen(), method))  # type: ignore[arg-type]
    note("twice", lambda: gradsieve.sparsify(model, method))
    note("name", lambda: gradsieve.sparsify(fresh, "micro"))  # type: ignore[arg-type]
    note("constructor", lambda: gradsieve.sparsify(fresh, gradsieve.micro))  # type: ignore[arg-type]
    note("pattern", lambda: gradsieve.sparsify(fresh, method, exclude="*.bias"))
    note("nothing", lambda: gradsieve.sparsify(vectors, method))
    note("double", lambda: gradsieve.sparsify(double, method))
    note("residual", lambda: gradsieve.sparsify(fresh, method, residual_dtype=torch.int8))
    note("wire", lambda: gradsieve.sparsify(fresh, method, wire="float16"))
    note("broadcasters", lambda: gradsieve.sparsify(fresh, gradsieve.iwp(num_broadcasters=3)))
    gradsieve.sparsify(fresh, method)
    gradsieve.sparsify(double, method, residual_dtype=torch.float64)
    return messages


def test_misuse_gets_an_error_that_says_what_to_do(fleet2: Fleet) -> None:
    expected = {
        "not ddp": "TypeError: sparsify needs a DistributedDataParallel model, not Chosen: wrap it first",
        "twice": "RuntimeError: this model has a communication hook already",
        "name": "TypeError: method must be made by a gradsieve constructor, not str: try gradsieve.method('micro')",
        "constructor": "TypeError: method must be made by a gradsieve constructor, not function",
        "pattern": "ValueError: exclude: no parameter matches '*.bias'; the model's are named like weights.0",
        "nothing": "ValueError: all 2 trainable parameters are excluded or empty",
        "double": "TypeError: parameter 'weights.0' is torch.float64; gradients may be",
        "residual": "ValueError: residual_dtype must be one of",
        "wire": "ValueError: wire must be one of 'float32', 'bfloat16', 'float8', not 'float16'",
        "broadcasters": "ValueError: num_broadcasters=3, but there are only 2 ranks",
    }
    for messages in fleet2.run(_misuse):
        assert messages.keys() == expected.keys()
        for key, start in expected.items():
            assert messages[key].startswith(start), messages[key]


REGRESSION_STEPS = 200


def _regression(name: str, wire: str = "float32") -> float:
    """The loss that training a small network on a fixed task ends with."""
    torch.manual_seed(0)
    inputs = torch.randn(96, 12)
    targets = torch.tanh(inputs @ torch.randn(12, 4))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4)))
    options: dict[str, Any] = {} if name == "dense" else {"density": 0.1}
    if name == "dgc":
        options["momentum"] = 0.0  # the optimizer below has none either
    sieve = gradsieve.sparsify(model, gradsieve.method(name, **options), wire=wire)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    own = slice(dist.get_rank(), None, dist.get_world_size())
    for _ in range(REGRESSION_STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[own]), targets[own])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert sieve.stats is not None
    assert sieve.stats.step == REGRESSION_STEPS - 1
    with torch.no_grad():
        return nn.functional.mse_loss(model.module(inputs), targets).item()


@pytest.fixture(scope="module")
def dense_loss(fleet3: Fleet) -> float:
    return float(fleet3.run(_regression, "dense")[0])


FASTEST = ("micro", "union")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FASTEST)) for name in ERROR_FEEDBACK]
)
def test_toy_regression_reaches_the_dense_loss(name: str, dense_loss: float, fleet3: Fleet) -> None:
    losses = fleet3.run(_regression, name)
    assert len(set(losses)) == 1
    assert losses[0] <= 1.1 * dense_loss, (losses[0], dense_loss)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["union", "dense", "topk", "micro"])
def test_so_it_does_where_values_travel_as_bfloat16(name: str, dense_loss: float, fleet3: Fleet) -> None:
    losses = fleet3.run(_regression, name, "bfloat16")
    assert len(set(losses)) == 1
    assert losses[0] <= 1.1 * dense_loss, (losses[0], dense_loss)
