"""Finds the driver of a job through checkpoint storage, and asks it.

An address in storage may be of a driver that was killed. So every request names the instance that
left it, and an answer counts only if it names the same: anything else says who answers instead.
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
from onceflow.core.errors import (
    CheckpointCorrupt,
    CheckpointError,
    ConfigError,
    StateIncompatible,
    StorageError,
)
from onceflow.core.msgspec_decoders import json_decoder
from onceflow.core.runtime.driver.job_api import DEADLINE_HEADER, INSTANCE_HEADER
from onceflow.core.storage import CheckpointStorage, JobStorage, checkpoint_storage
from onceflow.core.storage.log.driver_address import DriverAddress
from onceflow.core.storage.log.driver_token import EXPECTED_FORM, is_token
from onceflow.core.storage.log.last_run import LastRun

Answer = dict[str, Any]
CONTENT_BYTES_MAX = 64 << 20
"""The longest answer that is read: far more than the status of ten thousand subtasks."""
LOG_TIMEOUT_S = 10.0
"""How long the decision log may take to say how far a job is whose driver does not answer."""
_OPERATION = ("operation", "what", "state", "place")
_T = TypeVar("_T")
_DYING_S = 5.0
_CLOCKS_DIFFER_S = 5.0
"""A process begins before it leaves its address; both times are rounded, and clocks are set."""


class DriverNotThere(Exception):
    """Nobody answers for the job: no address, nobody at it, or somebody else."""


class DriverSilent(Exception):
    """The driver does not answer, and it is not known to be dead."""


class DriverRefused(Exception):
    """The driver has heard, and will not do it."""


@dataclass(frozen=True, slots=True)
class DriverLocation:
    """Where a job is, as the options say it."""

    storage: str
    name: str
    timeout_s: float
    access: DriverAccess = field(default_factory=DriverAccess)

    @property
    def described(self) -> CheckpointStorage:
        """The checkpoint storage; raises ConfigError when there is none of that name."""
        described = checkpoint_storage(self.storage)
        root = getattr(described, "root", None)
        if root is not None and not Path(root).is_dir():
            raise ConfigError(
                f"--storage {root}: this machine has no such directory; give the storage of the"
                " job's Checkpointing(storage=…), and run this where that directory is mounted"
            )
        return described

    def open(self) -> JobStorage:
        """Return the job's storage.

        Raises:
            ConfigError: It has no such job.
        """
        storage = self.described.open(self.name)
        jobs = storage.jobs()
        if self.name not in jobs:
            there = ", ".join(jobs) or "none"
            raise ConfigError(f"--storage {self.storage} has no job {self.name!r} (there: {there})")
        return storage


@dataclass(frozen=True, slots=True)
class RelayedAnswer:
    """What a driver has answered, as it came."""

    status: int
    content: bytes


class Driver:
    """One driver, to be asked over HTTP. Each request has a connection of its own."""

    def __init__(self, location: DriverLocation, storage: JobStorage) -> None:
        self._place = location
        self.storage = storage
        address = storage.driver_address.read()
        if address is None:
            raise DriverNotThere(
                f"no driver of job {location.name!r} can be asked: none has left its address in"
                f" {storage}, so it has ended, or was started with endpoint=None."
                f" {how_it_ended(storage)} {last_decision_of(storage)}"
            )
        self.address: DriverAddress = address
        self._target = parse_target(address, location.access)
        self._token = self._read_token()

    def get(self, path: str, *fields: str) -> Answer:
        """Return what the driver says at `path`, with at least these fields.

        Raises:
            DriverNotThere: Nobody answers for the job.
            DriverSilent: The driver does not answer, and may live.
            DriverRefused: The driver does not do it.
        """
        return self._ask("GET", path, fields)

    def post(self, what: str, **body: Any) -> Answer:
        """Ask the driver to do something; return the operation. Raises as `get`.

        The driver does nothing when it reads this after we have given up.
        """
        given = {name: value for name, value in body.items() if value}
        return self._ask("POST", what, _OPERATION, given)

    def outcome(self, operation: Answer, timeout_s: float) -> Answer:
        """Wait for the end of `operation`; return how it ended.

        Raises:
            DriverNotThere: The driver has died meanwhile.
            TimeoutError: It was pending still after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        wait_s = 0.02
        while True:
            state = self.get(f"operations/{quote(str(operation['operation']))}", *_OPERATION)
            if state["state"] != "pending":
                return state
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{operation['what']} of job {self._place.name!r} is pending after"
                    f" {timeout_s:.0f} s, and goes on; ask again with --timeout"
                )
            time.sleep(wait_s)
            # Most operations end at once; of a long one, two questions a second are enough.
            wait_s = min(0.5, wait_s * 1.5)

    def relay(
        self, method: str, path: str, body: bytes | None, deadline_ms: int, timeout_s: float
    ) -> RelayedAnswer:
        """Return the driver's answer to somebody else's request, whatever it is.

        Raises:
            DriverNotThere: Nobody answers for the job.
            DriverSilent: The driver does not answer, and may live.
        """
        data = None if method == "GET" else body or b"{}"
        return self._exchange(method, path, data, deadline_ms, timeout_s)

    def _ask(
        self, method: str, path: str, fields: tuple[str, ...], body: Answer | None = None
    ) -> Answer:
        timeout_s = self._place.timeout_s
        data = None if body is None else json.dumps(body).encode()
        # By the wall clock: the driver compares it with its own, on another machine perhaps.
        deadline_ms = int((time.time() + timeout_s) * 1000)
        reply = self._exchange(method, path, data, deadline_ms, timeout_s)
        try:
            answer = json_decoder(dict[str, Any]).decode(reply.content)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._explain_gone(f"{self.address.url} answers with no JSON object") from error
        if reply.status == http.client.UNAUTHORIZED:
            raise DriverRefused(
                f"the driver of job {self._place.name!r} at {self.address.url} does not take the"
                f" token of {self._token_location()}: it is an old one, or another driver's"
            )
        if reply.status >= 400:
            raise DriverRefused(str(answer.get("error", reply.status)))
        if missing := [field for field in fields if field not in answer]:
            raise DriverRefused(
                f"the answer of the driver of job {self._place.name!r} at {self.address.url} to"
                f" {method} /v1/{path} has no {missing[0]!r}: a driver of another version, or not a"
                " driver. Whether it did anything, the decision log says"
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
            # Only a request that changes something: reading late does no harm.
            headers[DEADLINE_HEADER] = str(deadline_ms)
        try:
            connection.request(method, f"/v1/{path}", data, headers)
            # An answer without a length owns the socket, which the connection then does not close.
            with connection.getresponse() as response:
                content = _read_content(response)
        except (OSError, http.client.HTTPException) as error:
            raise self._explain_silence(error, deadline_ms if data is not None else None) from error
        finally:
            connection.close()
        # The port may belong to another job's driver by now, or to another program.
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
            raise ConfigError(
                f"{target.authority!r}, the file of the authority that signed the driver's"
                f" certificate, cannot be read ({error}): name a copy by --authority"
            ) from error
        return http.client.HTTPSConnection(
            target.host, target.port, timeout=timeout_s, context=context
        )

    def _explain_silence(
        self, error: OSError | http.client.HTTPException, deadline_ms: int | None
    ) -> DriverNotThere | DriverSilent:
        """Say what is known of a driver that has not answered; `deadline_ms` of what it may do."""
        address = self.address
        why = f"{address.url} does not answer ({error or type(error).__name__})"
        # A process number says something only on its own machine.
        is_here = address.host == socket.gethostname()
        # A process that is being killed closes its connections before it is gone.
        patience_s = 0.0 if isinstance(error, TimeoutError) else _DYING_S
        if is_here and (state := _state_after(patience_s, address.pid, address.since_ms)):
            known = f"its process lives on this machine ({state}), and does not answer"
            advice = f"`kill -CONT {address.pid}` wakes a stopped one"
        # A refused connection tells that nobody listens; silence tells nothing: the network may be
        # cut.
        elif not is_here and isinstance(error, TimeoutError) and not address.loopback:
            known = f"whether its process lives cannot be told from {socket.gethostname()}"
            advice = f"look on {address.host}"
        else:
            return self._explain_gone(why)
        may_be_done = ""
        if deadline_ms is not None:
            until = _utc(deadline_ms)
            may_be_done = (
                " The request may have been carried out. If the driver reads it after"
                f" {until}, it is not."
            )
        return DriverSilent(
            f"the driver of job {address.job!r} ({self._who()}) is silent: {why}; {known}."
            f"{may_be_done} Do not start the job again while it may live: {advice}; or kill it"
            " first"
        )

    def _who(self) -> str:
        address = self.address
        return f"process {address.pid} on {address.host}, since {_utc(address.since_ms)}"

    def _explain_gone(self, why: str) -> DriverNotThere:
        address, who = self.address, self._who()
        if address.loopback and address.host != socket.gethostname():
            return DriverNotThere(
                f"the driver of job {address.job!r} ({who}) listens at {address.url}, on its own"
                f" machine alone: run this on {address.host}; or it is not there any more"
            )
        return DriverNotThere(
            f"the driver of job {address.job!r} ({who}) is not there any more: {why}."
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
                " elsewhere by Endpoint(token_file=…), name a copy of that file by --token-file"
            )
        if not is_token(token):
            raise CheckpointCorrupt(
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
    """Return what `work` returns; it goes on alone when that takes longer.

    A storage that is down is asked again and again by its client, for longer than a user waits.

    Raises:
        TimeoutError: It took longer than `timeout_s`; says `what` did.
    """
    ended = begin(what, work)
    if not wait([ended], timeout_s).done:
        raise TimeoutError(f"{what} has not answered within {timeout_s:g} s")
    return ended.result()


def begin(what: str, work: Callable[[], _T]) -> Future[_T]:
    """Do `work` on a daemon thread called `what`, which keeps no process from ending."""
    ended: Future[_T] = Future()

    def run() -> None:
        try:
            ended.set_result(work())
        # Whatever it is goes to whoever waits: on this thread nobody would see it.
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, name=what, daemon=True).start()
    return ended


def process_state(pid: int, since_ms: int) -> str:
    """Return how process `pid` of this machine is, in a word; empty when it is dead.

    A process of that number that began after `since_ms` is another one.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # The second field is the program's name in parentheses, and may hold spaces and
        # parentheses: the rest begins after the last one. There the state is first, the start time
        # the twentieth.
        fields = text.rpartition(")")[2].split()
        uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _state_without_proc(pid)
    began_s = time.time() - uptime_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    # A zombie has ended and only waits for its parent.
    if fields[0] in "ZXx" or began_s > since_ms / 1000 + _CLOCKS_DIFFER_S:
        return ""
    return "stopped" if fields[0] in "Tt" else "running"


def _state_after(patience_s: float, pid: int, since_ms: int) -> str:
    """Return how a process is; empty when it is dead, or dies within `patience_s`."""
    until = time.monotonic() + patience_s
    while (state := process_state(pid, since_ms)) and time.monotonic() < until:
        time.sleep(0.02)
    return state


def _state_without_proc(pid: int) -> str:
    # Linux: there is a /proc, and the process is not in it.
    if Path("/proc/self").exists():
        return ""
    try:
        # Signal 0 is sent to nobody: it only asks whether the process is there.
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        return "another user's"
    return "running"


def _utc(at_ms: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_ms / 1000))


def last_run_of(storage: JobStorage) -> LastRun | None:
    """Return what the job's last driver has written of itself; None: nothing that can be read."""
    with contextlib.suppress(CheckpointError, StorageError, TimeoutError):
        return within(LOG_TIMEOUT_S, "checkpoint storage", storage.last_run.read)
    return None


def state_without_driver(run: LastRun | None) -> str:
    """Return the state of a job whose driver cannot be asked, in words."""
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
    """Return sentences on how the job's last driver ended, as far as it has written it."""
    run = last_run_of(storage)
    if run is None:
        return "Nothing is written of how it ended."
    if not run.ended_ms:
        return (
            f"Its last driver, process {run.pid} on {run.host}, did not write how it ended: it was"
            " killed, or runs still."
        )
    error = f": {run.error}" if run.error else ""
    return f"It has {run.state} at {_utc(run.ended_ms)}{error}."


def last_decision_of(storage: JobStorage) -> str:
    """Return a sentence on how far the job is, by its log."""
    with contextlib.suppress(CheckpointError, StorageError, StateIncompatible, TimeoutError):
        view = within(LOG_TIMEOUT_S, "the decision log", storage.log.read)
        if view.decided:
            last = view.completed[-1]
            how = "the job ended with it" if last.final else "a start goes on from there"
            return f"Its last decision is checkpoint {last.checkpoint}; {how}."
    return "Its decision log cannot be read, or holds no decision."
