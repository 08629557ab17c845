from __future__ import annotations

import pytest

from gradsieve.checks import UsageError
from gradsieve.training.place import Place, find_place

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4", "PMI_FD": "9"}
SLURM = {
    "SLURM_JOB_ID": "123",
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "2",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "node[07-08]",
}
LAUNCHERS = {"torchrun": TORCHRUN, "open-mpi": OPEN_MPI, "mpich": MPICH, "slurm": SLURM}


def placed(environment: dict[str, str]) -> Place:
    found = find_place(environment)
    assert found is not None
    return found


def test_torchrun_says_it_all() -> None:
    assert placed(TORCHRUN) == Place("torchrun", 5, 8, 1, 4, "node0", 29400)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (OPEN_MPI, ("mpirun", 3, 4, 3, 4, "127.0.0.1")),
        (MPICH, ("mpirun", 2, 4, 2, 4, "127.0.0.1")),
        (SLURM, ("srun", 6, 8, 2, 4, "node07")),
        (SLURM | {"MASTER_ADDR": "node3"}, ("srun", 6, 8, 2, 4, "node3")),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8"}, ("srun", 6, 8, 2, 8, "127.0.0.1")),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "5,3"}, ("srun", 6, 8, 2, 5, "node07")),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1(x2)"}, ("srun", 6, 8, 2, 2, "node07")),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ("torchrun", 1, 2, 1, 2, "127.0.0.1")),
    ],
)
def test_other_launchers_say_it_in_their_own_words(environment: dict[str, str], expected: tuple[object, ...]) -> None:
    place = placed(environment)
    found = (place.launcher, place.rank, place.world, place.local_rank, place.local_world, place.address)
    assert found == expected
    assert 20_000 <= place.port < 32_000


@pytest.mark.parametrize("environment", LAUNCHERS.values(), ids=LAUNCHERS)
def test_the_meeting_place_can_be_given(environment: dict[str, str]) -> None:
    place = placed(environment | {"MASTER_ADDR": "here", "MASTER_PORT": "1234"})
    assert (place.address, place.port) == ("here", 1234)


PER_RANK = {
    "open-mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpich": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_FD"),  # each process has a descriptor of its own
    "slurm": ("SLURM_PROCID", "SLURM_LOCALID"),
}


@pytest.mark.parametrize(
    "name",
    [
        "open-mpi",
        "mpich",
        "slurm",
    ],
)
def test_all_ranks_of_a_job_find_the_same_meeting_place(name: str) -> None:
    ranks = [
        LAUNCHERS[name] | {variable: str(rank + number) for number, variable in enumerate(PER_RANK[name])}
        for rank in range(4)
    ]
    assert len({(placed(rank).address, placed(rank).port) for rank in ranks}) == 1


@pytest.mark.parametrize(("name", "job"), [("open-mpi", "PMIX_NAMESPACE"), ("slurm", "SLURM_JOB_ID")])
def test_jobs_on_one_machine_meet_at_different_ports(name: str, job: str) -> None:
    ports = {placed(LAUNCHERS[name] | {job: str(number)}).port for number in range(20)}
    assert len(ports) == 20


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({name: value for name, value in TORCHRUN.items() if name != "MASTER_ADDR"}, "torchrun"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "mpirun"),
        (MPICH | {"MPI_LOCALNRANKS": "1"}, "mpirun"),
        ({name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}, "srun"),
    ],
)
def test_several_machines_need_an_address(environment: dict[str, str], launcher: str) -> None:
    with pytest.raises(UsageError, match=f"^{launcher} started workers on several machines: export MASTER_ADDR"):
        find_place(environment)


@pytest.mark.parametrize("text", ["", "two", "-1", "1.5", " 3", "0x3", "(x2)"])
@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("torchrun", "RANK"),
        ("torchrun", "WORLD_SIZE"),
        ("torchrun", "LOCAL_RANK"),
        ("torchrun", "MASTER_PORT"),
        ("open-mpi", "OMPI_COMM_WORLD_SIZE"),
        ("open-mpi", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("mpich", "PMI_RANK"),
        ("slurm", "SLURM_STEP_TASKS_PER_NODE"),
    ],
)
def test_what_is_not_a_whole_number_is_refused_by_name(name: str, variable: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_place(LAUNCHERS[name] | {variable: text})
    assert str(caught.value) == f"the environment variable {variable} is {text!r}, not a whole number"


BATCH_SCRIPT = {name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP")}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"PATH": "/bin"},
        {"RANK": "0"},
        {"WORLD_SIZE": "2"},
        {"MASTER_ADDR": "here", "MASTER_PORT": "1234"},
        BATCH_SCRIPT,
        BATCH_SCRIPT | {"SLURM_STEP_ID": "4294967291"},
    ],
)
def test_a_process_that_nobody_placed_has_no_place(environment: dict[str, str]) -> None:
    assert find_place(environment) is None


def test_torchrun_inside_of_a_slurm_step_goes_before_it() -> None:
    assert placed(SLURM | TORCHRUN) == placed(TORCHRUN)
