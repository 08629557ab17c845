from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from gradsieve.report import RESULT_KEYS, TIME_KEYS, Table, summary_rows, summary_table, tables
from gradsieve.report.grouping import Section, sections
from gradsieve.report.summary import SummaryRow
from gradsieve.runs import Run
from synthetic_runs import HOSTILE, PERPLEXITY, Plan, make_runs, odd_plans

SHORT = Plan(epochs=4, steps_per_epoch=5)
DENSE = replace(SHORT, label="dense", density=1.0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    plans = [replace(plan, seed=seed) for plan in (DENSE, SHORT) for seed in range(3)]
    return make_runs(tmp_path_factory.mktemp("runs"), [*plans, replace(SHORT, world=8)])


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Section:
    (section,) = sections(make_runs(tmp_path_factory.mktemp("odd"), odd_plans()))
    return section


@pytest.fixture
def rows(runs: list[Run]) -> list[SummaryRow]:
    return summary_rows(runs)


def parsed(table: Table) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(table.csv())))


def cells(table: Table, key: str) -> list[str]:
    place = [column.key for column in table.columns].index(key)
    return [row[place].text for row in table.rows]


def test_a_row_for_each_group_the_main_world_first(rows: list[SummaryRow]) -> None:
    assert [(row.method, row.world, row.seeds, row.finished) for row in rows] == [
        ("dense", 4, 3, 3),
        ("micro", 4, 3, 3),
        ("micro", 8, 1, 1),
    ]


def test_rows_compare_with_dense_at_the_same_world(rows: list[SummaryRow]) -> None:
    dense, ours, elsewhere = rows
    assert ours.difference == pytest.approx(ours.final.mean - dense.final.mean)
    assert ours.wire_ratio == pytest.approx(ours.wire_bytes / dense.wire_bytes)
    assert ours.speedup_slow == pytest.approx(dense.projected_slow / ours.projected_slow)
    assert ours.speedup_fast == pytest.approx(dense.projected_fast / ours.projected_fast)
    assert math.isnan(dense.difference)
    assert dense.wire_ratio == dense.speedup_slow == 1.0
    assert math.isnan(elsewhere.difference)
    assert math.isnan(elsewhere.wire_ratio)
    assert math.isnan(elsewhere.speedup_slow)


def test_the_actual_density_and_its_error(rows: list[SummaryRow]) -> None:
    ours = rows[1]
    assert ours.density_actual == pytest.approx(0.01, rel=0.05)
    assert ours.density_error == pytest.approx(ours.density_actual / 0.01 - 1)


def test_csv_holds_full_values_and_nothing_for_what_is_not_there(rows: list[SummaryRow]) -> None:
    lines = parsed(summary_table(rows))
    assert [line["method"] for line in lines] == ["dense", "micro", "micro"]
    assert float(lines[1]["final"]) == rows[1].final.mean
    assert float(lines[1]["select_seconds"]) == rows[1].phases.select
    assert lines[1]["compute_seconds"] == lines[2]["difference"] == ""


def test_texts_are_for_people(rows: list[SummaryRow]) -> None:
    table = summary_table(rows)
    mean, deviation = 100 * rows[1].final.mean, 100 * rows[1].final.deviation
    assert cells(table, "final")[1] == f"{mean:.2f} ± {deviation:.2f} %"
    assert cells(table, "wire_bytes")[0] == "4.51 MB"
    assert cells(table, "wire_ratio")[:2] == ["100 %", "0.49 %"]
    assert cells(table, "difference")[1][0] in "+\N{MINUS SIGN}"


def test_some_columns_are_picked_and_empty_ones_left_out(rows: list[SummaryRow]) -> None:
    table = summary_table(rows)
    assert [column.key for column in table.only(*RESULT_KEYS).columns] == list(RESULT_KEYS)
    assert [column.key for column in table.only(*TIME_KEYS).columns] == [
        key for key in TIME_KEYS if key != "compute_seconds"
    ]


def test_a_measure_that_is_no_percentage(tmp_path: Path) -> None:
    plans = [replace(plan, measure=PERPLEXITY, seed=seed) for plan in (DENSE, SHORT) for seed in (0, 1)]
    table = summary_table(summary_rows(make_runs(tmp_path, plans)))
    assert "%" not in "".join(cells(table, "final") + cells(table, "difference"))
    assert [column.title for column in table.columns if column.key == "final"] == ["final perplexity"]


def test_several_tasks_in_one_table(tmp_path: Path) -> None:
    rows = summary_rows(make_runs(tmp_path, [SHORT, replace(SHORT, task="text", measure=PERPLEXITY)]))
    assert cells(summary_table(rows), "task") == ["digits", "text"]
    assert [column.title for column in summary_table(rows).columns if column.key == "final"] == ["final measure"]


def test_how_runs_ended_is_told(odd: Section) -> None:
    table = summary_table(summary_rows(odd.runs))
    told = dict(
        zip(cells(table, "method"), zip(cells(table, "final"), cells(table, "seeds"), strict=True), strict=True)
    )
    assert told["micro"] == ("diverged", "1")
    assert told["topk"] == ("\N{EN DASH}", "0 of 1")
    assert told["union"][0].endswith("so far")


def test_runs_that_did_not_finish_come_first_with_their_error(odd: Section) -> None:
    table = tables.runs_table(odd)
    status = cells(table, "status")
    assert sorted(status[:3]) == ["failed", "interrupted", "unfinished"]
    assert set(status[3:]) == {"finished"}
    assert "</script>" in cells(table, "error")[status.index("failed")]
    assert cells(table, "steps")[status.index("unfinished")] == "0"


def test_folders_are_seen_from_the_one_that_holds_them(tmp_path: Path) -> None:
    runs = make_runs(tmp_path / "a", [SHORT]) + make_runs(tmp_path / "b", [SHORT])
    assert tables.folder_names(runs) == [f"{name}/00-digits-micro-0.01-w4-s0" for name in "ab"]
    assert tables.folder_names(runs[:1]) == ["00-digits-micro-0.01-w4-s0"]


def test_options_are_common_or_differ(runs: list[Run]) -> None:
    (section,) = sections(runs)
    common = dict(zip(*(cells(tables.configuration_table(section), key) for key in ("option", "value")), strict=True))
    several = dict(zip(*(cells(tables.differences_table(section), key) for key in ("option", "value")), strict=True))
    assert common["lr"] == "0.1"
    assert common["data"] == "none"
    assert several == {"method": "dense, micro", "density": "1.0, 0.01", "workers": "4, 8", "seed": "0, 1, 2"}
    assert not common.keys() & several.keys()
    assert common.keys() | several.keys() == runs[0].config.keys()


def test_the_environment_leaves_out_what_is_of_one_run(runs: list[Run]) -> None:
    (section,) = sections(runs)
    options = cells(tables.environment_table(section), "option")
    assert "torch" in options
    assert not {"command", "started"} & set(options)


def test_commands_and_options_to_run_it_again(runs: list[Run]) -> None:
    (section,) = sections(runs)
    lines = parsed(tables.commands_table(section))
    assert [line["command"] for line in lines] == [run.provenance["command"] for run in section.runs]
    assert [json.loads(line["config"]) for line in lines] == [dict(run.config) for run in section.runs]


def test_markdown_has_a_cell_for_each_column(odd: Section) -> None:
    for make in (tables.runs_table, tables.configuration_table, tables.differences_table, tables.commands_table):
        table = make(odd)
        lines = table.markdown().splitlines()
        assert len(lines) == 2 + len(table.rows)
        for line in lines:
            assert line.replace("\\|", "").count("|") == len(table.columns) + 1
            assert "<" not in line


def test_csv_keeps_hostile_texts_whole(odd: Section) -> None:
    errors = [line["error"] for line in parsed(tables.runs_table(odd))]
    assert HOSTILE.replace("\x00", "") in [error.replace("\x00", "") for error in errors]


def test_rows_are_plain_data(rows: list[SummaryRow]) -> None:
    assert all(dataclasses.is_dataclass(row) for row in rows)
    assert rows[0].series == ("dense", 1.0)
