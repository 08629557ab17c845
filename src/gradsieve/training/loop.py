"""The training loop, the same for processes and virtual workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter

import torch

from gradsieve.runs import Status
from gradsieve.training.checkpoint import load_checkpoint, save_checkpoint
from gradsieve.training.engine import Engine, Outcome
from gradsieve.training.evaluation import evaluate
from gradsieve.training.plan import Plan
from gradsieve.training.recorder import Recorder


class Training:
    """A run under way in this process."""

    def __init__(
        self, plan: Plan, engine: Engine, folder: Path, recorder: Recorder | None, stopping: Callable[[], bool]
    ) -> None:
        self.plan = plan
        self._engine = engine
        self._folder = folder
        self._recorder = recorder
        """None where another process writes."""
        self._stopping = stopping
        self._optimizer = engine.optimizer
        self._steps_done = 0
        self._elapsed = 0.0

    def resume(self) -> int:
        """Go on from the run's checkpoint; returns the steps done by then."""
        shared = load_checkpoint(self._folder, self._engine)
        steps_done = shared["steps_done"]
        # checkpoints of before runs could change their number of workers do not say it
        place, steps_per_epoch = shared.get("place", steps_done), shared.get("steps_per_epoch")
        self.plan = self.plan.going_on(steps_done, place, steps_per_epoch or self.plan.steps_per_epoch)
        self._engine.batches.shift = self.plan.shift
        self._engine.model.load_state_dict(shared["model"])
        self._optimizer.load_state_dict(shared["optimizer"])
        self._steps_done, self._elapsed = steps_done, shared["elapsed"]
        return self._steps_done

    def run(self) -> Status:
        """Train to the end, or until someone asks to stop; returns how it ended."""
        stop = good_enough = False
        while self._steps_done < self.plan.total_steps and not stop and not good_enough:
            stop = self._step()
            if self.plan.evaluates_after(self._steps_done):
                good_enough = self._evaluate()
            ending = stop or good_enough
            if self.plan.saves_after(self._steps_done) or (ending and self.plan.config.checkpoint_every):
                self._save()
        return "finished" if good_enough or self._steps_done >= self.plan.total_steps else "interrupted"

    def _step(self) -> bool:
        began = perf_counter()
        lr = self.plan.learning_rate(self._steps_done)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._engine.gradients(self._steps_done)
        with self._engine.timed("rest"):
            self._apply()
        outcome = self._engine.outcome(stop=self._stopping())
        self._steps_done += 1
        self._elapsed += sum(outcome.seconds.values())
        self._write(self._step_record(outcome, lr) | {"time/wall": perf_counter() - began})
        return outcome.stop

    def _apply(self) -> None:
        if self.plan.config.clip is not None:
            torch.nn.utils.clip_grad_norm_(self._engine.model.parameters(), self.plan.config.clip)
        self._optimizer.step()
        self._engine.clear_gradients()

    def _step_record(self, outcome: Outcome, lr: float) -> dict[str, float | int | None]:
        stats = outcome.stats
        return {
            "train/loss": outcome.loss,
            "train/lr": lr,
            "sparsity/density_asked": stats.target / stats.numel,
            "sparsity/density_actual": stats.density,
            "sparsity/support": stats.support,
            "sparsity/threshold": stats.threshold,
            "sparsity/imbalance": stats.imbalance,
            "sparsity/error_norm": outcome.error_norm,
            "comm/wire_bytes": stats.wire_bytes,
            "comm/link_bytes": stats.link_bytes,
            "comm/messages": stats.num_messages,
            **_counted(outcome),
            **{f"time/{phase}": seconds for phase, seconds in outcome.seconds.items()},
            "time/step": sum(outcome.seconds.values()),
        }

    def _evaluate(self) -> bool:
        """Judge the model, where it is written down; returns whether it is good enough to end."""
        good_enough = False
        if self._recorder is not None:
            engine, task, most = self._engine, self.plan.task, self.plan.config.eval_examples
            judged = evaluate(engine.model, task, engine.device, most)
            self._write(judged)
            good_enough = self.plan.is_good_enough(judged[f"eval/{task.measure.name}"])
        # were there nothing to agree on, the others would wait within their next step, and that would be its time
        return self._engine.agreed(good_enough)

    def _write(self, record: Mapping[str, float | int | None]) -> None:
        if self._recorder is None:
            return
        place = {"step": self._steps_done, "epoch": self.plan.epoch(self._steps_done), "time/elapsed": self._elapsed}
        self._recorder.write({**place, **record})

    def _save(self) -> None:
        shared = {
            "model": self._engine.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "steps_done": self._steps_done,
            "elapsed": self._elapsed,
            "place": self.plan.place(self._steps_done),
            "steps_per_epoch": self.plan.steps_per_epoch,
        }
        save_checkpoint(self._folder, self._engine, shared)


def _counted(outcome: Outcome) -> dict[str, float]:
    """Bytes by the kernel's counters, where somebody asked for them."""
    counted = {"comm/sent_bytes": outcome.sent_bytes, "comm/uplink_bytes": outcome.uplink_bytes}
    return {name: value for name, value in counted.items() if value is not None}
