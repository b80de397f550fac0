"""A real browser for tests of pages: Debian's Chromium without a screen, driven by Playwright.

Playwright's own browsers are not downloaded: the machine's Chromium is driven, whichever is first
of ONCEFLOW_CHROMIUM and the commands below.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

COMMANDS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome-stable")
"""The first starts fastest, and is the one that script/setup installs on Debian."""
MISSING = "no Chromium: apt-get install chromium-headless-shell, or name one in ONCEFLOW_CHROMIUM"
VARIABLE = "ONCEFLOW_CHROMIUM"


def find_chromium() -> str | None:
    """Return the path of this machine's Chromium; None: there is none."""
    if named := os.environ.get(VARIABLE):
        return named
    return next(filter(None, map(shutil.which, COMMANDS)), None)


@contextmanager
def start_chromium() -> Generator[Browser, None, None]:
    """Start a browser; skip the test where there is none."""
    path = find_chromium()
    if path is None:
        pytest.skip(MISSING)
    with sync_playwright() as playwright:
        # Chromium's sandbox refuses to be started by root; it loads nothing but our own page.
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=sandbox)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Tab:
    """A page of its own session, and what the browser has complained about."""

    page: Page
    violations: list[str] = field(default_factory=list[str])
    """Scripts that raised, and what the content security policy has blocked."""
    requests: list[str] = field(default_factory=list[str])
    """The URLs that were asked for."""

    @classmethod
    def watch(cls, page: Page) -> Tab:
        """Return `page`, from now on watched."""
        tab = cls(page)
        page.on("console", tab._take_message)
        page.on("pageerror", lambda error: tab.violations.append(str(error)))
        page.on("request", tab._take_request)
        return tab

    def _take_message(self, message: ConsoleMessage) -> None:
        # A refused request is an error to the console as well; the page shows these itself.
        if "Content Security Policy" in message.text:
            self.violations.append(message.text)

    def _take_request(self, request: Request) -> None:
        self.requests.append(request.url)


@contextmanager
def open_tab(
    browser: Browser, width: int = 1280, height: int = 900, *, dark: bool = False
) -> Generator[Tab, None, None]:
    """Open a tab with a session of its own, `width` pixels wide."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
    )
    try:
        yield Tab.watch(context.new_page())
    finally:
        context.close()
