"""Tests the driver's endpoint without a server: its answers, permissions and requests."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from onceflow import FileSystemStorage, JobState
from onceflow.core.errors import SavepointFailed, StorageError
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind, SavepointRequest, StateForm
from onceflow.core.runtime.driver.health import Health
from onceflow.core.runtime.driver.http_server import Request
from onceflow.core.runtime.driver.job_api import JobApi
from onceflow.core.runtime.driver.job_views import GraphView
from onceflow.core.runtime.driver.savepoints import AskedSavepoint
from onceflow.core.runtime.driver.state_lookup import StateAnswer
from onceflow.core.runtime.events.job_events import CheckpointTriggered, JobEnded, JobStarted
from onceflow.core.runtime.events.status import JobStatus, apply
from onceflow.core.runtime.metrics.commit_latency import RecentLatency
from onceflow.core.runtime.metrics.exposition import Measured
from onceflow.core.runtime.metrics.job_metrics import JobMetrics
from onceflow.core.settings.effective_settings import EffectiveSetting

TOKEN, INSTANCE = "the token", "this one"
DIRECTORY = FileSystemStorage("/kept").open_savepoint("/kept/1")


@dataclass
class Job:
    """Notes what it is asked for."""

    now: JobStatus = field(default_factory=lambda: apply(JobStatus("ledger"), JobStarted()))
    asked: list[object] = field(default_factory=list[object])
    done: Future[str] = field(default_factory=Future[str])
    metrics: JobMetrics = field(default_factory=JobMetrics)

    def status(self) -> JobStatus:
        return self.now

    def measure(self) -> Measured:
        return Measured.of_job("ledger", self.metrics.collect())

    def read_latencies(self) -> dict[str, RecentLatency]:
        return {"out": RecentLatency(10, 0.1, 0.5)}

    def judge_health(self) -> Health:
        return Health("ledger", "", "no checkpoint is decided yet")

    def request(self, kind: CheckpointKind) -> None:
        self.asked.append(kind)

    def savepoint(
        self, kind: CheckpointKind, directory: str | None, form: StateForm
    ) -> AskedSavepoint:
        del form
        if directory == "/refused":
            raise StorageError("/refused cannot be written")
        self.asked.append((kind, directory))
        return AskedSavepoint(SavepointRequest("1", kind), DIRECTORY, self.done)

    def graph_view(self) -> GraphView:
        return GraphView((), (), 1)

    def settings(self) -> Sequence[EffectiveSetting]:
        return (EffectiveSetting("pipeline.parallelism", "2", "program", "1"),)

    def prove_sinks(self) -> Mapping[str, Any]:
        self.asked.append("proof")
        return {"sinks": []}

    def describe_stored(self) -> Mapping[str, Any]:
        return {"checkpoints": []}

    def look_up(self, uid: str, state: str | None, keys: Sequence[Any]) -> StateAnswer:
        self.asked.append((uid, state, keys))
        return StateAnswer(uid, state or "only", "value", keys[0], True, 7, "checkpoint", 3, 0)

    def cancel(self) -> None:
        self.asked.append("cancel")


class Client:
    def __init__(self) -> None:
        self.job = Job()
        self.api = JobApi(self.job, INSTANCE, TOKEN)

    def ask(
        self,
        what: str,
        body: bytes | None = None,
        *,
        method: str = "",
        token: str = TOKEN,
        instance: str = "",
    ) -> tuple[int, dict[str, Any]]:
        headers = {"authorization": f"Bearer {token}"}
        if instance:
            headers["onceflow-instance"] = instance
        asked = method or ("GET" if body is None else "POST")
        request = Request(asked, f"/v1/{what}", headers, body or b"")
        response = self.api.refuse(request) or self.api.answer(request)
        response.sent()
        return response.status.value, json.loads(response.body)


READS = [
    *("status", "checkpoints", "subtasks", "events", "about", "overview", "timeline", "history"),
    *("graph", "settings", "stored"),
]
ASKS = ["checkpoint", "savepoint", "stop", "cancel"]


@pytest.mark.parametrize("what", [*READS, *ASKS, "operations/x", "nothing"])
def test_nothing_is_told_or_done_without_the_token(what: str) -> None:
    client = Client()
    body = b"{}" if what in ASKS else None
    assert client.ask(what, body, token="")[0] == 401
    assert client.ask(what, body, token="another")[0] == 401
    assert client.ask(what, body, instance="one before")[0] == 421
    assert client.job.asked == []


@pytest.mark.parametrize("what", READS)
def test_reading_asks_nothing_of_the_job(what: str) -> None:
    client = Client()
    assert client.ask(what)[0] == 200
    assert client.ask(what, b"{}")[0] == 405
    assert client.job.asked == []


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/", "/healthz", "/readyz", "/metrics", "/v1/status", "/v1/none"])
def test_every_answer_names_the_driver_that_gives_it(path: str, method: str) -> None:
    client = Client()
    for headers in ({"authorization": f"Bearer {TOKEN}"}, {}, {"onceflow-instance": "one before"}):
        request = Request(method, path, headers, b"{}")
        response = client.api.refuse(request) or client.api.answer(request)
        assert response.headers["Onceflow-Instance"] == INSTANCE, (path, response.status)


def test_events_are_told_once_to_who_says_what_he_knows() -> None:
    client = Client()
    for number in (1, 2):
        event = CheckpointTriggered(number, CheckpointKind.SAVEPOINT)  # type: ignore[arg-type]
        client.api.on_event(event, client.job.now)
    found = client.ask("events?after=1")[1]
    assert found["last"] == 2
    (event,) = found["events"]
    assert (event["number"], event["event"]) == (2, "CheckpointTriggered")
    assert event["fields"]["kind"] == "savepoint"
    assert client.ask("events?after=x")[0] == 400


@pytest.mark.parametrize(
    ("what", "body", "asked"),
    [
        ("checkpoint", b"", CheckpointKind.MANUAL),
        ("stop", b"", CheckpointKind.STOP),
        ("cancel", b"{}", "cancel"),
        ("savepoint", b'{"path": "/kept"}', (CheckpointKind.SAVEPOINT, "/kept")),
        ("stop", b'{"savepoint": true}', (CheckpointKind.SAVEPOINT_STOP, None)),
        (
            "stop",
            b'{"savepoint": true, "drain": true}',
            (CheckpointKind.SAVEPOINT_DRAIN, None),
        ),
    ],
)
def test_what_is_asked_for_is_asked_of_the_job_and_pending(
    what: str, body: bytes, asked: object
) -> None:
    client = Client()
    status, begun = client.ask(what, body)
    assert (status, begun["state"], client.job.asked) == (202, "pending", [asked])
    assert client.ask(f"operations/{begun['operation']}")[1]["state"] == "pending"


def test_a_savepoint_is_done_when_it_is_whole_and_a_stop_with_it_when_the_job_has_ended() -> None:
    client = Client()
    _, taken = client.ask("savepoint", b"{}")
    _, stopped = client.ask("stop", b'{"savepoint": true}')
    assert taken["place"] == stopped["place"] == "/kept/1"
    client.job.done.set_result("/kept/1")
    found = client.ask(f"operations/{taken['operation']}")[1]
    assert (found["state"], found["result"]) == ("done", "/kept/1")
    assert client.ask(f"operations/{stopped['operation']}")[1]["state"] == "pending"
    client.job.now = apply(client.job.now, JobEnded(JobState.STOPPED))
    found = client.ask(f"operations/{stopped['operation']}")[1]
    assert (found["state"], found["result"]) == ("done", "stopped")
    assert client.ask("cancel", b"{}")[0] == 409, "it has ended"


def test_what_fails_says_why() -> None:
    client = Client()
    _, begun = client.ask("stop", b'{"savepoint": true}')
    client.job.done.set_exception(SavepointFailed("no space"))
    found = client.ask(f"operations/{begun['operation']}")[1]
    assert (found["state"], found["error"]) == ("failed", "no space")
    _, begun = client.ask("checkpoint", b"")
    client.job.now = apply(client.job.now, JobEnded(JobState.FAILED, "lost"))
    found = client.ask(f"operations/{begun['operation']}")[1]
    assert (found["state"], found["error"]) == ("failed", "the job has failed: lost")


@pytest.mark.parametrize(
    ("what", "body", "status", "word"),
    [
        ("savepoint", b"no json", 400, "malformed"),
        ("savepoint", b'{"pth": "/kept"}', 400, "pth"),
        ("savepoint", b'{"path": "/refused"}', 409, "cannot be written"),
        ("stop", b'{"drain": true}', 400, "with a savepoint"),
        ("checkpoint", b'{"now": 1}', 400, "now"),
        ("restart", b"", 404, "savepoint"),
    ],
)
def test_bad_requests_are_refused_by_name(what: str, body: bytes, status: int, word: str) -> None:
    client = Client()
    found, answer = client.ask(what, body)
    assert found == status
    assert word in answer["error"]
    assert client.job.asked == []


def test_a_job_that_has_ended_waits_until_who_asked_has_been_sent_how() -> None:
    client = Client()
    _, begun = client.ask("cancel", b"{}")
    client.job.now = apply(client.job.now, JobEnded(JobState.CANCELLED))
    client.ask(f"operations/{begun['operation']}")
    began = time.monotonic()
    client.api.await_answers(timeout_s=30.0)
    assert time.monotonic() - began < 25.0


@pytest.mark.parametrize(("path", "status"), [("/healthz", 200), ("/readyz", 503)])
def test_probes_need_no_token_and_only_read(path: str, status: int) -> None:
    api = JobApi(Job(), INSTANCE, TOKEN)
    head = Request("GET", path, {"host": "10.0.0.7:9249"})
    assert api.refuse(head) is None
    assert api.answer(head).status == status
    refused = api.refuse(Request("POST", path, {}))
    assert refused is not None
    assert refused.status == 401
    stranger = api.refuse(Request("GET", path, {"host": "evil.example"}))
    assert stranger is not None
    assert stranger.status == 421
