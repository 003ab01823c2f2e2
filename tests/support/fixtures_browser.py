"""A real browser for the pages: the system's Chromium, headless, watched for whatever a page must not do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.support.places import ROOT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
ARTIFACTS = Path(os.environ.get("CUKILN_TEST_ARTIFACTS") or ROOT / ".test-artifacts")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt install chromium)")

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (apt install chromium)")
    with sync_playwright() as playwright:
        # A container's root has no sandbox to be in, and its /dev/shm may be too small.
        arguments = ["--disable-dev-shm-usage", "--no-proxy-server"]
        found = playwright.chromium.launch(executable_path=CHROMIUM, chromium_sandbox=False, args=arguments)
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens a URL in a context of its own. The test fails if a page breaks its security policy, throws, or asks another
    origin for anything."""
    contexts: list[BrowserContext] = []
    faults: list[str] = []

    def opened(url: str, **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        origin = "/".join(url.split("/")[:3]) + "/"
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("console", lambda said: faults.append(said.text) if _is_fault(said.text) else None)
        page.on("request", lambda asked: None if asked.url.startswith((origin, "data:")) else faults.append(asked.url))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not faults


def _is_fault(text: str) -> bool:
    return "Content Security Policy" in text or "charts are not drawn" in text


def drawn(page: Page) -> Page:
    """The page, once its charts stand."""
    page.wait_for_selector("#main[data-drawn]")
    return page


def screenshot(page: Page, name: str) -> Path:
    """The whole page as .test-artifacts/<name>.png."""
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    path = ARTIFACTS / f"{name}.png"
    page.screenshot(path=path, full_page=True)
    return path


def plotted(page: Page, canvas: str) -> dict[str, Any]:
    """What a Chart instance plots: its labels, and by dataset its data."""
    script = """id => { const { labels, datasets } = Chart.getChart(id).data;
        return { labels, datasets: Object.fromEntries(datasets.map(({ label, data }) => [label, data])) }; }"""
    size: dict[str, Any] = page.evaluate(script, canvas)
    return size


def numbers(page: Page, selector: str) -> list[float]:
    """The values of all `<data>` that the selector finds, shown or not."""
    return [float(one.get_attribute("value") or "nan") for one in page.locator(f"{selector} data").all()]
