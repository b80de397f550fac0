"""`onceflow ui` and `onceflow top`: jobs of a storage that run, have ended or were killed."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from tests.support.chromium import open_tab, start_chromium
from tests.support.page_job_process import PageJobProcess
from tests.support.program import REPOSITORY
from typer.testing import CliRunner

from onceflow import Checkpointing, LocalProcesses, Pipeline
from onceflow.cli.main import app
from onceflow.sinks import FileSink
from onceflow.sources import DatagenSource

PATIENCE_MS = 60_000


@dataclass(frozen=True)
class Ui:
    """A running `onceflow ui`."""

    url: str
    token: str
    process: subprocess.Popen[str]

    def ask(self, path: str, *, token: str = "", body: bytes | None = None) -> tuple[int, Any]:
        """Return the status and the JSON of an answer."""
        request = urllib.request.Request(f"{self.url}/v1/{path}", body)
        request.add_header("Authorization", f"Bearer {token or self.token}")
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


@contextmanager
def run_ui(storage: str) -> Generator[Ui, None, None]:
    """Run `onceflow ui`; it must end well at SIGTERM."""
    command = [sys.executable, "-m", "onceflow.cli.main", "ui", "--storage", storage]
    process = subprocess.Popen(
        [*command, "--port", "0", "--no-open"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        url, token = (line.partition(":")[2].strip() for line in lines)
        yield Ui(url, token, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def run_bounded_job(directory: Path, storage: str) -> None:
    pipeline = Pipeline(
        LocalProcesses(directory / "logs"),
        name="refunds",
        parallelism=1,
        checkpointing=Checkpointing(storage=storage, interval="1 s"),
    )
    refunds = pipeline.read(DatagenSource(rows=200, accounts=3), uid="refunds")
    refunds.write(FileSink(str(directory / "refunds")), uid="archive")
    pipeline.run()


def row_of(page: Page, job: str) -> Locator:
    return page.get_by_role("row").filter(has=page.get_by_role("link", name=job, exact=True))


def test_jobs_are_there_whether_they_run_have_ended_or_were_killed(tmp_path: Path) -> None:
    job = PageJobProcess(tmp_path)
    with start_chromium() as browser:
        try:
            job.start()
            run_bounded_job(tmp_path, job.storage)
            with run_ui(job.storage) as ui:
                follow_jobs(browser, ui, job)
        finally:
            job.end()


def run_top(job: str, storage: str, *more: str) -> tuple[int, str]:
    """Return exit status and output of `onceflow top --once`."""
    result = CliRunner().invoke(app, ["top", job, "--storage", storage, "--once", *more])
    return result.exit_code, result.output


def look_from_terminal(storage: str) -> None:
    status, text = run_top("payments", storage)
    assert (status, text.split()[:2]) == (0, ["payments", "running"])
    lines = [line.split() for line in text.splitlines()]
    assert {"CHAIN", "SINK", "PARTITION", "SLOT"} <= {line[0] for line in lines if line}, text
    sinks = [line for line in lines if line[:1] in (["archive"], ["ledger"])]
    assert len(sinks) == 2, text
    status, text = run_top("payments", storage, "--json")
    now = json.loads(text)
    assert (status, now["state"], len(now["slots"])) == (0, "running", 1)
    status, text = run_top("refunds", storage)
    assert (status, text.split()[:2]) == (3, ["refunds", "finished"])
    status, text = run_top("nothing", storage)
    assert (status, "has no job 'nothing'" in " ".join(text.split())) == (2, True), text


def follow_jobs(browser: Browser, ui: Ui, job: PageJobProcess) -> None:
    assert ui.ask("jobs", token="a guess")[0] == 401
    assert ui.ask("jobs", token=job.token)[0] == 401, "a driver's token is not the page's"
    with open_tab(browser) as tab:
        page = tab.page
        page.goto(ui.url)
        page.get_by_label("Token").fill(ui.token)
        page.get_by_role("button", name="Show the job").click()
        expect(row_of(page, "payments")).to_contain_text("running", timeout=PATIENCE_MS)
        expect(row_of(page, "refunds")).to_contain_text("finished")
        expect(row_of(page, "refunds").get_by_role("cell").nth(3)).to_have_text(re.compile(r"^\d+"))

        page.get_by_role("link", name="payments", exact=True).click()
        state = page.locator("header .pill")
        expect(state).to_have_text("running", timeout=PATIENCE_MS)
        page.get_by_role("button", name="Checkpoint", exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name="Checkpoint").click()
        expect(page.locator("#banner")).to_contain_text("Checkpoint: done", timeout=PATIENCE_MS)

        job.kill()
        expect(state).to_have_text("its driver is gone", timeout=PATIENCE_MS)
        ending = page.get_by_role("region", name="How it ended")
        expect(ending).to_contain_text("it was killed, or still runs")
        stored = page.get_by_role("region", name="Checkpoints and savepoints in storage")
        expect(stored.locator("tbody tr").first).to_be_visible(timeout=PATIENCE_MS)
        expect(page.get_by_role("button", name="Stop", exact=True)).to_have_count(0)

        page.get_by_role("link", name="onceflow").click()
        expect(row_of(page, "payments")).to_contain_text("its driver is gone")
        assert tab.violations == []
        assert [url for url in tab.requests if ui.token in url] == []
    status, answer = ui.ask("jobs/payments/checkpoint", body=b"{}")
    assert status == 409
    assert "no longer exists" in answer["error"]
    assert ui.ask("jobs/nothing/overview")[0] == 404
    assert ui.ask("nothing")[0] == 404


@pytest.mark.servers
def test_top_follows_a_job_in_a_terminal_until_it_has_ended(tmp_path: Path) -> None:
    job = PageJobProcess(tmp_path)
    terminal, inner = pty.openpty()
    command = [sys.executable, "-m", "onceflow.cli.main", "top", "payments"]
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}", "TERM": "xterm"}
    try:
        job.start()
        process = subprocess.Popen(
            [*command, "--storage", job.storage, "--interval", "0.2"],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            cwd=REPOSITORY,
            env=environment,
        )
        os.close(inner)
        screen = b""
        while screen.count(b"CHAIN") < 5:
            screen += os.read(terminal, 65_536)
        job.post("stop")
        with contextlib.suppress(OSError):  # The other end is closed when the command has ended.
            while more := os.read(terminal, 65_536):
                screen += more
        assert process.wait(30) == 0
        assert b"stopped" in screen
    finally:
        os.close(terminal)
        job.end()


def fail(*arguments: str) -> str:
    """Return what the command prints that must refuse its arguments."""
    result = CliRunner().invoke(app, ["ui", "--no-open", *arguments])
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


def test_a_storage_that_is_not_there_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "typo"
    assert f"{missing}: this machine has no such directory" in fail("--storage", str(missing))


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = fail("--storage", str(tmp_path), "--port", port)
    assert f"port {port} of 127.0.0.1 is in use: choose another with --port" in said


def test_an_address_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    said = fail("--storage", str(tmp_path), "--host", "127.0.0.1x")
    assert "127.0.0.1x" in said


def test_other_machines_are_served_with_tls_only(tmp_path: Path) -> None:
    said = fail("--storage", str(tmp_path), "--host", "0.0.0.0", "--port", "0")
    assert "add --certificate and --key" in said
    half = fail("--storage", str(tmp_path), "--certificate", "c.pem")
    assert "--certificate and --key go together" in half
    pair = ["--certificate", str(tmp_path / "c.pem"), "--key", str(tmp_path / "k.pem")]
    assert "cannot be used" in fail("--storage", str(tmp_path), *pair)
