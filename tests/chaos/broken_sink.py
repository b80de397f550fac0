"""A sink that loses rows, by which a test shows that chaos notices a loss."""

from __future__ import annotations

from tests.conformance.broken_server_sinks import BrokenServerSink, HandsOnCommits

from onceflow.core.protocol import committables

_FORGOTTEN_EACH = 3


class _ForgetfulCommitter(HandsOnCommits):
    """Reports every third checkpoint as committed and leaves its transaction prepared."""

    def commit(self, committable: committables.Committable) -> committables.CommitOutcome:
        if committable.transaction.checkpoint % _FORGOTTEN_EACH == 0:
            return committables.Committed()
        return super().commit(committable)


class ForgetsCommits(BrokenServerSink):
    """A Postgres sink whose committer forgets commits."""

    breaks = "rows-are-committed"
    committer_class = _ForgetfulCommitter
