"""Tests that repeated refusals of a sink are recognized, and which ones may end by themselves."""

from __future__ import annotations

import errno
from collections.abc import Callable
from email.message import Message
from urllib.error import HTTPError

import pyarrow as pa
import pytest

from onceflow.core.commit.queue import CommitQueue, CommitRetryPolicy, Done, RetryAt
from onceflow.core.protocol import committables
from onceflow.core.protocol.failures import STUCK_TRIES, make_fingerprint
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi.bad_rows import is_data_at_fault, may_answer_otherwise, may_pass

ONE = CheckpointId(1)


def caused_by(cause: BaseException) -> Exception:
    try:
        raise RuntimeError("rows were not written") from cause
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    "cause",
    [
        ValueError("no such month"),
        pa.ArrowInvalid("list child is null"),
        OverflowError("date"),
        KeyError("amount"),
        OSError(errno.ENAMETOOLONG, "File name too long"),
    ],
)
def test_a_value_that_code_cannot_handle_is_the_datas_fault(cause: Exception) -> None:
    for error in (cause, caused_by(cause)):
        assert is_data_at_fault(error)
        assert not may_pass(error)


@pytest.mark.parametrize(
    "cause",
    [
        ConnectionResetError("reset by peer"),
        TimeoutError("no answer"),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EACCES, "Permission denied"),
        RuntimeError("the driver of a database says no"),
        MemoryError("no room for a column"),
    ],
)
def test_what_the_network_or_a_disk_may_have_caused_is_not(cause: Exception) -> None:
    assert not is_data_at_fault(cause)
    assert not is_data_at_fault(caused_by(cause))


class ServerSelectionTimeoutError(Exception):
    """Named as a driver of a database names it, of no class that Python knows."""


class DuplicateTableError(Exception):
    """An answer of a database that is there."""


def test_an_error_whose_name_says_that_a_server_is_away_may_pass() -> None:
    for error in (ServerSelectionTimeoutError("no"), caused_by(ServerSelectionTimeoutError("no"))):
        assert may_pass(error)
    assert not may_pass(DuplicateTableError("no"))


def test_a_value_error_of_a_broken_connection_may_pass() -> None:
    error = caused_by(ConnectionResetError("reset by peer"))
    wrapped = ValueError("no JSON")
    wrapped.__cause__ = error
    assert may_pass(wrapped)
    assert not is_data_at_fault(wrapped)


class Response:
    """The answer of a server, as HTTP libraries keep it."""

    def __init__(self, status_code: int) -> None:
        self.status_code = status_code


class RequestsError(OSError):
    """Shaped as `requests.HTTPError`."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status} for url")
        self.response = Response(status)


class AiohttpError(Exception):
    """Shaped as `aiohttp.ClientResponseError`."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status}, message='no'")
        self.status = status


def _make_urllib_error(status: int) -> HTTPError:
    return HTTPError("http://service", status, "no", Message(), None)


@pytest.mark.parametrize("make", [RequestsError, AiohttpError, _make_urllib_error])
def test_the_status_of_an_answer_says_if_it_may_pass(make: Callable[[int], Exception]) -> None:
    passing = {status for status in range(300, 700) if may_answer_otherwise(make(status))}
    assert passing == {408, 425, 429, *range(500, 600)}
    assert may_answer_otherwise(make(200)) is None
    for status in (400, 404, 422):
        assert not may_pass(make(status))
        assert not may_pass(caused_by(make(status)))
    for status in (429, 503):
        assert may_pass(make(status))
        assert may_pass(caused_by(make(status)))


@pytest.mark.parametrize("make", [RequestsError, _make_urllib_error])
def test_refused_credentials_are_no_fault_of_the_data(make: Callable[[int], Exception]) -> None:
    refused = {status for status in range(400, 600) if is_data_at_fault(make(status))}
    assert {400, 404, 422} <= refused
    assert not {401, 403, 407, 429, 503} & refused
    assert not is_data_at_fault(caused_by(make(401)))


def test_a_refusal_after_a_broken_connection_is_a_refusal() -> None:
    refusal = RequestsError(400)
    refusal.__context__ = ConnectionResetError("reset by peer")
    assert not may_pass(refusal)


def test_the_same_refusal_is_known_again_in_the_next_attempt() -> None:
    text = "sink job.out subtask 0: job.out/{}/7/0 is not durable: column 'at' cannot be {}"
    first = make_fingerprint("out", "PreCommitFailed", text.format(1, "written"))
    assert first == make_fingerprint("out", "PreCommitFailed", text.format(2, "written"))
    others = (
        make_fingerprint("out", "PreCommitFailed", text.format(1, "read")),
        make_fingerprint("out", "SinkError", text.format(1, "written")),
        make_fingerprint("dead", "PreCommitFailed", text.format(1, "written")),
    )
    assert first not in others


def test_a_sink_that_has_got_on_begins_anew() -> None:
    stuck, got_on = (make_fingerprint("out", "SinkError", "no", only_in=n) for n in (None, 4))
    assert stuck != got_on != make_fingerprint("out", "SinkError", "no", only_in=5)


def refuse(outcomes: list[committables.CommitOutcome]) -> list[bool]:
    """Return, for each outcome of a commit that is tried again, whether it is called stuck."""
    queue = CommitQueue(CommitRetryPolicy(deadline_s=1e6))
    commit = committables.Committable(TransactionId("job.out", 1, ONE, 0))
    queue.pre_committed(ONE, [commit])
    queue.note_decision(ONE)
    ends = [queue.outcome(commit, outcome, float(n)) for n, outcome in enumerate(outcomes)]
    return [isinstance(end, RetryAt) and end.is_stuck for end in ends]


def test_a_commit_is_stuck_after_the_same_refusal_several_times_until_it_succeeds() -> None:
    refused = committables.RetryLater("try {}: a row is in the way", until_fixed=True)
    tries = [
        committables.RetryLater(refused.reason.format(n), until_fixed=True)
        for n in range(STUCK_TRIES)
    ]
    assert refuse([*tries, *tries]) == [False] * (STUCK_TRIES - 1) + [True] * (STUCK_TRIES + 1)
    assert refuse([*tries, committables.Committed()])[-1] is False


def test_a_commit_whose_outcome_stays_unknown_until_a_person_helps_is_stuck() -> None:
    assert refuse([committables.Unknown("a right is missing", until_fixed=True)] * STUCK_TRIES)[-1]


def test_a_target_that_is_away_or_answers_otherwise_is_not_stuck() -> None:
    other = committables.RetryLater("another row is in the way", until_fixed=True)
    fixed = committables.RetryLater("a row is in the way", until_fixed=True)
    assert not any(refuse([committables.RetryLater("no answer")] * 20))
    assert not any(refuse([committables.Unknown("no answer")] * 20))
    assert not any(refuse([fixed, other] * 10))
    assert not any(refuse([fixed, fixed, committables.RetryLater("no answer")] * 5))


def test_a_commit_that_was_stuck_is_done_as_any_other() -> None:
    queue = CommitQueue(CommitRetryPolicy(deadline_s=1e6))
    commit = committables.Committable(TransactionId("job.out", 1, ONE, 0))
    queue.pre_committed(ONE, [commit])
    queue.note_decision(ONE)
    for n in range(STUCK_TRIES):
        queue.outcome(commit, committables.RetryLater("no", until_fixed=True), float(n))
    assert queue.outcome(commit, committables.Committed(), 9.0) == Done(already=False)
