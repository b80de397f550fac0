"""After a lost reply the server is asked until it answers, and nobody guesses."""

from __future__ import annotations

from collections.abc import Callable

from onceflow.clients.sql.session import ConnectionLost
from onceflow.core.errors import SinkError
from onceflow.core.protocol.committables import Committed, RetryLater, Unknown
from onceflow.sinks.sql.committer import ask_until_known


def _answers(*given: Exception | Committed | None) -> Callable[[], Committed | None]:
    """Return what gives each answer once, and the last one for ever."""
    left = list(given)

    def ask() -> Committed | None:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


def test_server_that_cannot_be_reached_before_anything_is_sent_is_asked_later() -> None:
    outcome = ask_until_known(
        _answers(SinkError("no route")), "COMMIT x", sent_to="the server", timeout_s=9.0
    )
    assert outcome == RetryLater("no route")


def test_lost_reply_is_asked_for_again_also_while_the_server_is_away() -> None:
    ask = _answers(ConnectionLost("cut"), SinkError("starting"), Committed())
    assert ask_until_known(ask, "COMMIT x", sent_to="the server", timeout_s=9.0) == Committed()


def test_reply_that_stays_lost_is_unknown_and_never_a_retry() -> None:
    """Whoever takes it for "nothing happened" would apply the rows twice."""
    ask = _answers(ConnectionLost("cut"), SinkError("starting"))
    outcome = ask_until_known(ask, "COMMIT x", sent_to="the server", timeout_s=0.2)
    assert isinstance(outcome, Unknown)
    assert "COMMIT x was sent to the server, but not answered (cut)" in str(outcome)


def test_rows_held_by_a_session_are_asked_for_again_and_a_lost_reply_is_not_forgotten() -> None:
    """None is no answer: neither that it is committed, nor that nothing was sent."""
    ask = _answers(None, ConnectionLost("cut"), None, SinkError("starting"))
    outcome = ask_until_known(ask, "XA COMMIT x", sent_to="the server", timeout_s=0.2)
    assert isinstance(outcome, Unknown)
    assert (
        ask_until_known(
            _answers(None, None, Committed()), "XA COMMIT x", sent_to="the server", timeout_s=0.0
        )
        == Committed()
    )
