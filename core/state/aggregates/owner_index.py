"""Finds the entries of all members of some namespaces and keys, by the hash of both.

A part of the entries is sorted by this hash, and the entries added later are searched one by one.
When the second part becomes large, all are sorted again. So a lookup costs little more than its
results, and an entry is sorted a few times on average.
"""

from __future__ import annotations

import numpy as np

from onceflow.core.state.keys.key_columns import Ints
from onceflow.core.state.keys.key_groups import Hashes

UNSORTED_MIN = 4096
"""The number of unsorted entries above which all are sorted, if they also are more than a quarter
of the sorted ones."""


class OwnerIndex:
    """The entries of a table by the hash of their namespace and key. Entries have no gaps."""

    def __init__(self) -> None:
        self._hashes: Hashes = np.zeros(0, np.uint64)
        self._sorted_entries: Ints = np.zeros(0, np.int64)
        self._unsorted: Hashes = np.zeros(0, np.uint64)

    @property
    def end(self) -> int:
        """The first entry that has not been added."""
        return 1 + len(self._hashes) + len(self._unsorted)

    def add(self, hashes: Hashes) -> None:
        """Add the next entries."""
        self._unsorted = np.concatenate([self._unsorted, hashes])
        if len(self._unsorted) > max(UNSORTED_MIN, len(self._hashes) // 4):
            first = 1 + len(self._hashes)
            entries = np.concatenate(
                [self._sorted_entries, np.arange(first, first + len(self._unsorted))]
            )
            every = np.concatenate([self._hashes, self._unsorted])
            order = np.argsort(every, kind="stable")
            self._hashes, self._sorted_entries = every[order], entries[order]
            self._unsorted = np.zeros(0, np.uint64)

    def find(self, hashes: Hashes) -> tuple[Ints, Ints]:
        """Return the entries that have one of `hashes`, and the index of the hash of each.

        Other namespaces and keys may have the same hash. If `hashes` has repeated items, an entry
        is returned for each of them.
        """
        starts = np.searchsorted(self._hashes, hashes, "left")
        counts = np.searchsorted(self._hashes, hashes, "right") - starts
        indices = np.repeat(np.arange(len(hashes)), counts)
        ends = np.cumsum(counts)
        positions = np.arange(len(indices)) + np.repeat(starts - (ends - counts), counts)
        entries = self._sorted_entries[positions]
        if len(self._unsorted):
            order = np.argsort(hashes, kind="stable")
            asked = hashes[order]
            firsts = np.searchsorted(asked, self._unsorted, "left")
            number = np.searchsorted(asked, self._unsorted, "right") - firsts
            rows = np.repeat(np.arange(len(number)), number)
            until = np.cumsum(number)
            at = np.arange(len(rows)) + np.repeat(firsts - (until - number), number)
            entries = np.concatenate([entries, 1 + len(self._hashes) + rows])
            indices = np.concatenate([indices, order[at]])
        return entries, indices
