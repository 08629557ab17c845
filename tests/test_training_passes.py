"""Virtual workers do what processes do; and how a model is judged."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import small_runs
from gradsieve.runs import Run
from gradsieve.tasks import Examples, Measure
from gradsieve.training.evaluation import BATCH_SIZE, evaluate
from gradsieve.training.virtual import Virtual
from small_runs import WORLD, plan, told

CPU = torch.device("cpu")
ROUNDED = ("train/loss", "eval/loss", "sparsity/error_norm", "sparsity/threshold")


def codes(world: int) -> dict[str, int]:
    """Bytes that processes send beside: a code for each rank, that says whether its gradient was finite."""
    return {"comm/wire_bytes": 4 * world, "comm/link_bytes": 8 * (world - 1)}


def assert_alike(virtual: Run, processes: Run) -> None:
    beside = codes(processes.world)
    assert len(virtual.steps) == len(processes.steps)
    for ours, theirs in zip(told(virtual), told(processes), strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            if name in ROUNDED and ours[name] is not None:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-6), (name, ours["step"])
            elif name in beside:
                assert ours[name] == theirs[name] - beside[name], (name, ours["step"])
            else:
                assert ours[name] == theirs[name], (name, ours["step"])


@pytest.mark.parametrize(
    "options",
    [
        {"method": "micro"},
        {"method": "union"},
        {"method": "topk"},
        {"method": "dense"},
        {"method": "union", "wire": "bfloat16"},
        {"method": "micro(ahead=0.5)", "schedule": "cosine"},
        {"model": "dropout", "optimizer": "adamw", "lr": 0.01},
        {"model": "small_runs:convolved", "method": "union"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_virtual_workers_do_what_processes_do(tmp_path: Path, options: dict[str, Any]) -> None:
    virtual = small_runs.here(tmp_path / "virtual", steps=12, **options)
    processes = small_runs.started(tmp_path / "processes", steps=12, workers=WORLD, **options)
    assert (virtual.virtual, processes.virtual) == (True, False)
    assert_alike(virtual, processes)


def test_so_they_do_in_bfloat16(tmp_path: Path) -> None:
    virtual = small_runs.here(tmp_path / "virtual", steps=12, precision="bfloat16")
    assert_alike(virtual, small_runs.started(tmp_path / "processes", steps=12, precision="bfloat16", workers=WORLD))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("method", ["sidco", "deft", "dgc", "exdyna", "iwp", "cltk", "randomk", "hard_threshold"])
def test_so_they_do_for_other_methods_and_worlds(tmp_path: Path, method: str, world: int) -> None:
    virtual = small_runs.here(tmp_path / "virtual", steps=12, method=method, virtual=world)
    assert_alike(virtual, small_runs.started(tmp_path / "processes", steps=12, method=method, workers=world))


def losses_and_gradients(engine: Virtual, model: nn.Module, step: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """What each worker would find for itself, with a model of its own."""
    found = []
    for rank in range(engine.plan.world):
        own = copy.deepcopy(model)
        batch = engine.batches.take(step, rank, 1)
        loss = functional.cross_entropy(own(batch.inputs), batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
        found.append((loss.detach(), gradients | dict(own.named_buffers())))
    return found


def test_every_worker_has_the_gradient_of_its_own_examples() -> None:
    engine = Virtual(plan(method="dense", virtual=3), CPU)
    expected = losses_and_gradients(engine, engine.model, 4)
    engine.gradients(4)
    torch.testing.assert_close(engine._passes.losses, torch.stack([loss for loss, _ in expected]))
    for name, parameter in engine.model.named_parameters():
        mean = torch.stack([own[name] for _, own in expected]).mean(0)
        torch.testing.assert_close(parameter.grad, mean, rtol=1e-5, atol=1e-7)


def test_all_start_from_the_buffers_of_rank_0_and_only_its_own_stay() -> None:
    engine = Virtual(plan(method="dense", virtual=3), CPU)
    for step in range(3):
        expected = losses_and_gradients(engine, engine.model, step)
        engine.gradients(step)
        for name, buffer in engine.model.named_buffers():
            torch.testing.assert_close(buffer, expected[0][1][name], rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_convolutions_lie_channels_last_with_their_gradients(precision: str) -> None:
    engine = Virtual(plan(model="small_runs:convolved", precision=precision), CPU)
    engine.gradients(0)
    (weight,) = (parameter for parameter in engine.model.parameters() if parameter.dim() == 4)
    assert weight.grad is not None
    for tensor in (weight, weight.grad, engine._passes._twins[0][1].weight):  # type: ignore[index]
        assert tensor.is_contiguous(memory_format=torch.channels_last)


def test_a_model_without_buffers_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_runs, "task", replace(small_runs.task, models={"line": lambda: nn.Linear(12, 4)}))
    run = small_runs.here(tmp_path, steps=3)
    assert run.header["model"] == {"name": "line", "parameters": 52, "sparsified": 48, "dense": 4}


def test_a_model_with_frozen_parameters_will_do(tmp_path: Path) -> None:
    virtual = small_runs.here(tmp_path / "virtual", steps=3, model="small_runs:frozen")
    assert_alike(virtual, small_runs.started(tmp_path / "processes", steps=3, model="small_runs:frozen", workers=WORLD))


def test_bfloat16_is_for_the_passes_only(tmp_path: Path) -> None:
    engine = Virtual(plan(precision="bfloat16"), CPU)
    assert engine._passes.gradients.dtype == torch.bfloat16
    engine.gradients(0)
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.float32}
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all() for parameter in engine.model.parameters()
    )
    half, whole = (small_runs.here(tmp_path / p, steps=10, precision=p) for p in ("bfloat16", "float32"))
    losses = half.series("train/loss")
    assert losses.tolist() == pytest.approx(whole.series("train/loss").tolist(), rel=0.05)
    assert losses.tolist() != whole.series("train/loss").tolist()


@pytest.mark.parametrize(
    ("method", "wire"), [*((name, "bfloat16") for name in ("dense", "micro", "union")), ("union", "float8")]
)
def test_values_that_travel_in_fewer_bits_train_as_well(tmp_path: Path, method: str, wire: str) -> None:
    half, whole = (small_runs.here(tmp_path / w, steps=30, method=method, wire=w) for w in (wire, "float32"))
    losses, expected = half.series("train/loss").tolist(), whole.series("train/loss").tolist()
    assert losses != expected
    assert losses == pytest.approx(expected, rel=0.05)
    assert losses[-1] < 0.8 * losses[0]


def test_the_twin_in_bfloat16_follows_the_parameters_and_feeds_the_buffers() -> None:
    engine = Virtual(plan(precision="bfloat16", method="dense"), CPU)
    engine.gradients(0)
    first = engine._passes.losses.clone()
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.zero_()
    engine.gradients(0)
    assert not torch.equal(engine._passes.losses, first)
    buffers = dict(engine.model.named_buffers())
    assert int(buffers["1.num_batches_tracked"]) == 2
    assert buffers["1.running_mean"].abs().sum() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["dense", "micro", "union"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_captured_passes_are_those_on_the_cpu(method: str, precision: str) -> None:
    options = {"method": method, "precision": precision, "virtual": 12, "batch_size": 2}
    cpu, cuda = (Virtual(plan(**options), torch.device(name)) for name in ("cpu", "cuda"))
    tolerance = 1e-3 if precision == "float32" else 0.1
    for step in range(3):
        # each step from the same place: a choice that falls otherwise by a rounding would part them for good
        with torch.no_grad():
            for here, there in zip(cpu.model.state_dict().values(), cuda.model.state_dict().values(), strict=True):
                there.copy_(here)
        states = cpu.worker_states()
        cuda.load_worker_states(states.__getitem__)
        for engine in (cpu, cuda):
            engine.gradients(step)
        for ours, theirs in ((cuda._passes.losses, cpu._passes.losses), (sent_or_waiting(cuda), sent_or_waiting(cpu))):
            assert float((ours.cpu() - theirs).norm()) <= tolerance * float(theirs.norm()), step
        for ours, theirs in zip(cuda.model.buffers(), cpu.model.buffers(), strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=tolerance, atol=tolerance)
        for engine in (cpu, cuda):
            engine.optimizer.step()


def sent_or_waiting(engine: Virtual) -> Tensor:
    """Which entries were chosen does not change it."""
    return engine._mean + engine._simulation.residual_rows().mean(0)


def test_dropout_differs_between_workers_and_steps_but_not_between_runs() -> None:
    still = Examples(torch.ones(48, 12), torch.zeros(48, dtype=torch.long))
    losses = []
    for _ in range(2):
        asked = plan(model="dropout", method="dense")
        engine = Virtual(replace(asked, task=replace(asked.task, train=still)), CPU)
        for step in range(2):
            engine.gradients(step)
            losses.append(engine._passes.losses.tolist())
    assert losses[:2] == losses[2:]
    assert len({loss for both in losses[:2] for loss in both}) == 4


def test_a_step_record_tells_the_times_of_the_slowest_worker(tmp_path: Path) -> None:
    run = small_runs.here(tmp_path, steps=4)
    phases = {"time/forward", "time/backward", "time/select", "time/exchange", "time/rest"}
    total = 0.0
    for record in run.steps:
        assert phases <= record.keys()
        assert all((record[phase] or 0) > 0 for phase in phases)
        assert record["time/step"] == pytest.approx(sum(record[phase] or 0 for phase in phases))
        total += record["time/step"] or 0
        assert record["time/elapsed"] == pytest.approx(total)
        assert (record["time/wall"] or 0) > 0


@pytest.mark.parametrize("count", [1, 3, BATCH_SIZE, BATCH_SIZE + 1, 2 * BATCH_SIZE + 7])
@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_judged_over_all_test_examples(count: int, training: bool) -> None:
    test = Examples(torch.randn(count, 12), torch.randint(0, 4, (count,)))
    task = replace(small_runs.task, test=test)
    model = small_runs.dropout().train(training)
    buffers = copy.deepcopy(dict(model.named_buffers()))
    found = evaluate(model, task, CPU)
    assert model.training is training
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
    outputs = model.eval()(test.inputs).detach()
    assert found == pytest.approx(
        {
            "eval/loss": float(functional.cross_entropy(outputs, test.targets)),
            "eval/accuracy": float((outputs.argmax(1) == test.targets).double().mean()),
        },
        rel=1e-5,
    )


@pytest.mark.parametrize(("most", "expected"), [(1, 1), (7, 7), (60, 60), (100, 60), (None, 60)])
def test_a_model_is_judged_on_the_first_examples_if_asked(most: int | None, expected: int) -> None:
    model = small_runs.plain()
    some = Examples(small_runs.task.test.inputs[:expected], small_runs.task.test.targets[:expected])
    assert evaluate(model, small_runs.task, CPU, most) == evaluate(model, replace(small_runs.task, test=some), CPU)


def test_a_measure_may_have_several_scores_an_example_and_a_last_word() -> None:
    def squares(outputs: Tensor, targets: Tensor) -> Tensor:
        assert len(outputs) == len(targets)
        return outputs**2

    root_mean_square = Measure("rms", squares, finish=math.sqrt)
    model = small_runs.plain().eval()
    found = evaluate(model, replace(small_runs.task, measure=root_mean_square), CPU)
    outputs = model(small_runs.task.test.inputs).detach()
    assert found.keys() == {"eval/loss", "eval/rms"}
    assert found["eval/rms"] == pytest.approx(float((outputs**2).mean().sqrt()))
