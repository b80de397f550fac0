"""`onceflow status`, `savepoint`, `stop` and so on, of a job in another process, killed or not."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from subprocess import PIPE
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.runtime.test_timers import await_rows
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import assert_exactly_once, ledger
from tests.support.program import Program, python
from tests.support.scripted_sink import ScriptedSink, When
from typer.testing import CliRunner

from onceflow import JobState, LocalProcesses, NoRestart
from onceflow.cli.jobs import client, command
from onceflow.cli.main import app
from onceflow.core.errors import SinkError

SOURCE = CountingSource(4_000)
ROOT = Path(__file__).parents[2]


def a_job(directory: Path, *more: str) -> Program:
    """Run the ledger in a process of its own."""
    return Program(
        directory / "driver.log",
        *python("-m", "tests.support.ledger_process", directory),
        *("--records", SOURCE.records, "--pause-s", "0.002"),
        *("--ends-with", directory / "read all", *more),
    )


def run(directory: Path, command: str, *more: str, name: str = "ledger") -> tuple[int, str, str]:
    """Return exit status, stdout and stderr of `onceflow <command> ledger --storage …`."""
    names = [] if command == "list" else [name]
    storage = ["--storage", str(directory / "checkpoints")]
    result = CliRunner().invoke(app, [*command.split(), *names, *storage, *more])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def asked(directory: Path, command: str, *more: str) -> dict[str, Any]:
    """Return the JSON that the command prints; it must end well."""
    status, out, error = run(directory, command, "--json", *more)
    assert status == 0, (out, error)
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def await_running(
    directory: Path, *more: str, timeout_s: float = 90.0, records: int = 1
) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while True:
        if (directory / "checkpoints" / "ledger" / "driver.json").exists():
            status, out, _ = run(directory, "status", "--json", *more)
            if status == 0 and json.loads(out)["records_in"] >= records:
                found: dict[str, Any] = json.loads(out)
                return found
        assert time.monotonic() < deadline
        time.sleep(0.05)


def sink_of(directory: Path) -> DirectorySink:
    return DirectorySink(str(directory / "out"))


def finish(directory: Path, from_savepoint: str | None = None) -> None:
    """Start the job again, in this process, let it read to the end, and count."""
    pipeline, sink = ledger(LocalProcesses(directory / "logs"), directory, SOURCE)
    status = pipeline.start(from_savepoint=from_savepoint).wait(60)
    assert status.state is JobState.FINISHED
    assert_exactly_once(sink, SOURCE)


@pytest.mark.only_proof
def test_a_user_looks_at_a_job_saves_it_stops_it_and_goes_on(tmp_path: Path) -> None:
    with a_job(tmp_path, "--interval", "0") as process:
        running = await_running(tmp_path)
        assert (running["job"], running["state"]) == ("ledger", "running")
        (listed,) = asked(tmp_path, "list")["jobs"]
        assert (listed["job"], listed["state"]) == ("ledger", "running")
        assert "ledger: running, attempt 1" in run(tmp_path, "status")[1]
        place = asked(tmp_path, "savepoint")["result"]
        assert Path(place, "_metadata").exists()
        assert sink_of(tmp_path).rows() == [], "a savepoint commits nothing"
        assert asked(tmp_path, "checkpoint")["state"] == "done"
        await_rows(sink_of(tmp_path), 1)  # it is decided; they are committed right after
        status, out, _ = run(tmp_path, "stop", "--savepoint", "--path", str(tmp_path / "kept"))
        assert status == 0
        assert process.wait(90) == 0
    stopped = out.strip()
    assert Path(stopped).parent == tmp_path / "kept"
    assert sink_of(tmp_path).prepared() == []
    job = tmp_path / "checkpoints" / "ledger"
    assert not (job / "driver.json").exists()
    assert not (job / "driver.token").exists()
    status, _, error = run(tmp_path, "status")
    assert status == 3
    assert "the job ended with it" in error
    finish(tmp_path, stopped)


@pytest.mark.servers
def test_a_drained_and_a_cancelled_job_say_how_they_ended(tmp_path: Path) -> None:
    with a_job(tmp_path) as process:
        await_running(tmp_path)
        status, out, _ = run(tmp_path, "cancel")
        assert (status, out.strip()) == (0, "job ledger has cancelled")
        process.wait(30)
    with a_job(tmp_path) as process:
        await_running(tmp_path, records=0)  # The job before may have read them all.
        done = asked(tmp_path, "stop", "--savepoint", "--drain")
        assert (done["state"], done["result"]) == ("done", "finished")
        assert process.wait(90) == 0
    assert sink_of(tmp_path).prepared() == []


@pytest.mark.servers
def test_clients_without_a_token_keep_no_job_from_being_asked_or_from_ending(
    tmp_path: Path,
) -> None:
    with a_job(tmp_path) as process:
        await_running(tmp_path)
        address = tmp_path / "checkpoints" / "ledger" / "driver.json"
        url: str = json.loads(address.read_text())["url"]
        port = urlsplit(url).port
        slow = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(40)]
        try:
            for connection in slow:
                connection.sendall(b"POST /v1/stop HTTP/1.1\r\nHost: x\r\nX-Slow: ")
            assert run(tmp_path, "status", "--json")[0] == 0
            assert asked(tmp_path, "stop")["state"] == "done"
            assert process.wait(90) == 0
        finally:
            for connection in slow:
                connection.close()
    finish(tmp_path)


def test_a_driver_that_was_killed_is_not_taken_for_a_running_one(tmp_path: Path) -> None:
    """SIGKILL right after a savepoint was asked for: the command says so, and the job goes on."""
    with a_job(tmp_path) as process:
        await_running(tmp_path)
        command = [sys.executable, "-m", "onceflow.cli.main", "savepoint", "ledger"]
        storage = ["--storage", str(tmp_path / "checkpoints")]
        users = [
            subprocess.Popen([*command, *storage], stdout=PIPE, stderr=PIPE, text=True)
            for _ in range(2)
        ]
        deadline = time.monotonic() + 90
        while not list((tmp_path / "checkpoints" / "ledger").glob("savepoints/*")):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
        answers = [(user.communicate(timeout=30), user.returncode) for user in users]
    for (out, error), exit_status in answers:
        whole = exit_status == 0 and Path(out.strip(), "_metadata").exists()
        assert whole or (exit_status == 3 and "no longer exists" in error), (out, error)
    for one in ("status", "checkpoint", "savepoint", "stop", "cancel"):
        exit_status, _, error = run(tmp_path, one)
        assert exit_status == 3, one
        assert f"process {process.pid} on {socket.gethostname()}" in error
        assert "Its last decision is checkpoint" in error
    (listed,) = asked(tmp_path, "list")["jobs"]
    assert listed["state"] == "its driver is gone"
    assert run(tmp_path, "list")[1].splitlines()[1].endswith("  -"), "an address of no driver"
    # The driver died before it wrote the metadata. The directory that it leaves is the user's.
    for savepoint in (tmp_path / "checkpoints" / "ledger" / "savepoints").iterdir():
        if not (savepoint / "_metadata").exists():
            shutil.rmtree(savepoint)
    finish(tmp_path)


def test_how_a_job_ended_is_told_for_ever_after(tmp_path: Path) -> None:
    """Stopped, cancelled, finished, failed with the error, and no record of one that is killed."""
    # The target is never there.
    full = When(tmp_path, SinkError("the directory is full"))
    failing = ScriptedSink(str(tmp_path / "out"), {"open": full})
    source = CountingSource(1_000)

    def run_and_list(how: str) -> tuple[str, str]:
        sink = failing if how == "failed" else None
        endless = replace(source, endless=how in {"stopped", "cancelled"}, pause_s=0.005)
        pipeline, _ = ledger(LocalProcesses(), tmp_path, endless, sink=sink, restart=NoRestart())
        job = pipeline.start()
        if how == "stopped":
            job.stop(60)
        elif how == "cancelled":
            job.cancel(60)
        else:
            with contextlib.suppress(SinkError):
                job.wait(60)
        (listed,) = asked(tmp_path, "list")["jobs"]
        exit_status, _, error = run(tmp_path, "status")
        assert exit_status == 3
        assert f"It has {how} at 20" in error
        return listed["state"], listed.get("error", "")

    for how in ("stopped", "cancelled", "finished"):
        assert run_and_list(how) == (how, "")
    state, error = run_and_list("failed")
    assert state == "failed"
    assert "the directory is full" in error


@pytest.mark.only_proof
def test_a_frozen_driver_is_told_from_a_dead_one_and_does_nothing_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancel that was not answered is not carried out when the driver wakes."""
    monkeypatch.setattr(command, "ANSWER_TIMEOUT_S", 1.0)
    with a_job(tmp_path) as process:
        await_running(tmp_path)
        os.kill(process.pid, signal.SIGSTOP)
        try:
            exit_status, _, error = run(tmp_path, "cancel")
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert exit_status == 3
        assert f"process {process.pid} on {socket.gethostname()}" in error
        assert "its process still exists on this machine (stopped), but does not answer" in error
        assert "The request may have been carried out. If the driver reads it after" in error
        assert "no longer exists" not in error
        assert "the next start continues from there" not in error
        monkeypatch.setattr(command, "ANSWER_TIMEOUT_S", 60.0)
        before = asked(tmp_path, "status")["checkpoints_completed"]
        deadline = time.monotonic() + 90
        while (status := asked(tmp_path, "status"))["checkpoints_completed"] <= before:
            assert status["state"] in {"running", "restarting", "starting"}, status
            assert time.monotonic() < deadline
        assert asked(tmp_path, "stop")["state"] == "done"
        assert process.wait(90) == 0
    finish(tmp_path)


def test_a_storage_that_does_not_answer_keeps_no_command_longer_than_its_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").mkdir()
    released = threading.Event()

    def hang(place: client.DriverLocation) -> None:
        del place
        released.wait(300)

    monkeypatch.setattr(client.DriverLocation, "open", hang)
    try:
        for one in ("checkpoint", "savepoint", "stop", "cancel"):
            began = time.monotonic()
            exit_status, _, error = run(tmp_path, one, "--timeout", "0.2")
            assert (exit_status, time.monotonic() - began < 60) == (1, True)
            assert "which holds the driver's address, did not answer within 0.2 s" in error
    finally:
        released.set()


def test_a_job_whose_files_cannot_be_read_keeps_neither_list_nor_status_from_answering(
    tmp_path: Path,
) -> None:
    """Reading a pipe into which nobody writes hangs, as a dead network file system does."""
    with a_job(tmp_path):
        await_running(tmp_path)
        asked(tmp_path, "stop")
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(checkpoints / "ledger", checkpoints / "hanging")
    pipes = (checkpoints / "hanging" / "driver.json", checkpoints / "hanging" / "last_run.json")
    for pipe in pipes:
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
    try:
        began = time.monotonic()
        listed = {one["job"]: one for one in asked(tmp_path, "list", "--timeout", "3")["jobs"]}
        assert time.monotonic() - began < 60
        assert listed["ledger"]["state"] == "stopped"
        assert "storage did not answer within 3 s" in listed["hanging"]["state"]
        for one in ("status", "state get"):
            more = ["--uid", "balance", "--key", "1"] if one == "state get" else []
            exit_status, _, error = run(tmp_path, one, "--timeout", "0.5", *more, name="hanging")
            assert exit_status == 1
            assert "which holds the driver's address, did not answer within 0.5 s" in error
    finally:
        for pipe in pipes:
            with contextlib.suppress(OSError):  # nobody has come to read it
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        # The search for leftovers would wait at the pipes.
        shutil.rmtree(checkpoints / "hanging")


def test_whoever_else_answers_at_the_address_is_told_from_the_driver(tmp_path: Path) -> None:
    """An old address, an old token, another job's driver, a program that knows nothing of us."""
    job = tmp_path / "checkpoints" / "ledger"
    with a_job(tmp_path):
        await_running(tmp_path)
        address = json.loads((job / "driver.json").read_text())
        assert stat.S_IMODE((job / "driver.token").stat().st_mode) == 0o600
        assert address["url"].startswith("http://127.0.0.1:")
        token = (job / "driver.token").read_text()
        (job / "driver.token").write_text("the-token-of-an-older-driver")
        exit_status, _, error = run(tmp_path, "stop")
        assert exit_status == 1
        assert "rejects the token" in error
        (job / "driver.token").write_text(token)
        (job / "driver.json").write_text(json.dumps(address | {"instance": "f" * 16}))
        exit_status, _, error = run(tmp_path, "stop")
        assert exit_status == 3
        assert f"driver {address['instance']} answers now" in error
        with a_foreign_server() as url:
            (job / "driver.json").write_text(json.dumps(address | {"url": url}))
            exit_status, _, error = run(tmp_path, "stop")
        gc.collect()  # a connection that is left open would be reported here
        assert exit_status == 3
        assert "a program that is not a driver of onceflow answers now" in error
        (job / "driver.json").write_text("{")
        assert run(tmp_path, "status")[0] == 1
        (job / "driver.json").write_text(json.dumps(address))
        assert run(tmp_path, "status")[0] == 0, "all of it was refused, and the job runs"
    exit_status, _, error = run(tmp_path, "status", name="another")
    assert exit_status == 2
    assert "has no job 'another' (there: ledger)" in error


@pytest.mark.servers
def test_checkpoints_and_savepoints_in_storage_are_listed_verified_and_disposed_of(
    tmp_path: Path,
) -> None:
    with a_job(tmp_path):
        await_running(tmp_path)
        place = asked(tmp_path, "savepoint")["result"]
        asked(tmp_path, "checkpoint")
        assert asked(tmp_path, "cancel")["state"] == "done"

    def checkpoints(*words: str) -> tuple[int, str, str]:
        storage = ["--storage", str(tmp_path / "checkpoints")]
        result = CliRunner().invoke(app, ["checkpoints", *words, *storage])
        return result.exit_code, result.stdout, result.stderr

    listed = json.loads(checkpoints("list", "--json")[1])["checkpoints"]
    assert json.loads(checkpoints("list", "ledger", "--json")[1])["checkpoints"] == listed
    *retained, kept = listed
    assert retained
    assert {one["kind"] for one in retained} == {"checkpoint"}
    assert (kept["kind"], kept["name"]) == ("savepoint", place)
    shown = json.loads(checkpoints("show", listed[0]["name"], "--json")[1])
    assert {one["uid"] for one in shown["operators"]} == {"records", "balance", "ledger"}
    exit_status, out, _ = checkpoints("verify")
    assert exit_status == 0
    assert re.fullmatch(
        rf"verified {len(listed)} checkpoints and savepoints with \d+ files: 0 files are damaged\n",
        out,
    )
    assert checkpoints("verify", place)[0] == 0
    exit_status, _, error = checkpoints("dispose", listed[0]["name"], "--yes")
    assert exit_status == 1
    assert "belongs to its job" in error
    assert checkpoints("dispose", place, "--yes")[0] == 0
    assert not Path(place).exists()
    assert checkpoints("show", place)[0] == 1
    assert checkpoints("show", "99999")[0] == 2


class _Foreign(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - overrides
        del format, args


@contextmanager
def a_foreign_server() -> Generator[str, None, None]:
    server = HTTPServer(("127.0.0.1", 0), _Foreign)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
