"""Run folders as training would leave them, made up: for tests of what reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradsieve.runs import METRICS, RESULT, RUN, Run, read_run

PARAMETERS, DENSE_PARAMETERS = 1_126_410, 2_058
SPARSIFIED = PARAMETERS - DENSE_PARAMETERS
HOSTILE = "</script><img src=x onerror=alert(1)> $\\frac{ | \"'&\x00\n"

ACCURACY = {"name": "accuracy", "higher_is_better": True, "percent": True}
PERPLEXITY = {"name": "perplexity", "higher_is_better": False, "percent": False}

SETTINGS = {"device": "cpu", "batch_size": 32, "steps": None, "lr": 0.1, "momentum": 0.9, "schedule": "step"}
MACHINE = {
    "gradsieve": "0.1.0",
    "torch": "2.13.0",
    "python": "3.11.7",
    "commit": "d347735",
    "host": "bench",
    "cpu": "x",
}


@dataclass(frozen=True)
class Kind:
    """How a method behaves in these tales."""

    loss_of_accuracy: float = 0.004
    build_up: float = 1.0
    """Actual density over the asked one; it grows with the workers where this is above 1."""
    noise: float = 0.02
    threshold: bool = False
    imbalance: float = 0.0
    select_milliseconds: float = 2.0
    messages: int = 3
    index_share: float = 1.0
    """Indices that travel for each value."""


KINDS: Mapping[str, Kind] = {
    "dense": Kind(0, noise=0, select_milliseconds=0.6, messages=1, index_share=0),
    "topk": Kind(0.002, build_up=0.93, noise=0.03, select_milliseconds=14, messages=2),
    "cltk": Kind(0.009, imbalance=math.inf, noise=0, select_milliseconds=4.5, messages=2, index_share=0.25),
    "hard_threshold": Kind(0.003, build_up=3.2, noise=0.5, threshold=True, imbalance=0.25, select_milliseconds=1.8),
    "micro": Kind(0.004, threshold=True, imbalance=0.35, select_milliseconds=1.1, index_share=0.25),
    "micro(control='paper')": Kind(
        0.006, build_up=1.25, noise=0.3, threshold=True, imbalance=0.5, select_milliseconds=0.9, index_share=0.25
    ),
    "exdyna": Kind(0.0035, threshold=True, imbalance=0.12, select_milliseconds=1.3, index_share=0.25),
    "iwp": Kind(0.012, threshold=True, imbalance=math.inf, select_milliseconds=3.4, messages=4),
    "union": Kind(0.001, noise=0.04, threshold=True, imbalance=0.2, select_milliseconds=2.4, messages=4),
}


@dataclass(frozen=True)
class Plan:
    """A run to make up."""

    label: str = "micro"
    density: float = 0.01
    world: int = 4
    seed: int = 0
    epochs: int = 12
    steps_per_epoch: int = 9
    status: str = "finished"
    """`unfinished` leaves no result, as a kill does."""
    error: str | None = None
    stop_after: int | None = None
    """Steps that were done."""
    nan_from: int | None = None
    """The step from which nothing is finite any more."""
    task: str = "digits"
    model: str = "mlp"
    measure: Mapping[str, Any] | None = None
    virtual: int | None = None
    fused: bool = False
    """Forward and backward as one `time/compute`."""
    extra: tuple[tuple[str, Any], ...] = ()
    """Options of the configuration beside the usual ones."""

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch if self.stop_after is None else self.stop_after

    @property
    def name(self) -> str:
        task, label = (
            "".join(letter if letter.isalnum() else "-" for letter in text) for text in (self.task, self.label)
        )
        return f"{task}-{label.strip('-')}-{self.density:g}-w{self.world}-s{self.seed}"


def make_runs(folder: Path, plans: Sequence[Plan]) -> list[Run]:
    """Write the runs, each in a folder of its own, and read them back."""
    return [read_run(write_run(folder / f"{place:02d}-{plan.name}", plan)) for place, plan in enumerate(plans)]


def write_run(folder: Path, plan: Plan) -> Path:
    folder.mkdir(parents=True)
    (folder / RUN).write_text(json.dumps(header(plan)))
    lines = [json.dumps(record) for record in records(plan)]
    (folder / METRICS).write_text("".join(line + "\n" for line in lines))
    if plan.status != "unfinished":
        result = {"status": plan.status, "error": plan.error, "summary": {"steps": plan.steps}}
        (folder / RESULT).write_text(json.dumps(result))
    return folder


def header(plan: Plan) -> dict[str, Any]:
    options = {"method": plan.label.split("(")[0], "density": plan.density, "workers": plan.world, "seed": plan.seed}
    command = f"gradsieve train {plan.task} --method {options['method']} --workers {plan.world} --seed {plan.seed}"
    return {
        "format": 1,
        "label": plan.label,
        "method": f"{options['method']}(density={plan.density}, control='adaptive', ceiling=None)",
        "density": plan.density,
        "world": plan.world,
        "task": plan.task,
        "measure": plan.measure or ACCURACY,
        "model": {"name": plan.model, "parameters": PARAMETERS, "sparsified": SPARSIFIED, "dense": DENSE_PARAMETERS},
        "steps_per_epoch": plan.steps_per_epoch,
        "config": {
            "task": plan.task,
            "model": plan.model,
            "data": None,
            **options,
            **SETTINGS,
            "virtual": plan.virtual,
            "epochs": plan.epochs,
            **dict(plan.extra),
        },
        "provenance": {
            "started": f"2025-11-15T10:{plan.seed:02d}:00+00:00",
            "command": command,
            **MACHINE,
        },
    }


def records(plan: Plan) -> list[dict[str, Any]]:
    """The records of steps, with evaluations between them."""
    tale = Tale(plan)
    found: list[dict[str, Any]] = []
    for step in range(1, plan.steps + 1):
        found.append(tale.step(step))
        if step % plan.steps_per_epoch == 0:
            found.append(tale.evaluation(step))
    return found


class Tale:
    """Makes up the numbers of a run."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.kind = KINDS.get(plan.label, Kind())
        self.random = np.random.default_rng([plan.seed, plan.world, sum(map(ord, plan.label))])
        self.elapsed = 0.0
        self.total = max(1, plan.epochs * plan.steps_per_epoch)

    def step(self, step: int) -> dict[str, Any]:
        plan, kind, part = self.plan, self.kind, step / self.total
        density = self._density(part)
        support = round(density * SPARSIFIED)
        own = support if plan.density == 1 else support / plan.world
        wire = 4 * own * (1 + kind.index_share) + 4 * DENSE_PARAMETERS
        link = 2 * (plan.world - 1) / plan.world * 4 * support * (1 + kind.index_share / 2) + 8 * DENSE_PARAMETERS
        error = 0.0 if plan.density == 1 else 3.0 * (1 - math.exp(-12 * part)) * (0.4 + 0.6 * math.exp(-2 * part))
        seconds = self._seconds(link)
        self.elapsed += seconds["time/step"]
        record = {
            "step": step,
            "epoch": step / plan.steps_per_epoch,
            "train/loss": self._finite(step, 2.3 * math.exp(-5 * part) + 0.02 * self._noise()),
            "train/lr": 0.1,
            "sparsity/density_asked": plan.density,
            "sparsity/density_actual": density,
            "sparsity/support": support,
            "sparsity/threshold": 0.004 * (0.3 + error) * (1 + 0.05 * self._noise()) if kind.threshold else None,
            "sparsity/imbalance": self._imbalance(part),
            "sparsity/error_norm": self._finite(step, error),
            "comm/wire_bytes": round(wire),
            "comm/link_bytes": round(link),
            "comm/messages": kind.messages,
        }
        return record | seconds | {"time/elapsed": self.elapsed, "time/wall": seconds["time/step"]}

    def evaluation(self, step: int) -> dict[str, Any]:
        part = step / self.total
        handicap = self.kind.loss_of_accuracy * (1 + 0.35 * math.log2(self.plan.world / 4) if self.plan.world else 1)
        handicap *= (0.01 / self.plan.density) ** 0.4 if self.plan.density < 1 else 1
        slower = 5 / (1 + 40 * handicap)
        accuracy = 0.984 - handicap - 0.88 * math.exp(-slower * 2.2 * part) + 0.0016 * self._noise()
        measure = self.plan.measure or ACCURACY
        value = accuracy if measure["higher_is_better"] else math.exp(6 * (1.4 - accuracy))
        return {
            "step": step,
            "epoch": step / self.plan.steps_per_epoch,
            "time/elapsed": self.elapsed,
            "eval/loss": self._finite(step, 2.3 * (1 - accuracy)),
            f"eval/{measure['name']}": self._finite(step, value),
        }

    def _noise(self) -> float:
        return float(self.random.normal())

    def _finite(self, step: int, value: float) -> float:
        return math.nan if self.plan.nan_from is not None and step >= self.plan.nan_from else value

    def _density(self, part: float) -> float:
        if self.plan.density == 1:
            return 1.0
        build_up = self.kind.build_up
        if self.plan.label == "topk":
            build_up *= self.plan.world
        drift = 1 + (build_up - 1) * (1 - math.exp(-6 * part))
        return float(min(1.0, self.plan.density * drift * math.exp(self.kind.noise * self._noise())))

    def _imbalance(self, part: float) -> float:
        if math.isinf(self.kind.imbalance):
            return self.plan.world - 1.0
        return abs(self.kind.imbalance * (0.5 + math.exp(-4 * part)) * (1 + 0.3 * self._noise()))

    def _seconds(self, link_bytes: float) -> dict[str, float]:
        jitter = 1 + 0.05 * abs(self._noise())
        forward, backward, rest = 0.0021 * jitter, 0.0043 * jitter, 0.0012 * jitter
        select = self.kind.select_milliseconds / 1000 * jitter
        exchange = (0.0004 * self.kind.messages + 8 * link_bytes / 4e9) * jitter
        computing = {"compute": forward + backward} if self.plan.fused else {"forward": forward, "backward": backward}
        phases = computing | {"select": select, "exchange": exchange, "rest": rest}
        return {f"time/{phase}": seconds for phase, seconds in phases.items()} | {"time/step": sum(phases.values())}


METHODS = ("dense", "topk", "cltk", "hard_threshold", "micro", "exdyna", "iwp", "union")


def comparison(seeds: int = 3, world: int = 4, labels: Sequence[str] = METHODS, **more: Any) -> list[Plan]:
    """Methods by seeds, at one world."""
    return [
        Plan(label, 1.0 if label == "dense" else 0.01, world, seed, **more) for label in labels for seed in range(seeds)
    ]


def odd_plans() -> list[Plan]:
    """What goes wrong: not finite, killed before the first step, failed, hostile names."""
    return [
        Plan("dense", 1.0),
        Plan("micro", nan_from=40),
        Plan("topk", status="unfinished", stop_after=0),
        Plan("union", status="failed", error=HOSTILE, stop_after=30),
        Plan(f"custom({HOSTILE!r})", extra=(("note", HOSTILE), (HOSTILE, 1))),
        Plan("exdyna", status="interrupted", stop_after=4),
        Plan("dgc", fused=True, virtual=4),
    ]
