from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from command_line import until
from gradsieve.lab import jobs, names
from gradsieve.lab.jobs import JobError, agent_command, agent_environment, last_words, run_job
from gradsieve.lab.layout import Layout, parse_rate
from gradsieve.lab.network import Network
from labs import FakeNetwork, processes_of

WORKER = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(total)
if sys.argv[1] == "fail" and dist.get_rank() == 1:
    raise ValueError("born under a bad star")
if sys.argv[1] != "end":
    time.sleep(600)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total[0]:g} in {Path.cwd()}")
dist.destroy_process_group()
"""


def test_the_agent_of_a_host() -> None:
    command = agent_command(4, 2, ["-m", "gradsieve", "bench"])
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert {"--nnodes=4", "--node-rank=2", "--nproc-per-node=1", "--master-addr=10.77.0.1"} < set(command)
    assert command[-3:] == ["-m", "gradsieve", "bench"]
    assert agent_environment()["GLOO_SOCKET_IFNAME"] == "eth0"
    assert agent_environment()["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ("", "without a word"),
        ("one\n two \n\n", "two"),
        ("gradsieve: no such thing\nTraceback\n  ...\na.b.ChildFailedError: \n====\n", "gradsieve: no such thing"),
        ("KeyboardInterrupt\nmore\n", "KeyboardInterrupt"),
        ("[rank1]: ValueError: bad\na.b.ChildFailedError:\n===\nRoot Cause\n", "ValueError: bad"),
    ],
)
def test_the_line_that_says_most(errors: str, told: str) -> None:
    assert last_words(errors) == told


def test_what_every_agent_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_OUTSIDE", "kept")
    network = FakeNetwork(3, lambda host: f"echo {host} $FROM_OUTSIDE $OMP_NUM_THREADS $GIVEN; echo quiet >&2")
    ended = run_job(network, [], seconds=30, environment={"GIVEN": "7"})
    assert [agent.host for agent in ended] == [0, 1, 2]
    assert {agent.code for agent in ended} == {0}
    assert [agent.output for agent in ended] == [f"{host} kept 1 7\n" for host in range(3)]
    assert {agent.errors for agent in ended} == {"quiet\n"}


def test_one_that_fails_ends_all() -> None:
    network = FakeNetwork(3, lambda host: "echo 'ValueError: bad' >&2; exit 3" if host == 1 else "sleep 600 & wait")
    with pytest.raises(JobError, match=r"^host 1 ended with exit code 3: ValueError: bad$") as caught:
        run_job(network, [], seconds=60)
    assert [agent.code for agent in caught.value.ended] == [-9, 3, -9]
    until(lambda: network.name not in names.processes().values(), "the end of all processes")


def test_a_job_that_takes_too_long_is_ended() -> None:
    network = FakeNetwork(3, lambda host: "sleep 600" if host else "echo done")
    with pytest.raises(
        JobError, match=r"^after 0.5 s hosts 1, 2 had not come to an end: give the job more time$"
    ) as caught:
        run_job(network, [], seconds=0.5)
    assert caught.value.ended[0].output == "done\n"
    until(lambda: network.name not in names.processes().values(), "the end of all processes")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_ends_all(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise error

    network = FakeNetwork(2, lambda _: "sleep 600")
    monkeypatch.setattr(jobs, "_followed", interrupted)
    with pytest.raises(error):
        run_job(network, [], seconds=60)
    until(lambda: network.name not in names.processes().values(), "the end of all processes")


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return str(path)


@pytest.mark.root
def test_a_job_over_real_hosts(worker: str) -> None:
    with Network(Layout(3, parse_rate("1gbit"))) as network:
        ended = run_job(network, [worker, "end"], seconds=90)
        sent = [traffic.sent for traffic in network.host_traffic()]
    assert [agent.output for agent in ended] == [f"rank {rank} of 3: 6 in {Path.cwd()}\n" for rank in range(3)]
    assert min(sent) > 4 * 1000, "they met over the network"
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["worker.py"]


@pytest.mark.root
@pytest.mark.parametrize(
    ("how", "seconds", "told"),
    [("fail", 90, "ValueError: born under a bad star"), ("hang", 15, "after 15 s hosts 0, 1 had not come to an end")],
)
def test_a_failed_job_leaves_the_lab_to_the_next_one(worker: str, how: str, seconds: float, told: str) -> None:
    with Network(Layout(2)) as network:
        holders = processes_of(os.getpid())
        with pytest.raises(JobError, match=told):
            run_job(network, [worker, how], seconds=seconds)
        until(lambda: processes_of(os.getpid()) == holders, "the end of agents and workers")
        assert [agent.code for agent in run_job(network, [worker, "end"], seconds=90)] == [0, 0]
