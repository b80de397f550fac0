"""The contract of tables that are looked up by key while a job runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import pyarrow as pa


class LookupReader(ABC):
    """A reader of a table's rows by their keys. It lives in one subtask, used by one thread."""

    @abstractmethod
    def read(self, keys: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows whose key equals a row of `keys`, in the schema of `describe`.

        `keys` has different rows, without nulls, in the types of the stream. Further rows may be
        returned: the operator compares the keys itself.

        Raises:
            SourceUnavailable: The table cannot be reached now.
        """

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Idempotent."""


class LookupSource(ABC):
    """The description of a table that is looked up. Pickled to the slots, so it holds settings."""

    @abstractmethod
    def describe(self, on: Sequence[str]) -> pa.Schema:
        """Return the columns of the table, with those of the key `on`. Runs on the driver.

        Each join calls it once, on a shallow copy of its own, which is the one that is pickled. So
        the object may keep what `open` needs.

        Raises:
            ConfigError: The table cannot be looked up by these columns.
        """

    @abstractmethod
    def open(self, on: Sequence[str], name: str) -> LookupReader:
        """Return a reader by the columns `on`. Runs in a slot. `name` names its connection."""
