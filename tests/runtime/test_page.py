"""The page of a driver in a real browser: while processes are killed, on a phone, by keyboard."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect
from tests.support.chromium import Tab, open_tab, start_chromium
from tests.support.page_job_process import PageJobProcess
from tests.support.page_pictures import PICTURES, make_pictures
from tests.support.program import REPOSITORY

PATIENCE_MS = 60_000
"""A restart on a loaded machine; a page that is right is there within seconds."""
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with start_chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def shared_job(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PageJobProcess]:
    del browser  # Without one no job is started.
    job = PageJobProcess(tmp_path_factory.mktemp("page"))
    try:
        yield job
    finally:
        job.end()


@pytest.fixture
def job(shared_job: PageJobProcess) -> PageJobProcess:
    """A job that runs and has completed a checkpoint, whatever the test before has killed."""
    shared_job.start()
    return shared_job


@contextmanager
def watch_job(
    browser: Browser, job: PageJobProcess, width: int = 1280
) -> Generator[Tab, None, None]:
    """Sign in and wait for the first data; in the end nothing may have been blocked or failed."""
    with open_tab(browser, width) as tab:
        tab.page.goto(job.url)
        sign_in(tab.page, job.token)
        expect(state_of(tab.page)).to_have_text("running", timeout=PATIENCE_MS)
        yield tab
        assert tab.violations == []
        assert {url for url in tab.requests if not url.startswith(job.url)} == set()
        assert [url for url in tab.requests if job.token in url] == []


def sign_in(page: Page, token: str) -> None:
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Show the job").click()


def state_of(page: Page) -> Locator:
    return page.locator("header .pill")


def card(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=name, exact=True)


def test_a_wrong_token_shows_nothing_of_the_job(browser: Browser, job: PageJobProcess) -> None:
    with open_tab(browser) as tab:
        tab.page.goto(job.url)
        sign_in(tab.page, "a guess")
        expect(tab.page.get_by_role("alert")).to_have_text(re.compile("token is wrong"))
        assert "payments" not in tab.page.content()
        assert tab.violations == []


def test_a_killed_slot_is_told_with_its_cause_and_the_proof_agrees_afterwards(
    browser: Browser, job: PageJobProcess
) -> None:
    with watch_job(browser, job) as tab:
        page, attempt = tab.page, job.get("overview")["attempt"]
        os.kill(job.slot_pids()[0], signal.SIGKILL)
        restarts = card(page, "Attempts and restarts").get_by_role("listitem")
        expect(restarts.filter(has_text=f"attempt {attempt}").first).to_be_visible(
            timeout=PATIENCE_MS
        )
        facts = page.locator("header .facts")
        expect(facts).to_have_text(re.compile(f"attempt {attempt + 1},"), timeout=PATIENCE_MS)
        expect(state_of(page)).to_have_text("running", timeout=PATIENCE_MS)
        proof = card(page, "The proof")
        proof.get_by_role("button", name="Read back").click()
        ledger = proof.locator(".witness", has_text="ledger").first
        expect(ledger).to_contain_text(re.compile("agree|commit under way"), timeout=PATIENCE_MS)
        assert "ahead" not in proof.inner_text()
        assert "behind" not in proof.inner_text()


def test_a_frozen_driver_is_told_and_the_page_goes_on_when_it_does(
    browser: Browser, job: PageJobProcess
) -> None:
    with watch_job(browser, job) as tab:
        page = tab.page
        rows = card(page, "Sinks").locator("tbody tr")
        expect(rows.first).to_be_visible(timeout=PATIENCE_MS)
        os.kill(job.pid, signal.SIGSTOP)
        try:
            expect(page.locator("#banner")).to_contain_text("Nobody answers", timeout=PATIENCE_MS)
            expect(state_of(page)).to_have_text("unknown: no answer")
            expect(page.get_by_role("button", name="Checkpoint")).to_have_count(0)
            assert rows.count() > 0, "what was heard last is still there"
        finally:
            os.kill(job.pid, signal.SIGCONT)
        expect(state_of(page)).to_have_text("running", timeout=PATIENCE_MS)
        expect(page.get_by_role("button", name="Checkpoint")).to_be_visible()


@pytest.mark.servers
def test_a_killed_driver_is_told_and_the_next_one_takes_another_token(
    browser: Browser, job: PageJobProcess
) -> None:
    with watch_job(browser, job) as tab:
        page, old = tab.page, job.token
        rows = card(page, "Sinks").locator("tbody tr")
        expect(rows.first).to_be_visible(timeout=PATIENCE_MS)
        job.kill()
        expect(page.locator("#banner")).to_contain_text("the driver has ended", timeout=PATIENCE_MS)
        expect(state_of(page)).to_have_text("unknown: no answer")
        expect(page.get_by_role("button", name="Checkpoint")).to_have_count(0)
        assert rows.count() > 0, "what was heard last is still there"
        job.start()
        assert job.token != old
        expect(page.get_by_role("alert")).to_contain_text("out of date", timeout=PATIENCE_MS)
        sign_in(page, job.token)
        expect(state_of(page)).to_have_text("running", timeout=PATIENCE_MS)
        expect(page.locator("#banner")).to_be_empty(timeout=PATIENCE_MS)


def test_the_browser_tells_what_the_policy_blocks(browser: Browser, job: PageJobProcess) -> None:
    """Otherwise `violations` would prove nothing."""
    with open_tab(browser) as tab:
        tab.page.goto(job.url)
        tab.page.evaluate(
            "document.head.append(Object.assign(document.createElement('script'),"
            " { textContent: 'window.hasRun = true' }))"
        )
        assert tab.page.evaluate("window.hasRun") is None
        assert "script-src 'self'" in "".join(tab.violations)


LONG_NAMES = {
    "ledger": "balances-into-the-ledger-of-the-bank",
    "archive": "archive_of_every_payment_as_it_came",
    "balance": "balance-of-each-account-and-currency",
    "payments": "payments-of-the-north-european-branches",
}
BROKEN_WORDS = """() => {
  const cells = [...document.querySelectorAll("td.wide, .operators b, h1, h3")];
  return cells.flatMap((cell) => {
  const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  const broken = [];
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    for (const word of text.data.matchAll(/[^\\s-]+/g)) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
      if (lines.size > 1 && word[0].length < 20) broken.push(word[0]);
    }
  }
  return broken;
  });
}"""


def _with_long_names(route: Route) -> None:
    body = route.fetch().text()
    for name, longer in LONG_NAMES.items():
        body = body.replace(f'"{name}"', f'"{longer}"').replace(f"{name}-", f"{longer}-")
    route.fulfill(body=body, content_type="application/json")


@pytest.mark.parametrize("width", [390, 1024, 1920])
def test_long_names_are_not_broken_in_the_middle_of_a_word(
    browser: Browser, job: PageJobProcess, width: int
) -> None:
    with open_tab(browser, width) as tab:
        for path in ("overview", "graph"):
            tab.page.route(re.compile(rf"/v1/{path}$"), _with_long_names)
        tab.page.goto(job.url)
        sign_in(tab.page, job.token)
        sinks = card(tab.page, "Sinks").locator("tbody")
        expect(sinks).to_contain_text(LONG_NAMES["ledger"], timeout=PATIENCE_MS)
        expect(tab.page.locator(".flow")).to_contain_text(LONG_NAMES["balance"])
        assert tab.page.evaluate(BROKEN_WORDS) == []
        assert tab.page.evaluate(SIDEWAYS) == 0
        if directory := os.environ.get("ONCEFLOW_PICTURES"):
            tab.page.screenshot(path=f"{directory}/long-names-{width}.png", full_page=True)
        tab.page.unroute_all(behavior="ignoreErrors")


def test_on_a_phone_nothing_leads_out_of_the_screen_and_buttons_can_be_hit(
    browser: Browser, job: PageJobProcess
) -> None:
    with watch_job(browser, job, width=360) as tab:
        page = tab.page
        expect(card(page, "Sinks").locator("tbody tr").first).to_be_visible(timeout=PATIENCE_MS)
        expect(card(page, "Checkpoints").locator("svg")).to_be_visible(timeout=PATIENCE_MS)
        page.locator("#settings > summary").click()
        assert page.evaluate(SIDEWAYS) == 0
        for button in page.locator("header button").all():
            box = button.bounding_box()
            assert box is not None
            assert (box["x"] >= 0, box["x"] + box["width"] <= 360, box["height"] >= 24) == (
                True,
                True,
                True,
            )
        page.get_by_role("button", name="Stop", exact=True).click()
        expect(page.get_by_role("dialog")).to_contain_text("Stop the job?")
        assert page.evaluate(SIDEWAYS) == 0
        page.get_by_role("button", name="Leave it").click()
    assert job.get("overview")["state"] == "running"


def test_all_is_done_by_keyboard(browser: Browser, job: PageJobProcess) -> None:
    with open_tab(browser) as tab:
        page, keyboard = tab.page, tab.page.keyboard
        page.goto(job.url)
        expect(page.get_by_label("Token")).to_be_focused()
        keyboard.type(job.token)
        keyboard.press("Enter")
        expect(state_of(page)).to_have_text("running", timeout=PATIENCE_MS)
        expect(page.locator("main")).to_be_focused()
        page.reload()  # The tab keeps the token.
        expect(state_of(page)).to_have_text("running", timeout=PATIENCE_MS)
        keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()

        button = page.locator("#act-checkpoint")
        press_tab_until_focused(page, button)
        keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_contain_text("Take a checkpoint now?")
        # The page goes on behind the question: the header is made anew by what it hears.
        expect(page.locator("header .facts")).to_have_text(re.compile("attempt"))
        keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        expect(button).to_be_focused()
        keyboard.press("Enter")
        press_tab_until_focused(page, page.locator("#dialog-yes"))
        keyboard.press("Enter")
        expect(page.locator("#banner")).to_contain_text("Checkpoint: done", timeout=PATIENCE_MS)

        bars = page.locator("#checkpoint-bars")
        bars.focus()
        picked = card(page, "One checkpoint").locator(".note")
        before = number_in(picked.inner_text())
        keyboard.press("ArrowLeft")
        keyboard.press("ArrowLeft")
        # The last one moves on while nobody has picked another.
        expect(picked).not_to_have_text(re.compile(f"number {before},"))
        chosen = number_in(picked.inner_text())
        expect(bars).to_be_focused()
        keyboard.press("ArrowRight")
        expect(picked).to_have_text(re.compile(f"number {chosen + 1},"))
        assert tab.violations == []


def press_tab_until_focused(page: Page, wanted: Locator, presses_max: int = 30) -> None:
    for _ in range(presses_max):
        page.keyboard.press("Tab")
        if wanted.evaluate("element => element === document.activeElement"):
            return
    raise AssertionError(f"{wanted} is not reached by {presses_max} times Tab")


def number_in(note: str) -> int:
    match = re.search(r"number (\d+)", note)
    assert match, note
    return int(match.group(1))


# What a page of another site can try, even if it had the token: [name, path, options of fetch].
ATTACK = """async ([driver, token]) => {
  const bearer = { Authorization: `Bearer ${token}` };
  const tries = {
    "simple": ["v1/checkpoint", { method: "POST", mode: "no-cors", body: "{}" }],
    "with the token": ["v1/checkpoint", { method: "POST", headers: bearer, body: "{}" }],
    "read": ["v1/overview", { headers: bearer }],
    "read the page": ["", {}],
  };
  const answers = {};
  for (const [name, [path, options]] of Object.entries(tries)) {
    try {
      const response = await fetch(`${driver}/${path}`, options);
      answers[name] = response.type === "opaque" ? "opaque" : await response.text();
    } catch (error) {
      answers[name] = "blocked";
    }
  }
  return answers;
}"""


def test_another_site_neither_reads_nor_acts_nor_frames(
    browser: Browser, job: PageJobProcess
) -> None:
    asked = job.get("overview")["checkpoints_completed"]
    with serve_another_site(job.url) as site, open_tab(browser) as tab:
        tab.page.goto(site)
        frame = tab.page.frames[1]
        assert frame.url != f"{job.url}/", "the browser shows the page in a frame"
        assert tab.page.evaluate(ATTACK, [job.url, job.token]) == {
            "simple": "blocked",  # by the browser: Cross-Origin-Resource-Policy
            "with the token": "blocked",
            "read": "blocked",
            "read the page": "blocked",
        }
    # Whatever the browser has sent, nothing was done; and what is asked rightly, is.
    assert "manual" not in kinds_after(job, asked)
    operation = job.post("checkpoint")["operation"]
    while job.get(f"operations/{operation}")["state"] == "pending":
        pass
    assert "manual" in kinds_after(job, asked)


def kinds_after(job: PageJobProcess, completed: int) -> list[str]:
    """Return the kinds of checkpoints beyond the first `completed` of this driver."""
    history = job.get("history?limit=1000")
    count = history["completed"] - completed
    return [one["kind"] for one in history["checkpoints"][-count:]] if count else []


@contextmanager
def serve_another_site(framed: str) -> Generator[str, None, None]:
    """Serve a page that frames `framed`, at another origin."""
    content = f"<!doctype html><title>evil</title><iframe src='{framed}/'></iframe>".encode()

    class Site(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://localhost:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.servers
def test_a_users_traceback_is_on_the_page(browser: Browser, tmp_path: Path) -> None:
    job = PageJobProcess(tmp_path)
    try:
        job.start()
        with watch_job(browser, job) as tab:
            (tmp_path / "mistake").touch()
            # The mistake may lose slots, too, and such an incident may be the newest.
            incidents = card(tab.page, "Attempts and restarts").get_by_role("listitem")
            traced = incidents.filter(has=tab.page.locator("pre"))
            mistake = traced.filter(has_text="no exchange rate").first
            mistake.get_by_text("Traceback", exact=True).click(timeout=PATIENCE_MS)
            expect(mistake.locator("pre")).to_contain_text("in check_currency", timeout=PATIENCE_MS)
            (tmp_path / "mistake").unlink()
            expect(state_of(tab.page)).to_have_text("running", timeout=PATIENCE_MS)
    finally:
        job.end()


@pytest.mark.servers
def test_the_pictures_of_the_documentation_can_be_made_anew(
    browser: Browser, tmp_path: Path
) -> None:
    make_pictures(browser, tmp_path, runs_s=6)
    kept = REPOSITORY / "docs" / "images"
    for name in PICTURES:
        assert (tmp_path / name).read_bytes()[:8] == (kept / name).read_bytes()[:8]
        assert 10_000 < (tmp_path / name).stat().st_size < 250_000
