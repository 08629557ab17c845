from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradsieve import digests
from gradsieve.digests import MOST_POINTS, Digest, digest_text, find_runs, is_digest, read_digest, read_run, thinned
from gradsieve.report.grouping import sections
from gradsieve.report.summary import summary_rows, summary_table
from gradsieve.runs import Run, RunError
from synthetic_runs import Plan, comparison, make_runs, odd_plans, write_run

LONG = Plan("micro", epochs=10, steps_per_epoch=97)
SHORT = Plan("micro", epochs=2, steps_per_epoch=5)


def kept(runs: Sequence[Run], folder: Path) -> list[Run]:
    """The digests of runs, written and read again."""
    folder.mkdir()
    for run in runs:
        (folder / f"{run.folder.name}.json").write_text(digest_text(run))
    return [read_run(path) for path in find_runs([folder])]


@pytest.fixture
def long(tmp_path: Path) -> tuple[Run, Digest]:
    (run,) = make_runs(tmp_path / "runs", [LONG])
    (digest,) = kept([run], tmp_path / "digests")
    assert isinstance(digest, Digest)
    return run, digest


def test_a_digest_is_small_and_tells_what_the_folder_does(long: tuple[Run, Digest]) -> None:
    run, digest = long
    assert digest.folder.stat().st_size < 16_000
    assert digest.header == run.header
    assert (digest.status, digest.error, digest.num_steps) == (run.status, run.error, run.num_steps)
    assert [dict(record) for record in digest.evaluations] == [dict(record) for record in run.evaluations]
    assert len(digest.steps) == MOST_POINTS


def test_means_are_those_of_all_steps(long: tuple[Run, Digest]) -> None:
    run, digest = long
    for name in ("sparsity/density_actual", "comm/link_bytes", "comm/wire_bytes", "sparsity/imbalance"):
        assert digest.mean(name) == pytest.approx(run.mean(name), rel=1e-12)
    for name in ("time/forward", "time/select", "time/step"):
        assert digest.steady(name) == pytest.approx(run.steady(name), rel=1e-12)
    assert math.isnan(digest.mean("nothing"))
    assert math.isnan(digest.steady("nothing"))


def test_the_median_error_of_the_density_is_of_all_steps(long: tuple[Run, Digest]) -> None:
    run, digest = long
    errors = np.abs(run.series("sparsity/density_actual") / run.series("sparsity/density_asked") - 1)
    assert digest.median_density_error == pytest.approx(np.median(errors))
    assert run.median_density_error == pytest.approx(np.median(errors))


def test_points_are_means_of_blocks_at_the_end_of_them() -> None:
    steps = [{"step": step, "time/elapsed": 0.5 * step, "train/loss": float(step)} for step in range(1, 11)]
    assert thinned(steps, 5) == [
        {"step": last, "time/elapsed": 0.5 * last, "train/loss": last - 0.5} for last in (2, 4, 6, 8, 10)
    ]
    assert thinned(steps, 20) == steps
    assert thinned([], 5) == []
    assert thinned([{"step": 1, "x": None}, {"step": 2, "x": 3.0}], 1) == [{"step": 2, "x": 3.0}]


def test_the_text_is_the_same_whenever_it_is_made(tmp_path: Path) -> None:
    one, other = (make_runs(tmp_path / name, [SHORT])[0] for name in ("one", "other"))
    assert digest_text(one, {"name": "study"}) == digest_text(other, {"name": "study"})
    assert json.loads(digest_text(one))["format"] == digests.FORMAT


def test_tables_of_digests_are_those_of_the_runs(tmp_path: Path) -> None:
    runs = make_runs(tmp_path / "runs", comparison(2, labels=("dense", "topk", "micro"), epochs=4))
    rows = [summary_rows(found) for found in (runs, kept(runs, tmp_path / "digests"))]
    assert summary_table(rows[0]).markdown() == summary_table(rows[1]).markdown()


def test_odd_runs_have_digests_too(tmp_path: Path) -> None:
    runs = make_runs(tmp_path / "runs", odd_plans())
    found = kept(runs, tmp_path / "digests")
    assert [run.status for run in found] == [run.status for run in runs]
    assert len(sections(found)[0].groups) == len(runs)


def test_runs_of_another_setting_have_a_section_of_their_own(long: tuple[Run, Digest]) -> None:
    _, digest = long
    studies: list[dict[str, Any]] = [{}, {"form": "full"}, {"form": "short"}, {"form": "short", "global_batch": 512}]
    virtual = {**digest.header, "config": {**digest.config, "virtual": 4}}
    whole = {**virtual, "config": {**virtual["config"], "device": "cuda", "precision": "float32"}}
    found = sections(
        [
            *(replace(digest, study=study, header=virtual) for study in studies),
            *(replace(digest, study=studies[2]), replace(digest, study=studies[2], header=whole)),
        ]
    )
    settings = [
        *("", " · full form", " · short form", " · short form, 512 examples a step", " · short form, in processes"),
        " · short form, passes in float32",
    ]
    assert [section.title for section in found] == [f"digits · mlp{setting}" for setting in settings]


def test_digests_are_found_below_folders_and_by_name(tmp_path: Path) -> None:
    runs = make_runs(tmp_path / "runs", [SHORT, replace(SHORT, seed=1)])
    kept(runs, tmp_path / "digests")
    files = sorted((tmp_path / "digests").iterdir())
    assert all(map(is_digest, files))
    assert find_runs([tmp_path / "digests", files[0]]) == files
    assert find_runs([tmp_path / "runs"]) == [run.folder for run in runs]


def test_runs_and_digests_in_one_folder_are_not_merged(tmp_path: Path) -> None:
    kept(make_runs(tmp_path / "runs", [SHORT]), tmp_path / "digests")
    with pytest.raises(RunError, match=r"holds folders of runs as well as digests, such as .*json: name them apart"):
        find_runs([tmp_path])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read as JSON"),
        ("[1]", "holds a list, not an object"),
        ("{}", "is no digest of a run: its format is None"),
        ('{"format": "gradsieve digest 9"}', "its format is 'gradsieve digest 9', not 'gradsieve digest 1'"),
        ('{"format": "gradsieve digest 1"}', "lacks 'run': it is damaged"),
    ],
)
def test_other_json_files_are_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(RunError, match=rf"other\.json .*{message}"):
        [read_run(found) for found in find_runs([tmp_path])]


@pytest.mark.parametrize("part", ["label", "status", "columns"])
def test_a_damaged_digest_is_refused_by_name(tmp_path: Path, part: str) -> None:
    (run,) = make_runs(tmp_path / "runs", [SHORT])
    digest = json.loads(digest_text(run))
    if part == "label":
        del digest["run"]["label"]
    elif part == "status":
        digest["result"]["status"] = "fine"
    else:
        digest["steps"]["step"].pop()
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(digest))
    with pytest.raises(RunError, match=r"bad\.json .*damaged; make it again"):
        read_digest(path)


def test_a_folder_of_neither_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "run", SHORT)
    assert find_runs([tmp_path / "run"]) == [tmp_path / "run"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="holds no run"):
        find_runs([tmp_path / "empty"])
