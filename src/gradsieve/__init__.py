"""gradsieve: data-parallel training that sends only the gradients that matter.

sieve = gradsieve.sparsify(ddp_model, gradsieve.micro(density=0.01))
"""

from gradsieve.agreement import AgreementError
from gradsieve.collectives import ExchangeError
from gradsieve.hook import Sieve, sparsify
from gradsieve.methods import (
    METHODS,
    Method,
    cltk,
    deft,
    dense,
    dgc,
    exdyna,
    gtopk,
    hard_threshold,
    iwp,
    method,
    micro,
    oktopk,
    randomk,
    sidco,
    topk,
    union,
)
from gradsieve.nonfinite import NonFiniteError
from gradsieve.sharded import Sharded
from gradsieve.simulation import Simulation, Trace, simulate
from gradsieve.states import consolidated, reshard
from gradsieve.types import StepStats
from gradsieve.version import __version__ as __version__

__all__ = [
    "METHODS",
    "AgreementError",
    "ExchangeError",
    "Method",
    "NonFiniteError",
    "Sharded",
    "Sieve",
    "Simulation",
    "StepStats",
    "Trace",
    "cltk",
    "consolidated",
    "deft",
    "dense",
    "dgc",
    "exdyna",
    "gtopk",
    "hard_threshold",
    "iwp",
    "method",
    "micro",
    "oktopk",
    "randomk",
    "reshard",
    "sidco",
    "simulate",
    "sparsify",
    "topk",
    "union",
]
