"""Debian's Chromium without a screen, through Playwright: opens pages from disk, and notes what goes wrong."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

DRAWN = "html[data-drawn]"


@contextmanager
def chromium() -> Iterator["Browser"]:
    """A browser; the test is skipped where there is none."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium on this machine")
    with driver.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=program)
        try:
            yield Browser(browser)
        finally:
            browser.close()


class Browser:
    """Opens pages, each in a context of its own."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser

    @contextmanager
    def opened(self, file: Path, width: int = 1600, theme: str = "light", drawn: bool = True) -> Iterator[Any]:
        """A page from a file; it must load nothing else and report no error or warning."""
        context = self._browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        page, troubles, loaded = context.new_page(), list[str](), list[str]()

        def on_console(said: Any) -> None:
            if said.type in ("error", "warning"):
                troubles.append(said.text)

        page.on("console", on_console)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: loaded.append(request.url))
        page.goto(file.as_uri())
        if drawn:
            page.wait_for_selector(DRAWN)
        yield page
        context.close()
        assert troubles == []
        assert [url for url in loaded if not url.startswith("data:")] == [file.as_uri()]
