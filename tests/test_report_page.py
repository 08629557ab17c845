from __future__ import annotations

import csv
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gradsieve.report import MissingExtraError, write_report
from gradsieve.report.figures import EXHIBITS
from synthetic_runs import HOSTILE, PERPLEXITY, Plan, comparison, make_runs, odd_plans

SHORT = Plan(epochs=3, steps_per_epoch=4)
TABLES = {"summary", "frontier", "runs", "configuration", "differences", "environment", "commands", "claims"}
VOID = {"meta", "link", "br", "wbr", "img", "input"}


class Tags(HTMLParser):
    """Every tag of a page with its attributes, and the text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open[-1:]):
            self.text += data

    def attributes(self, name: str) -> list[str]:
        return [attributes[name] or "" for _, attributes in self.tags if name in attributes]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of eight methods and three seeds, long enough to be thinned, at two worlds."""
    folder = tmp_path_factory.mktemp("report")
    plans = [*comparison(3, epochs=10, steps_per_epoch=50), *comparison(1, world=8, labels=("dense", "micro"))]
    return write_report(make_runs(folder / "runs", plans), folder / "out", title="Eight methods").parent


@pytest.fixture(scope="module")
def page(output: Path) -> str:
    return (output / "index.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def odd_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("odd")
    runs = make_runs(folder / "runs", [replace(plan, epochs=5) for plan in odd_plans()])
    return write_report(runs, folder / "out", title=HOSTILE).read_text(encoding="utf-8")


def test_every_figure_is_in_the_page_and_beside_it(output: Path, page: str) -> None:
    tags = Tags(page)
    ids = [attributes.get("id") for tag, attributes in tags.tags if tag == "figure"]
    assert ids == [exhibit.name for exhibit in EXHIBITS]
    assert "No figure" not in page
    assert {path.name for path in (output / "figures").iterdir()} == {
        f"{exhibit.name}.{suffix}" for exhibit in EXHIBITS for suffix in ("svg", "png", "csv")
    }


def test_every_table_is_beside_the_page(output: Path) -> None:
    files = {f"{table}.{suffix}" for table in TABLES for suffix in ("csv", "md")}
    assert {path.name for path in (output / "tables").iterdir()} == files


def test_the_page_is_well_formed_and_small(page: str) -> None:
    tags = Tags(page)
    assert tags.open == []
    assert len(page.encode()) < 2_000_000
    assert page.startswith("<!doctype html>")


def test_ids_are_unique(page: str) -> None:
    assert [name for name, number in Counter(Tags(page).attributes("id")).items() if number > 1] == []


def test_the_page_reaches_out_for_nothing(page: str) -> None:
    tags = Tags(page)
    links = tags.attributes("href") + tags.attributes("src")
    assert links
    assert all(link.startswith(("#", "figures/", "tables/", "data:,")) for link in links)
    assert tags.attributes("src") == []
    assert "http:" not in page
    assert "https:" not in page
    assert "@import" not in page
    (policy,) = [content for content in tags.attributes("content") if "default-src" in content]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:")


def test_every_link_to_a_file_leads_there(output: Path, page: str) -> None:
    links = [link for link in Tags(page).attributes("href") if link.startswith(("figures/", "tables/"))]
    assert len(links) >= 3 * len(EXHIBITS)
    assert all((output / link).is_file() for link in links)


def test_references_within_figures_are_met(page: str) -> None:
    tags = Tags(page)
    wanted = {link[1:] for link in tags.attributes("href") if link.startswith("#")}
    wanted |= {clip.removeprefix("url(#").removesuffix(")") for clip in tags.attributes("clip-path")}
    assert wanted
    assert wanted <= set(tags.attributes("id"))


def test_headline_and_legend(page: str) -> None:
    text = Tags(page).text
    assert "Eight methods" in text
    assert "of the bytes of dense and ends" in text
    assert "4 workers (also 8)" in text
    toggles = Tags(page).attributes("data-toggle")
    assert toggles == [str(place) for place in range(8)]


def test_figures_carry_their_data(output: Path) -> None:
    with (output / "figures" / "density-by-iteration.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["series"] for row in rows} == {"topk", "cltk", "hard_threshold", "micro", "exdyna", "iwp", "union"}
    assert len(rows) == 7 * 400


def test_the_same_runs_make_the_same_files(tmp_path: Path) -> None:
    runs = make_runs(tmp_path / "runs", [SHORT])
    one, two = (write_report(runs, tmp_path / name).parent for name in ("one", "two"))
    files = [path.relative_to(one) for path in one.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert all((one / file).read_bytes() == (two / file).read_bytes() for file in files)


def test_hostile_texts_come_out_escaped(odd_page: str) -> None:
    tags = Tags(odd_page)
    assert tags.open == []
    assert "img" not in {tag for tag, _ in tags.tags}
    assert [tag for tag, _ in tags.tags].count("script") == 1
    assert "onerror" not in {name for _, attributes in tags.tags for name in attributes}
    assert "</script><img src=x onerror=alert(1)>" in tags.text


def test_odd_runs_are_told_of(odd_page: str) -> None:
    text = Tags(odd_page).text
    assert "3 runs did not finish" in text
    assert "diverged" in text
    assert "No figure: it needs evaluated runs of one method with several world sizes." in text
    assert "times of a simulation" in text


def test_times_of_runs_made_at_a_time_are_told_of(tmp_path: Path) -> None:
    runs = make_runs(tmp_path / "runs", [SHORT])
    told = [{**run.header["provenance"], "command": "gradsieve compare --jobs 3"} for run in runs]
    beside = [replace(run, header={**run.header, "provenance": new}) for run, new in zip(runs, told, strict=True)]
    texts = [
        Tags(write_report(found, tmp_path / name).read_text(encoding="utf-8")).text
        for name, found in (("alone", runs), ("beside", beside))
    ]
    assert ["Up to 3 runs were made at a time" in text for text in texts] == [False, True]


def test_a_run_without_steps_makes_a_page(tmp_path: Path) -> None:
    runs = make_runs(tmp_path / "runs", [replace(SHORT, stop_after=0, status="failed", error="no space left")])
    text = Tags(write_report(runs, tmp_path / "out").read_text(encoding="utf-8")).text
    assert text.count("No figure") == len(EXHIBITS)
    assert "no space left" in text
    assert list((tmp_path / "out" / "figures").iterdir()) == []


def test_tasks_have_sections_of_their_own(tmp_path: Path) -> None:
    plans = [
        *(SHORT, replace(SHORT, seed=1, extra=(("lr", 0.5),))),
        replace(SHORT, task="text", model="lstm", measure=PERPLEXITY),
    ]
    page = write_report(make_runs(tmp_path / "runs", plans), tmp_path / "out")
    tags = Tags(page.read_text(encoding="utf-8"))
    assert max(Counter(tags.attributes("id")).values()) == 1
    assert [tag for tag, _ in tags.tags].count("figure") == 2 * len(EXHIBITS)
    assert "digits · mlp" in tags.text
    assert "Perplexity by epoch" in tags.text
    assert tags.text.count("differ in more than the seed (lr)") == 1
    assert (page.parent / "tables" / "2-summary.csv").is_file()
    assert (page.parent / "figures" / "1-measure-by-epoch.svg").is_file()


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], tmp_path)


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = make_runs(tmp_path / "runs", [SHORT])
    monkeypatch.delitem(sys.modules, "gradsieve.report.page", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r"jinja2.*pip install 'gradsieve\[report\]'"):
        write_report(runs, tmp_path / "out")


def test_rows_need_neither_matplotlib_nor_jinja() -> None:
    check = "import sys, gradsieve, gradsieve.report; assert not {'matplotlib', 'jinja2'} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", check], timeout=60, check=True)


def test_writing_needs_no_pyplot_and_prints_nothing(tmp_path: Path) -> None:
    make_runs(tmp_path / "runs", [SHORT])
    check = f"""
import sys, pathlib, gradsieve.report, gradsieve.runs
folders = gradsieve.runs.find_runs([pathlib.Path({str(tmp_path / "runs")!r})])
gradsieve.report.write_report([gradsieve.runs.read_run(f) for f in folders], pathlib.Path({str(tmp_path / "out")!r}))
assert "matplotlib.pyplot" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", check], capture_output=True, timeout=60, check=True)
    assert done.stdout == done.stderr == b""
