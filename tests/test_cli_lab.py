from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from command_line import MODULE, Done, call, complaint, finish, spawn, started, until
from gradsieve.bench.figures import Spread
from gradsieve.bench.step import StepRow, StepSetting
from gradsieve.cli import lab as command
from gradsieve.cli.lab import bench_command
from gradsieve.lab import names
from gradsieve.lab.jobs import Ended, JobError
from labs import Pretended, assert_gone, belongings, interfaces, processes_of

ROWS = [
    StepRow("plain DDP", Spread(0.5, 0.4, 0.6, 3), 4000, None, None, None, link_bytes=6000, counted_bytes=6300),
    StepRow("micro", Spread(0.05, 0.04, 0.06, 3), 40, 0.01, 0.01, 0.02, link_bytes=60, counted_bytes=63),
    StepRow("bf16 hook", error="not supported here: for a test"),
]
UNDER = {"link": {"bandwidth": 1e9, "latency": 1e-4}, "machine": {"add": 1e-9}}
SMALL = ["lab", "--hosts", 2, "--parameters", 200_000, "--steps", 3, "--warmup", 1, "--methods", "micro,fp16"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def pretended_job(network: Pretended, script: Sequence[str], *, seconds: float) -> list[Ended]:
    assert script[:4] == ["-m", "gradsieve", "bench", "step"]
    assert seconds == 77
    assert ("--uplink" in script) == (network.layout.racks > 1)
    if network.layout.rate.name == "1kbit":
        raise JobError("host 1 ended with exit code 1: ValueError: bad", [])
    rows = [row.as_record(ROWS) for row in ROWS]
    return [
        Ended(host, 0, json.dumps({"rows": rows, **UNDER}) if host == 0 else "", "")
        for host in range(network.layout.hosts)
    ]


@pytest.fixture
def _pretending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "check_tools", lambda: None)
    monkeypatch.setattr(command, "Network", Pretended)
    monkeypatch.setattr(command, "run_job", pretended_job)


def printed(done: Done) -> Any:
    assert done.code == 0, done
    assert done.err == ""
    return json.loads(done.out)


@pytest.mark.usefixtures("_pretending")
def test_a_table_for_every_rate_and_one_file() -> None:
    done = call("lab", "--rate", "100mbit,none", "--timeout", 77, "--json", "lab.json")
    assert done.code == 0, done
    for told in ("100mbit each way: 4 hosts, 11,173,962 parameters", "no limit: 4 hosts", "by counter", "by formula"):
        assert told in done.out
    for told in ("1.05", "6,300", "6,000", "none: 80,000 bytes sent by all hosts", "bf16 hook: not supported here"):
        assert told in done.out
    assert done.last == "lab.json"
    found = json.loads(Path("lab.json").read_text())
    assert found["benchmark"] == "lab"
    assert found["provenance"].keys() >= {"commit", "torch", "cpu", "cores", "command"}
    asked = {"world": 4, "racks": 1, "model": "resnet18", "interface": "eth0", "steps": 10, "density": 0.01}
    assert found["setting"].items() >= asked.items()
    assert [(row["rate"], row["name"]) for row in found["rows"]] == [
        (rate, row.name) for rate in ("100mbit", "none") for row in ROWS
    ]
    assert found["rows"][1]["ratio_to_dense"] == pytest.approx(0.1)
    assert found["rows"][1]["ratio_to_formula"] == pytest.approx(1.05)
    assert [network["rate"] for network in found["networks"]] == ["100mbit", "none"]
    assert found["networks"][0]["hosts"] == [{"received": 10_000, "sent": 20_000}] * 4
    assert all(network.items() >= UNDER.items() for network in found["networks"])


@pytest.mark.usefixtures("_pretending")
def test_racks_as_json_alone() -> None:
    order = ["lab", "--hosts", 2, "--racks", 2, "--uplink", "500mbit", "--rate", "1gbit", "--timeout", 77]
    found = printed(call(*order, "--json", "-"))
    assert found["setting"].items() >= {"racks": 2, "uplink": "500mbit", "world": 2}.items()
    assert found["networks"][0]["uplink"] == {"received": 300, "sent": 400}
    shown = call(*order)
    assert "1gbit each way: 2 hosts in 2 racks, 500mbit between them" in shown.out
    assert "700 between the racks" in shown.out


@pytest.mark.usefixtures("_pretending")
def test_a_rate_that_fails_is_told_and_the_others_go_on() -> None:
    done = call("lab", "--rate", "1kbit,1gbit", "--timeout", 77, "--json", "lab.json")
    assert done.code == 1
    assert "1kbit: failed: host 1 ended with exit code 1: ValueError: bad" in done.out
    assert "1gbit each way" in done.out
    found = json.loads(Path("lab.json").read_text())
    assert [network["failure"] is None for network in found["networks"]] == [False, True]


def test_what_a_host_runs() -> None:
    setting = StepSetting(None, "resnet50", 0.001, 7, 2, ("micro", "powersgd(rank=1)"), "bfloat16", "bucket", "eth0")
    assert " ".join(bench_command(setting, threads=2)) == (
        "-m gradsieve bench step --device cpu --json - --model resnet50 --density 0.001 --steps 7 --warmup 2 "
        "--methods micro,powersgd(rank=1) --wire bfloat16 --scope bucket --threads 2 --interface eth0 --links"
    )
    assert "--parameters 5" in " ".join(bench_command(StepSetting(5), threads=1))


def test_rows_come_back_as_they_were() -> None:
    for row in ROWS:
        assert StepRow.from_record(json.loads(json.dumps(row.as_record()))) == row


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--rate fast", "such as 100mbit or 2.5gbit, or none; not 'fast'"),
        ("--rate ,", "--rate names no rate"),
        ("--rate none,none", "--rate names none twice"),
        ("--hosts 0", "hosts must be at least 1, not 0"),
        ("--racks 3", "racks must be 1 or 2, not 3"),
        ("--uplink 1gbit", "an uplink of 1gbit joins two racks"),
        ("--methods nope", "--methods: unknown 'nope'"),
        ("--timeout 0", "timeout must be above 0, not 0.0"),
        ("--json folder", "--json folder is a folder"),
        ("--steps 0", "steps must be at least 1, not 0"),
    ],
)
def test_what_the_user_can_mend_ends_with_one_line(arguments: str, told: str) -> None:
    Path("folder").mkdir()
    assert told in complaint(call("lab", *arguments.split()))


def test_a_machine_without_tools_ends_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    for arguments in ([], ["--clean"]):
        assert "a lab needs ip, tc, unshare, nsenter: install them" in complaint(call("lab", *arguments))


def test_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, value)
    assert "lab starts its own workers, one on each host, but torchrun started 2" in complaint(call("lab"))


def test_cleaning_says_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "check_tools", lambda: None)
    monkeypatch.setattr(names, "strays", dict)
    monkeypatch.setattr(names, "clean", lambda: ["7-8-1"])
    assert call("lab", "--clean") == Done(0, "removed what lab 7-8-1 left\n", "")
    monkeypatch.setattr(names, "clean", list)
    assert call("lab", "--clean") == Done(0, "no lab has left anything\n", "")
    monkeypatch.setattr(names, "strays", lambda: {12: "7-8-1"})
    assert "these processes of dead labs cannot be ended: 12" in complaint(call("lab", "--clean"))


@pytest.mark.root
def test_a_lab(tmp_path: Path) -> None:
    before = interfaces()
    done = spawn(*MODULE, *SMALL, "--rate", "1gbit,none", "--json", "lab.json", cwd=tmp_path, seconds=110)
    assert done.code == 0, done
    found = json.loads(Path("lab.json").read_text())
    assert [row["rate"] for row in found["rows"]] == ["1gbit"] * 4 + ["none"] * 4
    for row in found["rows"]:
        assert row["error"] is None
        if row["name"] in ("plain DDP", "fp16 hook"):
            assert row["ratio_to_formula"] == pytest.approx(1, abs=0.1)
    assert interfaces() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lab.json"]


@pytest.mark.root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_lab_that_is_ended_at_work(number: signal.Signals, tmp_path: Path) -> None:
    before, torch_before = interfaces(), scratch()
    with started([*MODULE, *SMALL, "--steps", 100_000, "--rate", "100mbit"], tmp_path) as process:
        until(lambda: num_workers(process.pid) == 2, "workers on both hosts")
        owned = belongings(process.pid)
        os.kill(process.pid, number)
        done = finish(process)
    assert done.code == (130 if number == signal.SIGINT else -number), done
    assert_gone(owned, before)
    assert scratch() == torch_before


def num_workers(owner: int) -> int:
    """Processes of a lab that measure; an agent has torchrun's name in its command line, too."""
    texts = [command_line_of(process) for process in processes_of(owner)]
    return sum(b"gradsieve" in text and b"bench" in text and b"torch.distributed.run" not in text for text in texts)


def command_line_of(process: int) -> bytes:
    """Nothing, of one that is gone."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def scratch() -> set[str]:
    """What torchrun leaves in the folder for temporary files where it is not given another."""
    return {path.name for path in Path("/tmp").glob("torchelastic_*")}
