"""The page in a real browser: Chromium by Playwright, on small models."""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch
from demo_parts import save_clip, save_vit, write_photo

REQUIRED = os.environ.get("SELECTIVIT_BROWSER") == "required"
SHOTS = os.environ.get("SELECTIVIT_SCREENSHOTS")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
SIZE = 112


def missing() -> str | None:
    """Why the browser's tests cannot run here."""
    if CHROMIUM is None:
        return "there is no Chromium (Debian: apt-get install chromium)"
    for name in ("playwright", "gradio"):
        try:
            __import__(name)
        except ModuleNotFoundError as error:
            return f"{name} is missing ({error}): pip install -e '.[dev]'"
    return None


WHY = missing()
if WHY and not REQUIRED:
    pytest.skip(WHY, allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if WHY:
        pytest.fail(f"SELECTIVIT_BROWSER=required, but {WHY}")
    folder = tmp_path_factory.mktemp("page")
    write_photo(folder / "red.png", (200, 30, 30))
    write_photo(folder / "blue.png", (30, 60, 200), size=(112, 160))
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and then nothing")
    (folder / "heavy.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(1_200_000))
    write_photo(folder / "wide.png", (9, 9, 9), size=(1200, 1000))
    return folder


@pytest.fixture(scope="module")
def served(folder):
    """A page that is served by this process: its address, its answers and its ViT."""
    from selectivit.demo.answers import Answers
    from selectivit.demo.memory import Memory
    from selectivit.demo.page import Start
    from selectivit.demo.photo import Limits
    from selectivit.demo.serve import launch
    from selectivit.demo.shelf import Shelf

    torch.set_num_threads(1)
    vit, clip = save_vit(folder / "vit"), save_clip(folder / "clip")
    answers = Answers(Shelf([vit, clip]), Memory(100), Limits(megabytes=1, megapixels=1), (folder / "red.png",))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    page = launch(answers, Start(vit, clip, "veca-tiny", SIZE, SIZE), port=port)
    yield page.local_url, answers, vit
    page.close(verbose=False)


@pytest.fixture(scope="module")
def address(served):
    return served[0]


@pytest.fixture(scope="module")
def browser(folder):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, address):
    """Open the page as a visitor; gives the tab, with all that went wrong or elsewhere in `page.faults`."""
    contexts = []

    def visit(**options):
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        contexts.append(context)
        context.set_default_timeout(15_000)
        page = context.new_page()
        page.faults = []
        page.on("pageerror", lambda error: page.faults.append(f"script: {error}"))
        page.on(
            "request",
            lambda r: None if r.url.startswith((address, "data:", "blob:")) else page.faults.append(f"asks {r.url}"),
        )
        page.goto(address)
        page.wait_for_selector(".sv-wipe img")
        return page

    yield visit
    for context in contexts:
        context.close()


def shoot(page, name):
    if SHOTS:
        Path(SHOTS).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(Path(SHOTS) / f"{name}.png"), full_page=True)


def source(page, selector):
    return page.locator(selector).first.get_attribute("src")


def until(read, changed_from, seconds=15.0):
    """Wait until something reads otherwise than before; gives what it reads."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = read()
        if found is not None and found != changed_from:
            return found
        time.sleep(0.05)
    raise AssertionError(f"nothing changed within {seconds} s")


def upload(page, path):
    page.locator("#sv-upload input[type=file]").set_input_files(str(path))


def said(page):
    return page.locator("#sv-said").inner_text()


def open_tab(page, name, ready):
    page.get_by_role("tab", name=name).first.click()
    page.wait_for_selector(ready)


def test_first_picture_upload_and_a_patch_by_mouse_and_keyboard(visit, folder):
    page = visit()
    assert "red.png" in said(page)
    first = source(page, ".sv-over")
    upload(page, folder / "blue.png")
    page.wait_for_function("document.querySelector('#sv-said').innerText.includes('blue.png')")
    until(lambda: source(page, ".sv-over"), first)
    seen = source(page, "#sv-attention img")
    page.locator(".sv-pick img").click(position={"x": 20, "y": 20})
    again = until(lambda: source(page, "#sv-attention img"), seen)
    assert "row 1 of" in page.locator(".sv-pick").get_attribute("aria-label")
    page.locator(".sv-pick").press("ArrowDown")
    until(lambda: source(page, "#sv-attention img"), again)
    assert "row 2 of" in page.locator(".sv-pick").get_attribute("aria-label")
    text = page.locator("#sv-attention").inner_text()
    assert re.search(r"entmax 1\.5: support [\d.]+ of \d+ keys", text) and "exactly 0" in text
    shoot(page, "features")
    assert page.faults == []


def test_the_wipe_moves_by_keyboard_and_stays(visit):
    page = visit()
    page.locator(".sv-wipe input").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    at = "document.querySelector('.sv-wipe').style.getPropertyValue('--at')"
    assert page.evaluate(at) == "53%"
    before = source(page, ".sv-over")
    page.get_by_label("number input for How many of the last layers").fill("1")
    page.keyboard.press("Enter")
    until(lambda: source(page, ".sv-over"), before)
    assert page.evaluate(at) == "53%" and "the last layer" in page.locator("#sv-maps figcaption").inner_text()


def test_every_slider_moves_its_picture(visit):
    page = visit()
    moved = [
        ("Features", ".sv-wipe", r"range slider for α", ".sv-over"),
        ("Features", ".sv-wipe", r"range slider for How many", ".sv-over"),
        ("Budget", "#sv-budget table", r"range slider for Cores", "#sv-budget img"),
        ("Compare layers", "#sv-layers img", r"range slider for α", "#sv-layers img"),
        ("Compare layers", "#sv-layers img", r"range slider for How many", "#sv-layers img"),
    ]
    for name, ready, label, picture in moved:
        open_tab(page, name, ready)
        before = source(page, picture)
        slider = page.get_by_role("tabpanel").get_by_label(re.compile(label)).locator("visible=true").first
        slider.focus()
        page.keyboard.press("ArrowLeft")
        began = time.monotonic()
        until(lambda picture=picture: source(page, picture), before)
        assert time.monotonic() - began < 10, label
    assert page.faults == []


def test_a_budget_is_told_in_numbers(visit):
    page = visit()
    open_tab(page, "Budget", "#sv-budget table")
    before = page.locator("#sv-budget table").inner_text()
    assert "8 cores" in before and "all 64" in before
    page.get_by_label("number input for Cores in use").fill("2")
    page.keyboard.press("Enter")
    after = until(lambda: page.locator("#sv-budget table").inner_text(), before)
    assert "2 cores" in after and "GFLOPs" in after and "milliseconds" in after
    shoot(page, "budget")


def test_words_are_typed_and_named_under_the_pointer(visit):
    page = visit()
    open_tab(page, "Segment", ".sv-probe")
    before = page.locator(".sv-legend").inner_text()
    page.locator("#sv-labels textarea").fill("ball, <b>sky</b>, tiles|brick")
    page.get_by_role("button", name="Segment", exact=True).click()
    legend = until(lambda: page.locator(".sv-legend").inner_text(), before)
    assert "<b>sky</b>" in legend and "tiles" in legend and "brick" not in legend
    page.locator(".sv-probe img").hover(position={"x": 30, "y": 30})
    told = page.locator(".sv-told").inner_text()
    assert re.search(r"(ball|sky|tiles).* [\d.]+ % · ", told)
    page.locator(".sv-probe").focus()
    for _ in range(6):
        page.keyboard.press("ArrowDown")
    until(lambda: page.locator(".sv-told").inner_text(), told)
    grid = page.locator(".sv-probe").get_attribute("data-grid")
    page.get_by_label("entmax, α below").check()
    page.get_by_role("tabpanel").get_by_label(re.compile("number input for α")).locator("visible=true").fill("2")
    page.keyboard.press("Enter")
    until(lambda: page.locator(".sv-probe").get_attribute("data-grid"), grid)
    page.locator("#sv-labels textarea").fill("")
    page.get_by_role("button", name="Segment", exact=True).click()
    page.wait_for_selector("#sv-segments [role=alert]")
    assert "expected one label" in page.locator("#sv-segments").inner_text()
    page.locator("#sv-labels textarea").fill("ball, box, sky, grass")
    page.get_by_role("button", name="Segment", exact=True).click()
    page.wait_for_selector(".sv-probe img")
    shoot(page, "segment")
    assert page.faults == []


@pytest.mark.parametrize(("name", "told"), [("broken.png", "not a picture"), ("wide.png", "more than the limit")])
def test_a_bad_upload_is_told_and_the_page_lives(visit, folder, name, told):
    page = visit()
    upload(page, folder / name)
    page.wait_for_selector("#sv-said [role=alert]")
    assert told in said(page) and name in said(page) and "red.png" in said(page)
    assert str(folder) not in said(page)
    before = source(page, ".sv-over")
    upload(page, folder / "blue.png")
    until(lambda: source(page, ".sv-over"), before)
    assert "blue.png" in said(page) and page.locator("#sv-said [role=alert]").count() == 0


def test_a_file_that_is_too_heavy_is_told_and_the_page_lives(visit, folder):
    page = visit()
    upload(page, folder / "heavy.png")
    page.get_by_text(re.compile("exceed|maximum|too large", re.I)).first.wait_for()
    shoot(page, "heavy")
    before = source(page, ".sv-over")
    upload(page, folder / "blue.png")
    until(lambda: source(page, ".sv-over"), before)


def test_two_visitors_do_not_get_each_others_pictures(visit, folder, served):
    """Both ask at once, one with another photo, one with another α: each gets what the answers give alone."""
    from selectivit.demo.attending import Attend, feature_maps
    from selectivit.demo.markup import image
    from selectivit.demo.memory import Memory
    from selectivit.demo.photo import open_photo
    from selectivit.demo.shelf import Shelf

    def alone(name, attend):
        found = feature_maps(Shelf([]), Memory(9), open_photo(folder / name), served[2], SIZE, attend)
        return re.findall(r'src="(.*?)"', image(found.pictures[1], ""))[0]

    one, two = visit(), visit()
    first = source(two, ".sv-over")
    assert first == source(one, ".sv-over") == alone("red.png", Attend())
    upload(one, folder / "blue.png")
    two.get_by_label("number input for α of entmax").first.fill("2")
    two.keyboard.press("Enter")
    assert until(lambda: source(one, ".sv-over"), first) == alone("blue.png", Attend())
    assert until(lambda: source(two, ".sv-over"), first) == alone("red.png", Attend(alpha=2.0))
    assert "blue.png" in said(one) and "red.png" in said(two) and "blue" not in said(two)


def test_an_unknown_model_is_told(visit):
    page = visit()
    box = page.get_by_label("Model: a name or a folder").locator("visible=true").first
    box.fill("/no/such/folder")
    page.keyboard.press("Enter")
    page.wait_for_selector("#sv-maps [role=alert]")
    assert "there is no folder" in page.locator("#sv-maps").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_width_light_and_dark(visit, scheme):
    page = visit(viewport={"width": 390, "height": 844}, color_scheme=scheme, is_mobile=True, has_touch=True)
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) <= 0
    colour = page.evaluate("getComputedStyle(document.querySelector('#sv-maps figcaption')).color")
    red = int(re.findall(r"\d+", colour)[0])
    assert red > 180 if scheme == "dark" else red < 80
    assert page.locator(".sv-wipe").bounding_box()["width"] > 250
    shoot(page, f"phone_{scheme}")
    page.locator(".sv-pick img").tap(position={"x": 20, "y": 20})
    page.wait_for_function("document.querySelector('.sv-pick').getAttribute('aria-label').includes('row 1 of')")
    if scheme == "dark":
        page.get_by_role("tab", name="Segment").first.tap()
        page.wait_for_selector(".sv-probe img")
        assert page.evaluate(overflow) <= 0
        shoot(page, "phone_segment")


def test_controls_have_names(visit):
    page = visit()
    for name, ready in (("Features", ".sv-wipe"), ("Segment", ".sv-probe"), ("Budget", "#sv-budget table")):
        open_tab(page, name, ready)
        unnamed = page.evaluate(
            """() => [...document.querySelectorAll('input, textarea, button, img')].filter(e => e.offsetParent)
            .filter(e => !(e.ariaLabel || e.labels?.length || e.innerText?.trim() || e.alt || e.title
                || e.getAttribute('aria-labelledby') || e.type === 'file' || e.closest('[aria-label]')))
            .map(e => e.outerHTML.slice(0, 200))"""
        )
        assert unnamed == [], name
