"""A lane's two stages differ in shade and W from I, in the pixels of a real browser (see test_browser.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.devtools import CHROMIUM, Browser
from tests.support.show_toys import toy_model, toy_plan

from pipefit.schedule import vee_placement
from pipefit.show.page import render_report
from pipefit.show.subject import make_subject

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: no chromium or google-chrome in PATH")

STYLES = Path(__file__).parents[2] / "src" / "pipefit" / "show" / "assets" / "report.css"
PLAIN = {"F": (0, 114, 178), "I": (230, 159, 0), "W": (0, 158, 115)}
LIGHT = {"F": (148, 196, 223), "I": (245, 215, 148), "W": (148, 214, 196)}
"""58 % of white in the colour above."""
SPY = """(() => { window.texts = []; const draw = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
  if (this.canvas.id === "timeline") texts.push(String(text)); return draw.call(this, text, ...rest); }; })()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


def opened(browser: Browser, path: Path, **decisions: object) -> Browser:
    plan, cluster = toy_plan(blocks=13, microbatches=8, **decisions)
    path.write_text(render_report(make_subject(plan, toy_model(13), cluster)), encoding="utf-8")
    browser.size(1200, 900)
    browser.open(path)
    browser.settle()
    return browser


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = tmp_path_factory.mktemp("shades") / "v.html"
    yield opened(browser, path, stages=8, placement=vee_placement(4), schedule="v-half")
    assert browser.problems == []


def places(page: Browser, colour: tuple[int, int, int]) -> list[int]:
    """(number of pixels of a colour, x and y of the first of them on a row of its kind)."""
    tests = " && ".join(f"Math.abs(d[i + {k}] - {value}) < 3" for k, value in enumerate(colour))
    found: list[int] = page.evaluate(
        "(() => { const c = document.getElementById('timeline'), d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data, r = c.width / c.clientWidth; let n = 0, at = 0;"
        f" for (let i = 0; i < d.length; i += 4) if ({tests}) {{ n++; at = at || i / 4; }}"
        " return [n, at % c.width / r, Math.floor(at / c.width) / r]; })()"
    )
    return found


def test_the_stages_of_a_lane_differ_in_shade_and_w_from_i(page: Browser) -> None:
    for kind in "FIW":
        assert places(page, PLAIN[kind])[0] > 300, kind
        assert places(page, LIGHT[kind])[0] > 300, kind
    assert "A lane's later stages are lighter." in page.evaluate("document.querySelector('.lead').textContent")


def test_the_light_ones_are_the_way_up(page: Browser) -> None:
    for colours, stages in ((PLAIN, "0123"), (LIGHT, "4567")):
        for kind, name in (("F", "Forward"), ("I", "Input gradient"), ("W", "Weight gradient")):
            _, x, y = places(page, colours[kind])
            page.click("#timeline", x + 1, y + 1)
            status = page.evaluate("document.getElementById('timeline-status').textContent")
            assert re.match(rf"{name}, stage [{stages}], microbatch \d", status), (kind, status)
    page.key("Escape", 27)


def test_narrow_boxes_show_the_microbatch_alone(page: Browser) -> None:
    page.evaluate(SPY)
    page.click("[data-view=fit]")
    page.settle()
    narrow = page.evaluate("texts.splice(0)")
    assert {str(m) for m in range(8)} <= set(narrow) and not any(re.fullmatch(r"\d[FIW]\d", t) for t in narrow)
    for _ in range(2):
        page.click("[data-view=in]")
    page.settle()
    wide = page.evaluate("texts.splice(0)")
    assert {text[1] for text in wide if re.fullmatch(r"\d[FIW]\d", text)} == set("FIW")


def test_one_stage_a_lane_has_no_light_shade(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, tmp_path / "plain.html", stages=4, schedule="zb-h1")
    for kind in "FIW":
        assert places(page, PLAIN[kind])[0] > 300
        assert places(page, LIGHT[kind])[0] < 100, "more than the edges of letters and boxes"
    assert "lighter" not in page.evaluate("document.querySelector('.lead').textContent")


def test_dark_ink_is_readable_on_every_light_shade() -> None:
    """WCAG 2.1: a contrast of at least 4.5."""

    def luminance(colour: tuple[float, ...]) -> float:
        parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    ink = luminance((0x1B, 0x1F, 0x24))
    found = re.findall(r"--[fiwb]: #(\w\w)(\w\w)(\w\w)", STYLES.read_text())
    assert len(found) == 8
    for hexes in found:
        light = tuple(int(part, 16) * 0.42 + 255 * 0.58 for part in hexes)
        assert (luminance(light) + 0.05) / (ink + 0.05) >= 4.5
