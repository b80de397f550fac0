"""The driver's HTTP API: JSON in, JSON out.

    GET  /  /page/*                      the page, which needs no token
    GET  /healthz  /readyz               for probes, which need no token; see `health`
    GET  /metrics                        for Prometheus; see core/runtime/metrics
    GET  /v1/about                       the kind of server and the job's name
    GET  /v1/overview  /v1/timeline  /v1/history?before=N&limit=M  /v1/graph  /v1/settings
    GET  /v1/stored                      checkpoints and savepoints in storage, read now
    GET  /v1/proof                       what log and targets say, read now
    GET  /v1/status  /v1/checkpoints  /v1/subtasks?chain=C  /v1/events?after=N
    GET  /v1/state?uid=U&state=S&key=K   of the last completed checkpoint; key= once a key column
    POST /v1/checkpoint  /v1/savepoint {path}  /v1/stop {savepoint, drain, path}  /v1/cancel
    GET  /v1/operations/ID

A POST starts an operation, which goes on if the client disconnects. The answer names the operation,
whose state is `pending`, `done` or `failed`. Every request shows the token. It also names the
driver's instance if the client knows it: after a crash another driver, or another job, may listen
at the address. A POST may carry a deadline.
Answers are 200 and 202, or `{"error": …}` with 400 (a bad request), 401 (no token, or an old one),
403 (a request of another site's page), 404, 405, 409 (the job cannot do that now), 410 (read after
its deadline), 421 (another instance, or a foreign host name), and the server's own: 408, 413 and
431. The API runs on the server's threads and never waits for the job.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from onceflow.core.decoding import json_decoder
from onceflow.core.errors import ConfigError, OnceflowError
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind, StateForm
from onceflow.core.runtime.driver import job_views, web_page
from onceflow.core.runtime.driver.health import HEALTH_PATH, READY_PATH, Health, answer_probe
from onceflow.core.runtime.driver.http_server import Request, Response
from onceflow.core.runtime.driver.metrics_server import METRICS_PATH, answer_scrape
from onceflow.core.runtime.driver.savepoints import AskedSavepoint
from onceflow.core.runtime.driver.state_lookup import StateAnswer, parse_keys
from onceflow.core.runtime.driver.web_page import has_token
from onceflow.core.runtime.events.job_events import JobEvent, JobState
from onceflow.core.runtime.events.job_history import JobHistory
from onceflow.core.runtime.events.status import JobStatus
from onceflow.core.runtime.metrics.commit_latency import RecentLatency
from onceflow.core.runtime.metrics.exposition import Measured
from onceflow.core.settings.effective_settings import EffectiveSetting

INSTANCE_HEADER = "Onceflow-Instance"
DEADLINE_HEADER = "Onceflow-Deadline"
"""The name of a header with a Unix time in milliseconds. A POST that is read after that time is not
carried out: a driver that was frozen must not act on a request that its client has given up.
"""
EVENTS_KEPT = 1_000
OPERATIONS_KEPT = 1_000
_PROBES = frozenset({HEALTH_PATH, READY_PATH})

_Body = TypeVar("_Body")


class ControlledJob(Protocol):
    """The methods of a job that the API calls, from any thread. `JobDriver` implements them."""

    def status(self) -> JobStatus:
        """Return the status of the job now."""
        ...

    def measure(self) -> Measured:
        """Return the job's metrics up to now."""
        ...

    def read_latencies(self) -> Mapping[str, RecentLatency]:
        """Return, by sink, the recent latency until records became visible."""
        ...

    def judge_health(self) -> Health:
        """Return the job's health: whether it makes progress, and whether it runs."""
        ...

    def request(self, kind: CheckpointKind) -> None:
        """Request a checkpoint."""
        ...

    def savepoint(
        self, kind: CheckpointKind, directory: str | None, form: StateForm
    ) -> AskedSavepoint:
        """Request a savepoint."""
        ...

    def graph_view(self) -> job_views.GraphView:
        """Return the job's dataflow."""
        ...

    def settings(self) -> Sequence[EffectiveSetting]:
        """Return every setting with its origin."""
        ...

    def prove_sinks(self) -> Mapping[str, Any]:
        """Read the decision log and each target, and compare them."""
        ...

    def describe_stored(self) -> Mapping[str, Any]:
        """Read the list of checkpoints and savepoints in storage."""
        ...

    def look_up(self, uid: str, state: str | None, keys: Sequence[Any]) -> StateAnswer:
        """Return the value of a key in the last completed checkpoint."""
        ...

    def cancel(self) -> None:
        """Request that the job is cancelled."""
        ...


class _Refused(Exception):
    def __init__(self, status: HTTPStatus, text: str) -> None:
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
    """An operation that a POST started.

    `answer` returns its state and a text, or None while the operation is pending.
    """

    what: str
    location: str
    answer: Callable[[JobStatus], tuple[str, str] | None]
    outcome_sent: threading.Event = field(default_factory=threading.Event)
    """Set once a client has been sent the outcome."""


class JobApi:
    """The HTTP application of one driver. Any number of threads."""

    def __init__(
        self, job: ControlledJob, instance: str, token: str, names: Collection[str] = ()
    ) -> None:
        """Create the application. `names` are further host names that browsers may use.

        Addresses and localhost are always accepted.
        """
        self._job = job
        self._instance = instance
        self._token = token
        self._names = frozenset(name.lower() for name in names)
        self._page = web_page.WebPage()
        self._history = JobHistory()
        self._proving = threading.Lock()
        self._lock = threading.Lock()
        self._operations: dict[str, _Operation] = {}
        self._events: deque[tuple[int, JobEvent]] = deque(maxlen=EVENTS_KEPT)
        self._events_seen = 0

    def on_event(self, event: JobEvent, status: JobStatus) -> None:
        """Remember an event. The API is a listener of the job."""
        self._history.on_event(event, status)
        with self._lock:
            self._events_seen += 1
            self._events.append((self._events_seen, event))

    def await_answers(self, timeout_s: float) -> None:
        """Wait until clients have read the outcome of each operation.

        Called when the job has ended.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            operations = tuple(self._operations.values())
        for operation in operations:
            operation.outcome_sent.wait(max(0.0, deadline - time.monotonic()))

    def refuse(self, head: Request) -> Response | None:
        """Return the response to a request that names another driver or lacks the right to ask.

        Return None if the request is accepted.
        """
        if stranger := web_page.find_stranger(head, self._names):
            return self.explain(*stranger)
        path = urlsplit(head.target).path
        if self._page.has(path) or (path in _PROBES and head.method == "GET"):
            return None
        meant = head.headers.get(INSTANCE_HEADER.lower(), self._instance)
        if meant != self._instance:
            another = "another driver uses this address now"
            return self.explain(HTTPStatus.MISDIRECTED_REQUEST, another)
        if not has_token(head, self._token):
            what_is_missing = "send the token: Authorization: Bearer …"
            return self.explain(HTTPStatus.UNAUTHORIZED, what_is_missing)
        return None

    def has_token(self, head: Request) -> bool:
        """Return True if a request shows the driver's token."""
        return has_token(head, self._token)

    def answer(self, request: Request) -> Response:
        """Answer a request that `refuse` accepted."""
        response = self._answer_or_explain(request)
        # A client takes an answer without this header for that of another program.
        named = {**response.headers, INSTANCE_HEADER: self._instance}
        return replace(response, headers=named)

    def _answer_or_explain(self, request: Request) -> Response:
        try:
            return self._answer(request)
        except _Refused as refused:
            return self.explain(refused.status, str(refused))
        except ConfigError as error:
            return self.explain(HTTPStatus.BAD_REQUEST, str(error))
        except OnceflowError as error:
            return self.explain(HTTPStatus.CONFLICT, str(error))

    def explain(self, status: HTTPStatus, reason: str) -> Response:
        """Return a response that describes the problem with a request."""
        return self._respond(status, {"error": reason})

    def _respond(
        self, status: HTTPStatus, answer: object, sent: Callable[[], None] = lambda: None
    ) -> Response:
        return web_page.make_json_response(status, answer, {INSTANCE_HEADER: self._instance}, sent)

    def _answer(self, request: Request) -> Response:
        target = urlsplit(request.target)
        if self._page.has(target.path):
            return self._page.answer(request)
        if target.path in _PROBES:
            return self._probe(request.method, target.path)
        if target.path == METRICS_PATH:
            return self._scrape(request)
        path, query = unquote(target.path).rstrip("/"), target.query
        name = path.removeprefix("/v1/")
        if name.startswith("operations/"):
            return self._operation(name.removeprefix("operations/"))
        reads: dict[str, Callable[[], object]] = {
            "about": lambda: {"kind": "job", "job": self._job.status().job},
            "overview": lambda: job_views.describe_now(
                self._job.status(), self._history, self._instance, self._job.read_latencies()
            ),
            "timeline": lambda: job_views.describe_timeline(self._job.status(), self._history),
            "history": partial(self._history_before, query),
            "graph": self._job.graph_view,
            "settings": lambda: {"settings": self._job.settings()},
            "stored": self._job.describe_stored,
            "proof": self._proof,
            "status": self._status,
            "checkpoints": self._checkpoints,
            "subtasks": partial(self._subtasks, query),
            "events": partial(self._events_after, query),
            "state": partial(self._state, query),
        }
        asks: dict[str, Callable[[bytes], object]] = {
            "checkpoint": self._checkpoint,
            "savepoint": self._savepoint,
            "stop": self._stop,
            "cancel": self._cancel,
        }
        if not path.startswith("/v1/") or name not in {*reads, *asks}:
            known = ", ".join((*reads, *asks))
            raise _Refused(HTTPStatus.NOT_FOUND, f"unknown path {path}; see {known}")
        if request.method != ("GET" if name in reads else "POST"):
            not_taken = f"{path} does not support {request.method}"
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, not_taken)
        if read := reads.get(name):
            return self._respond(HTTPStatus.OK, read())
        _check_deadline(request)
        if (state := self._job.status().state).ended:
            raise _Refused(HTTPStatus.CONFLICT, f"the job has {state.value}")
        return self._respond(HTTPStatus.ACCEPTED, asks[name](request.body or b"{}"))

    def _probe(self, method: str, path: str) -> Response:
        if method != "GET":
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes GET")
        return answer_probe(path, [self._job.judge_health()])

    def _scrape(self, request: Request) -> Response:
        if request.method != "GET":
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"{METRICS_PATH} takes GET")
        try:
            return answer_scrape([self._job.measure()], request)
        except ConfigError as error:
            raise _Refused(HTTPStatus.NOT_IMPLEMENTED, str(error)) from error

    # --- reading ---------------------------------------------------------------------------------

    def _status(self) -> object:
        status = self._job.status()
        names = (field.name for field in fields(status) if field.name != "tally")
        return {name: getattr(status, name) for name in names} | {
            "summary": status.describe(time.time()),
            "records_in": status.records_in,
            "rejected": status.rejected,
            "waits": status.waits,
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

    def _proof(self) -> object:
        # One request at a time, because each connects to every target.
        with self._proving:
            return self._job.prove_sinks()

    def _history_before(self, query: str) -> object:
        before, limit = _number_in(query, "before"), _number_in(query, "limit")
        return job_views.describe_history(self._job.status(), self._history, before, limit or 100)

    def _subtasks(self, query: str) -> object:
        slots = self._job.status().slots
        chain = parse_qs(query).get("chain", [""])[0]
        if not chain:
            return {"slots": slots}
        loads = self._history.loads()
        return {
            "subtasks": [
                {"slot": slot.slot, "metrics": metrics, "load": loads.get(metrics.subtask)}
                for slot in slots
                for metrics in slot.subtasks
                if metrics.subtask.chain == chain
            ]
        }

    def _events_after(self, query: str) -> object:
        after = _number_in(query, "after") or 0
        with self._lock:
            events = [(number, event) for number, event in self._events if number > after]
            last = self._events_seen
        return {
            "events": [
                {"number": number, "event": type(event).__name__, "fields": event}
                for number, event in events
            ],
            "last": last,
        }

    def _state(self, query: str) -> object:
        asked = parse_qs(query, keep_blank_values=True)
        if unknown := sorted(set(asked) - {"uid", "state", "key"}):
            raise _Refused(
                HTTPStatus.BAD_REQUEST, f"unknown parameter {unknown[0]}=: give uid=, state=, key="
            )
        if len(asked.get("uid", ())) != 1 or not asked.get("key"):
            raise _Refused(
                HTTPStatus.BAD_REQUEST,
                "give uid= and key=, with one key= for each column of the key",
            )
        state = asked["state"][0] if "state" in asked else None
        return self._job.look_up(asked["uid"][0], state, parse_keys(asked["key"]))

    def _operation(self, name: str) -> Response:
        operation = self._operations.get(name)
        if operation is None:
            raise _Refused(
                HTTPStatus.NOT_FOUND,
                f"unknown operation {name}; this attempt of the driver did not start it",
            )
        outcome = operation.answer(self._job.status())
        state, text = outcome or ("pending", "")
        answer = {
            "operation": name,
            "what": operation.what,
            "state": state,
            "place": operation.location,
            "error" if state == "failed" else "result": text,
        }
        if outcome is None:
            return self._respond(HTTPStatus.OK, answer)
        return self._respond(HTTPStatus.OK, answer, operation.outcome_sent.set)

    # --- asking ----------------------------------------------------------------------------------

    def _checkpoint(self, body: bytes) -> object:
        _parse_body(body, _NoBody)
        status = self._job.status()
        known = [pending.checkpoint for pending in status.pending]
        before = max([*known, *(stats.checkpoint for stats in status.history)], default=0)

        def answer(now: JobStatus) -> tuple[str, str] | None:
            if now.history and now.history[-1].checkpoint > before:
                return "done", str(now.history[-1].checkpoint)
            return _unless_running(now)

        begun = self._begin_operation("checkpoint", answer)
        self._job.request(CheckpointKind.MANUAL)
        return begun

    def _savepoint(self, body: bytes) -> object:
        options = _parse_body(body, _SavepointBody)
        asked = self._job.savepoint(CheckpointKind.SAVEPOINT, options.path, _choose_form(options))
        return self._begin_operation("savepoint", lambda _: _outcome(asked.done), asked.location)

    def _stop(self, body: bytes) -> object:
        options = _parse_body(body, _StopBody)
        if not options.savepoint:
            if options.drain or options.path or options.native:
                raise ConfigError(
                    "drain, path and native belong to a stop with a savepoint: add savepoint=true"
                )
            begun = self._begin_operation("stop", _has_stopped)
            self._job.request(CheckpointKind.STOP)
            return begun
        drains = options.drain
        kind = CheckpointKind.SAVEPOINT_DRAIN if drains else CheckpointKind.SAVEPOINT_STOP
        asked = self._job.savepoint(kind, options.path, _choose_form(options))

        def answer(now: JobStatus) -> tuple[str, str] | None:
            taken = _outcome(asked.done)
            return taken if taken is None or taken[0] == "failed" else _has_stopped(now)

        return self._begin_operation("stop with savepoint", answer, asked.location)

    def _cancel(self, body: bytes) -> object:
        _parse_body(body, _NoBody)
        # Begin the operation first: a job that ends at once still waits for the client.
        begun = self._begin_operation("cancel", _has_stopped)
        self._job.cancel()
        return begun

    def _begin_operation(
        self, what: str, answer: Callable[[JobStatus], tuple[str, str] | None], location: str = ""
    ) -> object:
        name = uuid.uuid4().hex
        with self._lock:
            self._operations[name] = _Operation(what, location, answer)
            while len(self._operations) > OPERATIONS_KEPT:
                del self._operations[next(iter(self._operations))]
        return {"operation": name, "what": what, "state": "pending", "place": location}


def _number_in(query: str, name: str) -> int | None:
    """Return the number parameter `name` of `query`, or None if it is absent."""
    text = parse_qs(query, keep_blank_values=True).get(name, [None])[0]
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 18:
        raise _Refused(HTTPStatus.BAD_REQUEST, f"{name}={text[:40]!r} must be a number, 0 or more")
    return int(text)


def _choose_form(options: _SavepointBody | _StopBody) -> StateForm:
    return StateForm.NATIVE if options.native else StateForm.CANONICAL


def _outcome(done: Future[str]) -> tuple[str, str] | None:
    if not done.done():
        return None
    error = done.exception()
    return ("failed", str(error)) if error is not None else ("done", done.result())


def _check_deadline(request: Request) -> None:
    """Raise _Refused if the request carries a deadline that has passed or is malformed."""
    text = request.headers.get(DEADLINE_HEADER.lower())
    if text is None:
        return
    if not text.isdecimal():
        reason = f"{DEADLINE_HEADER}: {text[:40]!r} is not a Unix time in milliseconds"
        raise _Refused(HTTPStatus.BAD_REQUEST, reason)
    late_s = time.time() - int(text) / 1000
    if late_s > 0:
        raise _Refused(
            HTTPStatus.GONE,
            f"nothing was done: the driver read the request {late_s:.1f} s after its deadline."
            " Either the driver did not run for that long, or its clock differs from the"
            " client's. Send the request again",
        )


def _has_stopped(status: JobStatus) -> tuple[str, str] | None:
    if status.state is JobState.FAILED:
        return "failed", f"the job has failed: {status.last_error}"
    return ("done", status.state.value) if status.state.ended else None


def _unless_running(status: JobStatus) -> tuple[str, str] | None:
    if not status.state.ended:
        return None
    return "failed", f"the job has {status.state.value}: {status.last_error}".rstrip(": ")


def _parse_body(body: bytes, kind: type[_Body]) -> _Body:
    try:
        return json_decoder(kind).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the request's body: {error}") from error
