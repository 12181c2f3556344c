"""Both pages in a real browser: they open, answer to mouse and keyboard, fit a phone, and log no error."""

import time
from pathlib import Path
from typing import Any

import pytest

from gradveil.audit.render import to_html
from gradveil.audit.report import Report

pytestmark = pytest.mark.browser
HEIGHT = 1000  # of the window
by = pytest.importorskip("selenium.webdriver.common.by", reason="selenium is not installed").By
keys = pytest.importorskip("selenium.webdriver.common.keys", reason="selenium is not installed").Keys


def show(browser: Any, report: Report, folder: Path) -> None:
    path = folder / "report.html"
    path.write_text(to_html(report), encoding="utf-8")
    resize(browser, 1600)
    browser.get(path.as_uri())


def resize(browser: Any, width: int) -> None:
    size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def no_errors(browser: Any) -> None:
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def column(browser: Any, index: int) -> list[str]:
    script = "return [...document.querySelectorAll('#results tbody tr:not([hidden])')].map(r => r.cells[%d].innerText)"
    return browser.execute_script(script % index)


def visible(browser: Any, selector: str) -> bool:
    return browser.find_element(by.CSS_SELECTOR, selector).is_displayed()


def wait(condition: Any, seconds: float = 30) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "the page did not get there in time"
        time.sleep(0.1)


def test_table_sorts_and_filters(browser, report: Report, tmp_path) -> None:
    show(browser, report, tmp_path)
    head = browser.find_elements(by.CSS_SELECTOR, "#results thead button")
    names = [h.text for h in head]
    ssim = names.index("SSIM")
    head[ssim].click()
    down = [float(v) for v in column(browser, ssim)]
    assert down == sorted(down, reverse=True)
    assert head[ssim].find_element(by.XPATH, "..").get_attribute("aria-sort") == "descending"
    head[ssim].send_keys(keys.ENTER)
    assert [float(v) for v in column(browser, ssim)] == sorted(down)
    head[names.index("Defense")].click()
    assert column(browser, 1) == sorted(column(browser, 1))
    browser.find_element(by.ID, "search").send_keys("dgp")
    assert set(column(browser, 1)) == {"dgp"}
    assert browser.find_element(by.ID, "count").text == "4 of 20 rows"
    browser.find_element(by.ID, "filter-column").send_keys("diag")
    browser.find_element(by.ID, "filter-outcome").send_keys("beats")
    assert column(browser, 2) == ["mask_aware"]
    no_errors(browser)


def test_chart_tells_on_hover_and_on_focus(browser, report: Report, tmp_path) -> None:
    from selenium.webdriver import ActionChains

    show(browser, report, tmp_path)
    point = browser.find_element(by.CSS_SELECTOR, ".point .dot")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", point)
    time.sleep(0.2)
    ActionChains(browser).move_to_element(point).perform()
    assert visible(browser, "#tip")
    assert "SSIM" in browser.find_element(by.ID, "tip").text
    ActionChains(browser).move_by_offset(0, 200).perform()
    assert not visible(browser, "#tip")
    browser.execute_script("document.querySelectorAll('.point')[2].focus()")
    assert browser.find_element(by.ID, "tip").text.startswith("dgp leaks")
    no_errors(browser)


def test_pictures_and_layers_by_keyboard(browser, report: Report, tmp_path) -> None:
    show(browser, report, tmp_path)
    tab = browser.find_element(by.ID, "tab-diagnostic")
    assert visible(browser, "#wall-diagnostic")
    tab.send_keys(keys.ARROW_RIGHT)
    assert visible(browser, "#wall-realistic")
    assert not visible(browser, "#wall-diagnostic")
    browser.find_element(by.CSS_SELECTOR, "#wall-realistic .zoom").send_keys(keys.ENTER)
    assert visible(browser, "#viewer")
    assert "SSIM" in browser.find_element(by.ID, "viewer-scores").text
    browser.find_element(by.CSS_SELECTOR, "#viewer button").send_keys(keys.ESCAPE)
    assert not visible(browser, "#viewer")
    assert visible(browser, "#layers .share.sent")
    browser.find_element(by.CSS_SELECTOR, "input[value=largest]").send_keys(keys.SPACE)
    assert visible(browser, "#layers .share.largest")
    assert not visible(browser, "#layers .share.sent")
    no_errors(browser)


def test_light_and_dark(browser, report: Report, tmp_path) -> None:
    show(browser, report, tmp_path)
    paper = "return getComputedStyle(document.body).backgroundColor"
    seen = {}
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        seen[scheme] = browser.execute_script(paper)
    assert seen["light"] != seen["dark"]
    button = browser.find_element(by.ID, "theme")
    button.click()
    assert browser.execute_script(paper) == seen["light"]  # the toggle goes before the system
    button.click()
    assert browser.execute_script(paper) == seen["dark"]
    button.click()
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    no_errors(browser)


@pytest.mark.parametrize("width", [380, 1600])
def test_fits_the_screen(browser, report: Report, tmp_path, width: int) -> None:
    show(browser, report, tmp_path)
    resize(browser, width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    small = "return [...document.querySelectorAll('main p, main td, main dd')].filter(e => e.offsetParent).map("
    sizes = browser.execute_script(small + "e => parseFloat(getComputedStyle(e).fontSize))")
    assert min(sizes) >= 13
    first_screen = "return document.querySelector('.todo').getBoundingClientRect().bottom"
    assert browser.execute_script(first_screen) < HEIGHT  # what leaks and what to do, before any scrolling
    no_errors(browser)


def test_hostile_names_stay_text(browser, hostile_report: Report, tmp_path) -> None:
    show(browser, hostile_report, tmp_path)
    assert browser.execute_script("return typeof window.hacked") == "undefined"
    assert "<script>" in browser.find_element(by.TAG_NAME, "h1").text or "<script>" in browser.page_source.replace(
        "&lt;", "<"
    )
    no_errors(browser)


def set_slider(browser: Any, name: str, value: float) -> None:
    script = "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
    browser.execute_script(script + "s.dispatchEvent(new Event('input', {bubbles: true}))", name, value)


DROP = """
const bytes = Uint8Array.from(atob(arguments[0]), (c) => c.charCodeAt(0));
const held = new DataTransfer();
held.items.add(new File([bytes], "mine.png", { type: "image/png" }));
for (const name of ["dragover", "drop"]) {
  const event = new DragEvent(name, { bubbles: true, cancelable: true, dataTransfer: held });
  document.getElementById("drop").dispatchEvent(event);
}
"""


def test_dropped_picture_and_two_tabs(browser, base: str, report: Report) -> None:
    resize(browser, 1600)
    browser.get(f"{base}/")
    first = browser.current_window_handle
    browser.execute_script(DROP, report.originals[0].png)
    wait(lambda: browser.find_element(by.CSS_SELECTOR, "#own input").is_selected())
    set_slider(browser, "steps", 50)
    browser.find_element(by.ID, "run").click()
    browser.switch_to.new_window("tab")
    browser.get(f"{base}/")
    set_slider(browser, "steps", 50)
    browser.find_element(by.ID, "run").click()
    shown = {}
    for tab in (browser.current_window_handle, first):
        browser.switch_to.window(tab)
        wait(lambda: browser.find_element(by.ID, "status").text == "Done.")
        shown[tab] = browser.find_element(by.ID, "original").get_attribute("src")
        no_errors(browser)
    assert len(set(shown.values())) == 2  # each tab kept its own picture
    browser.switch_to.window(next(tab for tab in shown if tab != first))
    browser.close()
    browser.switch_to.window(first)


def test_live_page_runs_stops_and_reports_errors(browser, base: str, tmp_path) -> None:
    resize(browser, 1600)
    browser.get(f"{base}/")

    def status() -> str:
        return browser.find_element(by.ID, "status").text

    set_slider(browser, "steps", 50)
    browser.find_element(by.ID, "run").click()
    wait(lambda: status() == "Done.")
    assert float(browser.find_element(by.ID, "ssim").text) > 0
    assert "kB" in browser.find_element(by.ID, "bytes").text
    assert browser.find_element(by.ID, "step").text == "step 50 of 50"
    assert browser.find_element(by.ID, "guess").get_attribute("src").startswith("data:image/png")
    assert len(browser.find_element(by.ID, "line").get_attribute("points").split()) > 10

    browser.find_element(by.ID, "defense").send_keys("none")
    assert not visible(browser, "#top")
    set_slider(browser, "steps", 2000)
    browser.find_element(by.ID, "run").click()
    wait(
        lambda: (
            "step" in browser.find_element(by.ID, "step").text and "of 2000" in browser.find_element(by.ID, "step").text
        )
    )
    browser.find_element(by.ID, "stop").click()
    wait(lambda: status() == "Stopped.")
    assert browser.find_element(by.ID, "run").is_enabled()
    no_errors(browser)

    (tmp_path / "broken.png").write_bytes(b"this is no picture")
    browser.find_element(by.ID, "file").send_keys(str(tmp_path / "broken.png"))
    wait(lambda: browser.find_element(by.CSS_SELECTOR, "#own input").is_selected())
    browser.find_element(by.ID, "run").click()
    wait(lambda: "not a picture" in status())
    assert browser.find_element(by.ID, "run").is_enabled()
    browser.get_log("browser")  # the refusal itself is logged by the browser

    resize(browser, 380)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 380
