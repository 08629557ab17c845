"""How good a model is on the examples that it was not trained on."""

from __future__ import annotations

import torch
from torch import nn

from gradsieve.tasks import Task

BATCH_SIZE = 500


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, device: torch.device, most: int | None = None) -> dict[str, float]:
    """Loss and measure over the test examples, or `most` of them, by the names they are logged under."""
    num_examples = min(len(task.test), most or len(task.test))
    was_training = model.training
    model.eval()
    losses, scores, num_scores = 0.0, 0.0, 0
    for start in range(0, num_examples, BATCH_SIZE):
        rows = torch.arange(start, min(start + BATCH_SIZE, num_examples))
        batch = task.prepare(task.test.rows(rows).to(device), None)
        outputs = model(batch.inputs).float()
        scored = task.measure.score(outputs, batch.targets)
        losses += float(task.loss(outputs, batch.targets)) * len(rows)
        scores += float(scored.sum(dtype=torch.float64))
        num_scores += scored.numel()
    model.train(was_training)
    return {
        "eval/loss": losses / num_examples,
        f"eval/{task.measure.name}": task.measure.finish(scores / num_scores),
    }
