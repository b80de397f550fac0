"""The client of a job's driver, whose address it finds in checkpoint storage.

The address in storage may belong to a driver that was killed. So every request names the instance
that stored the address. An answer counts only if it names the same instance. Otherwise the error
names the program that answers instead.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from onceflow.cli.jobs.driver_access import DriverAccess, parse_target, read_token_file
from onceflow.core import errors
from onceflow.core.decoding import json_decoder
from onceflow.core.runtime.driver.job_api import DEADLINE_HEADER, INSTANCE_HEADER
from onceflow.core.storage import CheckpointStorage, JobStorage, checkpoint_storage
from onceflow.core.storage.log.driver_files import EXPECTED_FORM, DriverAddress, LastRun, is_token

Answer = dict[str, Any]
CONTENT_BYTES_MAX = 64 << 20
"""The maximum size of an answer: far more than the status of ten thousand subtasks."""
LOG_TIMEOUT_S = 10.0
"""The timeout for reading the decision log if a driver does not answer."""
_OPERATION = ("operation", "what", "state", "place")
_T = TypeVar("_T")
_DYING_S = 5.0
_CLOCKS_DIFFER_S = 5.0
"""The tolerance when comparing a process's start with the time of its address. Both times are
rounded, and clocks may be adjusted."""


class DriverNotThere(Exception):
    """Raised when no driver of the job answers: no address, no listener, or another program."""


class DriverSilent(Exception):
    """Raised when the driver does not answer, and may still be alive."""


class DriverRefused(Exception):
    """Raised when the driver refuses a request."""


@dataclass(frozen=True, slots=True)
class DriverLocation:
    """The location of a job, as given by the options."""

    storage: str
    name: str
    timeout_s: float
    access: DriverAccess = field(default_factory=DriverAccess)

    @property
    def described(self) -> CheckpointStorage:
        """The checkpoint storage. Raises ConfigError if it does not exist."""
        described = checkpoint_storage(self.storage)
        root = getattr(described, "root", None)
        if root is not None and not Path(root).is_dir():
            raise errors.ConfigError(
                f"--storage {root}: this machine has no such directory. Give the storage of the"
                " job's Checkpointing(storage=…), on a machine where that directory is mounted"
            )
        return described

    def open(self) -> JobStorage:
        """Return the job's storage.

        Raises:
            ConfigError: The storage has no such job.
        """
        storage = self.described.open(self.name)
        jobs = storage.jobs()
        if self.name not in jobs:
            there = ", ".join(jobs) or "none"
            raise errors.ConfigError(
                f"--storage {self.storage} has no job {self.name!r} (there: {there})"
            )
        return storage


@dataclass(frozen=True, slots=True)
class RelayedAnswer:
    """The unchanged answer of a driver."""

    status: int
    content: bytes


class Driver:
    """An HTTP client of one driver. Each request opens a new connection."""

    def __init__(self, location: DriverLocation, storage: JobStorage) -> None:
        self._place = location
        self.storage = storage
        address = storage.driver_address.read()
        if address is None:
            raise DriverNotThere(
                f"no driver of job {location.name!r} can be reached: {storage} holds no address"
                " of it, so it has ended, or was started with endpoint=None."
                f" {how_it_ended(storage)} {last_decision_of(storage)}"
            )
        self.address: DriverAddress = address
        self._target = parse_target(address, location.access)
        self._token = self._read_token()

    def get(self, path: str, *fields: str) -> Answer:
        """Return the driver's answer at `path`, which must have at least these fields.

        Raises:
            DriverNotThere: No driver of the job answers.
            DriverSilent: The driver does not answer, and may be alive.
            DriverRefused: The driver refuses the request.
        """
        return self._ask("GET", path, fields)

    def post(self, what: str, **body: Any) -> Answer:
        """Ask the driver to start an operation. Return the operation. Raises the errors of `get`.

        If the driver reads the request after our timeout, it does nothing.
        """
        given = {name: value for name, value in body.items() if value}
        return self._ask("POST", what, _OPERATION, given)

    def outcome(self, operation: Answer, timeout_s: float) -> Answer:
        """Wait for the end of `operation`. Return its result.

        Raises:
            DriverNotThere: The driver has died in the meantime.
            TimeoutError: The operation was still pending after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        wait_s = 0.02
        while True:
            state = self.get(f"operations/{quote(str(operation['operation']))}", *_OPERATION)
            if state["state"] != "pending":
                return state
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{operation['what']} of job {self._place.name!r} is not done after"
                    f" {timeout_s:.0f} s and continues; run the command again with a longer"
                    " --timeout"
                )
            time.sleep(wait_s)
            # Most operations end at once. For a long one, two polls a second are enough.
            wait_s = min(0.5, wait_s * 1.5)

    def relay(
        self, method: str, path: str, body: bytes | None, deadline_ms: int, timeout_s: float
    ) -> RelayedAnswer:
        """Forward a client's request to the driver. Return the unchanged answer.

        Raises:
            DriverNotThere: No driver of the job answers.
            DriverSilent: The driver does not answer, and may be alive.
        """
        data = None if method == "GET" else body or b"{}"
        return self._exchange(method, path, data, deadline_ms, timeout_s)

    def _ask(
        self, method: str, path: str, fields: tuple[str, ...], body: Answer | None = None
    ) -> Answer:
        timeout_s = self._place.timeout_s
        data = None if body is None else json.dumps(body).encode()
        # Use the wall clock: the driver, perhaps on another machine, compares it with its own
        # clock.
        deadline_ms = int((time.time() + timeout_s) * 1000)
        reply = self._exchange(method, path, data, deadline_ms, timeout_s)
        try:
            answer = json_decoder(dict[str, Any]).decode(reply.content)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._explain_gone(
                f"{self.address.url} did not answer with a JSON object"
            ) from error
        if reply.status == http.client.UNAUTHORIZED:
            raise DriverRefused(
                f"the driver of job {self._place.name!r} at {self.address.url} rejects the token"
                f" of {self._token_location()}: the token is out of date, or belongs to another"
                " driver"
            )
        if reply.status >= 400:
            raise DriverRefused(str(answer.get("error", reply.status)))
        if missing := [field for field in fields if field not in answer]:
            raise DriverRefused(
                f"the answer of the driver of job {self._place.name!r} at {self.address.url} to"
                f" {method} /v1/{path} has no {missing[0]!r}: the driver has another version, or"
                " it is not a driver. Look in the decision log for what was done"
            )
        return answer

    def _exchange(
        self, method: str, path: str, data: bytes | None, deadline_ms: int, timeout_s: float
    ) -> RelayedAnswer:
        connection = self._connection(timeout_s)
        headers = {
            INSTANCE_HEADER: self.address.instance,
            "Authorization": f"Bearer {self._token}",
        }
        if data is not None:
            # Only requests that change something need a deadline. A late read does no harm.
            headers[DEADLINE_HEADER] = str(deadline_ms)
        try:
            connection.request(method, f"/v1/{path}", data, headers)
            # A response without a length owns the socket, and the connection does not close it.
            with connection.getresponse() as response:
                content = _read_content(response)
        except (OSError, http.client.HTTPException) as error:
            raise self._explain_silence(error, deadline_ms if data is not None else None) from error
        finally:
            connection.close()
        # The port may now belong to another job's driver, or to another program.
        answers = response.getheader(INSTANCE_HEADER, "")
        if response.status == http.client.MISDIRECTED_REQUEST or answers != self.address.instance:
            who = f"driver {answers}" if answers else "a program that is not a driver of onceflow"
            raise self._explain_gone(f"at {self.address.url} {who} answers now")
        return RelayedAnswer(response.status, content)

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        target = self._target
        if not target.is_encrypted:
            return http.client.HTTPConnection(target.host, target.port, timeout=timeout_s)
        try:
            context = ssl.create_default_context(cafile=target.authority or None)
        except (OSError, ssl.SSLError) as error:
            raise errors.ConfigError(
                f"{target.authority!r}, the file of the authority that signed the driver's"
                f" certificate, cannot be read ({error}): give a copy with --authority"
            ) from error
        return http.client.HTTPSConnection(
            target.host, target.port, timeout=timeout_s, context=context
        )

    def _explain_silence(
        self, error: OSError | http.client.HTTPException, deadline_ms: int | None
    ) -> DriverNotThere | DriverSilent:
        """Return the error for a driver that has not answered a request with this deadline."""
        address = self.address
        why = f"{address.url} does not answer ({error or type(error).__name__})"
        # A process id is meaningful only on its own machine.
        is_here = address.host == socket.gethostname()
        # A process that is being killed closes its connections before it exits.
        patience_s = 0.0 if isinstance(error, TimeoutError) else _DYING_S
        if is_here and (state := _state_after(patience_s, address.pid, address.since_ms)):
            known = f"its process still exists on this machine ({state}), but does not answer"
            advice = f"`kill -CONT {address.pid}` wakes a stopped one"
        # A refused connection proves that no process listens. A timeout proves nothing, because the
        # network may be down.
        elif not is_here and isinstance(error, TimeoutError) and not address.loopback:
            known = f"it is not known on {socket.gethostname()} whether its process still exists"
            advice = f"look on {address.host}"
        else:
            return self._explain_gone(why)
        may_be_done = ""
        if deadline_ms is not None:
            until = _utc(deadline_ms)
            may_be_done = (
                f" The request may have been carried out. If the driver reads it after {until},"
                " the driver ignores it."
            )
        return DriverSilent(
            f"the driver of job {address.job!r} ({self._who()}) is silent: {why};"
            f" {known}.{may_be_done} Do not start the job again while that process may still run:"
            f" {advice}; or kill it first"
        )

    def _who(self) -> str:
        address = self.address
        return f"process {address.pid} on {address.host}, since {_utc(address.since_ms)}"

    def _explain_gone(self, why: str) -> DriverNotThere:
        address, who = self.address, self._who()
        if address.loopback and address.host != socket.gethostname():
            return DriverNotThere(
                f"the driver of job {address.job!r} ({who}) listens at {address.url}, only on its"
                f" own machine: run this on {address.host}. If it does not answer there, it no"
                " longer exists"
            )
        return DriverNotThere(
            f"the driver of job {address.job!r} ({who}) no longer exists: {why}."
            f" {how_it_ended(self.storage)} {last_decision_of(self.storage)}"
        )

    def _token_location(self) -> str:
        return str(self._place.access.token_file or self.storage)

    def _read_token(self) -> str:
        if (path := self._place.access.token_file) is not None:
            return read_token_file(path)
        token = self.storage.driver_address.read_token()
        if token is None:
            raise self._explain_gone(
                "its token is not in checkpoint storage. If the job's program keeps the token"
                " elsewhere with Endpoint(token_file=…), give a copy of that file with"
                " --token-file"
            )
        if not is_token(token):
            raise errors.CheckpointCorrupt(
                f"driver.token of job {self._place.name!r} in {self.storage} is not a token:"
                f" {EXPECTED_FORM}. No request was sent; the next start of the job replaces it"
            )
        return token


def _read_content(response: http.client.HTTPResponse) -> bytes:
    """Return the body of an answer.

    Raises:
        http.client.HTTPException: The body is longer than CONTENT_BYTES_MAX.
    """
    content = response.read(CONTENT_BYTES_MAX + 1)
    if len(content) > CONTENT_BYTES_MAX:
        raise http.client.HTTPException(f"an answer of more than {CONTENT_BYTES_MAX} bytes")
    return content


def within(timeout_s: float, what: str, work: Callable[[], _T]) -> _T:
    """Return the result of `work`. If `work` takes longer, it continues in the background.

    Clients of a storage that is down retry for longer than a user waits.

    Raises:
        TimeoutError: It took longer than `timeout_s`. The message has `what`.
    """
    ended = begin(what, work)
    if not wait([ended], timeout_s).done:
        raise TimeoutError(f"{what} did not answer within {timeout_s:g} s")
    return ended.result()


def begin(what: str, work: Callable[[], _T]) -> Future[_T]:
    """Run `work` on a daemon thread named `what`, which does not keep the process alive."""
    ended: Future[_T] = Future()

    def run() -> None:
        try:
            ended.set_result(work())
        # Pass any error to the waiting thread: on this thread it would be lost.
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, name=what, daemon=True).start()
    return ended


def process_state(pid: int, since_ms: int) -> str:
    """Return the state of local process `pid` in a word, or "" if it is dead.

    If the process with this id started after `since_ms`, it is a different process.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # The second field is the program's name in parentheses, which may contain spaces and
        # parentheses. The remaining fields start after the last parenthesis: the state is the
        # first, the start time the twentieth.
        fields = text.rpartition(")")[2].split()
        uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _state_without_proc(pid)
    began_s = time.time() - uptime_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    # A zombie has already ended.
    if fields[0] in "ZXx" or began_s > since_ms / 1000 + _CLOCKS_DIFFER_S:
        return ""
    return "stopped" if fields[0] in "Tt" else "running"


def _state_after(patience_s: float, pid: int, since_ms: int) -> str:
    """Return the state of a process, or "" if it is dead or dies within `patience_s`."""
    until = time.monotonic() + patience_s
    while (state := process_state(pid, since_ms)) and time.monotonic() < until:
        time.sleep(0.02)
    return state


def _state_without_proc(pid: int) -> str:
    # On Linux, /proc exists and does not list the process.
    if Path("/proc/self").exists():
        return ""
    try:
        # Signal 0 is not delivered. It only tests whether the process exists.
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        return "another user's"
    return "running"


def _utc(at_ms: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_ms / 1000))


def last_run_of(storage: JobStorage) -> LastRun | None:
    """Return the record of the job's last run, or None if it cannot be read."""
    with contextlib.suppress(errors.CheckpointError, errors.StorageError, TimeoutError):
        return within(LOG_TIMEOUT_S, "checkpoint storage", storage.last_run.read)
    return None


def state_without_driver(run: LastRun | None) -> str:
    """Return in words the state of a job whose driver does not answer."""
    if run is None:
        return "not running"
    if run.ended_ms:
        return run.state
    if run.host != socket.gethostname():
        return f"unknown: it ran on {run.host}"
    if process_state(run.pid, run.began_ms):
        return "running, without an endpoint"
    return "its driver is gone"


def how_it_ended(storage: JobStorage) -> str:
    """Return sentences on the end of the job's last run, from its record."""
    run = last_run_of(storage)
    if run is None:
        return "There is no record of how it ended."
    if not run.ended_ms:
        return (
            f"Its last driver, process {run.pid} on {run.host}, did not record its end: it was"
            " killed, or still runs."
        )
    error = f": {run.error}" if run.error else ""
    return f"It has {run.state} at {_utc(run.ended_ms)}{error}."


def last_decision_of(storage: JobStorage) -> str:
    """Return a sentence on the last decision in the job's log."""
    with contextlib.suppress(
        errors.CheckpointError, errors.StorageError, errors.StateIncompatible, TimeoutError
    ):
        view = within(LOG_TIMEOUT_S, "the decision log", storage.log.read)
        if view.decided:
            last = view.completed[-1]
            how = "the job ended with it" if last.final else "the next start continues from there"
            return f"Its last decision is checkpoint {last.checkpoint}; {how}."
    return "Its decision log cannot be read, or holds no decision."
