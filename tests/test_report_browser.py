"""The page in a browser: nothing is fetched, nothing complains, everything is seen at two widths and in two themes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradsieve.report import write_report
from gradsieve.report.figures import EXHIBITS
from synthetic_runs import HOSTILE, Plan, comparison, make_runs, odd_plans

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
WIDTHS = (1280, 390)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="neither chromium nor google-chrome is installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    plans = [
        *comparison(2),
        Plan("micro(control='paper')"),
        *comparison(1, world=8, labels=("dense", "micro")),
        Plan("deft", status="failed", error="RuntimeError: worker 2 was lost", stop_after=20),
    ]
    return write_report(make_runs(folder / "runs", plans), folder / "out")


@pytest.fixture(scope="module")
def hostile_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    plans = [replace(plan, task=HOSTILE, model=HOSTILE) for plan in odd_plans()]
    return write_report(make_runs(folder / "runs", plans), folder / "out", title=HOSTILE)


Open = Callable[..., Any]


@pytest.fixture
def opened(browser: Any) -> Iterator[Open]:
    """Opens pages; at the end none may have complained or asked for anything but itself."""
    contexts, complaints, requests, pages = [], [], [], []

    def open_page(path: Path, width: int = 1280, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        pages.append(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert requests == pages


def background(page: Any) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_sticks_out(opened: Open, report: Path, tmp_path: Path, width: int, scheme: str) -> None:
    page = opened(report, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.screenshot(path=str(tmp_path / f"{width}-{scheme}.png"), full_page=True)
    assert (tmp_path / f"{width}-{scheme}.png").stat().st_size > 50_000


@pytest.mark.parametrize("width", WIDTHS)
def test_hostile_texts_do_no_harm(opened: Open, hostile_report: Path, width: int) -> None:
    page = opened(hostile_report, width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("img").count() == 0
    assert "<img src=x" in page.title()


def test_all_figures_are_drawn(opened: Open, report: Path) -> None:
    boxes = opened(report).evaluate(
        """() => [...document.querySelectorAll("figure > svg")].map((svg) => {
            const marks = [...svg.querySelectorAll("[data-series] path, [data-series] use")];
            const seen = marks.map((mark) => mark.getBoundingClientRect()).filter((box) => box.width + box.height > 1);
            const box = svg.getBoundingClientRect();
            return [box.width, box.height, seen.length];
        })"""
    )
    assert len(boxes) == len(EXHIBITS)
    for width, height, marks in boxes:
        assert width > 300
        assert height > 150
        assert marks > 0


@pytest.mark.parametrize("width", WIDTHS)
def test_texts_in_figures_can_be_read_and_stay_inside(opened: Open, report: Path, width: int) -> None:
    texts = opened(report, width).evaluate(
        """() => [...document.querySelectorAll("figure > svg text")].map((text) => {
            const svg = text.closest("svg"), frame = svg.getBoundingClientRect(), box = text.getBoundingClientRect();
            const size = parseFloat(getComputedStyle(text).fontSize) * frame.width / svg.viewBox.baseVal.width;
            return [text.textContent, size, box.left - frame.left, frame.right - box.right];
        })"""
    )
    assert texts
    for words, size, left, right in texts:
        assert size > 8, words
        assert min(left, right) > -2, words


def test_colours_follow_the_theme(opened: Open, report: Path) -> None:
    page = opened(report)
    light = background(page)
    stroke = "getComputedStyle(document.querySelector('figure [data-series] > path')).stroke"
    before = page.evaluate(stroke)
    page.click("[data-theme-toggle]")
    assert background(page) != light
    assert page.evaluate(stroke) != before
    page.click("[data-theme-toggle]")
    assert background(page) == light


def test_the_chosen_theme_is_remembered(opened: Open, report: Path) -> None:
    page = opened(report)
    page.click("[data-theme-toggle]")
    dark = background(page)
    second = page.context.new_page()
    second.goto(report.as_uri())
    assert background(second) == dark


def test_the_system_decides_until_the_reader_does(opened: Open, report: Path) -> None:
    assert background(opened(report, scheme="dark")) != background(opened(report, scheme="light"))


def test_a_method_is_hidden_everywhere_and_comes_back(opened: Open, report: Path) -> None:
    page = opened(report)
    entry = page.locator("[data-toggle]", has_text="topk")
    place = entry.get_attribute("data-toggle")
    marks = page.locator(f"figure [data-series='{place}']")
    others = page.locator(f"figure [data-series]:not([data-series='{place}']).off")
    assert marks.count() > 10
    entry.click()
    assert page.locator(f"figure [data-series='{place}']:not(.off)").count() == 0
    assert not marks.first.is_visible()
    assert entry.get_attribute("aria-pressed") == "false"
    assert others.count() == 0
    entry.click()
    assert page.locator("figure .off").count() == 0
    assert entry.get_attribute("aria-pressed") == "true"


def test_a_method_can_be_seen_alone_and_all_again(opened: Open, report: Path) -> None:
    page = opened(report)
    page.locator("[data-toggle]", has_text="union").dblclick()
    assert page.locator("[data-toggle][aria-pressed=true]").all_inner_texts() == ["union"]
    page.click("[data-all]")
    assert page.locator("figure .off").count() == 0
    assert not page.locator("[data-all]").is_visible()


def test_wide_tables_scroll_in_their_box(opened: Open, report: Path) -> None:
    page = opened(report, 390)
    moved = page.evaluate(
        """() => [...document.querySelectorAll(".scroll")].map((box) => {
            box.scrollLeft = 60;
            return [box.scrollWidth > box.clientWidth + 60, box.scrollLeft];
        })"""
    )
    assert [left for wide, left in moved if wide] == [60] * sum(wide for wide, _ in moved)
    assert sum(wide for wide, _ in moved) >= 2
    assert page.evaluate("document.querySelector('.scroll').getBoundingClientRect().right") <= 390


def test_it_works_without_storage(browser: Any, report: Path) -> None:
    context = browser.new_context()
    context.add_init_script(
        "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('refused'); } })"
    )
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(report.as_uri())
    light = background(page)
    page.click("[data-theme-toggle]")
    assert background(page) != light
    assert errors == []
    context.close()
