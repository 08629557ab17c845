"""The passes over vectors that a step is made of."""

from gradsieve.kernels.dispatch import has_triton, path, uses_triton, using
from gradsieve.kernels.reference import (
    at_least,
    count_at_least,
    count_by_rank,
    exponential_threshold,
    kth_largest,
    largest,
    magnitudes_at_least,
    merged,
    sampled_threshold,
    thinned,
    uniform,
)

__all__ = [
    "at_least",
    "count_at_least",
    "count_by_rank",
    "exponential_threshold",
    "has_triton",
    "kth_largest",
    "largest",
    "magnitudes_at_least",
    "merged",
    "path",
    "sampled_threshold",
    "thinned",
    "uniform",
    "uses_triton",
    "using",
]
