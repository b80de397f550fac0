"""Makes the pictures of the page that the documentation shows, from a job under kills.

    python -m tests.support.page_pictures [DIRECTORY]

They are written to docs/images, light and dark, unless a directory is named.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Browser, Page, expect
from tests.support.chromium import open_tab, start_chromium
from tests.support.page_job_process import PageJobProcess
from tests.support.program import REPOSITORY

RUNS_S = 40
"""Long enough for curves and a restart."""
PATIENCE_MS = 60_000
WIDTH, HEIGHT = 1200, 1040
PICTURES = ("page-light.png", "page-dark.png", "page-proof.png")


def make_pictures(browser: Browser, directory: Path, runs_s: float = RUNS_S) -> None:
    """Write the pictures; takes `runs_s` and the time that a job needs to start and restart."""
    with tempfile.TemporaryDirectory() as scratch:
        job = PageJobProcess(Path(scratch), rows_per_s=2_000, parallelism=2)
        try:
            job.start()
            time.sleep(runs_s / 3)
            os.kill(job.slot_pids()[0], signal.SIGKILL)
            time.sleep(runs_s * 2 / 3)
            job.start()
            directory.mkdir(parents=True, exist_ok=True)
            for dark, name in ((False, PICTURES[0]), (True, PICTURES[1])):
                _take_picture(browser, job, directory / name, dark=dark)
            _take_picture_of_proof(browser, job, directory / PICTURES[2])
        finally:
            job.end()


def _take_picture(browser: Browser, job: PageJobProcess, path: Path, *, dark: bool) -> None:
    with open_tab(browser, WIDTH, HEIGHT, dark=dark) as tab:
        _sign_in(tab.page, job)
        tab.page.screenshot(path=path)


def _take_picture_of_proof(browser: Browser, job: PageJobProcess, path: Path) -> None:
    with open_tab(browser, WIDTH, HEIGHT) as tab:
        _sign_in(tab.page, job)
        tab.page.get_by_role("button", name="Read back").click()
        proof = tab.page.get_by_role("region", name="The proof")
        expect(proof.locator(".witness").first).to_be_visible(timeout=PATIENCE_MS)
        proof.screenshot(path=path)


def _sign_in(page: Page, job: PageJobProcess) -> None:
    page.goto(job.url)
    page.get_by_label("Token").fill(job.token)
    page.get_by_role("button", name="Show the job").click()
    expect(page.locator("#checkpoint-bars")).to_be_visible(timeout=PATIENCE_MS)
    expect(page.locator(".edge").first).to_be_attached(timeout=PATIENCE_MS)
    page.evaluate("document.activeElement.blur()")
    page.mouse.move(0, 0)


if __name__ == "__main__":
    named = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "docs" / "images"
    with start_chromium() as chromium:
        make_pictures(chromium, named)
