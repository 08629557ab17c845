"""The page of the papers' claims is up to date with the digests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import tables
from gradsieve.digests import digest_text
from gradsieve.report.claims import CLAIMS, PAPER_MICRO
from gradsieve.report.texts import percent
from synthetic_runs import Plan, make_runs


def test_the_page_is_up_to_date() -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.filled(page) == page, "run python studies/tables.py"


def test_every_study_and_claim_has_its_place() -> None:
    names = {mark["name"] for mark in tables.MARK.finditer(tables.PAGE.read_text(encoding="utf-8"))}
    assert names == {*tables.OF_CLAIMS, *(path.stem for path in tables.STUDIES.glob("*.toml"))}
    assert {claim.study for claim in CLAIMS} <= names


def test_without_runs_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    verdicts = {row.split("|")[-2].strip() for row in tables.claims_table().splitlines()[2:]}
    assert verdicts == {"not run yet", "not testable here"}
    assert tables.study_tables("iwp") == "Not run yet: `gradsieve compare studies/iwp.toml --short`\n"
    assert all(len(tables.small_claims_table(study).splitlines()) == 2 for study in tables.SMALL_STUDIES)


def test_digests_fill_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "state", lambda *_: (2, 6))
    folder = tmp_path / "micro-threshold" / "short"
    folder.mkdir(parents=True)
    for run in make_runs(tmp_path / "runs", [Plan(PAPER_MICRO, seed=seed) for seed in (0, 1)]):
        (folder / f"{run.folder.name}.json").write_text(digest_text(run))
    (row,) = [line for line in tables.claims_table().splitlines() if "rises and falls" in line]
    assert "1 setting, 2 seeds" in row
    assert row.endswith("| confirmed so far (2 of 6 runs) |")
    table = tables.study_tables("micro-threshold")
    assert table.startswith("Short form, 2 of 6 runs of the first seed:")
    assert f"| {PAPER_MICRO} | 4 | 0.01 |" in table


@pytest.mark.parametrize("study", tables.SMALL_STUDIES)
def test_small_studies_judge_what_models_are_no_part_of(
    study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "state", lambda *_: (4, 4))
    folder = tmp_path / study / "short"
    folder.mkdir(parents=True)
    for run in make_runs(
        tmp_path / "runs", [Plan(method) for method in (PAPER_MICRO, "topk", "iwp", "hard_threshold")]
    ):
        (folder / f"{run.folder.name}.json").write_text(digest_text(run))
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in tables.small_claims_table(study).splitlines()[2:]
    ]
    words = " ".join(row[0] for row in rows)
    assert "rises and falls with the norm" in words
    assert "With indices from one worker alone" in words
    # of AlexNet, of times, and of methods that were not run
    assert not any(part in words for part in ("64 times", "sorting", "ExDyna"))
    assert {row[3] for row in rows} == {f"`gradsieve compare studies/{study}.toml --short`"}
    # each form by itself
    shutil.copytree(folder, tmp_path / study / "full")
    assert len(tables.small_claims_table(study).splitlines()) == 2 + 2 * len(rows)
    assert {row[5] for row in rows} <= {"confirmed", "not confirmed"}


def test_a_run_that_two_grids_asked_for_is_one_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    folder = tmp_path / "iwp" / "short"
    folder.mkdir(parents=True)
    (run,) = make_runs(tmp_path / "runs", [Plan("iwp")])
    for grid in ("one", "two"):
        (folder / f"{grid}.json").write_text(digest_text(run, {"name": "iwp", "form": "short", "grid": grid}))
    (section,) = tables.results("iwp", "short")
    assert [len(group.runs) for group in section.groups] == [1]


def test_phases_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "state", lambda *_: (1, 2))
    folder = tmp_path / "phases" / "short"
    folder.mkdir(parents=True)
    for run in make_runs(tmp_path / "runs", [Plan("micro", world=1), Plan("topk", world=1)]):
        (folder / f"{run.folder.name}.json").write_text(digest_text(run))
    (section,) = tables.results("phases", "short")
    (group,) = [group for group in section.groups if group.label == "micro"]
    (row,) = [line for line in tables.study_tables("phases").splitlines() if line.startswith("| micro ")]
    share = group.phases.select / (group.phases.step - group.phases.rest)
    assert f"{percent(share)} | 1 |" in row
