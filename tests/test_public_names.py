from __future__ import annotations

import importlib.metadata
from pathlib import Path

import gradsieve

PUBLIC = {
    *("sparsify", "Sieve", "StepStats", "simulate", "Simulation", "Trace", "METHODS", "Method", "method"),
    *("AgreementError", "ExchangeError", "NonFiniteError"),
    *("dense", "topk", "randomk", "cltk", "hard_threshold", "sidco"),
    *("reshard", "consolidated", "Sharded"),
    *("deft", "gtopk", "oktopk", "dgc", "micro", "exdyna", "iwp", "union"),
}


def test_public_names_are_these() -> None:
    assert set(gradsieve.__all__) == PUBLIC
    assert all(getattr(gradsieve, name).__doc__ for name in PUBLIC if name != "METHODS")


def test_version_is_the_installed_one() -> None:
    assert importlib.metadata.version("gradsieve") == gradsieve.__version__


def test_types_are_shipped() -> None:
    assert (Path(gradsieve.__file__).parent / "py.typed").exists()
