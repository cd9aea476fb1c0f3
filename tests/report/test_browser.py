"""The page in a real browser: the slider redraws, nothing is loaded, nothing goes wrong."""

import re
import shutil
import subprocess
import tarfile
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LinearRegression

from esvdfair import Effort, ESVDFair
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.report import write_report

playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here (Debian: apt install chromium)")

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]
# tables that are cut, and places of lines that a name stands on
CUT = """[...document.querySelectorAll('.scroll')]
    .filter((table) => !table.closest('details') && table.scrollWidth > table.clientWidth).length"""
CROSSED = """id => {
    const boxes = [...document.querySelectorAll(`#${id} text.name`)].map((name) => name.getBBox());
    const within = (b, { x, y }) => x > b.x && x < b.x + b.width && y > b.y + 2 && y < b.y + b.height - 2;
    const place = (path, i) => path.getPointAtLength((path.getTotalLength() * i) / 400);
    const places = (path) => Array.from({ length: 400 }, (_, i) => place(path, i));
    const lines = [...document.querySelectorAll(`#${id} path.curve`)].flatMap(places);
    return lines.filter((point) => boxes.some((box) => within(box, point))).length;
}"""
AXE = "axe-core@4.14.0"
"""Checks accessibility; MPL 2.0 and half a megabyte, so npm fetches it and it is not in the repository."""
# contrast of the texts in charts with the page, which axe leaves out
CONTRAST = """() => {
    const scale = (colour) => (colour.includes('srgb') ? 1 : 255);
    const parts = (colour) => colour.match(/[0-9.]+/g).slice(0, 3).map((part) => part / scale(colour));
    const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const weights = [0.2126, 0.7152, 0.0722];
    const light = (colour) => parts(colour).map(linear).reduce((sum, part, i) => sum + part * weights[i], 0);
    const page = light(getComputedStyle(document.body).backgroundColor);
    const contrast = (text) => {
        const own = light(getComputedStyle(text).fill);
        return (Math.max(own, page) + 0.05) / (Math.min(own, page) + 0.05);
    };
    return Math.min(...[...document.querySelectorAll('svg text')].map(contrast));
}"""
CHARTS = ["density-before", "cdf-before", "cdf-after", "tradeoff", "density-step", "changes", "ratios"]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def address(page, tmp_path_factory):
    place = tmp_path_factory.mktemp("report") / "report.html"
    place.write_text(page, encoding="utf-8")
    return place.as_uri()


@pytest.fixture
def visit(browser, address):
    """Open the page; at the end, it must have asked for nothing and complained of nothing."""
    troubles, requests, contexts = [], [], []

    def opened(address=address, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: troubles.append(message.text))
        tab.on("pageerror", lambda error: troubles.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(address)
        tab.wait_for_selector("#changes svg")
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert troubles == []
    assert len(requests) == len(contexts)
    assert all(request.startswith("file:") for request in requests)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """The address of a page with eight groups of long names, and salaries."""
    rng = np.random.default_rng(0)
    groups = pd.DataFrame({
        "origin": rng.choice(["Hispanic or Latino", "African-American", "Caucasian", "Other"], 2000),
        "sex": rng.choice(["female", "male"], 2000),
    })  # fmt: skip
    X = pd.DataFrame(rng.normal(size=(2000, 3)), columns=["years in the last position", "age", "rent"])
    X["age"] += (groups["origin"] == "Other") - 0.5 * (groups["sex"] == "male")
    y = 30_000 + 8_000 * X.sum(axis=1) + rng.normal(scale=3_000, size=2000)
    fair = ESVDFair(LinearRegression().fit(X, y), method="parity", effort=Effort.quick())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ESVDFairWarning)  # three columns cannot serve eight groups
        fair.fit(X, y, sensitive_features=groups)
    place = tmp_path_factory.mktemp("crowded") / "report.html"
    write_report(place, fair, X, y, sensitive_features=groups, predicts="salary", unit="EUR a year")
    return place.as_uri()


@pytest.fixture(scope="module")
def axe(request):
    """The source of axe-core, fetched once."""
    place = request.config.cache.mkdir("axe-core") / f"{AXE}.js"
    if not place.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("there is no npm here to fetch axe-core")
        fetch = [npm, "pack", "--silent", "--pack-destination", place.parent, AXE]
        done = subprocess.run(fetch, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            pytest.skip(f"npm cannot fetch axe-core: {done.stderr.strip()[-200:]}")
        with tarfile.open(place.parent / done.stdout.split()[-1]) as archive:
            place.write_bytes(archive.extractfile("package/axe.min.js").read())
    return place.read_text("utf-8")


def drawn(tab, name):
    return tab.locator(f"#{name}").inner_html()


def pages_printed(tab):
    printed = tab.pdf(format="A4", margin=dict.fromkeys(("top", "bottom", "left", "right"), "15mm"))
    return len(re.findall(rb"/Type\s*/Page\b", printed))


def test_every_chart_is_drawn_and_no_name_runs(visit):
    tab = visit()
    for name in CHARTS:
        assert tab.locator(f"#{name} svg").count() == 1
        assert "NaN" not in drawn(tab, name)
    tab.locator("#engineers summary").click()
    for name in ("spectrum", "layers"):  # drawn when they are opened, at their full width
        tab.wait_for_function("n => document.querySelector(`#${n} svg`)?.getBoundingClientRect().width > 500", arg=name)
        assert drawn(tab, name).startswith('<svg viewBox="0 0 9')
        assert "NaN" not in drawn(tab, name)
    assert tab.title().startswith("Repair report")
    assert tab.locator("#density-before svg text.name").first.text_content().startswith("<img src=x")


def test_the_slider_redraws_by_keyboard_and_a_dot_can_be_chosen(visit):
    tab = visit()
    slider, readout = tab.locator("#slider"), tab.locator("#readout")
    pays = tab.locator("#of-groups tbody tr").first.locator("td")  # rows; then pairs of before and here
    start = drawn(tab, "density-step"), drawn(tab, "tradeoff"), readout.text_content()
    assert "the chosen model" in start[2]
    slider.press("Home")
    untouched = drawn(tab, "density-step"), drawn(tab, "tradeoff"), readout.text_content()
    assert all(old != new for old, new in zip(start, untouched, strict=True))
    assert untouched[2].startswith("Original model")
    assert slider.get_attribute("aria-valuetext") == untouched[2]
    assert "Original model" in tab.locator("#density-step").get_attribute("aria-label")
    before, now = (
        [node.get_attribute("d") for node in tab.locator(f"#{name} path.curve").all()]
        for name in ("density-before", "density-step")
    )
    assert before == now
    assert [pays.nth(i).text_content() for i in (1, 3)] == [pays.nth(i).text_content() for i in (2, 4)]
    slider.press("ArrowRight")
    assert drawn(tab, "density-step") != untouched[0]
    assert readout.text_content().startswith("Point 1 of")
    assert tab.locator("#make-python").text_content().startswith("model = fair.")
    slider.press("End")
    assert all(pays.nth(i).text_content() != pays.nth(i + 1).text_content() for i in (1, 3))
    tab.locator("#tradeoff circle.pick").first.dispatch_event("click")
    assert slider.input_value() == "0"
    assert readout.text_content() == untouched[2]


def test_nothing_sticks_out_and_charts_follow_the_width(visit):
    tab = visit(viewport={"width": 1200, "height": 800})
    wide = tab.locator("#changes svg").get_attribute("viewBox")
    for width in (390, 320):
        tab.set_viewport_size({"width": width, "height": 800})
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate(CUT) == 0
        assert tab.locator("#changes svg text.tick").count() >= 3
    tab.wait_for_function("w => document.querySelector('#changes svg').getAttribute('viewBox') !== w", arg=wide)


def test_dark_and_light_differ_and_paper_is_white(visit):
    colour = "getComputedStyle(document.body).backgroundColor"
    tab = visit(color_scheme="dark")
    assert tab.evaluate(colour) == "rgb(20, 23, 27)"
    tab.emulate_media(color_scheme="light")
    assert tab.evaluate(colour) == "rgb(255, 255, 255)"
    tab.emulate_media(media="print", color_scheme="dark")
    assert tab.evaluate(colour) == "rgb(255, 255, 255)"


@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 1000)])
def test_axe_finds_no_violation(visit, crowded, axe, scheme, width):
    for where in ({}, {"address": crowded}):
        tab = visit(**where, color_scheme=scheme, viewport={"width": width, "height": 800})
        for fold in tab.locator("summary").all():
            fold.evaluate("fold => { fold.parentElement.open = true; }")
        tab.evaluate(axe)
        found = tab.evaluate("axe.run({resultTypes: ['violations']})")  # of what passes, one node
        assert found["passes"]
        nodes = [(v["id"], v["help"], n["html"][:200]) for v in found["violations"] for n in v["nodes"]]
        assert nodes == []
        assert tab.evaluate(CONTRAST) >= 4.5


def test_paper_shows_the_chosen_model_on_at_most_four_pages(visit):
    tab = visit()
    assert 1 <= pages_printed(tab) <= 4
    chosen = tab.locator("#readout").text_content()
    tab.locator("#slider").press("Home")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.locator("#readout").text_content() == chosen
    tab.emulate_media(media="print")
    assert "follow the slider" not in tab.locator("main").inner_text()
    assert not tab.locator("#slider").is_visible()
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.locator("#readout").text_content().startswith("Original model")


def test_names_stand_on_no_line(visit):
    tab = visit()
    for width in (1000, 390):
        tab.set_viewport_size({"width": width, "height": 800})
        tab.wait_for_function("w => document.querySelector('#changes svg').viewBox.baseVal.width <= w", arg=width)
        for position in ("Home", "ArrowRight", "End"):
            tab.locator("#slider").press(position)
            for name in ("density-before", "density-step", "changes"):
                assert tab.evaluate(CROSSED, name) == 0


def test_many_groups_of_long_names_and_large_numbers(visit, crowded):
    tab = visit(crowded, viewport={"width": 1000, "height": 800})
    assert tab.evaluate(CUT) == 0
    assert "e+04" not in tab.content()  # 39,750 is a salary
    names = tab.locator("#density-before svg text.name").all_text_contents()
    assert len(set(names)) == 8
    assert pages_printed(tab) <= 4


def test_axes_write_numbers_as_tables_do(visit, crowded):
    tab = visit(crowded, viewport={"width": 390, "height": 900})
    ticks = tab.eval_on_selector_all("#density-before .tick", "nodes => nodes.map((node) => node.textContent)")
    assert "20,000" in ticks
    errors = tab.eval_on_selector_all("#tradeoff .tick", "nodes => nodes.map((node) => node.textContent)")
    assert any(text.endswith(",000,000") for text in errors)
    assert not any("e" in text for text in [*ticks, *errors] if text[0].isdigit())
