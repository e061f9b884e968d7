"""The report and its mask explorer in headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import pytest
from command_runs import verify_once
from mask_expressions import FIXED, exact, generated
from typer.testing import CliRunner

from undivided.cli._app import application

pytestmark = pytest.mark.skipif(bool(browser.missing()), reason=browser.missing() or "none")

EXPRESSIONS = [*FIXED, *generated(40, seed=1)]
BENCHMARKS = sorted((Path(__file__).resolve().parents[2] / "benchmarks").glob("*-earlier.json"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report, with charts if the repository has a benchmark report."""
    out = tmp_path_factory.mktemp("report") / "report.html"
    bench = ["--bench", str(BENCHMARKS[0])] if BENCHMARKS else ["--no-bench"]
    with pytest.MonkeyPatch.context() as patch:
        verify_once(patch)
        done = CliRunner().invoke(application("report"), ["report", "--out", str(out), *bench], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return out.as_uri()


@pytest.fixture(scope="module", params=["light", "dark", "phone"])
def opened(request: pytest.FixtureRequest, page: str) -> Iterator[Any]:
    width = 390 if request.param == "phone" else 1200
    with browser.chromium(width, 844, request.param == "dark") as driver:
        driver.get(page)
        yield driver


def test_console_has_no_errors(opened: Any) -> None:
    set_expression(opened, "casual()")
    set_expression(opened, "causal()")
    assert opened.get_log("browser") == []


def test_page_does_not_scroll_sideways(opened: Any) -> None:
    for text in ("causal() & documents([0, 3, 7, 12])", f"documents({list(range(0, 400, 2))}) & causal()"):
        set_expression(opened, text)
        width, inner = opened.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert width <= inner


def test_axe_finds_no_serious_fault(opened: Any) -> None:
    script = browser.axe()
    if script is None:
        pytest.skip("axe-core is not installed: npm install --global axe-core")
    opened.execute_script(script.read_text(encoding="utf-8"))
    opened.execute_script("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    for text in ("causal()", "casual()"):  # with a drawing, and with an error
        set_expression(opened, text)
        found = opened.execute_async_script("const done = arguments[0]; axe.run().then((result) => done(result))")
        faults = [(one["id"], [node["html"][:200] for node in one["nodes"]][:3]) for one in found["violations"]
                  if one["impact"] in ("serious", "critical")]  # fmt: skip
        assert faults == []
        assert any(one["id"] == "color-contrast" for one in found["passes"])


def test_theme_is_that_of_the_system_until_it_is_chosen(opened: Any) -> None:
    def paper() -> str:
        return opened.execute_script("return getComputedStyle(document.body).backgroundColor")

    def choose(theme: str) -> None:
        opened.execute_script(
            "const c = document.getElementById('theme'); c.value = arguments[0]; c.dispatchEvent(new Event('change'))",
            theme,
        )

    dark = opened.execute_script("return matchMedia('(prefers-color-scheme: dark)').matches")
    system = paper()
    assert system == ("rgb(18, 22, 29)" if dark else "rgb(255, 255, 255)")
    choose("dark")
    assert paper() == "rgb(18, 22, 29)"
    shown = opened.execute_script(
        "return [...document.querySelectorAll('figure img')].map((i) => [i.className, getComputedStyle(i).display])"
    )
    assert all((display == "none") == (name == "light-only") for name, display in shown)
    choose("light")
    assert paper() == "rgb(255, 255, 255)"
    choose("")
    assert paper() == system


def test_ranges_are_those_of_the_library(page: str) -> None:
    with browser.chromium() as driver:
        driver.get(page)
        program = "return arguments[0].map(([text, q, kv]) => window.undividedMasks.ranges(text, q, kv))"
        found = driver.execute_script(program, EXPRESSIONS)
    assert len(EXPRESSIONS) >= 60
    assert [one for one, rows in zip(EXPRESSIONS, found, strict=True) if rows != exact(one)] == []


def test_explorer_is_used_by_keyboard(page: str) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    with browser.chromium() as driver:
        driver.get(page)
        grid = driver.find_element(By.CSS_SELECTOR, "[role=application]")
        grid.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
        reason = driver.find_element(By.CSS_SELECTOR, "[aria-label='Reason of the chosen pair']")
        assert reason.text.startswith("Query 2, key 1: allowed by causal() and documents(")
        grid.send_keys(Keys.END)
        assert "Query 2, key 11: hidden by causal()" in reason.text
        assert "after the query's own key" in reason.text
        code = driver.find_element(By.CSS_SELECTOR, ".mask-explorer pre").text
        assert "mask = masks.causal() & masks.documents([0, 3, 7, 12])" in code


def test_explorer_composes_every_constructor(page: str) -> None:
    with browser.chromium() as driver:
        driver.get(page)
        program = """
          const find = (label) => [...document.querySelectorAll('.mask-explorer label')]
            .find((one) => one.textContent === label).nextSibling;
          const add = [...document.querySelectorAll('.mask-explorer button')].find((one) => one.textContent === 'Add');
          find('Join by').value = '=';
          return Object.keys(window.undividedMasks.constructors).map((name) => {
            find('Mask').value = name;
            find('Mask').dispatchEvent(new Event('change'));
            add.click();
            return [find('Expression').value, document.querySelector('.mask-explorer .error').textContent];
          });"""
        found = driver.execute_script(program)
    assert [text.partition("(")[0] for text, _ in found] == [
        "causal", "window", "lengths", "documents", "document_ids", "prefix", "sinks", "chunks", "dense", "predicate",
    ]  # fmt: skip
    assert [error for _, error in found if error] == []


def test_a_wrong_expression_is_shown_with_its_position(page: str) -> None:
    with browser.chromium() as driver:
        driver.get(page)
        set_expression(driver, "causal() & casual()")
        shown = driver.execute_script("return document.querySelector('.mask-explorer .error').textContent")
        assert shown.splitlines()[1].index("^") == 11
        assert "did you mean causal?" in shown
        assert driver.execute_script("return document.querySelector('.mask-explorer .wide').ariaInvalid") == "true"


def set_expression(driver: Any, text: str) -> None:
    program = """const input = document.querySelector('.mask-explorer .wide');
      input.value = arguments[0]; input.dispatchEvent(new Event('input'))"""
    driver.execute_script(program, text)
