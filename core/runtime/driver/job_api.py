"""What the driver answers over HTTP, as a WSGI application: JSON in, JSON out.

    GET  /v1/status  /v1/checkpoints  /v1/subtasks  /v1/events?after=N
    GET  /v1/state?uid=U&state=S&key=K   of the last completed checkpoint; key= once a key column
    POST /v1/checkpoint  /v1/savepoint {path}  /v1/stop {savepoint, drain, path}  /v1/cancel
    GET  /v1/operations/ID

What is asked for by POST goes on when nobody waits for it: the answer names an operation, whose
state is `pending`, `done` or `failed`. Every request shows the token, and names the driver's
instance if it knows it: after a crash another driver, or another job, may listen at the address.
Answers are 200 and 202, or `{"error": …}` with 400 (a bad request), 401 (no token, or an old one),
404, 405, 409 (the job cannot do that now), 413 and 421 (another instance). Runs on the server's
threads; nothing here waits for the job.
"""

from __future__ import annotations

import hmac
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qs

import msgspec

from onceflow.core.decoders import json_decoder
from onceflow.core.errors import ConfigError, OnceflowError
from onceflow.core.protocol.decisions import CheckpointKind, StateForm
from onceflow.core.runtime.driver.job_events import JobEvent, JobState
from onceflow.core.runtime.driver.savepoints import AskedSavepoint
from onceflow.core.runtime.driver.state_lookup import StateAnswer, keys_meant
from onceflow.core.runtime.driver.status import JobStatus

INSTANCE_HEADER = "Onceflow-Instance"
BODY_BYTES_MAX = 64 * 1024
EVENTS_KEPT = 1_000
OPERATIONS_KEPT = 1_000

StartResponse = Callable[[str, list[tuple[str, str]]], object]
_Body = TypeVar("_Body")


class ControlledJob(Protocol):
    """What the application needs of a job; `JobDriver` is one. Any thread."""

    def status(self) -> JobStatus:
        """Return the job as of now."""
        ...

    def request(self, kind: CheckpointKind) -> None:
        """Ask for a checkpoint."""
        ...

    def savepoint(
        self, kind: CheckpointKind, directory: str | None, form: StateForm
    ) -> AskedSavepoint:
        """Ask for a savepoint."""
        ...

    def look_up(self, uid: str, state: str | None, keys: Sequence[Any]) -> StateAnswer:
        """Return what the last completed checkpoint holds under a key."""
        ...

    def cancel(self) -> None:
        """Ask to leave."""
        ...


class _Refused(Exception):
    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


class _SavepointBody(msgspec.Struct, forbid_unknown_fields=True):
    path: str | None = None
    native: bool = False


class _StopBody(msgspec.Struct, forbid_unknown_fields=True):
    savepoint: bool = False
    drain: bool = False
    path: str | None = None
    native: bool = False


class _NoBody(msgspec.Struct, forbid_unknown_fields=True):
    pass


@dataclass(slots=True)
class _Operation:
    """`answer` is asked whenever somebody wants to know; it says what to tell, None: pending."""

    what: str
    place: str
    answer: Callable[[JobStatus], tuple[str, str] | None]
    told: threading.Event = field(default_factory=threading.Event)
    """Set once somebody has been sent how it ended."""


class _Sent(list[bytes]):
    """A body; the server closes it when it is sent."""

    def __init__(self, body: bytes, told: list[_Operation]) -> None:
        super().__init__([body])
        self._told = told

    def close(self) -> None:
        for operation in self._told:
            operation.told.set()


class JobApi:
    """One driver's application. Any number of threads."""

    def __init__(self, job: ControlledJob, instance: str, token: str) -> None:
        self._job = job
        self._instance = instance
        self._token = token
        self._lock = threading.Lock()
        self._operations: dict[str, _Operation] = {}
        self._events: deque[tuple[int, JobEvent]] = deque(maxlen=EVENTS_KEPT)
        self._events_seen = 0

    def on_event(self, event: JobEvent, status: JobStatus) -> None:
        """Remember what has happened; a listener of the job."""
        del status
        with self._lock:
            self._events_seen += 1
            self._events.append((self._events_seen, event))

    def await_told(self, timeout_s: float) -> None:
        """Wait, once the job has ended, until all who asked for something know how it ended."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            operations = tuple(self._operations.values())
        for operation in operations:
            operation.told.wait(max(0.0, deadline - time.monotonic()))

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        told: list[_Operation] = []
        try:
            status, answer = self._answer(environ, told)
        except _Refused as refused:
            status, answer = refused.status, {"error": str(refused)}
        except ConfigError as error:
            status, answer = "400 Bad Request", {"error": str(error)}
        except OnceflowError as error:
            status, answer = "409 Conflict", {"error": str(error)}
        body = msgspec.json.encode(answer, enc_hook=str)
        headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            (INSTANCE_HEADER, self._instance),
        ]
        if status.startswith("401"):
            headers.append(("WWW-Authenticate", "Bearer"))
        start_response(status, headers)
        return _Sent(body, told)

    def _answer(self, environ: dict[str, Any], told: list[_Operation]) -> tuple[str, object]:
        """Return status and answer; add to `told` what has ended, if the answer says so."""
        self._check(environ)
        method, path = str(environ["REQUEST_METHOD"]), str(environ["PATH_INFO"]).rstrip("/")
        name = path.removeprefix("/v1/")
        if name.startswith("operations/"):
            return "200 OK", self._operation(name.removeprefix("operations/"), told)
        reads: dict[str, Callable[[], object]] = {
            "status": self._status,
            "checkpoints": self._checkpoints,
            "subtasks": lambda: {"slots": self._job.status().slots},
            "events": lambda: self._events_after(str(environ.get("QUERY_STRING", ""))),
            "state": lambda: self._state(str(environ.get("QUERY_STRING", ""))),
        }
        asks: dict[str, Callable[[bytes], object]] = {
            "checkpoint": self._checkpoint,
            "savepoint": self._savepoint,
            "stop": self._stop,
            "cancel": self._cancel,
        }
        if not path.startswith("/v1/") or name not in {*reads, *asks}:
            raise _Refused("404 Not Found", f"there is no {path}; see {', '.join((*reads, *asks))}")
        if method != ("GET" if name in reads else "POST"):
            raise _Refused("405 Method Not Allowed", f"{path} does not take {method}")
        if read := reads.get(name):
            return "200 OK", read()
        if self._job.status().state.ended:
            raise _Refused("409 Conflict", f"the job has {self._job.status().state.value}")
        return "202 Accepted", asks[name](_body_of(environ))

    def _check(self, environ: dict[str, Any]) -> None:
        """Refuse whoever does not mean this driver, or may not ask it."""
        meant = environ.get("HTTP_" + INSTANCE_HEADER.upper().replace("-", "_"), self._instance)
        if meant != self._instance:
            raise _Refused("421 Misdirected Request", "another driver answers here now")
        given = str(environ.get("HTTP_AUTHORIZATION", "")).encode("utf-8", "replace")
        if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise _Refused("401 Unauthorized", "show the token: Authorization: Bearer …")

    # --- reading ---------------------------------------------------------------------------------

    def _status(self) -> object:
        status = self._job.status()
        told = (field.name for field in fields(status) if field.name != "tally")
        return {name: getattr(status, name) for name in told} | {
            "records_in": status.records_in,
            "rejected": status.rejected,
            "sinks": status.sinks,
        }

    def _checkpoints(self) -> object:
        status = self._job.status()
        return {
            "completed": status.checkpoints_completed,
            "failed": status.checkpoints_failed,
            "pending": status.pending,
            "history": status.history,
            "failures": status.failures,
            "savepoints": status.savepoints,
        }

    def _events_after(self, query: str) -> object:
        try:
            after = int(parse_qs(query).get("after", ["0"])[0])
        except ValueError:
            raise _Refused("400 Bad Request", "after=N: N is the number of an event") from None
        with self._lock:
            found = [(number, event) for number, event in self._events if number > after]
            last = self._events_seen
        return {
            "events": [
                {"number": number, "event": type(event).__name__, "fields": event}
                for number, event in found
            ],
            "last": last,
        }

    def _state(self, query: str) -> object:
        asked = parse_qs(query, keep_blank_values=True)
        if unknown := sorted(set(asked) - {"uid", "state", "key"}):
            raise _Refused("400 Bad Request", f"there is no {unknown[0]}=: uid=, state=, key=")
        if len(asked.get("uid", ())) != 1 or not asked.get("key"):
            raise _Refused("400 Bad Request", "say uid= and key=, the key once a column")
        state = asked["state"][0] if "state" in asked else None
        return self._job.look_up(asked["uid"][0], state, keys_meant(asked["key"]))

    def _operation(self, name: str, told: list[_Operation]) -> object:
        operation = self._operations.get(name)
        if operation is None:
            raise _Refused("404 Not Found", f"there is no operation {name}")
        answer = operation.answer(self._job.status())
        state, text = answer or ("pending", "")
        if answer is not None:
            told.append(operation)
        return {
            "operation": name,
            "what": operation.what,
            "state": state,
            "place": operation.place,
            "error" if state == "failed" else "result": text,
        }

    # --- asking ----------------------------------------------------------------------------------

    def _checkpoint(self, body: bytes) -> object:
        _parsed(body, _NoBody)
        status = self._job.status()
        known = [one.checkpoint for one in status.pending]
        before = max([*known, *(one.checkpoint for one in status.history)], default=0)

        def answer(now: JobStatus) -> tuple[str, str] | None:
            if now.history and now.history[-1].checkpoint > before:
                return "done", str(now.history[-1].checkpoint)
            return _unless_running(now)

        begun = self._begun("checkpoint", answer)
        self._job.request(CheckpointKind.MANUAL)
        return begun

    def _savepoint(self, body: bytes) -> object:
        wanted = _parsed(body, _SavepointBody)
        asked = self._job.savepoint(CheckpointKind.SAVEPOINT, wanted.path, _form_of(wanted))
        return self._begun("savepoint", lambda _: _outcome(asked.done), asked.place)

    def _stop(self, body: bytes) -> object:
        wanted = _parsed(body, _StopBody)
        if not wanted.savepoint:
            if wanted.drain or wanted.path or wanted.native:
                raise ConfigError("drain, path and native are for a stop with a savepoint")
            begun = self._begun("stop", _has_stopped)
            self._job.request(CheckpointKind.STOP)
            return begun
        drains = wanted.drain
        kind = CheckpointKind.SAVEPOINT_DRAIN if drains else CheckpointKind.SAVEPOINT_STOP
        asked = self._job.savepoint(kind, wanted.path, _form_of(wanted))

        def answer(now: JobStatus) -> tuple[str, str] | None:
            taken = _outcome(asked.done)
            return taken if taken is None or taken[0] == "failed" else _has_stopped(now)

        return self._begun("stop with savepoint", answer, asked.place)

    def _cancel(self, body: bytes) -> object:
        _parsed(body, _NoBody)
        # Begun first: a job that ends at once still waits for who asked.
        begun = self._begun("cancel", _has_stopped)
        self._job.cancel()
        return begun

    def _begun(
        self, what: str, answer: Callable[[JobStatus], tuple[str, str] | None], place: str = ""
    ) -> object:
        name = uuid.uuid4().hex
        with self._lock:
            self._operations[name] = _Operation(what, place, answer)
            while len(self._operations) > OPERATIONS_KEPT:
                del self._operations[next(iter(self._operations))]
        return {"operation": name, "what": what, "state": "pending", "place": place}


def _form_of(wanted: _SavepointBody | _StopBody) -> StateForm:
    return StateForm.NATIVE if wanted.native else StateForm.CANONICAL


def _outcome(done: Future[str]) -> tuple[str, str] | None:
    if not done.done():
        return None
    error = done.exception()
    return ("failed", str(error)) if error is not None else ("done", done.result())


def _has_stopped(status: JobStatus) -> tuple[str, str] | None:
    if status.state is JobState.FAILED:
        return "failed", f"the job has failed: {status.last_error}"
    return ("done", status.state.value) if status.state.ended else None


def _unless_running(status: JobStatus) -> tuple[str, str] | None:
    if not status.state.ended:
        return None
    return "failed", f"the job has {status.state.value}: {status.last_error}".rstrip(": ")


def _body_of(environ: dict[str, Any]) -> bytes:
    try:
        length = int(environ.get("CONTENT_LENGTH") or 0)
    except ValueError:
        raise _Refused("400 Bad Request", "Content-Length is no number") from None
    if length > BODY_BYTES_MAX:
        raise _Refused("413 Content Too Large", f"{length} bytes are more than {BODY_BYTES_MAX}")
    return environ["wsgi.input"].read(length) if length else b"{}"


def _parsed(body: bytes, kind: type[_Body]) -> _Body:
    try:
        return json_decoder(kind).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the request's body: {error}") from error
