"""The architecture: imports point down only, and one module talks to torch.distributed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gradsieve

SOURCE = Path(gradsieve.__file__).parent

LAYERS = [
    {"checks", "weights", "clock", "control"},
    {"types", "kernels.reference"},
    {"kernels"},
    {"collectives", "score"},
    {"region", "proposers", "exchange", "residual"},
    {"criterion"},
    {"search"},
    {"methods"},
    {"pipeline", "layout"},
    {"simulation", "hook"},
    {""},
]
"""From the bottom up; "" is the package itself. Modules of one layer do not import one another."""

DISTRIBUTED = {"collectives", "hook"}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in SOURCE.rglob("*.py")}


def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(path: Path) -> set[str]:
    """The package's own modules that a file imports."""
    names = {name.removeprefix("gradsieve.") for name in imported(path) if name.startswith("gradsieve.")}
    return names & MODULES.keys()


def layer_of(module: str) -> int:
    return next(level for level, modules in enumerate(LAYERS) if module in modules)


def test_every_module_has_a_layer() -> None:
    assert set().union(*LAYERS) == MODULES.keys()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_down(module: str) -> None:
    for other in own_imports(MODULES[module]):
        assert layer_of(other) < layer_of(module), f"{module} imports {other}"


@pytest.mark.parametrize("module", sorted(MODULES.keys() - DISTRIBUTED))
def test_only_collectives_and_the_hook_know_torch_distributed(module: str) -> None:
    assert not any("distributed" in name for name in imported(MODULES[module]))


def test_importing_prints_nothing_and_needs_no_process_group() -> None:
    check = "import gradsieve, torch.distributed as dist; assert not dist.is_initialized()"
    done = subprocess.run([sys.executable, "-W", "error", "-c", check], capture_output=True, timeout=60, check=True)
    assert done.stdout == done.stderr == b""
