"""gradsieve: data-parallel training that sends only the gradients that matter.

sieve = gradsieve.sparsify(ddp_model, gradsieve.micro(density=0.01))
"""

from gradsieve.hook import Sieve, sparsify
from gradsieve.methods import (
    METHODS,
    Method,
    cltk,
    deft,
    dense,
    dgc,
    exdyna,
    hard_threshold,
    iwp,
    method,
    micro,
    randomk,
    sidco,
    topk,
    union,
)
from gradsieve.simulation import Simulation, Trace, simulate
from gradsieve.types import StepStats

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Method",
    "Sieve",
    "Simulation",
    "StepStats",
    "Trace",
    "cltk",
    "deft",
    "dense",
    "dgc",
    "exdyna",
    "hard_threshold",
    "iwp",
    "method",
    "micro",
    "randomk",
    "sidco",
    "simulate",
    "sparsify",
    "topk",
    "union",
]
