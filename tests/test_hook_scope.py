"""`scope="bucket"`: every bucket is exchanged on its own, while backward goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
import toys
from fleet import Fleet
from gradsieve import METHODS, Method, Sieve, hook
from gradsieve.collectives import OverlappedCollectives
from toys import SHAPES, Chosen, averaged, backward, flat, gradients_of

STEPS = 5
DENSITY = 0.05
CAP = 0.0001
"""Of the buckets, in MiB: after the first step, when DDP has one bucket of everything, there are four."""
ALONE = "weights.0"
"""A parameter that has a bucket of its own then."""


def make(variant: str) -> Method:
    return toys.make(variant, DENSITY)


def sparsified(
    method: Method, ddp: dict[str, Any] | None = None, **options: Any
) -> tuple[DistributedDataParallel, Sieve]:
    return toys.sparsified(method, {"bucket_cap_mb": CAP} | (ddp or {}), **({"scope": "bucket"} | options))


def buckets(sieve: Sieve) -> list[tuple[str, ...]]:
    """The parameters of each part, by name."""
    return [tuple(part["names"]) for part in sieve.state_dict()["learned"]["parts"]]


def _steps(name: str, device: str = "cpu", **options: Any) -> dict[str, list[dict[str, Tensor]]]:
    """For each step and parameter: the mean, what there was before over all ranks, and what there is afterwards."""
    model, sieve = sparsified(make(name), device=device, **options)
    kept: dict[str, list[dict[str, Tensor]]] = {"mean": [], "before": [], "after": []}
    for step in range(STEPS):
        gradients = [gradient.to(device) for gradient in gradients_of(dist.get_rank(), step)]
        before = {name: _total(gradients[_layer(name)] + old) for name, old in sieve.residuals().items()}
        found = backward(model, gradients)
        means = {f"weights.{layer}": mean for layer, mean in enumerate(found) if mean is not None}
        after = {
            name: _total(residual) + dist.get_world_size() * means[name] for name, residual in sieve.residuals().items()
        }
        for key, vectors in (("mean", means), ("before", before), ("after", after)):
            kept[key].append({name: vector.cpu() for name, vector in vectors.items()})
    return kept


def _layer(name: str) -> int:
    return int(name.removeprefix("weights."))


def _total(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor)
    return tensor


def check_agreement(ranks: list[dict[str, list[dict[str, Tensor]]]]) -> None:
    for other in ranks[1:]:
        for ours, theirs in zip(ranks[0]["mean"], other["mean"], strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def check_conservation(rank: dict[str, list[dict[str, Tensor]]], rounding: float = 1e-6) -> None:
    for before, after in zip(rank["before"], rank["after"], strict=True):
        assert before.keys() == after.keys()
        for name in before:
            torch.testing.assert_close(before[name], after[name], rtol=rounding, atol=10 * rounding)


@pytest.mark.parametrize("world", [3])
@pytest.mark.parametrize("name", METHODS)
def test_ranks_agree_and_nothing_is_lost(name: str, world: int, fleets: Callable[[int], Fleet]) -> None:
    """Bit for bit and parameter by parameter, also over the rebuild of the buckets after the first step."""
    ranks = fleets(world).run(_steps, name)
    check_agreement(ranks)
    if name != "dgc":  # its velocity counts several times
        check_conservation(ranks[0])


OPTIONS: dict[str, dict[str, Any]] = {
    "static": {"ddp": {"static_graph": True}},
    "unused": {"ddp": {"find_unused_parameters": True}},
    "views": {"ddp": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}},
    "one bucket": {"ddp": {"bucket_cap_mb": 25}},
    "bfloat16": {"wire": "bfloat16", "exclude": ALONE},
}


def _steps_with(name: str, options: str) -> dict[str, list[dict[str, Tensor]]]:
    return _steps(name, **OPTIONS[options])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["micro", "union", "deft", "gtopk", "oktopk"])
def test_options_of_ddp_and_of_the_wire(name: str, options: str, fleet2: Fleet) -> None:
    ranks = fleet2.run(_steps_with, name, options)
    check_agreement(ranks)
    check_conservation(ranks[0], 1e-5)


def _one_bucket(scope: str) -> list[Tensor]:
    model, _ = sparsified(make("union"), ddp={"bucket_cap_mb": 25}, scope=scope)
    return averaged(model, STEPS)


def test_one_bucket_is_the_model(fleet2: Fleet) -> None:
    expected, found = fleet2.run(_one_bucket, "model"), fleet2.run(_one_bucket, "bucket")
    assert all(torch.equal(a, b) for a, b in zip(expected[0], found[0], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("world", "backend"), [(1, "nccl"), (2, "gloo"), (3, "gloo")])
@pytest.mark.parametrize("name", METHODS)
def test_cuda(name: str, world: int, backend: str, fleets: Callable[[int], Fleet]) -> None:
    ranks = fleets(world).run(_steps, name, "cuda", backend=backend)
    check_agreement(ranks)
    if name != "dgc":
        check_conservation(ranks[0], 1e-5)


def _dense_and_plain(name: str) -> tuple[list[Tensor], list[Tensor]]:
    options = {} if name == "dense" else {"density": 1.0}
    model, _ = sparsified(gradsieve.method(name, **options), exclude="weights.1")
    return averaged(model, 3), averaged(DistributedDataParallel(Chosen()), 3)


@pytest.mark.parametrize("world", [3])
@pytest.mark.parametrize("name", METHODS)
def test_density_one_is_plain_ddp(name: str, world: int, fleets: Callable[[int], Fleet]) -> None:
    for ours, plain in fleets(world).run(_dense_and_plain, name):
        torch.testing.assert_close(torch.stack(ours), torch.stack(plain), rtol=1e-6, atol=1e-6)


def _bucket_of_excluded(name: str) -> tuple[bool, list[Tensor], list[Tensor]]:
    """With a bucket of excluded parameters only: its means, and what they should be."""
    model, sieve = sparsified(make(name), exclude=ALONE)
    found = [backward(model, gradients_of(dist.get_rank(), step))[0] for step in range(3)]
    ranks = range(dist.get_world_size())
    expected = [torch.stack([gradients_of(rank, step)[0] for rank in ranks]).mean(0) for step in range(3)]
    return (ALONE,) in buckets(sieve), [mean for mean in found if mean is not None], expected


@pytest.mark.parametrize("name", METHODS)
def test_bucket_of_excluded_parameters_is_averaged(name: str, fleet3: Fleet) -> None:
    for alone, found, expected in fleet3.run(_bucket_of_excluded, name):
        assert alone
        torch.testing.assert_close(torch.stack(found), torch.stack(expected))


def _rebuilt() -> tuple[list[list[tuple[str, ...]]], list[dict[str, Tensor]]]:
    """Buckets before the first step and after each, and the residuals of a method that never sends anything."""
    model, sieve = sparsified(gradsieve.hard_threshold(density=DENSITY, threshold=1e9))
    arranged, residuals = [buckets(sieve)], []
    for step in range(3):
        averaged(model, 1, first=step)
        arranged.append(buckets(sieve))
        residuals.append(sieve.residuals())
    return arranged, residuals


def test_residual_moves_to_the_new_buckets(fleet2: Fleet) -> None:
    for rank, (arranged, residuals) in enumerate(fleet2.run(_rebuilt)):
        every = sorted(f"weights.{layer}" for layer in range(len(SHAPES)))
        assert all(sorted(name for names in parts for name in names) == every for parts in arranged)
        fresh, first, second, third = map(set, arranged)
        assert fresh == first
        assert (len(first), len(second)) == (1, 4)
        assert second == third
        for step, found in enumerate(residuals):
            for name in found:
                sums = torch.zeros_like(found[name])
                for earlier in range(step + 1):
                    sums += gradients_of(rank, earlier)[_layer(name)]
                assert torch.equal(found[name], sums)


def _resumed(name: str, ddp: dict[str, Any], steps_before_loading: int) -> tuple[bool, bool]:
    """Does a restored sieve go on as the saved one, and hold the same state?"""
    model, sieve = sparsified(make(name), ddp=ddp)
    averaged(model, 3)
    state = sieve.state_dict()
    expected = averaged(model, 3, first=3)
    other, restored = sparsified(make(name), ddp=ddp, seed=9)
    averaged(other, steps_before_loading)
    restored.load_state_dict(state)
    loaded = restored.state_dict()
    found = averaged(other, 3, first=3)
    same_state = all(
        torch.equal(state[kind][key], loaded[kind][key]) for kind in ("residuals", "velocities") for key in state[kind]
    )
    return all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), same_state


@pytest.mark.parametrize("name", [*METHODS, "iwp-momentum"])
def test_loading_a_state_continues_bit_exactly(name: str, fleet2: Fleet) -> None:
    assert fleet2.run(_resumed, name, {}, 2) == [(True, True)] * 2


@pytest.mark.parametrize("name", ["union", "exdyna", "dgc", "oktopk"])
def test_state_loaded_before_the_first_backward_waits_for_its_buckets(name: str, fleet2: Fleet) -> None:
    """With these buckets, which DDP never rebuilds, bit for bit."""
    assert fleet2.run(_resumed, name, {"find_unused_parameters": True}, 0) == [(True, True)] * 2


def _loaded_into_other_buckets() -> tuple[int, Tensor, Tensor]:
    model, sieve = sparsified(make("union"))
    averaged(model, 3)
    other, restored = sparsified(make("union"), ddp={"bucket_cap_mb": 0.001, "find_unused_parameters": True})
    restored.load_state_dict(sieve.state_dict())
    before = flat(list(restored.residuals().values())) + flat(gradients_of(dist.get_rank(), 3))
    means = averaged(other, 1, first=3)[0]
    assert restored.stats is not None
    after = _total(flat(list(restored.residuals().values()))) + dist.get_world_size() * means
    return restored.stats.step, _total(before), after


def test_state_of_other_buckets_keeps_the_residual_and_the_step(fleet2: Fleet) -> None:
    for step, before, after in fleet2.run(_loaded_into_other_buckets):
        assert step == 3
        torch.testing.assert_close(before, after, rtol=1e-5, atol=1e-5)


def _paused() -> dict[str, bool]:
    model, sieve = sparsified(make("union"))
    averaged(model, 2)
    kept, stats, norm = sieve.residuals(), sieve.stats, sieve.residual_norm()
    sieve.pause()
    means = averaged(model, 2, first=2)
    plain = averaged(DistributedDataParallel(Chosen()), 2, first=2)
    untouched = all(torch.equal(kept[name], residual) for name, residual in sieve.residuals().items())
    untouched = untouched and sieve.stats == stats and sieve.residual_norm() == norm > 0
    sieve.resume()
    resumed = averaged(model, 1, first=4)
    other, _ = sparsified(make("union"))
    averaged(other, 2)
    return {
        "dense": all(torch.allclose(a, b) for a, b in zip(means, plain, strict=True)),
        "untouched": untouched,
        "resumed": torch.equal(resumed[0], averaged(other, 1, first=4)[0]),
    }


def test_pause_goes_dense_and_keeps_the_residual(fleet2: Fleet) -> None:
    for findings in fleet2.run(_paused):
        assert all(findings.values()), findings


def _norms() -> list[tuple[float, float]]:
    model, sieve = sparsified(make("micro"))
    norms = []
    for step in range(3):
        averaged(model, 1, first=step)
        norms.append((sieve.residual_norm(), float(flat(list(sieve.residuals().values())).norm())))
    return norms


def test_residual_norm_is_that_of_all_parts(fleet2: Fleet) -> None:
    for norms in fleet2.run(_norms):
        for norm, expected in norms:
            assert norm == pytest.approx(expected, rel=1e-5)


def _records(name: str) -> tuple[Any, list[Any]]:
    """The record of a step and those of its parts."""
    model, sieve = sparsified(make(name), exclude="weights.1")
    averaged(model, 3)
    return sieve.stats, [pending.read() for pending in sieve._pending]


@pytest.mark.parametrize("name", ["micro", "topk", "dense"])
def test_record_sums_up_the_parts(name: str, fleet3: Fleet) -> None:
    for stats, parts in fleet3.run(_records, name):
        assert len(parts) > 2
        assert stats.step == 2
        sums = ("numel", "target", "support", "wire_bytes", "link_bytes", "num_messages", "dense_numel", "dense_bytes")
        for field in (*sums, "select_seconds", "exchange_seconds"):
            assert getattr(stats, field) == pytest.approx(sum(getattr(part, field) for part in parts)), field
        assert stats.counts == tuple(sum(part.counts[rank] for part in parts) for rank in range(3))
        assert stats.density == stats.support / stats.numel
        assert stats.imbalance == pytest.approx(max(stats.counts) * 3 / sum(stats.counts) - 1)
        thresholds = [part.threshold for part in parts if part.threshold]
        assert (stats.threshold is None) == (not thresholds)
        if thresholds:
            assert min(thresholds) <= stats.threshold <= max(thresholds)


def _with_unused(ddp: dict[str, Any], used_by: tuple[int, ...]) -> dict[str, Any]:
    """Build up a residual, then leave parameter 0 out on all ranks but `used_by`."""
    model, sieve = sparsified(make("micro"), ddp=ddp)
    if not ddp.get("static_graph"):
        averaged(model, 3)
    before = sieve.residuals()["weights.0"]
    gradients: list[Tensor | None] = list(gradients_of(dist.get_rank(), 3))
    given = gradients[0] if dist.get_rank() in used_by else None
    gradients[0] = given
    mean = backward(model, gradients)[0]
    return {"before": before, "given": given, "mean": mean, "after": sieve.residuals()["weights.0"]}


@pytest.mark.parametrize("ddp", [{"find_unused_parameters": True}, {"static_graph": True}], ids="+".join)
def test_residual_of_a_parameter_that_no_rank_used_waits(ddp: dict[str, Any], fleet2: Fleet) -> None:
    for rank in fleet2.run(_with_unused, ddp, ()):
        assert rank["mean"] is None
        assert torch.equal(rank["before"], rank["after"])


def test_parameter_used_by_one_rank_is_averaged_over_all(fleet2: Fleet) -> None:
    ranks = fleet2.run(_with_unused, {"find_unused_parameters": True}, (1,))
    before = sum(rank["before"] for rank in ranks) + ranks[1]["given"]
    after = 2 * ranks[0]["mean"] + sum(rank["after"] for rank in ranks)
    torch.testing.assert_close(before, after)


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


def _watched(name: str) -> list[list[tuple[str, int]]]:
    """Of each step, what was started and what was waited for, by the number of the exchange it belongs to."""
    events: list[tuple[str, int]] = []

    class Watched(OverlappedCollectives):
        number = 0

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            Watched.number += 1
            self.number = Watched.number

        async def _done(self, work: Any) -> None:
            events.append(("started", self.number))
            await super()._done(work)
            events.append(("ended", self.number))

    steps = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hook, "OverlappedCollectives", Watched)
        model, _ = sparsified(make(name))
        for step in range(3):
            averaged(model, 1, first=step)
            steps.append(list(events))
            events.clear()
    return steps


@pytest.mark.parametrize("name", METHODS)
def test_exchanges_are_under_way_together_in_one_order(name: str, fleet3: Fleet) -> None:
    first, *others = fleet3.run(_watched, name)
    assert all(other == first for other in others)
    for events in first[1:]:
        started = [number for kind, number in events if kind == "started"]
        assert sorted(started) == sorted(number for kind, number in events if kind == "ended")
        under_way = [
            sum(1 if kind == "started" else -1 for kind, _ in events[:position]) for position in range(len(events))
        ]
        # an exchange of one message ends when the next one begins: it has had the time between two buckets
        single = len(started) == len(set(started))
        assert max(under_way) == 1 if single else max(under_way) > 1
        # one collective of an exchange at a time, and the oldest exchange goes first
        assert list(dict.fromkeys(started)) == list(dict.fromkeys(n for kind, n in events if kind == "ended"))


@dataclass
class _Bucket:
    """What the hook sees of one of DDP's buckets."""

    number: int
    of: int
    parameter: nn.Parameter
    gradient: Tensor

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.number == self.of - 1

    def buffer(self) -> Tensor:
        return self.gradient.view(-1)

    def parameters(self) -> list[Tensor]:
        return [self.parameter]

    def gradients(self) -> list[Tensor]:
        return [self.gradient]


def _abandoned() -> tuple[list[int], Tensor, Tensor, int]:
    """A step that ends after its second bucket, then a whole one."""
    shapes = ((20, 10), (10, 10), (5, 30))
    model = DistributedDataParallel(Chosen(shapes))
    sieve = gradsieve.sparsify(model, gradsieve.union(density=0.1), scope="bucket")
    running = []
    total = torch.zeros(sum(rows * columns for rows, columns in shapes))
    for step, arriving in enumerate((2, 3)):
        gradients = gradients_of(dist.get_rank(), step, shapes)
        total += flat([gradient if place < arriving else 0 * gradient for place, gradient in enumerate(gradients)])
        for place, (parameter, gradient) in enumerate(zip(model.parameters(), gradients, strict=True)):
            if place < arriving:
                sieve._on_bucket(_Bucket(place, 3, parameter, gradient))  # type: ignore[arg-type]
        running.append(len(sieve._running))
    assert sieve.stats is not None
    after = _total(flat(list(sieve.residuals().values()))) + dist.get_world_size() * flat(gradients)
    return running, _total(total), after, sieve.stats.step


def test_abandoned_step_is_given_up_and_stays_in_the_residual(fleet2: Fleet) -> None:
    for running, given, found, step in fleet2.run(_abandoned):
        assert running == [2, 0]
        assert step == 0
        torch.testing.assert_close(given, found)


def _misuse() -> dict[str, str]:
    messages: dict[str, str] = {}

    def note(key: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except ValueError as error:
            messages[key] = str(error)

    fresh = DistributedDataParallel(Chosen())
    _, by_model = sparsified(make("micro"), scope="model")
    _, by_bucket = sparsified(make("micro"))
    note("scope", lambda: gradsieve.sparsify(fresh, make("micro"), scope="layer"))  # type: ignore[arg-type]
    note("clip", lambda: gradsieve.sparsify(fresh, gradsieve.dgc(clip=1.0), scope="bucket"))
    note("broadcasters", lambda: gradsieve.sparsify(fresh, gradsieve.iwp(num_broadcasters=3), scope="bucket"))
    note("state", lambda: by_model.load_state_dict(by_bucket.state_dict()))
    note("other state", lambda: by_bucket.load_state_dict(by_model.state_dict()))
    assert "by bucket" in repr(by_bucket)
    return messages


def test_misuse_gets_an_error_that_says_what_to_do(fleet2: Fleet) -> None:
    expected = {
        "scope": "scope must be one of 'model', 'bucket', not 'layer'",
        "clip": "clip=1.0 bounds the norm of the whole gradient, which no bucket knows: use scope=",
        "broadcasters": "num_broadcasters=3, but there are only 2 ranks",
        "state": "this state was saved with scope 'bucket', but here scope is 'model'",
        "other state": "this state was saved with scope 'model', but here scope is 'bucket'",
    }
    for messages in fleet2.run(_misuse):
        assert messages.keys() == expected.keys()
        for key, start in expected.items():
            assert messages[key].startswith(start), messages[key]


def _regression(name: str, scope: str) -> float:
    """The loss that training a small network on a fixed task ends with."""
    torch.manual_seed(0)
    inputs = torch.randn(96, 12)
    targets = torch.tanh(inputs @ torch.randn(12, 4))
    network = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))
    model = DistributedDataParallel(network, bucket_cap_mb=CAP)
    options: dict[str, Any] = {} if name == "dense" else {"density": 0.1}
    if name == "dgc":
        options["momentum"] = 0.0  # the optimizer below has none either
    gradsieve.sparsify(model, gradsieve.method(name, **options), scope=scope)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    own = slice(dist.get_rank(), None, dist.get_world_size())
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[own]), targets[own]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        return nn.functional.mse_loss(network(inputs), targets).item()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "union")) for name in METHODS],
)
def test_training_reaches_the_loss_of_the_whole_model(name: str, fleet2: Fleet) -> None:
    expected, losses = fleet2.run(_regression, name, "model"), fleet2.run(_regression, name, "bucket")
    assert len(set(losses)) == 1
    assert losses[0] <= 1.1 * expected[0], (losses[0], expected[0])
