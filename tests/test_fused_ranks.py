"""Ranks by themselves, in process and in DistributedDataParallel, by Triton's kernels and in plain torch: the same."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Coroutine, Generator, Iterator, Sequence
from types import coroutine
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
import toys
from fleet import Fleet
from gradsieve import Method, StepStats, control, kernels
from gradsieve.collectives import LocalCollectives, lockstep
from gradsieve.fused import FusedWorker, make_worker
from gradsieve.kernels.dispatch import Path
from gradsieve.layout import Layout, Slot, fewer_than_two_dimensions
from gradsieve.nonfinite import OnNonfinite
from gradsieve.pipeline import PendingStats, Worker
from gradsieve.rounding import WIRES
from gradsieve.types import Setup, Span
from kernel_place import DEVICE, MARKS, assert_same_bits
from twins import METHODS, PATHS, assert_same_records, plain_state

pytestmark = MARKS

SIZES = [40, 0, 33, 300, 1]
BUCKETS = [[4, 3], [2, 1, 0]]
"""The parameters in the order in which they come."""


class InPlace(LocalCollectives):
    """In process, but what is broadcast is written over what a rank brought, as process groups do it."""

    async def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return tensor.copy_(await super()._broadcast(tensor, source))


class Crew:
    """The workers of all ranks, each by itself, by one of the paths; they are fed in buckets."""

    def __init__(
        self,
        path: Path,
        method: Method,
        world: int,
        *,
        wire: torch.dtype = torch.float32,
        dtypes: Sequence[torch.dtype] = (torch.float32, torch.float32),
    ) -> None:
        parameters = [(str(number), nn.Parameter(torch.zeros(size, 1))) for number, size in enumerate(SIZES)]
        self._layout = Layout(parameters, set())
        self._dtypes = dtypes
        setup = Setup(world, self._layout.numel, self._layout.bounds)
        with kernels.using(path):
            self.workers = [
                make_worker(
                    method,
                    setup,
                    InPlace(rank, world, DEVICE),
                    seed=0,
                    dtype=torch.float32,
                    wire=wire,
                    narrow=any(dtype.itemsize < 4 for dtype in dtypes),
                )
                for rank in range(world)
            ]
        assert all(isinstance(worker, FusedWorker) == (path == "triton") for worker in self.workers)

    @property
    def residual(self) -> Tensor:
        return torch.stack([worker.residual.acc for worker in self.workers])

    def begin(self) -> None:
        """Begin a step on all ranks."""
        parameters = torch.linspace(-1, 1, self._layout.numel, device=DEVICE)
        for worker in self.workers:
            worker.begin(lambda: parameters)

    def feed(self, gradients: Tensor, buckets: Sequence[int] = (0, 1)) -> list[list[tuple[Slot, Tensor]]]:
        """Feed some buckets on all ranks; returns the flat gradients that each was fed."""
        fed = []
        for worker, gradient in zip(self.workers, gradients, strict=True):
            taken = [self._bucket(gradient, bucket) for bucket in buckets]
            for arrived in taken:
                worker.take(arrived)
            fed.append([pair for arrived in taken for pair in arrived])
        return fed

    def _bucket(self, gradient: Tensor, number: int) -> list[tuple[Slot, Tensor]]:
        """The parameters of a bucket, in one piece of memory."""
        slots = [self._layout.sparse[place] for place in BUCKETS[number]]
        buffer = torch.cat([gradient[slot.start : slot.stop] for slot in slots]).to(self._dtypes[number], copy=True)
        pieces = torch.split(buffer, [slot.stop - slot.start for slot in slots])
        return list(zip(slots, pieces, strict=True))

    def step(self, gradients: Tensor, unapplied: Sequence[Span] = ()) -> tuple[Tensor, list[StepStats]]:
        """A whole step: the means on each rank, `[world, numel]`, and the records."""
        self.begin()
        fed = self.feed(gradients)
        pending = self.exchange(fed, unapplied)
        means = [torch.cat([mean.float() for _, mean in sorted(own, key=lambda pair: pair[0].place)]) for own in fed]
        return torch.stack(means), [each.read() for each in pending]

    def exchange(self, fed: Sequence[list[tuple[Slot, Tensor]]], unapplied: Sequence[Span] = ()) -> list[PendingStats]:
        """End a step on all ranks; the means are written into what they were fed."""
        outcomes = lockstep([worker.exchange() for worker in self.workers])
        return [
            worker.finish(outcome, unapplied, own)
            for worker, outcome, own in zip(self.workers, outcomes, fed, strict=True)
        ]

    def give_up(self, gradients: Tensor, buckets: Sequence[int] = (0, 1), meetings: int = 0) -> None:
        """Begin a step on all ranks that ends in the middle: after some buckets or, later, so many collectives."""
        self.begin()
        self.feed(gradients, buckets)
        if meetings:
            with pytest.raises(InterruptedError):
                lockstep([_interrupted(worker.exchange(), meetings) for worker in self.workers])


@coroutine
def _interrupted(exchange: Coroutine[Any, Any, Any], meetings: int) -> Generator[Any, Any, None]:
    """Drive an exchange as far as that."""
    answer = None
    for _ in range(meetings):
        answer = yield exchange.send(answer)
    exchange.close()
    raise InterruptedError


def assert_same_crews(crews: Sequence[Crew], gradients: Tensor, unapplied: Sequence[Span] = ()) -> None:
    """That both do the same in a step."""
    (means, records), (expected, expected_records) = (crew.step(gradients, unapplied) for crew in crews)
    assert_same_bits(means, expected)
    for record, other in zip(records, expected_records, strict=True):
        assert_same_records(record, other)


def crews_of(method: Method, world: int, **options: Any) -> list[Crew]:
    return [Crew("triton", method, world, **options), Crew("plain", method, world, **options)]


def noises(steps: int, world: int) -> list[Tensor]:
    """Gradients whose sums do not depend on an order."""
    return list(torch.randn(steps, world, sum(SIZES)).mul(1024).round().div(1024).to(DEVICE))


@pytest.mark.parametrize("name", ["micro", "exdyna", "union", "iwp by two"])
def test_ranks_by_themselves_do_what_they_do_in_plain_torch(name: str) -> None:
    crews = crews_of(METHODS[name](0.05), 3)
    for gradients in noises(5, 3):
        assert_same_crews(crews, gradients)
    assert_same_bits(*(crew.residual for crew in crews))
    states = [[plain_state(worker.state_dict()) for worker in crew.workers] for crew in crews]
    assert states[0] == states[1]


def test_gradients_of_16_bits_come_in_buckets_too() -> None:
    crews = crews_of(gradsieve.micro(density=0.05), 2, dtypes=(torch.bfloat16, torch.float16))
    for gradients in noises(3, 2):
        assert_same_crews(crews, gradients)
    assert_same_bits(*(crew.residual for crew in crews))


@pytest.mark.parametrize("wire", ["bfloat16", "float8"])
def test_where_values_travel_in_few_bits_ranks_agree_and_mass_is_conserved(wire: str) -> None:
    crew = Crew("triton", gradsieve.union(density=0.05), 3, wire=WIRES[wire])
    held = crew.residual
    for gradients in noises(3, 3):
        accumulated = held + gradients
        means, (first, *others) = crew.step(gradients)
        held = crew.residual
        off = accumulated.sum(0) - 3 * means[0] - held.sum(0)
        assert (off.abs() <= 1e-6 * accumulated.abs().sum(0).max()).all()
        for mean, record in zip(means[1:], others, strict=True):
            assert_same_bits(mean, means[0])
            assert_same_records(record, first)


def test_what_nobody_applies_stays_in_the_residual() -> None:
    crews = crews_of(gradsieve.micro(density=0.2), 2)
    for gradients in noises(3, 2):
        assert_same_crews(crews, gradients, unapplied=[Span(40, 73)])
    assert_same_bits(*(crew.residual for crew in crews))


@pytest.mark.parametrize("buckets", [(0,), (0, 1)])
def test_what_a_step_that_is_given_up_has_fed_stays_in_the_residual(buckets: Sequence[int]) -> None:
    crews = crews_of(gradsieve.micro(density=0.2), 2)
    for index, gradients in enumerate(noises(6, 2)):
        if index == 3:
            for crew in crews:
                crew.give_up(gradients, buckets)
        else:
            assert_same_crews(crews, gradients)
    assert_same_bits(*(crew.residual for crew in crews))


@pytest.mark.parametrize(("index", "meetings"), [(0, 5), (3, 1), (3, 3)])
def test_a_step_may_be_given_up_while_ranks_exchange(index: int, meetings: int) -> None:
    """What it fed stays, and nothing is learned from it."""
    by_kernels, plain = crews_of(gradsieve.union(density=0.2), 2)
    for step, gradients in enumerate(noises(5, 2)):
        if step == index:
            by_kernels.give_up(gradients, meetings=meetings)
            plain.give_up(gradients)
        else:
            assert_same_crews([by_kernels, plain], gradients)
    assert_same_bits(by_kernels.residual, plain.residual)


def test_the_residual_may_be_looked_at_in_the_middle_of_a_step() -> None:
    crews = crews_of(gradsieve.micro(density=0.2), 2)
    before, in_two, after = noises(3, 2)
    assert_same_crews(crews, before)
    fed = []
    for crew in crews:
        crew.begin()
        fed.append(crew.feed(in_two, [0]))
    assert_same_bits(*(crew.residual for crew in crews))
    for crew, first in zip(crews, fed, strict=True):
        crew.exchange([[*one, *other] for one, other in zip(first, crew.feed(in_two, [1]), strict=True)])
    assert_same_crews(crews, after)
    assert_same_bits(*(crew.residual for crew in crews))


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_buckets_may_be_of_unlike_types(dtypes: Sequence[torch.dtype]) -> None:
    crews = crews_of(gradsieve.micro(density=0.05), 2, dtypes=dtypes)
    for gradients in noises(3, 2):
        assert_same_crews(crews, gradients)
    assert_same_bits(*(crew.residual for crew in crews))


# --- in DistributedDataParallel -----------------------------------------------------------------------------------

STEPS = 4


@pytest.fixture
def alone(tmp_path: pathlib.Path) -> Iterator[None]:
    """A process group of this process."""
    backend = "gloo" if DEVICE.type == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def exact_gradients(rank: int, step: int, unused: Sequence[int] = ()) -> list[Tensor | None]:
    """Whole numbers, whose sums do not depend on an order; none for parameters that nobody uses in odd steps."""
    return [
        None if layer in unused and step % 2 else (4 * gradient).round().to(DEVICE)
        for layer, gradient in enumerate(toys.gradients_of(rank, step))
    ]


def mean_of(model: nn.Module, step: int, unused: Sequence[int] = ()) -> Tensor:
    """The flat averaged gradient of a step."""
    found = toys.backward(model, exact_gradients(dist.get_rank(), step, unused))
    return toys.flat([mean for mean in found if mean is not None]).cpu()


class Trained(NamedTuple):
    """What came of some steps of a model."""

    means: list[Tensor]
    residual: Tensor
    records: list[StepStats]
    learned: Any


def trained_by(path: Path, method: Method, ddp: dict[str, Any] | None = None, **options: Any) -> Trained:
    with kernels.using(path):
        model, sieve = toys.sparsified(method, ddp=ddp, device=str(DEVICE), **options)
        means, records = [], []
        unused = [0, 5] if model.find_unused_parameters else []
        for step in range(STEPS):
            means.append(mean_of(model, step, unused))
            assert sieve.stats is not None
            records.append(sieve.stats)
    kinds = {type(part.worker) for part in sieve._parts._parts.values()}
    assert kinds == {FusedWorker if path == "triton" else Worker}
    residual = toys.flat(list(sieve.residuals().values())).cpu()
    return Trained(means, residual, records, plain_state(sieve.state_dict()["learned"]))


def assert_same_training(one: Trained, other: Trained) -> None:
    for mean, expected_mean in zip(one.means, other.means, strict=True):
        assert_same_bits(mean, expected_mean)
    assert_same_bits(one.residual, other.residual)
    for record, expected in zip(one.records, other.records, strict=True):
        assert_same_records(record, expected)
    assert one.learned == other.learned


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("name", "scope"),
    [("micro", "bucket"), ("exdyna", "bucket"), ("union", "model"), ("iwp", "model")],
)
def test_a_model_is_trained_alike_by_both_paths(name: str, scope: str) -> None:
    by_kernels, plain = (trained_by(path, METHODS[name](0.05), scope=scope) for path in PATHS)
    assert_same_training(by_kernels, plain)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("ddp", "options"),
    [
        ({"gradient_as_bucket_view": True}, {"exclude": fewer_than_two_dimensions}),
        ({"find_unused_parameters": True}, {}),
        ({"bucket_cap_mb": 25}, {"residual_dtype": torch.bfloat16}),
    ],
    ids=["views", "unused", "one bucket"],
)
def test_so_it_is_with_other_options(ddp: dict[str, Any], options: dict[str, Any]) -> None:
    by_kernels, plain = (trained_by(path, gradsieve.micro(density=0.05), ddp, **options) for path in PATHS)
    assert_same_training(by_kernels, plain)


def unlike_types() -> nn.Module:
    """A model some of whose parameters have 16 bits."""
    model = toys.Chosen()
    for layer in (0, 2):
        model.weights[layer] = nn.Parameter(model.weights[layer].detach().bfloat16())
    return model.to(DEVICE)


@pytest.mark.usefixtures("alone")
def test_parameters_may_be_of_unlike_types() -> None:
    found = []
    for path in PATHS:
        with kernels.using(path):
            model = DistributedDataParallel(unlike_types(), bucket_cap_mb=0.003)
            sieve = gradsieve.sparsify(model, gradsieve.micro(density=0.05), exclude=())
            means = [mean_of(model, step) for step in range(4)]
        found.append((torch.stack(means), toys.flat(list(sieve.residuals().values()))))
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("exclude", "layer"), [((), 5), (("weights.6",), 6)], ids=["sparsified", "excluded"])
def test_a_gradient_that_is_not_finite_is_named_when_its_step_is_over(exclude: tuple[str, ...], layer: int) -> None:
    with kernels.using("triton"):
        model = DistributedDataParallel(toys.Chosen().to(DEVICE), bucket_cap_mb=0.003)
        sieve = gradsieve.sparsify(model, gradsieve.union(density=0.05), exclude=exclude)
        mean_of(model, 0)
        gradients = [gradient.to(DEVICE) for gradient in toys.gradients_of(0, 1)]
        gradients[layer].view(-1)[3] = float("nan")
        means = toys.backward(model, gradients)
        assert all(mean is not None and mean.isfinite().all() for mean in means)
        for step in range(2, 1 + control.LAG):
            mean_of(model, step)
        with pytest.raises(gradsieve.NonFiniteError, match=f"step 1: .*'weights.{layer}' on rank 0 .found now"):
            mean_of(model, 1 + control.LAG)
    assert all(residual.isfinite().all() for residual in sieve.residuals().values())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("on_nonfinite", ["raise", "propagate"])
def test_with_a_scaler_no_kernel_is_used_whatever_becomes_of_faults(on_nonfinite: OnNonfinite) -> None:
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0)
    with kernels.using("triton"):
        model = DistributedDataParallel(toys.Chosen().to(DEVICE), bucket_cap_mb=0.003)
        method = gradsieve.union(density=0.05)
        sieve = gradsieve.sparsify(model, method, exclude=(), scaler=scaler, on_nonfinite=on_nonfinite)
        gradients = [gradient.to(DEVICE) for gradient in toys.gradients_of(0, 0)]
        model.zero_grad()
        scaler.scale(model(gradients)).backward()
        sent = toys.flat([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    waiting = toys.flat(list(sieve.residuals().values()))
    torch.testing.assert_close(sent / 8 + waiting, toys.flat(gradients))


def _trained_by_both(name: str) -> tuple[Trained, Trained]:
    by_kernels, plain = (trained_by(path, METHODS[name](0.05)) for path in PATHS)
    return by_kernels, plain


@pytest.mark.slow
@pytest.mark.parametrize("name", ["micro", "exdyna", "union", "iwp", "iwp by two"])
def test_several_processes_train_a_model_alike_by_both_paths(name: str, fleet3: Fleet) -> None:
    for by_kernels, plain in fleet3.run(_trained_by_both, name):
        assert_same_training(by_kernels, plain)


@pytest.mark.usefixtures("alone")
def test_what_a_sieve_saved_is_taken_up_by_the_other_path() -> None:
    """Five steps by one path and three by the other, and the other way round."""
    means = []
    for path, other in itertools.permutations(PATHS):
        state, found = None, []
        for each, steps in ((path, range(5)), (other, range(5, 8))):
            with kernels.using(each):
                model, sieve = toys.sparsified(gradsieve.exdyna(density=0.05), device=str(DEVICE), scope="bucket")
                if state is not None:
                    # so that DDP has made its buckets
                    sieve.pause()
                    toys.backward(model, exact_gradients(0, 0))
                    sieve.resume()
                    sieve.load_state_dict(state)
                found += [mean_of(model, step) for step in steps]
                state = sieve.state_dict()
        means.append(found)
    for one, another in zip(*means, strict=True):
        assert_same_bits(one, another)
