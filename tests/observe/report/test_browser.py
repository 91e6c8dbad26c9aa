"""The page in a real browser: nothing on its console, nothing beyond its width, readable in the dark and on paper."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aliquot.observe.report.page import write_report
from tests.observe.report.directories import step, whole_run, write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium (apt install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra `dev`")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A whole run, one with nothing in it, one with long words, and two side by side."""
    folder = tmp_path_factory.mktemp("pages")
    whole = whole_run(folder / "whole")
    empty = write_run(folder / "empty")
    long = whole_run(folder / "long", name="x" * 300, data={"path": "y" * 500}, steps=[step(n) for n in (1, 2)])
    shown = {"whole": [whole], "empty": [empty], "long": [long], "several": [whole, long, empty]}
    for name, directories in shown.items():
        write_report(directories, folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in shown}


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("name", ["whole", "empty", "long", "several"])
def test_quiet_and_no_wider_than_the_window(browser: Any, pages: dict[str, Path], name: str, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if request.url.startswith("http") else None)
    page.goto(pages[name].as_uri())
    for summary in page.query_selector_all("summary"):
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert said == []
    page.close()


def test_text_of_pictures_is_large_enough_to_read(browser: Any, pages: dict[str, Path]) -> None:
    for width in (400, 1280):
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.goto(pages["whole"].as_uri())
        heights = page.evaluate(
            "[...document.querySelectorAll('svg .tick')].map(t => t.getBoundingClientRect().height)"
        )
        assert len(heights) > 40 and min(heights) >= 9
        # Of a scale, that is: no number lies on another.
        overlaps = page.evaluate(
            """[...document.querySelectorAll('svg')].map(svg => {
                const boxes = [...svg.querySelectorAll('.tick:not(.phase)')].map(t => t.getBoundingClientRect());
                return boxes.filter((a, i) => boxes.some((b, j) => i < j && a.left < b.right - 1 && b.left < a.right - 1
                    && a.top < b.bottom - 3 && b.top < a.bottom - 3)).length;
            })"""
        )
        assert set(overlaps) == {0}
        page.close()


def test_colours_follow_the_scheme_and_paper_is_white(browser: Any, pages: dict[str, Path]) -> None:
    page = browser.new_page()
    page.goto(pages["whole"].as_uri())
    brightness = {}
    for name, media in {"light": {"color_scheme": "light"}, "dark": {"color_scheme": "dark"},
                        "print": {"color_scheme": "dark", "media": "print"}}.items():  # fmt: skip
        page.emulate_media(**media)
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness[name] = sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))
    assert brightness["light"] > 700 and brightness["dark"] < 100 and brightness["print"] == 3 * 255
    page.close()


def test_hover_shows_the_numbers_of_a_chart(browser: Any, pages: dict[str, Path]) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(pages["whole"].as_uri())
    plot = page.query_selector("#loss .plot")
    assert not page.query_selector("#loss .hint").is_visible()
    plot.hover(position={"x": plot.bounding_box()["width"] / 2, "y": 50})
    shown = page.query_selector("#loss .hint")
    assert shown.is_visible() and shown.inner_text().startswith("step ") and "loss" in shown.inner_text()
    page.close()


def test_without_scripts_the_page_is_whole(browser: Any, pages: dict[str, Path]) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(pages["whole"].as_uri())
    assert "Where the time of a step goes" in page.inner_text("body")
    assert page.locator("svg", has_text="Loss").first.is_visible()
    context.close()
