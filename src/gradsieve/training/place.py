"""Which worker this process is, where someone else started the workers: torchrun, mpirun or srun."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from gradsieve.checks import UsageError


@dataclass(frozen=True)
class Place:
    """This process among the workers of a run."""

    launcher: str
    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int


@dataclass(frozen=True)
class _Launcher:
    """The environment variables in which a launcher tells a process its place."""

    name: str
    rank: str
    world: str
    local_rank: str
    local_world: str
    job: str
    """Differs between jobs, so that two on one machine do not meet at one port."""


_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    _Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMIX_NAMESPACE",
    ),
    # MPICH tells a process nothing that all of its job share: a second job on a machine needs a MASTER_PORT
    _Launcher("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""),
    # a batch script has most of SLURM's variables, too, but only srun makes a step
    _Launcher(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID"
    ),
)


def find_place(environment: Mapping[str, str]) -> Place | None:
    """The place that a launcher gave this process; None where nobody did."""
    for launcher in _LAUNCHERS:
        if launcher.rank in environment and launcher.world in environment:
            return _place(launcher, environment)
    return None


def meeting_point(place: Place, environment: Mapping[str, str]) -> str:
    """Where the process group of a launcher's workers meets: an init_method of torch.distributed."""
    # torchrun serves the meeting place itself, and says so in the environment
    served = place.launcher == "torchrun" and "MASTER_ADDR" in environment
    return "env://" if served else f"tcp://{place.address}:{place.port}"


def _place(launcher: _Launcher, environment: Mapping[str, str]) -> Place:
    world = _whole(launcher.world, environment[launcher.world])
    if world < 1:
        raise UsageError(f"the environment variable {launcher.world} is {world}: a run has at least one worker")
    local_world = _whole(launcher.local_world, environment.get(launcher.local_world, str(world)))
    return Place(
        launcher=launcher.name,
        rank=_whole(launcher.rank, environment[launcher.rank]),
        world=world,
        local_rank=_whole(launcher.local_rank, environment.get(launcher.local_rank, environment[launcher.rank])),
        local_world=local_world,
        address=_address(launcher, environment, one_machine=local_world >= world),
        port=_port(launcher, environment),
    )


def _whole(name: str, text: str) -> int:
    digits = text.split("(")[0].split(",")[0]  # SLURM writes 4(x2) for two nodes of four
    if not digits.isdecimal():
        raise UsageError(f"the environment variable {name} is {text!r}, not a whole number")
    return int(digits)


def _address(launcher: _Launcher, environment: Mapping[str, str], *, one_machine: bool) -> str:
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"]
    if one_machine:
        return "127.0.0.1"
    if launcher.name == "srun" and "SLURM_STEP_NODELIST" in environment:
        return first_host(environment["SLURM_STEP_NODELIST"])
    raise UsageError(
        f"{launcher.name} started workers on several machines: export MASTER_ADDR, rank 0's machine, to all of them"
    )


def first_host(nodes: str) -> str:
    """Of a list of SLURM's, the machine that has rank 0.

    >>> first_host("node[07-09,12],login1")
    'node07'
    """
    name, _, rest = nodes.split(",")[0].partition("[")
    return name + rest.rstrip("]").split("-")[0]


def _port(launcher: _Launcher, environment: Mapping[str, str]) -> int:
    if "MASTER_PORT" in environment:
        return _whole("MASTER_PORT", environment["MASTER_PORT"])
    # below the range that systems hand out for outgoing connections
    return 20_000 + zlib.crc32(environment.get(launcher.job, "").encode()) % 12_000
