"""The claims that a report judges by its runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from gradsieve.digests import digest_text, read_run
from gradsieve.report import write_report
from gradsieve.report.claims import CLAIMS, FORMS, PAPER_MICRO, judged_claims
from gradsieve.runs import Run
from synthetic_runs import Plan, make_runs


def rows(runs: list[Run]) -> dict[str, dict[str, str]]:
    table = judged_claims(runs)
    keys = [column.key for column in table.columns]
    told = [dict(zip(keys, (cell.text for cell in row), strict=True)) for row in table.rows]
    assert len({row["claim"] for row in told}) == len(told)
    return {row["claim"]: row for row in told}


def digests(folder: Path, study: Mapping[str, str], *plans: Plan) -> list[Run]:
    made = []
    for run in make_runs(folder / "runs", plans):
        path = folder / f"{run.folder.name}.json"
        path.write_text(digest_text(run, {**study, "grid": "any"}))
        made.append(read_run(path))
    return made


def of_study(study: str, form: str) -> set[str]:
    return {claim.words for claim in CLAIMS if claim.study == study and form in claim.forms}


def test_any_runs_are_held_against_the_claims_they_can_tell_of(tmp_path: Path) -> None:
    found = rows(make_runs(tmp_path, [Plan(PAPER_MICRO), Plan("topk", world=16), Plan("dense", 1.0)]))
    assert found["The threshold rises and falls with the norm of what was not sent."]["verdict"] == "confirmed"
    law = found["The published threshold law keeps the actual density close to the asked one."]
    assert law["verdict"] == "not confirmed"
    assert law["obtained"].endswith("1 setting, 1 seed")
    # nothing of methods that were not run, of a form of training, of a device's times
    assert not any(part in " ".join(found) for part in ("ExDyna", "union", "near dense", "sorting", "less time"))


def test_without_such_runs_no_claim_is_told_of(tmp_path: Path) -> None:
    assert rows(make_runs(tmp_path, [Plan("randomk")])) == {}


@pytest.mark.parametrize("form", FORMS)
def test_a_study_tells_of_all_that_it_is_for(form: str, tmp_path: Path) -> None:
    found = rows(digests(tmp_path, {"name": "micro-cifar10", "form": form}, Plan("micro", seed=1), Plan("micro")))
    assert {words for words, row in found.items() if row["verdict"] != "not run yet"} == {
        "Our law, searched within the step, keeps it within 3 %.",
        "MiCRO reaches its accuracy in less time than the others.",
    }
    assert set(found) == of_study("micro-cifar10", form)
    ours = found["Our law, searched within the step, keeps it within 3 %."]
    assert " ± " in ours["obtained"]
    assert ours["obtained"].endswith("1 setting, 2 seeds")
    assert found["MiCRO reaches its accuracy in less time than the others."]["verdict"] == "not testable here"


def test_a_claim_on_a_form_is_judged_by_runs_of_it(tmp_path: Path) -> None:
    near = "Where ranks look ahead, sparse training ends near dense training."
    plans = [Plan("union"), Plan("dense", 1.0)]
    short = digests(tmp_path / "short", {"name": "digits", "form": "short"}, *plans)
    full = digests(tmp_path / "full", {"name": "digits", "form": "full"}, *plans)
    assert near in rows(short)
    assert near not in rows(full)
    assert rows([*short, *full])[near] == rows(short)[near]


def test_the_page_has_them_and_a_link_to_them(tmp_path: Path) -> None:
    page = write_report(make_runs(tmp_path / "runs", [Plan("micro")]), tmp_path / "out").read_text(encoding="utf-8")
    assert '<a href="#claims">Claims</a>' in page
    assert '<div id="claims">' in page
    assert 'data-status="confirmed">confirmed</td>' in page


def test_a_page_without_any_has_no_place_for_them(tmp_path: Path) -> None:
    page = write_report(make_runs(tmp_path / "runs", [Plan("randomk")]), tmp_path / "out").read_text(encoding="utf-8")
    assert "claims" not in page
