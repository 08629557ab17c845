"""From what was asked to what is done: the task's choices filled in, the steps counted, the learning rate laid out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gradsieve.checks import UsageError
from gradsieve.methods import Method
from gradsieve.tasks import Task, base_model, load_task
from gradsieve.training.config import Precision, TrainConfig, method_label

PAPER_WORKERS = 4
"""Recipes give the learning rate for so many workers."""


@dataclass(frozen=True)
class Plan:
    """A run, ready to be carried out."""

    config: TrainConfig
    """With nothing left open that the task decides."""
    task: Task
    method: Method
    world: int
    steps_per_epoch: int
    shift: int = 0
    """How many steps the place in the epochs is ahead of the steps done: not 0 once the number of workers, and so of
    steps in an epoch, has changed."""

    @property
    def total_steps(self) -> int:
        whole = self.epochs * self.steps_per_epoch - self.shift
        return whole if self.config.steps is None else self.config.steps

    @property
    def epochs(self) -> int:
        assert self.config.epochs is not None
        return self.config.epochs

    @property
    def batch_size(self) -> int:
        assert self.config.batch_size is not None
        return self.config.batch_size

    @property
    def label(self) -> str:
        baseline = self.config.baseline
        return method_label(self.method) if baseline is None else baseline.name

    def epoch(self, steps_done: int) -> float:
        return self.place(steps_done) / self.steps_per_epoch

    def place(self, steps_done: int) -> int:
        """Where in the epochs the run is after so many steps, counted in steps of so many workers as there are."""
        return steps_done + self.shift

    def going_on(self, steps_done: int, place: int, steps_per_epoch: int) -> Plan:
        """The same plan from a checkpoint on, whose epochs may have had another number of steps."""
        return replace(self, shift=place * self.steps_per_epoch // steps_per_epoch - steps_done)

    def learning_rate(self, step: int) -> float:
        """Of the step that follows after `step` others: up from 0, then by the schedule."""
        config = self.config
        assert config.lr is not None
        assert config.warmup_epochs is not None
        place, warmup = self.place(step), config.warmup_epochs * self.steps_per_epoch
        if place < warmup:
            return config.lr * min(1.0, (place + 1) / warmup)
        whole = self.epochs * self.steps_per_epoch
        if config.schedule == "step":
            return config.lr * (0.1 if place >= 0.75 * whole else 1.0)
        if config.schedule == "cosine":
            progress = min(1.0, (place - warmup) / max(1.0, whole - warmup))
            return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
        return config.lr

    def evaluates_after(self, steps_done: int) -> bool:
        """Is the model judged after so many steps?"""
        if steps_done == self.total_steps:
            return True
        if not self.config.eval_every:
            return False
        return self.place(steps_done) % max(1, round(self.config.eval_every * self.steps_per_epoch)) == 0

    def is_good_enough(self, value: float) -> bool:
        """Does a measure of an evaluation end the run?"""
        goal = self.config.stop_at
        return goal is not None and (value >= goal if self.task.measure.higher_is_better else value <= goal)

    def saves_after(self, steps_done: int) -> bool:
        """Is a checkpoint written after so many steps?"""
        period = self.config.checkpoint_every
        return bool(period) and (steps_done == self.total_steps or steps_done % int(period or 1) == 0)


def make_plan(config: TrainConfig, world: int, task: Task | None = None) -> Plan:
    """Load the task, unless it is given, and fill in what the config leaves open."""
    task = task or load_task(config.task, config.data)
    method = config.make_method()
    model = config.model or next(iter(task.models), None)
    if model is None:
        raise UsageError(f"the task {task.name} has no models: give one by --model package.module:callable")
    recipe = task.recipes.get(base_model(model), task.recipe)
    baseline = config.baseline
    batch_size = config.batch_size or recipe.batch_size
    steps_per_epoch = len(task.train) // (world * batch_size)
    if steps_per_epoch == 0:
        raise UsageError(
            f"{world} workers with a batch of {batch_size} need {world * batch_size} training examples a step, "
            f"and {task.name} has {len(task.train)}: give fewer workers or a smaller --batch-size"
        )
    scale = world * batch_size / (PAPER_WORKERS * recipe.batch_size)
    open_options: dict[str, Any] = {
        "model": model,
        "batch_size": batch_size,
        "epochs": recipe.epochs,
        "lr": recipe.lr * (scale if recipe.optimizer == "sgd" else 1.0),
        "warmup_epochs": recipe.warmup_epochs,
        "schedule": recipe.schedule,
        "optimizer": recipe.optimizer,
        # a method that brings momentum of its own wants none after it
        "momentum": 0.0 if method.feedback.momentum else recipe.momentum,
        "weight_decay": recipe.weight_decay,
        "clip": recipe.clip,
        "checkpoint_every": steps_per_epoch if baseline is None else 0,
        "device": default_device(),
    }
    filled = {name: value for name, value in open_options.items() if getattr(config, name) is None}
    # so that the config of a run means the same wherever, and however the method was written
    device = filled.get("device", config.device)
    fixed: dict[str, Any] = {
        "precision": precision_on(str(device)) if config.precision == "auto" else config.precision,
        "method": method_label(method) if baseline is None else baseline.expression,
        "density": None if method.name == "dense" else method.density,
        "data": _absolute(config.data),
        "output": _absolute(config.output),
    }
    plan = Plan(replace(config, **filled, **fixed), task, method, world, steps_per_epoch)
    _check_ahead(plan)
    return plan


def _check_ahead(plan: Plan) -> None:
    """Before workers are started that could only refuse it."""
    if plan.method.feedback.ahead and plan.config.optimizer != "sgd":
        raise UsageError(
            f"{plan.config.method} looks ahead by the learning rate of sgd, and the optimizer is "
            f"{plan.config.optimizer}: leave ahead out, or give --optimizer sgd"
        )


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def precision_on(device: str) -> Precision:
    """What `auto` stands for."""
    return "bfloat16" if device.startswith("cuda") or _multiplies_bfloat16() else "float32"


def _multiplies_bfloat16() -> bool:
    """Has the processor instructions for it? Where it has none, passes take longer in bfloat16, not half as long."""
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # older torch cannot tell
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))


def _absolute(path: Path | None) -> Path | None:
    try:
        return None if path is None else path.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # no such user, a loop of links, a letter that no name has
        raise UsageError(f"{str(path)!r} is no path: {error}") from error
