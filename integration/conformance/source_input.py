"""The interface for authors of sources: the source under test, and the rows in its input.

An input has a few splits. The kit asks the author to put rows into them, and compares these rows
with those that readers return. Rows are compared by their keys. A key belongs to one row of the
input for ever. If the source has outputs, the key of a row is a pair (output, key), and rows are
compared output by output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import pyarrow as pa

from onceflow.core.spi import Source
from onceflow.integration.conformance.target import NotTestable


class SourceInput(ABC):
    """A source and the input that it reads. Used by one thread. Built anew for each clause.

    Only `fill` and `source` are required. Each optional method allows more tests. Clauses whose
    methods are missing are listed as "not tested".
    """

    @abstractmethod
    def fill(self, rows: int) -> Mapping[str, Sequence[object]]:
        """Make a new input, and put `rows` rows into each of its splits.

        Called once, before all other methods. Two or three splits test more than one split.

        Return the keys of the rows by split id, in the order in which a reader must return them.
        The keys are hashable, and no key occurs twice in the input. For a source with outputs, each
        is a pair (output, key); so are the keys of `append` and `add_split`.
        """

    @abstractmethod
    def source(self) -> Source:
        """Return the source as users build it. It is pickled to other processes.

        Set a small batch size, so that a reader returns the rows of an input in several batches.
        """

    def keys(self, batch: pa.RecordBatch) -> Sequence[object]:
        """Return the key of each row of `batch`. Default: the values of the first column.

        `batch` has the rows of one output if the source has outputs. The kit adds its name.
        """
        return batch.column(0).to_pylist()

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release all resources, and clean up if necessary."""

    # --- optional methods -----------------------------------------------------------------------

    def source_with_end(self) -> Source:
        """Return a source of the same input that ends after the rows that the input has now.

        Not needed if `source` returns a bounded source.
        """
        raise NotTestable("needs source_with_end()")

    def append(self, split_id: str, rows: int) -> Sequence[object]:
        """Put `rows` more rows at the end of a split, and return their keys in order.

        Only for sources without an end. A source may have readers meanwhile.
        """
        raise NotTestable("needs append()")

    def add_split(self, rows: int) -> tuple[str, Sequence[object]]:
        """Add a split with `rows` rows, and return its id and the keys of its rows in order."""
        raise NotTestable("needs add_split()")

    def remove_split(self, split_id: str) -> str:
        """Delete a split or more from the input, as an administrator would.

        Return the name of the removed split, such as a file name, which the source's error must
        contain.
        """
        raise NotTestable("needs remove_split()")

    def count_acknowledged(self, split_id: str) -> int:
        """Return the number of rows of a split that the source has acknowledged to its server.

        Examples are the committed offset of a consumer group, and the confirmed position of a
        replication slot. Ask the server itself. Do not use the source's own code.
        """
        raise NotTestable("needs count_acknowledged()")
