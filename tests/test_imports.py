"""The architecture: imports point down only, and few modules talk to torch.distributed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gradsieve

SOURCE = Path(gradsieve.__file__).parent


def layers_of(package: str, *layers: str) -> list[set[str]]:
    """Full names of the modules in each layer; `__init__` is the package itself."""
    return [{f"{package}.{module}".removesuffix(".__init__") for module in layer.split()} for layer in layers]


CORE = layers_of(
    "gradsieve",
    "checks clock control ddp expressions nonfinite recent version weights wire",
    "types kernels.reference kernels.dispatch kernels.tiling",
    "kernels.__init__ kernels.sieve",
    "kernels.ladder kernels.packing kernels.scatter",
    "kernels.pick",
    "kernels.merge",
    "collectives score",
    "agreement rounding",
    "parcel",
    "region proposers exchange residual",
    "criterion merge_tree owner_sums",
    "search",
    "methods",
    "layout",
    "ahead",
    "pipeline",
    "fused part states",
    "simulation hook",
    "sharded",
    "__init__",
)
MODELS = layers_of(
    "gradsieve.models",
    "layers language recommender",
    "alexnet googlenet resnet senet small vgg",
    "__init__",
)
TASKS = layers_of(
    "gradsieve.tasks",
    "task augment",
    "files digits",
    "cifar ratings text",
    "__init__",
)
RECORDS = layers_of("gradsieve", "baselines counters runs projection", "digests")
TRAINING = layers_of(
    "gradsieve.training",
    "__init__ config place provenance recorder batches evaluation",
    "plan",
    "engine folder",
    "checkpoint passes processes",
    "loop virtual",
    "session",
    "launch",
    "runner",
    "grid",
    "study",
)
COST = layers_of(
    "gradsieve.cost",
    "__init__ machine messages",
    "step",
    "advice check",
)
BENCH = layers_of(
    "gradsieve.bench",
    "__init__ figures given published timing",
    "contenders local",
    "kernels links",
    "step",
    "start",
)
LAB = layers_of(
    "gradsieve.lab",
    "__init__ layout names",
    "network",
    "jobs training",
)
REPORT = layers_of(
    "gradsieve.report",
    "texts curves",
    "colours",
    "drawing grouping table",
    "costs frontier judging labs summary tables",
    "claims figures findings",
    "page",
    "lab_page",
    "__init__",
)
CLI = layers_of(
    "gradsieve.cli",
    "display options report",
    "bench summary",
    "lab_training running",
    "study",
    "train compare lab plan",
    "demo",
    "app",
    "__init__",
)
MAIN = layers_of("gradsieve", "__main__")

LAYERS = [*CORE, *MODELS, *TASKS, *RECORDS, *TRAINING, *COST, *BENCH, *LAB, *REPORT, *CLI, *MAIN]
"""From the bottom up. Modules of one layer do not import one another."""

DISTRIBUTED = {
    "gradsieve.baselines",
    "gradsieve.bench.contenders",
    "gradsieve.bench.links",
    "gradsieve.bench.start",
    "gradsieve.bench.step",
    "gradsieve.collectives",
    "gradsieve.hook",
    "gradsieve.sharded",
    "gradsieve.training.processes",
    "gradsieve.training.session",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in SOURCE.rglob("*.py")}


def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports, and of what it takes out of them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.level == 0, f"{path} imports relatively"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            # who takes nothing but submodules out of a package does not use the package itself
            found |= names if names <= MODULES.keys() else names | {node.module}
    return found


def layer_of(module: str) -> int:
    return next(level for level, modules in enumerate(LAYERS) if module in modules)


def test_every_module_has_one_layer() -> None:
    assert sorted(module for modules in LAYERS for module in modules) == sorted(MODULES)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_down(module: str) -> None:
    for other in imported(MODULES[module]) & MODULES.keys():
        assert layer_of(other) < layer_of(module), f"{module} imports {other}"


@pytest.mark.parametrize("module", sorted(MODULES.keys() - DISTRIBUTED))
def test_few_modules_know_torch_distributed(module: str) -> None:
    assert not any("distributed" in name for name in imported(MODULES[module]))


def test_importing_prints_nothing_and_needs_no_process_group() -> None:
    check = "import gradsieve, torch.distributed as dist; assert not dist.is_initialized()"
    done = subprocess.run([sys.executable, "-W", "error", "-c", check], capture_output=True, timeout=60, check=True)
    assert done.stdout == done.stderr == b""
