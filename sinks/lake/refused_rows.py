"""The check that rows are refused only for columns that the table still has.

A writer reads the columns of its table once. Another program may change a column later, for example
so that refused rows fit. The writer therefore reads the columns again before it refuses rows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from onceflow.core.errors import BadRow, ConfigError, SinkError
from onceflow.core.spi import RejectedRows
from onceflow.core.spi.bad_rows import BadRows
from onceflow.sinks.lake.columns import TableColumns

_ADVICE = "No row is left out: the next attempt reads the columns again"


class RefusedRows:
    """The rows that one writer refuses, with the columns that it refuses them for. One thread."""

    def __init__(
        self, bad_rows: BadRows, columns: TableColumns, read_columns: Callable[[], TableColumns]
    ) -> None:
        """Begin with no refused rows.

        Args:
            bad_rows: The bad rows of the writer.
            columns: The columns that the writer has read.
            read_columns: Reads the columns of the newest version of the table.
        """
        self.bad_rows = bad_rows
        """Takes the rows that are refused."""
        self.columns = columns
        """The columns that decide which rows are refused."""
        self._read_columns = read_columns
        self._any_taken = False

    def take(self) -> Sequence[RejectedRows]:
        """Return the rows that were refused since the last call."""
        rejected = self.bad_rows.take()
        self._any_taken = self._any_taken or bool(rejected)
        return rejected

    @contextmanager
    def check_failure(self) -> Generator[None, None, None]:
        """Replace a `BadRow` with another error if the columns have changed.

        Raises:
            SinkError: The columns have changed, or the table cannot be read.
        """
        try:
            yield
        except BadRow as error:
            self._require_same_columns(error)
            raise

    def check_checkpoint(self) -> None:
        """Check the columns if rows were refused since the last call.

        Raises:
            SinkError: The columns have changed, or the table cannot be read.
        """
        any_refused = self._any_taken or self.bad_rows.any
        self._any_taken = False
        if any_refused:
            self._require_same_columns(None)

    def _require_same_columns(self, cause: BadRow | None) -> None:
        try:
            change = self.columns.find_change(self._read_columns())
        except ConfigError as error:
            # A secret's file may be missing while it is replaced.
            raise SinkError(
                "rows were refused, and by now the table cannot be read, or does not take the job's"
                f" rows: {error}. {_ADVICE}"
            ) from error
        if change:
            raise SinkError(
                f"the table was changed under the job: {change}. Rows were refused for the former"
                f" columns. {_ADVICE}"
            ) from cause
