"""The failures of a source's reader: the error names the source, and equal failures are counted.

onceflow's own errors say whether another attempt may help. A reader may also raise an error of
another package, or of its own code. Such an error counts as a mistake of the source, unless the
network, a disk or a lack of memory may have caused it. If equal mistakes occur in a few attempts
without progress, the job stops, because further attempts would fail in the same way.

Used by the thread of the chain. `protocol.failures` decides which mistakes are equal.
"""

from __future__ import annotations

import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from onceflow.core.errors import InvariantViolation, OnceflowError, SourceError
from onceflow.core.protocol.failures import make_fingerprint
from onceflow.core.protocol.splits import Split
from onceflow.core.spi.bad_rows import is_data_at_fault, may_pass

_TRACE_LENGTH_MAX = 4000
_ADVICE = (
    "No record is lost: the next attempt reads from the last checkpoint. For a record that can"
    " never be read, the source must raise BadRecord or return it from take_rejected. For a server"
    " that is away, it must raise SourceUnavailable"
)


class ReaderFailures:
    """The failures of one reader in one attempt."""

    def __init__(self, uid: str, reader: str, attempt: int, splits: Sequence[Split]) -> None:
        """Start without progress. The `reader`, a class name, begins at `splits`."""
        self._uid = uid
        self._reader = reader
        self._attempt = attempt
        self._start = {split.id: split.position for split in splits}
        self._has_got_on = False

    def record_decision(self, splits: Sequence[Split]) -> None:
        """Record that the positions of `splits` are decided."""
        self._has_got_on |= any(self._start.get(s.id, s.position) != s.position for s in splits)

    @contextmanager
    def during(self, call: str) -> Generator[None, None, None]:
        """Name the source in the error that `call`, a method of the reader, raises.

        Raises:
            SourceError: The reader raised an error that is not onceflow's; contains the traceback.
        """
        try:
            yield
        except (OnceflowError, InvariantViolation):
            raise
        except Exception as error:
            kind = type(error).__name__
            trace = "".join(traceback.format_exception(error))[-_TRACE_LENGTH_MAX:].rstrip()
            raise SourceError(
                f"source {self._uid!r}: {call} of {self._reader} raised {kind}: {error}."
                f" {_ADVICE}\n{trace}",
                fingerprint=self._make_fingerprint(error),
            ) from error

    def _make_fingerprint(self, error: Exception) -> str:
        if may_pass(error):
            return ""
        # Other splits may make progress for ever while one record of a split cannot be read.
        counts_anew = self._has_got_on and not is_data_at_fault(error)
        only_in = self._attempt if counts_anew else None
        return make_fingerprint(self._uid, type(error).__name__, str(error), only_in=only_in)
