"""The report in a real browser, headless Chromium: no errors, no requests, and pointer, keyboard and size of screen."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from headscope.results import Analysis
from headscope.views.report.build import report
from headscope.views.text import token_label, visible
from tests.importance_samples import curve, importance
from tests.report_samples import EVIL, hostile, over_texts, small, with_types
from tests.views_samples import TOKENS

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium: the system's, else the one that Playwright installed."""
    path = next((found for found in map(shutil.which, NAMES) if found), None)
    with sync_playwright() as playwright:
        # Containers have neither the rights for its sandbox nor much shared memory.
        options = ["--no-sandbox", "--disable-dev-shm-usage"]
        running = playwright.chromium.launch(executable_path=path, args=options)
        yield running
        running.close()


class Opened:
    """A page from disk, and everything that must not happen on it.

    Attributes:
        seconds: What the page's thread worked until everything on the screen was drawn, however busy the machine is.
    """

    def __init__(self, browser: Browser, file: Path, **context) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}} | context)
        self.page: Page = self.context.new_page()
        self.troubles: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.troubles.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.troubles.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("popup", lambda popup: self.troubles.append("popup"))
        session = self.context.new_cdp_session(self.page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        self.page.goto(file.as_uri())
        self.page.locator("html[data-ready]").wait_for()
        measured = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
        self.seconds = measured["TaskDuration"]
        self.file = file

    def check(self) -> None:
        """No errors, no warnings, and nothing asked for but the file itself and what it holds."""
        assert self.troubles == []
        assert [url for url in self.requests if not url.startswith("data:")] == [self.file.as_uri()]


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[object]:
    """`show(analysis)` opens its report; at the end of the test, all pages are checked for trouble."""
    opened: list[Opened] = []

    def open_page(found: Analysis, context: dict | None = None, **more) -> Opened:
        file = tmp_path / f"page-{len(opened)}.html"
        report(found, file, **more)
        opened.append(Opened(browser, file, **context or {}))
        return opened[-1]

    yield open_page
    for one in opened:
        one.context.close()
        one.check()


def cell(page: Page, index: int):
    return page.locator(f'#grids td[data-index="{index}"]')


# ------------------------------------------------------------------ opening
def test_it_opens_fast_and_draws_the_first_head(show) -> None:
    found = small(layers=12, heads=12)
    opened = show(found)
    assert 0 < opened.seconds < 2
    page = opened.page
    expect(page.locator("#head-title")).to_contain_text("prev_token")
    expect(page.locator("#heatmap canvas").first).to_be_visible()
    assert page.locator("#grids td[data-index]").count() == 144


def test_ranking_and_curve_are_drawn_when_they_are_near(show) -> None:
    page = show(over_texts(), importance=importance(2, 4, errors=True), curve=curve()).page
    for name in ("ranked", "curve"):
        page.locator(f"#{name}").scroll_into_view_if_needed()
        expect(page.locator(f"#{name} canvas").first).to_be_visible()
    expect(page.locator("#ranked-column option:checked")).to_have_text("importance")
    page.locator("#ranked-column").select_option(label="entropy")
    expect(page.locator("#ranked-note")).to_contain_text("95 % intervals over texts")


# ------------------------------------------------------------------ pointer
def test_hover_shows_the_numbers(show) -> None:
    found = over_texts()
    page = show(found).page
    record = found.heads[5]
    cell(page, 5).hover()
    tip = page.locator("#tip")
    expect(tip).to_be_visible()
    expect(tip).to_contain_text(f"{record.name}: {record.pattern}")
    for name, value in record.metrics.items():
        row = tip.locator("tr", has=page.get_by_role("rowheader", name=name, exact=True))
        mark = "~" if name in record.at_chance else ""
        spread = record.spread[name]
        expect(row.locator("td")).to_have_text(f"{value:.3f}{mark} [{spread.low:.3f}, {spread.high:.3f}]")
    page.mouse.move(1, 1)
    expect(tip).to_be_hidden()


def test_hover_over_the_heatmap_shows_tokens_and_weight(show) -> None:
    found = small()
    page = show(found).page
    cell(page, 3).click()
    row = TOKENS.index("sat")
    frame = page.locator("#heatmap .bk-CartesianFrame").bounding_box()
    side = frame["width"] / len(TOKENS)
    page.mouse.move(frame["x"] + (row - 1 + 0.5) * side, frame["y"] + (row + 0.5) * side, steps=3)
    values = page.locator(".bk-tooltip-row-value")
    expect(values).to_have_text(["sat", "cat", re.compile(r"^0\.\d{3}\s*$")])
    shown = float(values.nth(2).inner_text())
    assert abs(shown - found.maps[0].weights[3, row, row - 1]) <= 1 / 255 + 0.0005


def test_click_opens_the_head(show) -> None:
    found = with_types(small())
    page = show(found).page
    cell(page, 7).click()
    expect(page.locator("#head-title")).to_contain_text(f"L1H3 {found.heads[7].pattern}")
    expect(cell(page, 7)).to_have_attribute("aria-selected", "true")
    numbers = page.locator("#head-numbers")
    for name, value in found.heads[7].metrics.items():
        row = numbers.locator("tr", has=page.get_by_role("rowheader", name=name, exact=True))
        expect(row.locator("td").first).to_contain_text(f"{value:.3f}")
    expect(page.locator("#head-types")).to_contain_text("score 0.812 [0.700, 0.900]")
    page.locator("#next").click()
    expect(page.locator("#head-title")).to_contain_text("L0H0")
    expect(page.locator("#head-types")).to_be_empty()


def test_the_map_shows_any_number(show) -> None:
    found = small()
    page = show(found).page
    letters = {
        "attention_sink": "S",
        "prev_token": "P",
        "next_token": "N",
        "self_attend": "I",
        "focused": "F",
        "broad": "B",
    }
    for i, record in enumerate(found.heads):
        assert cell(page, i).inner_text().startswith(letters[record.pattern])
        assert cell(page, i).get_attribute("aria-label").startswith(f"{record.name}: {record.pattern}")
    page.locator("#map-column").select_option(label="sink")
    for i, record in enumerate(found.heads):
        expect(cell(page, i)).to_have_text(f"{record.metrics['sink']:.2f}".replace("0.", "."))
    page.locator("#all-heads summary").click()
    row = page.locator("#all-heads tbody tr").nth(4)
    expect(row).to_contain_text(f"L1H0{found.heads[4].pattern}{found.heads[4].metrics['sink']:.3f}")


def test_lines_join_tokens(show) -> None:
    found = small()
    page = show(found).page
    cell(page, 1).click()
    page.get_by_label("lines").check()
    expect(page.locator("#heatmap")).to_be_hidden()
    weights = found.maps[0].weights[1]
    lines = page.locator("#lines line")
    assert abs(lines.count() - int((weights >= 0.02).sum())) <= int((abs(weights - 0.02) < 0.003).sum())
    queries, keys = (page.locator("#lines ol").nth(i).get_by_role("button") for i in range(2))
    assert (queries.count(), keys.count()) == (len(TOKENS), len(TOKENS))
    queries.nth(3).hover()
    assert abs(float(keys.nth(2).locator(".share").inner_text()) - weights[3, 2]) < 0.01
    shown = page.locator("#lines line:not([hidden])")
    assert abs(shown.count() - int((weights[3] >= 0.02).sum())) <= int((abs(weights[3] - 0.02) < 0.003).sum())
    queries.nth(3).click()
    page.mouse.move(1, 1)
    expect(queries.nth(3)).to_have_attribute("aria-pressed", "true")
    assert shown.count() < lines.count()


# ------------------------------------------------------------------ keyboard and screen readers
def test_the_keyboard_moves_over_the_map_opens_and_comes_back(show) -> None:
    page = show(small()).page
    page.locator("#map-column").focus()
    page.keyboard.press("Tab")
    expect(cell(page, 0)).to_be_focused()
    for key, index in (("ArrowRight", 1), ("ArrowDown", 5), ("End", 7), ("ArrowRight", 7), ("Home", 4), ("ArrowUp", 0)):
        page.keyboard.press(key)
        expect(cell(page, index)).to_be_focused()
    outline = cell(page, 0).evaluate(
        "(cell) => getComputedStyle(cell).outlineStyle + getComputedStyle(cell).outlineWidth"
    )
    assert outline == "solid3px"
    expect(page.locator("#tip")).to_contain_text("L0H0")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator("#head-title")).to_be_focused()
    expect(page.locator("#head-title")).to_contain_text("L0H1")
    page.keyboard.press("Escape")
    expect(cell(page, 1)).to_be_focused()


def test_a_screen_reader_finds_grid_head_and_tables(show) -> None:
    found = small()
    page = show(found).page
    grid = page.get_by_role("grid", name="self: layers down, heads across")
    assert grid.get_by_role("gridcell").count() == 8
    assert grid.get_by_role("gridcell", name=f"L1H2: {found.heads[6].pattern}").count() == 1
    page.locator("#looks summary").click()
    table = page.locator("#looks table")
    layer, head = divmod(int(page.locator("#grids td[aria-selected]").get_attribute("data-index")), 4)
    weights = found.maps[layer].weights[head]
    best = TOKENS[int(weights[3].argmax())]
    expect(table.locator("tbody tr").nth(3)).to_contain_text(f"{TOKENS[3]}{best} {weights[3].max():.2f}")
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('button, select, input, [role=img], [role=grid]')].filter((e) =>
            !e.closest('.bk-Figure') && !e.textContent && !e.labels?.length
            && !e.getAttribute('aria-label') && !e.getAttribute('aria-labelledby')).length"""
    )
    assert unnamed == 0


# ------------------------------------------------------------------ screens
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_it_fits_phones_and_follows_light_and_dark(show, width: int, scheme: str) -> None:
    context = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    page = show(with_types(small(layers=3, heads=12)), context, curve=curve()).page
    page.get_by_label("lines").check()
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    colors = page.evaluate(
        "() => [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    dark, light = (sum(map(int, color[4:-1].split(", "))) < 300 for color in colors)
    assert (dark, light) == ((True, False) if scheme == "dark" else (False, True))


# ------------------------------------------------------------------ hostile text
def test_a_hostile_page_runs_no_script(show) -> None:
    page = show(hostile(), command=EVIL[0], importance=importance(1, 2, stack=EVIL[0], warnings=EVIL)).page
    page.evaluate("() => { window.alert = () => { document.title = 'run'; }; }")
    cell(page, 0).hover()
    cell(page, 1).click()
    expect(page.locator("#head-title")).to_contain_text(visible(EVIL[1]))
    for summary in page.locator("summary:visible").all():
        summary.click()
    box = page.locator("#heatmap").bounding_box()
    for share in (0.4, 0.5, 0.6):
        page.mouse.move(box["x"] + share * box["width"], box["y"] + share * box["height"])
        page.wait_for_timeout(100)
    page.get_by_label("lines").check()
    page.locator("#lines button").first.click()
    page.locator("#map-column").select_option(index=2)
    page.locator("#ranked").scroll_into_view_if_needed()
    expect(page.locator("#ranked canvas").first).to_be_visible()
    assert page.locator("img, iframe, object, embed, a[href], [onerror], [onload]").count() == 0
    assert page.locator("script").count() == 4
    assert page.title() == f"Attention heads of {visible(EVIL[1])}"
    tokens = page.locator("#lines ol").first.locator("bdi").all_inner_texts()
    assert tokens == [token_label(token, 24) for token in EVIL]
