"""What a rank's own part of a step costs, and where those figures come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Machine:
    """Seconds that a rank takes while all ranks of its machine work at once; of an entry, unless it says otherwise."""

    add: float
    """Taking a gradient into the residual, with a look at whether it is finite."""
    sweep: float
    """Writing an entry of the gradient: clearing it, or dividing it by the number of ranks."""
    copy: float
    """Copying an entry into memory that is new."""
    scan: float
    """Comparing an entry with a threshold, and collecting those that pass."""
    weigh: float
    """The same where an entry is measured by its parameter."""
    sort: float
    """Finding the largest entries."""
    index: float
    """Unpacking an index that arrives."""
    merge: float
    """Merging it with those of other ranks that may be the same."""
    value: float
    """For an entry of the support: reading, clearing and writing it where it belongs."""
    cast: float
    """To half the bits and back."""
    low_rank: float
    """PowerSGD's products and error feedback at rank 1."""
    low_rank_more: float
    """The same for each further rank."""
    column: float
    """For a column of a matrix of PowerSGD's factors: making it orthogonal."""
    tensor: float
    """For a tensor of the model, whatever its size."""
    step: float
    """For a step, whatever its size."""
    crowding: float = 1.0
    """How much longer work takes while all ranks of the machine do it than while one does."""

    def as_record(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Machine:
        return cls(**record)


# One core of an AMD EPYC for each rank, float32, 11.2 M entries, caches cold (benchmarks/results/kernels-cpu.json:
# `add_ + zero_` 5.6 ms, `topk` 232, local steps of micro 11.8, union 22.2, iwp 53.5; step-gloo.json for PowerSGD and
# what does not depend on the size; `gradsieve plan --measure` for the shares of each).
CPU = Machine(
    add=5e-10,
    sweep=1.5e-10,
    copy=1e-9,
    scan=7e-10,
    weigh=3.6e-9,
    sort=2.1e-8,
    index=1e-8,
    merge=1.5e-8,
    value=1.5e-8,
    cast=1e-9,
    low_rank=5e-9,
    low_rank_more=1e-9,
    column=5e-5,
    tensor=3e-5,
    step=1e-3,
)
# NVIDIA H200, float32 (kernels-h200.json at 1000 M entries: `add_ + zero_` 3.6 ms, local steps of micro 4.05, union
# 4.18, iwp 5.76, `topk` 20.5; step-h200.json, 62 tensors, for what the host does: micro 2.1 ms over a hook that does
# nothing, PowerSGD 5.4 and 13.3 at ranks 1 and 4).
H200 = Machine(
    add=1.8e-12,
    sweep=1.8e-12,
    copy=1.9e-12,
    scan=1.4e-13,
    weigh=1.7e-12,
    sort=2e-11,
    index=1e-11,
    merge=1e-11,
    value=2e-11,
    cast=4e-12,
    low_rank=8e-12,
    low_rank_more=2e-12,
    column=1.2e-4,
    tensor=2e-5,
    step=8e-4,
)
MACHINES: Mapping[str, Machine] = {"cpu": CPU, "cuda": H200}
"""By the type of device, where nothing was measured."""
