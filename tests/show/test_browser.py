"""The report in a real browser without a network: its controls are clicked and pressed, and the page changes.

Headless Chromium over the DevTools protocol (`devtools.py`); skipped, by name, where there is no Chromium.
"""

from dataclasses import replace

import pytest
from tests.support.devtools import CHROMIUM, Browser
from tests.support.show_toys import toy_model, toy_plan, write_toy_run

from pipefit.plan.types import TradePoint
from pipefit.show.page import render_report
from pipefit.show.record import read_run
from pipefit.show.subject import make_subject
from pipefit.show.trace import from_timeline

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: no chromium or google-chrome in PATH")

WIDTHS = (390, 1200)


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    plan, cluster = toy_plan(stages=4, microbatches=4, replicas=(1, 1), hosts=2, devices=4)
    directory = write_toy_run(tmp_path_factory.mktemp("report") / "run", plan, cluster)
    return make_subject(plan, toy_model(9), cluster, read_run(directory))


@pytest.fixture(scope="module")
def file(subject):
    path = subject.record.path.parent / "report.html"
    path.write_text(render_report(subject), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser():
    with Browser() as found:
        yield found


@pytest.fixture
def page(browser, file):
    browser.size(1200, 900)
    browser.open(file)
    browser.settle()
    yield browser
    assert browser.problems == []


def drawn(page):
    return int(page.evaluate("document.getElementById('timeline').dataset.drawn"))


def view(page):
    return [float(page.evaluate(f"document.getElementById('timeline').dataset.{end}")) for end in ("from", "to")]


def rows(page):
    return int(page.evaluate("document.getElementById('timeline').dataset.rows"))


def pixels(page, selector="#timeline"):
    """How many pixels of the canvas are painted in the colour of a forward, nearly."""
    return page.evaluate(
        f"(() => {{ const c = document.querySelector('{selector}'), d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; let n = 0;"
        "for (let i = 0; i < d.length; i += 4) if (Math.abs(d[i]) < 12 && Math.abs(d[i+1] - 114) < 12"
        " && Math.abs(d[i+2] - 178) < 12) n++; return n; })()"
    )


def status(page, name="timeline"):
    return page.evaluate(f"document.getElementById('{name}-status').textContent")


def test_it_opens_without_asking_for_anything_else(page, file):
    assert set(page.requests) <= {file.resolve().as_uri(), "about:blank"}
    assert page.evaluate("performance.getEntriesByType('resource').length") == 0


def test_the_page_unpacks_the_very_actions_and_times(page, subject):
    unpacked = page.evaluate(
        "decodeRows(DATA.timeline).map(row => row.spans.map(({action: a, start, stop}) =>"
        " [a.kind, a.stage, a.microbatch, a.slice, a.peer, a.what, start, stop]))"
    )
    rows = [*from_timeline(subject.simulation.timeline).rows, *subject.record.trace.rows]
    assert len(unpacked) == len(rows) == 12
    for found, row in zip(unpacked, rows, strict=True):
        assert [tuple(span[:6]) for span in found] == [tuple(action) for action in row.actions]
        assert [span[6] for span in found] == pytest.approx(row.start_s.tolist(), abs=1e-8)
        assert [span[7] for span in found] == pytest.approx(row.stop_s.tolist(), abs=1e-8)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_sticks_out_and_everything_is_drawn(page, file, width, dark):
    page.size(width, 900, dark)
    page.open(file)
    page.settle()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    wanted = "rgb(15, 18, 22)" if dark else "rgb(246, 247, 248)"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == wanted
    assert drawn(page) > 50
    assert page.evaluate("document.querySelectorAll('[data-memory] svg path').length") == 2 * 4
    assert page.evaluate("document.querySelectorAll('#links-map rect.cell:not(.none)').length") > 4
    assert page.evaluate("document.querySelectorAll('#training svg path').length") == 2
    small = page.evaluate(
        "[...document.querySelectorAll('button, .segments label')].map(e => e.getBoundingClientRect())"
        ".filter(b => b.width && (b.height < 30 || b.width < 30)).length"
    )
    assert small == 0


def test_the_legend_hides_and_shows_a_kind_of_action(page):
    before, blue = drawn(page), pixels(page)
    assert blue > 500
    page.click("[data-kind=F]")
    forwards = 4 * 4 + 8 * 4  # four microbatches on each of four predicted and eight measured rows
    assert page.evaluate("document.querySelector('[data-kind=F]').getAttribute('aria-pressed')") == "false"
    assert pixels(page) < 50 and drawn(page) == before - forwards
    page.click("[data-kind=F]")
    assert drawn(page) == before and pixels(page) == blue


def test_rows_of_prediction_and_run_can_be_switched(page):
    assert rows(page) == 4 + 8
    page.click("[data-set=measured]")
    assert rows(page) == 4
    page.click("[data-set=measured]")
    page.click("[data-set=all]")
    assert rows(page) == 4 + 4
    page.click("[data-set=predicted]")
    assert rows(page) == 4


def test_the_critical_path_is_drawn_when_asked_for(page):
    dark = (
        "(() => { const c = document.getElementById('timeline'), d = c.getContext('2d')"
        ".getImageData(160, 28, c.width - 160, c.height - 28).data; let n = 0; for (let i = 0; i < d.length; i += 4)"
        " if (d[i] < 40 && d[i+1] < 40 && d[i+2] < 40 && d[i+3] > 200) n++; return n; })()"
    )
    before = page.evaluate(dark)
    page.click("[data-set=critical]")
    assert page.evaluate(dark) > before + 200


def test_buttons_zoom_move_and_show_all_again(page):
    whole = view(page)
    page.click("[data-view=in]")
    near = view(page)
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 2)
    page.click("[data-view=right]")
    moved = view(page)
    assert moved[0] > near[0] and moved[1] - moved[0] == pytest.approx(near[1] - near[0])
    assert status(page).startswith("Shown: ") and "measured end at" in status(page)
    width = page.evaluate("document.getElementById('timeline-thumb').getBoundingClientRect().width")
    full = page.evaluate("document.getElementById('timeline-overview').getBoundingClientRect().width")
    assert width == pytest.approx(full / 2, rel=0.02)
    page.click("[data-view=fit]")
    assert view(page) == pytest.approx(whole)


def test_an_action_that_is_clicked_is_told_with_both_times(page):
    page.click("#timeline", 170, 40)
    text = status(page)
    assert text.startswith("Forward, stage 0, microbatch 0. Predicted for lane 0:") and "Measured:" in text
    tip = page.evaluate("document.getElementById('timeline-tip').textContent")
    assert "Forward, stage 0, microbatch 0" in tip


def test_the_keyboard_walks_through_actions_and_zooms(page):
    page.evaluate("document.getElementById('timeline').focus()")
    page.key("ArrowRight", 39)
    assert status(page).startswith("Forward, stage 0, microbatch 0. Predicted for lane 0")
    for _ in range(3):
        page.key("ArrowRight", 39)
    assert "microbatch" in status(page) and "microbatch 0. " not in status(page)
    page.key("ArrowDown", 40)
    assert "Measured on device 0" in status(page)
    before = view(page)
    page.key("+")
    assert view(page)[1] - view(page)[0] < before[1] - before[0]
    page.key("0")
    assert view(page) == pytest.approx(before)
    page.key("Escape", 27)
    assert status(page).startswith("Shown: 0 to")


def test_toggles_work_from_the_keyboard(page):
    before = drawn(page)
    page.evaluate("document.querySelector('[data-kind=B]').focus()")
    page.key("Enter", 13)
    assert drawn(page) < before
    page.evaluate("document.querySelector('input[name=links-metric][value=bytes]').focus()")
    page.key("ArrowRight", 39)
    assert page.evaluate("document.getElementById('links-map').dataset.metric") == "time"


def test_the_heat_map_changes_its_measure_and_its_level(page):
    assert page.evaluate("document.getElementById('links-map').dataset.level") == "devices"
    devices = page.evaluate("document.querySelectorAll('#links-map rect').length")
    low = page.evaluate("document.getElementById('links-low').textContent")
    page.click("#links label:has([value=bandwidth])")
    assert page.evaluate("document.getElementById('links-low').textContent").endswith("B/s") and not low.endswith("/s")
    page.click("#links label:has([value=hosts])")
    assert page.evaluate("document.querySelectorAll('#links-map rect').length") == 4 < devices == 64
    page.click("#links-map rect[data-from='0'][data-to='1']")
    assert "host0 to host1:" in status(page, "links") and "a step" in status(page, "links")


def test_memory_is_drawn_to_the_peak_or_to_the_limit(page):
    limits = "document.querySelectorAll('#memory .limit-line').length"
    assert page.evaluate(limits) == 0, "the toy model uses little of 80 GB"
    page.click("#memory label:has([value=limit])")
    assert page.evaluate(limits) == 4
    page.click("#memory label:has([value=peak])")
    assert page.evaluate(limits) == 0


def test_the_theme_button_goes_round(page):
    colours = []
    for _ in range(3):
        page.click("#theme")
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    light, dark, auto = colours
    assert light == auto == "rgb(246, 247, 248)" and dark == "rgb(15, 18, 22)"


def test_pointing_at_the_loss_curve_names_the_step(page):
    page.click("#loss-chart svg")
    assert page.evaluate("document.querySelector('#loss-chart output').textContent").startswith("Step 1")


def test_a_point_of_memory_against_time_tells_what_it_is(browser, tmp_path):
    plan, cluster = toy_plan(stages=4, microbatches=4)
    points = (
        TradePoint(schedule="1f1b", recompute="full", memory_bytes=1e9, step_s=2.0),
        TradePoint(schedule="fit", recompute="none,full,full,full", memory_bytes=2e9, step_s=1.5, chosen=True),
        TradePoint(schedule="zb-v", recompute="none", memory_bytes=9e10, step_s=1.2, fits=False),
    )
    plan = replace(plan, prediction=replace(plan.prediction, trade=points))
    path = tmp_path / "report.html"
    path.write_text(render_report(make_subject(plan, toy_model(9), cluster)), encoding="utf-8")
    browser.size(1200, 900)
    browser.open(path)
    browser.settle()
    told = "document.getElementById('trade-picked').textContent"
    assert "1 none, 3 full" in browser.evaluate(told) and "this plan" in browser.evaluate(told)
    browser.evaluate("document.querySelectorAll('.trade-point')[2].dispatchEvent(new MouseEvent('click'))")
    assert browser.evaluate(told).startswith("zb-v, recompute none") and "83.8 GiB" in browser.evaluate(told)
    assert browser.evaluate("document.querySelectorAll('.trade-point.picked').length") == 1
    assert "does not fit" in browser.evaluate("document.querySelector('tr.picked').textContent")
    browser.evaluate("document.querySelectorAll('.trade-point')[0].focus()")
    assert browser.evaluate(told).startswith("1f1b, recompute full")
    assert browser.problems == []
