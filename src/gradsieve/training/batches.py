"""Which examples each worker sees in each step: a function of seed and step alone, so that runs can be resumed."""

from __future__ import annotations

import torch

from gradsieve.tasks import Examples, Noise, Task


class Batches:
    """The training examples of a task on a device, shuffled anew each epoch and shared out among the workers."""

    def __init__(self, task: Task, batch_size: int, world: int, seed: int, device: torch.device) -> None:
        self._task = task
        self._examples = task.train.to(device)
        self._batch_size = batch_size
        self._world = world
        self._seed = seed
        self._device = device
        self._epoch = -1
        self._order = torch.empty(0)
        self.shift = 0
        """Added to the number of a step: the plan's."""
        self.steps_per_epoch = len(task.train) // (world * batch_size)

    def take(self, step: int, first: int, workers: int) -> Examples:
        """The batches of `workers` workers from rank `first` on, one after the other, ready for the model."""
        epoch, place = divmod(step + self.shift, self.steps_per_epoch)
        start = (place * self._world + first) * self._batch_size
        count = workers * self._batch_size
        batch = self._examples.rows(self._shuffled(epoch)[start : start + count])
        return self._task.prepare(batch, Noise(start, count, hash((self._seed, epoch)), self._device))

    def _shuffled(self, epoch: int) -> torch.Tensor:
        if epoch != self._epoch:
            draw = torch.Generator().manual_seed(hash((self._seed, epoch)) & 0xFFFF_FFFF)
            self._order = torch.randperm(len(self._examples), generator=draw).to(self._device)
            self._epoch = epoch
        return self._order
