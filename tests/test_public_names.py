from __future__ import annotations

import importlib.metadata
from pathlib import Path

import gradsieve

PUBLIC = ["METHODS", "Method", "Sieve", "Simulation", "StepStats", "Trace", "cltk", "deft", "dense", "dgc", "exdyna", "hard_threshold", "iwp", "method", "micro", "randomk", "sidco", "simulate", "sparsify", "topk", "union"]


def test_public_names_are_these() -> None:
    assert sorted(gradsieve.__all__) == sorted(PUBLIC)
    assert all(getattr(gradsieve, name).__doc__ for name in PUBLIC if name != "METHODS")


def test_version_is_the_installed_one() -> None:
    assert importlib.metadata.version("gradsieve") == gradsieve.__version__


def test_types_are_shipped() -> None:
    assert (Path(gradsieve.__file__).parent / "py.typed").exists()
