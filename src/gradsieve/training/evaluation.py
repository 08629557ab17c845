"""How good a model is on the examples that it was not trained on."""

from __future__ import annotations

import torch
from torch import nn

from gradsieve.tasks import Task

BATCH_SIZE = 500


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, device: torch.device) -> dict[str, float]:
    """Loss and measure over the test examples, by the names they are logged under."""
    was_training = model.training
    model.eval()
    losses, scores, num_scores = 0.0, 0.0, 0
    for start in range(0, len(task.test), BATCH_SIZE):
        rows = torch.arange(start, min(start + BATCH_SIZE, len(task.test)))
        batch = task.prepare(task.test.rows(rows).to(device), None)
        outputs = model(batch.inputs).float()
        scored = task.measure.score(outputs, batch.targets)
        losses += float(task.loss(outputs, batch.targets)) * len(rows)
        scores += float(scored.sum(dtype=torch.float64))
        num_scores += scored.numel()
    model.train(was_training)
    return {
        "eval/loss": losses / len(task.test),
        f"eval/{task.measure.name}": task.measure.finish(scores / num_scores),
    }
