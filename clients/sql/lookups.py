"""The session by which rows of a table are looked up while a job runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from onceflow.clients.sql.session import ConnectionLost, Session, SqlError
from onceflow.core.errors import SinkError, SourceUnavailable

_SessionT = TypeVar("_SessionT", bound=Session)
_AnswerT = TypeVar("_AnswerT")


class ReopenedSession(Generic[_SessionT]):
    """A session that is opened for the first question, and again if it was lost meanwhile.

    Used by one thread.
    """

    def __init__(self, connect: Callable[[], _SessionT]) -> None:
        self._connect = connect
        self._session: _SessionT | None = None

    def ask(self, question: Callable[[_SessionT], _AnswerT]) -> _AnswerT:
        """Return the answer; ask again on a new session if an open one was lost.

        Raises:
            SqlError: The server refuses the question, or the new session was lost, too.
            SourceUnavailable: The server cannot be reached now.
        """
        is_reused = self._session is not None
        try:
            try:
                return question(self._open())
            except ConnectionLost:
                self.close()
                if not is_reused:
                    raise
            return question(self._open())
        except SqlError:
            self.close()
            raise

    def close(self) -> None:
        """Close the session if there is one. Idempotent."""
        if self._session is not None:
            with suppress(SqlError):
                self._session.close()
            self._session = None

    def _open(self) -> _SessionT:
        if self._session is None:
            try:
                self._session = self._connect()
            except SinkError as error:
                raise SourceUnavailable(str(error)) from None
        return self._session
