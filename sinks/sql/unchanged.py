"""The sets of columns whose values are not in a row, because its change left them as they were.

A source names them in a column of lists: `unchanged_column`. In this process each set is a number:
0 is the empty set, of a row that has all of its values. The numbers are columns of the buffered
rows, so one registry belongs to one buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from onceflow.core.arrow.exact_arrays import array_of
from onceflow.core.arrow.nested_rows import filter_batch

Numbers = NDArray[np.int32]

_CODE_BYTES = 4

WHOLE = 0
"""The number of the empty set."""


class UnchangedSets:
    """A registry of sets of column names. Used by one thread."""

    def __init__(self) -> None:
        self._sets: list[frozenset[str]] = [frozenset()]
        self._numbers: dict[frozenset[str], int] = {frozenset(): WHOLE}

    @property
    def is_needed(self) -> bool:
        """True if any row lacked a value so far."""
        return len(self._sets) > 1

    def add(self, names: frozenset[str]) -> int:
        """Return the number of the set `names`."""
        number = self._numbers.get(names)
        if number is None:
            number = self._numbers[names] = len(self._sets)
            self._sets.append(names)
        return number

    def names(self, number: int) -> frozenset[str]:
        """Return the set with this number."""
        return self._sets[number]

    def encode(self, lists: pa.Array) -> Numbers:
        """Return the number of the set in each of `lists`; a null is the empty set."""
        numbers = np.zeros(len(lists), np.int32)
        if lists.null_count == len(lists):
            return numbers
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
        # Codes of 4 bytes stand for the names, so that the bytes of a list of codes identify it.
        names = lists.flatten().cast(pa.large_string()).dictionary_encode("encode")
        codes = names.indices.to_numpy().astype(np.int32).tobytes()
        ends: list[int] = (np.cumsum(lengths) * _CODE_BYTES).tolist()
        known: dict[bytes, int] = {}
        for row in np.flatnonzero(lengths).tolist():
            codes_of_row = codes[ends[row] - int(lengths[row]) * _CODE_BYTES : ends[row]]
            number = known.get(codes_of_row)
            if number is None:
                number = known[codes_of_row] = self.add(frozenset(lists[row].as_py()))
            numbers[row] = number
        return numbers

    def lack(self, numbers: Numbers, name: str) -> NDArray[np.bool_]:
        """Return a mask of the rows with `numbers` that lack the value of column `name`."""
        having = [number for number, names in enumerate(self._sets) if name in names]
        return np.isin(numbers, having)

    def list_columns(self, numbers: Numbers) -> Sequence[str]:
        """Return the columns that any row with `numbers` lacks, sorted."""
        present: Sequence[int] = np.unique(numbers).tolist()
        return sorted({name for at in present for name in self._sets[at]})

    def decode(self, numbers: Numbers, kind: pa.DataType) -> pa.Array:
        """Return the lists of `numbers`, each sorted, with the type `kind`."""
        present: Sequence[int] = numbers.tolist()
        return array_of([sorted(self._sets[at]) or None for at in present], kind)


def split_by_set(rows: pa.RecordBatch, numbers: Numbers) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows of each set in `numbers` but the empty one, in the order of the numbers."""
    for number in np.unique(numbers):
        if number != WHOLE:
            yield int(number), filter_batch(rows, pa.array(numbers == number))
