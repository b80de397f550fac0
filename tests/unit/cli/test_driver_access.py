"""Files in checkpoint storage cannot make a command send a file, or a token, to another address."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from onceflow.cli.jobs import command
from onceflow.cli.jobs.driver_access import (
    DriverAccess,
    UnknownDriverHost,
    parse_target,
    read_token_file,
    remember_host,
)
from onceflow.cli.jobs.observed_jobs import ObservedJobs
from onceflow.cli.main import app
from onceflow.core.errors import CheckpointCorrupt, ConfigError
from onceflow.core.storage import checkpoint_storage
from onceflow.core.storage.log.driver_files import DriverAddress

SECRET = "the-operators-own-secret-0123456789"
TOKEN = "the-token-of-the-driver-0123456789"
COMMANDS = ("status", "checkpoint", "savepoint", "stop", "cancel")


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def _address(url: str, **more: Any) -> DriverAddress:
    known: dict[str, Any] = {"host": "elsewhere", "pid": 1, "since_ms": 0, "loopback": False}
    return DriverAddress(job="ledger", instance="drawn", url=url, **known | more)


def _leave(directory: Path, job: str, address: dict[str, Any] | bytes, token: str | None) -> None:
    """Make a job whose files in storage are what somebody has written there."""
    storage = checkpoint_storage(str(directory)).open(job)
    storage.log.claim("test")
    content = address if isinstance(address, bytes) else msgspec.json.encode(address)
    (directory / job / "driver.json").write_bytes(content)
    if token is not None:
        (directory / job / "driver.token").write_text(token)


def _described(url: str, **more: Any) -> dict[str, Any]:
    described: dict[str, Any] = msgspec.to_builtins(_address(url, **more))
    return described


def _run(directory: Path, name: str, *more: str) -> tuple[int, str]:
    job = [] if name == "list" else ["ledger"]
    called = CliRunner().invoke(app, [name, *job, "--storage", str(directory), *more])
    assert called.exception is None or isinstance(called.exception, SystemExit), called.exception
    return called.exit_code, called.output


@contextmanager
def _listener(answer: bytes = b"{}") -> Generator[tuple[int, list[str]], None, None]:
    """Yield the port of a server that always answers with `answer`, and its requests."""
    received: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            received.append(f"{self.requestline}\n{self.headers}")
            self.send_response(200)
            self.send_header("Onceflow-Instance", "drawn")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_GET  # noqa: N815 - http.server finds it by this name

        def log_message(self, *_: object, **__: object) -> None:
            """Print nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server.server_port, received
        server.shutdown()
        thread.join(60)


@pytest.mark.parametrize("name", ["list", *COMMANDS])
def test_no_command_sends_a_file_that_storage_names(tmp_path: Path, name: str) -> None:
    secret = tmp_path / "id_secret"
    secret.write_text(SECRET)
    with _listener() as (port, received):
        record = _described(f"http://127.0.0.1:{port}") | {"token_file": str(secret)}
        _leave(tmp_path / "storage", "ledger", record, None)
        exit_status, output = _run(tmp_path / "storage", name)
        assert received == []
        assert exit_status == (0 if name == "list" else 3)
        assert SECRET not in output
        # Control: the token of the driver itself is sent.
        _leave(tmp_path / "storage", "ledger", record, TOKEN)
        _run(tmp_path / "storage", name)
        assert received
        assert all(f"Bearer {TOKEN}" in request for request in received)


@pytest.mark.parametrize(
    "url",
    [
        "http://10.1.2.3:80",
        "http://example.org:8080",
        "https://user@127.0.0.1:80",
        "http://127.0.0.1:80/other",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:port",
        "http://127.0.0.1",
        "http://[::1",
        "http://[::1]",
        "file:///etc/passwd",
        "ftp://127.0.0.1:21",
        "",
    ],
)
def test_no_request_goes_to_what_is_no_address_of_a_driver(tmp_path: Path, url: str) -> None:
    with pytest.raises(CheckpointCorrupt, match="No request was sent"):
        parse_target(_address(url), DriverAccess(hosts=("example.org", "10.1.2.3")))
    _leave(tmp_path, "ledger", _described(url), TOKEN)
    exit_status, output = _run(tmp_path, "status")
    assert exit_status == 1
    assert "No request was sent" in output
    # Another job of the storage is listed all the same, on the page too.
    _leave(tmp_path, "payments", b"{}", TOKEN)
    (tmp_path / "payments" / "driver.json").unlink()
    listed = {
        job["job"]: job["state"] for job in json.loads(_run(tmp_path, "list", "--json")[1])["jobs"]
    }
    assert listed["payments"] == "not running"
    assert "No request was sent" in listed["ledger"]
    states = {
        job["job"]: job["state"] for job in ObservedJobs(str(tmp_path), DriverAccess()).summaries()
    }
    assert states == {"ledger": "unknown: no answer", "payments": "not running"}


@pytest.mark.parametrize("url", ["http://127.0.0.1:80", "http://[::1]:80", "http://localhost:80"])
def test_the_loopback_interface_needs_no_consent(url: str) -> None:
    target = parse_target(_address(url), DriverAccess())
    assert (target.port, target.is_encrypted) == (80, False)


def test_a_token_goes_to_another_machine_only_with_consent(tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    authority.write_text("one authority")
    address = _address("https://driver.example:8443", authority=str(authority))
    with pytest.raises(UnknownDriverHost, match="--driver-host driver.example") as refused:
        parse_target(address, DriverAccess())
    assert parse_target(address, DriverAccess(hosts=("Driver.example",))).host == "driver.example"
    remember_host(refused.value.host, refused.value.authority)
    assert parse_target(address, DriverAccess()).host == "driver.example"
    other = _address("https://other.example:8443", authority=str(authority))
    with pytest.raises(UnknownDriverHost):
        parse_target(other, DriverAccess())
    # The consent was for this authority: whoever replaces the file is asked about again.
    authority.write_text("another authority")
    with pytest.raises(UnknownDriverHost):
        parse_target(address, DriverAccess())
    known = tmp_path / "config" / "onceflow" / "known_drivers"
    assert known.stat().st_mode & 0o777 == 0o600


def test_a_consent_that_cannot_be_kept_names_the_option_that_needs_no_file(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("a file where a directory should be")
    with pytest.raises(ConfigError, match="use --driver-host driver.example"):
        remember_host("driver.example", "")
    with pytest.raises(UnknownDriverHost):
        parse_target(_address("https://driver.example:1"), DriverAccess())


@pytest.mark.parametrize("agrees", [True, False])
def test_status_asks_once_in_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agrees: bool
) -> None:
    asked: list[str] = []

    def confirm(question: str, **_: object) -> bool:
        asked.append(question)
        return agrees

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("typer.confirm", confirm)
    _leave(tmp_path, "ledger", _described("https://driver.invalid:1"), TOKEN)
    access = command.make_access(None, None, None)
    for _ in range(2):
        if agrees:
            command.find_driver(10.0, "ledger", str(tmp_path), access)
        else:
            with pytest.raises(UnknownDriverHost):
                command.find_driver(10.0, "ledger", str(tmp_path), access)
    assert len(asked) == (1 if agrees else 2)


@pytest.mark.parametrize(
    "content",
    ["", "short", f"{SECRET}\nsecond line", f"{SECRET} {SECRET}", SECRET * 99, "\x1b[31m" * 9],
)
def test_a_file_that_is_no_token_is_refused_without_its_content(
    tmp_path: Path, content: str
) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    with pytest.raises(ConfigError, match="does not hold a token") as refused:
        read_token_file(path)
    with _listener() as (port, received):
        _leave(tmp_path / "storage", "ledger", _described(f"http://127.0.0.1:{port}"), TOKEN)
        exit_status, output = _run(tmp_path / "storage", "status", "--token-file", str(path))
        _leave(tmp_path / "storage", "ledger", _described(f"http://127.0.0.1:{port}"), content)
        assert _run(tmp_path / "storage", "status")[0] == 1
    assert (exit_status, received) == (2, [])
    for text in (str(refused.value), output):
        assert SECRET not in text
        assert "\x1b" not in text


@pytest.mark.parametrize("answer", [b"[]", b"{}", b"null", b'{"state": 7}', b"no JSON", b"\xff"])
def test_a_broken_answer_of_one_driver_hides_no_other_job(tmp_path: Path, answer: bytes) -> None:
    with _listener(answer) as (port, _):
        _leave(tmp_path, "ledger", _described(f"http://127.0.0.1:{port}"), TOKEN)
        _leave(tmp_path, "payments", b"{}", None)
        (tmp_path / "payments" / "driver.json").unlink()
        exit_status, output = _run(tmp_path, "list", "--json")
        summaries = ObservedJobs(str(tmp_path), DriverAccess()).summaries()
        for name in COMMANDS:
            assert _run(tmp_path, name, "--timeout", "5")[0] in {1, 3}
    assert exit_status == 0
    assert [job["job"] for job in json.loads(output)["jobs"]] == ["ledger", "payments"]
    assert [job["job"] for job in summaries] == ["ledger", "payments"]
