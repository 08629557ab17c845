"""The page of the papers' claims: up to date with the digests, and its verdicts are right."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import tables
from gradsieve.digests import digest_text, find_runs, read_run
from gradsieve.report.grouping import Section, sections
from gradsieve.report.texts import percent, signed, times
from synthetic_runs import Plan, make_runs

PAPER = tables.PAPER_MICRO
Made = Callable[..., list[Section]]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Sections of digests of made-up runs."""

    def make(*plans: Plan) -> list[Section]:
        for run in make_runs(tmp_path / "runs", plans):
            (tmp_path / f"{run.folder.name}.json").write_text(digest_text(run))
        return sections([read_run(path) for path in find_runs(sorted(tmp_path.glob("*.json")))])

    return make


def told(judge: tables.Judge, found: Sequence[Section]) -> tables.Found:
    outcome = judge(found)
    assert outcome is not None
    return outcome


def test_the_page_is_up_to_date() -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.filled(page) == page, "run python studies/tables.py"


def test_every_study_and_claim_has_its_place() -> None:
    names = {mark["name"] for mark in tables.MARK.finditer(tables.PAGE.read_text(encoding="utf-8"))}
    assert names == {*tables.OF_CLAIMS, *(path.stem for path in tables.STUDIES.glob("*.toml"))}
    assert {claim.study for claim in tables.CLAIMS} <= names


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
    for run in make_runs(tmp_path / "runs", [Plan(PAPER, seed=seed) for seed in (0, 1)]):
        (folder / f"{run.folder.name}.json").write_text(digest_text(run))
    (row,) = [line for line in tables.claims_table().splitlines() if "rises and falls" in line]
    assert "1 setting, 2 seeds" in row
    assert row.endswith("| confirmed so far (2 of 6 runs) |")
    table = tables.study_tables("micro-threshold")
    assert table.startswith("Short form, 2 of 6 runs of the first seed:")
    assert f"| {PAPER} | 4 | 0.01 |" in table


@pytest.mark.parametrize("study", tables.SMALL_STUDIES)
def test_small_studies_judge_what_models_are_no_part_of(
    study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "state", lambda *_: (4, 4))
    folder = tmp_path / study / "short"
    folder.mkdir(parents=True)
    for run in make_runs(tmp_path / "runs", [Plan(method) for method in (PAPER, "topk", "iwp", "hard_threshold")]):
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


def test_phases_are_shown_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Made) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "state", lambda *_: (1, 2))
    (tmp_path / "phases").mkdir()
    found = made(Plan("micro", world=1), Plan("topk", world=1))
    (tmp_path / "phases" / "short").mkdir()
    for path in tmp_path.glob("*.json"):
        path.rename(tmp_path / "phases" / "short" / path.name)
    (row,) = [line for line in tables.study_tables("phases").splitlines() if line.startswith("| micro ")]
    (group,) = [group for group in found[0].groups if group.label == "micro"]
    share = group.phases.select / (group.phases.step - group.phases.rest)
    assert f"{percent(share)} | 1 |" in row
    assert told(tables.share_of_step(["micro"], "time/select", share * 1.01, virtual=False), found).holds
    assert not told(tables.share_of_step(["micro", "topk"], "time/select", share * 0.99, virtual=False), found).holds
    assert tables.share_of_step(["micro"], "time/select", 1.0, virtual=True)(found) is None
    assert tables.share_of_step(["micro"], "time/select", 1.0, virtual=False, world=16)(found) is None
    assert tables.share_of_step(["micro"], "time/select", 1.0, virtual=False, setting="float32")(found) is None


def test_densities_are_judged(made: Made) -> None:
    found = made(Plan("topk", world=16), Plan("micro", world=16))
    assert told(tables.density_error("micro", 0.1), found).holds
    assert not told(tables.density_error("topk", 0.1), found).holds
    assert told(tables.density_factor("topk", lambda factor: factor > 10), found).holds
    assert tables.density_error("union", 0.1)(found) is None


def test_measures_are_judged_against_another_method(made: Made) -> None:
    found = made(Plan("dense", 1.0), Plan("topk"), Plan("iwp"))
    ahead, behind = tables.measure_to("topk", "iwp", 0.0), tables.measure_to("iwp", "topk", 0.0)
    assert (told(ahead, found).holds, told(behind, found).holds) == (True, False)
    assert told(tables.measure_to("iwp", "dense", -50.0), found).holds
    assert tables.measure_to("iwp", "cltk", 0.0)(found) is None


def test_growth_is_from_the_fewest_workers_to_the_most(made: Made) -> None:
    (section,) = found = made(*(Plan("micro", world=world) for world in (2, 4, 8)))
    seconds = {group.world: group.steady("time/select") for group in section.groups}
    growth = seconds[8] / seconds[2]
    outcome = told(tables.growth_over_worlds("micro", "time/select", growth * 1.01), found)
    assert outcome.holds
    assert "8 workers); 1 setting" in outcome.obtained
    assert not told(tables.growth_over_worlds("micro", "time/select", growth * 0.99), found).holds
    assert tables.growth_over_worlds("topk", "time/select", 1.0)(found) is None


def test_a_lead_counts_at_no_more_bytes(made: Made) -> None:
    (section,) = found = made(Plan("union"), Plan("topk"), Plan("iwp"))
    by_label = {group.label: group for group in section.groups}
    assert by_label["union"].link_bytes <= by_label["topk"].link_bytes
    gain = 100 * (by_label["union"].final.mean - by_label["topk"].final.mean)
    outcome = told(tables.ahead_at_bytes("union", ["topk"]), found)
    assert outcome.holds == (gain > 0)
    assert outcome.obtained.startswith(signed(gain, 2))
    assert "1 setting" in outcome.obtained
    assert tables.ahead_at_bytes("topk", ["union"])(found) is None


def test_what_diverged_is_not_confirmed(made: Made) -> None:
    found = made(Plan("dense", 1.0), Plan("micro", nan_from=40))
    outcome = told(tables.measure_to("micro", "dense", -100.0), found)
    assert not outcome.holds
    assert outcome.obtained.startswith("diverged (mlp, micro at 0.01, 4 workers)")
    assert told(tables.measure_to("dense", "micro", 0.0), [relabelled(found[0])]).holds


def relabelled(section: Section) -> Section:
    """With dense at the density of the other."""
    return replace(section, groups=tuple(replace(group, density=0.01) for group in section.groups))


def test_worlds_are_judged_by_their_range(made: Made) -> None:
    found = made(*(Plan("micro", world=world) for world in (2, 4, 8)))
    assert told(tables.range_over_worlds("micro", 5.0), found).holds
    narrow = told(tables.range_over_worlds("micro", 0.001), found)
    assert not narrow.holds
    assert narrow.obtained.startswith("digits · mlp: ")
    assert tables.range_over_worlds("topk", 1.0)(found) is None


def test_densities_are_no_numbers_of_workers(made: Made) -> None:
    found = made(*(Plan("micro", density=density) for density in (0.1, 0.001)))
    assert tables.range_over_worlds("micro", 1.0)(found) is None


def test_threshold_imbalance_and_times_are_judged(made: Made) -> None:
    found = made(Plan("micro"), Plan("exdyna"), Plan("topk"))
    assert told(tables.threshold_follows_error("micro", 0.5), found).holds
    assert told(tables.mean_relative_to("exdyna", "micro", "sparsity/imbalance", 0.8), found).holds
    assert told(tables.mean_relative_to("micro", "topk", "time/select", 0.1), found).holds
    assert not told(tables.mean_relative_to("topk", "micro", "time/select", 0.1), found).holds


def test_a_fall_of_density_is_seen(made: Made) -> None:
    (section,) = made(Plan("hard_threshold"))
    (group,) = section.groups
    (run,) = group.runs
    steps = [
        {**record, "sparsity/density_actual": 0.04 if float(record["epoch"] or 0) <= 9 else 0.01}
        for record in run.steps
    ]
    fallen = replace(section, groups=(replace(group, runs=(replace(run, steps=steps),)),))
    judge = tables.density_falls_at_decay("hard_threshold", 1.5)
    assert told(judge, [fallen]).obtained.startswith(times(4))
    assert not told(judge, [section]).holds
    assert math.isclose(tables._density_within(fallen.groups[0], 0.65, 0.75), 0.04)


def test_where_the_learning_rate_does_not_fall_at_once_the_density_need_not(made: Made) -> None:
    found = made(Plan("hard_threshold", extra=(("schedule", "cosine"),)))
    assert tables.density_falls_at_decay("hard_threshold", 1.5)(found) is None
