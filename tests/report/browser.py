"""A real browser, headless."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def browser_path() -> str:
    """Where Chromium is; without one the test is skipped, or fails where ``ZEROIR_REQUIRE_BROWSER`` is set."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is not None:
        return path
    reason = f"no browser was path ({', '.join(NAMES)}): the page of a report was not opened"
    if os.environ.get("ZEROIR_REQUIRE_BROWSER"):
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Chromium, with flags that let it run as root in a container, without network traffic."""
    # Here, because every worker collects these tests and one opens the page.
    from playwright.sync_api import sync_playwright

    path = browser_path()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()
