"""The split of rows by partition columns, with directories named as Hive and Spark name them.

A directory is `<column>=<value>`; the columns are not in the files. Characters that end a path or
are special in a shell or a glob are written `%XX`, which Spark, DuckDB and pyarrow read back. A
null is `__HIVE_DEFAULT_PARTITION__`. So no value may be that text, or be empty: readers would read
both as a null.

Source: Spark 4, ExternalCatalogUtils.escapePathName and getPartitionPathString.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import types as arrow

from onceflow.core.arrow.kinds import is_text, to_plain_column, to_plain_type
from onceflow.core.arrow.nested_rows import TIMES_BEYOND_PYTHON, find_rows, take_batch
from onceflow.core.errors import ConfigError

NULL_DIRECTORY = "__HIVE_DEFAULT_PARTITION__"
NAME_LENGTH_MAX_BYTES = 255
"""The longest name in a directory, on the usual file systems."""

_ESCAPED = re.compile(r"[\x00-\x1f\"#%'*/:=?\\\x7f{\[\]^]")
_CACHE_MAX = 10_000
"""The largest number of directories whose escaped names are cached."""


class Partitions:
    """The partitions of rows of one schema."""

    def __init__(self, columns: Sequence[str], schema: pa.Schema) -> None:
        """Check that `columns` can name directories.

        Raises:
            ConfigError: A column does not exist, or its type cannot be part of a name.
        """
        _require_columns(columns, schema)
        self._columns = tuple(columns)
        self._rest = [name for name in schema.names if name not in columns]
        self._directories: dict[tuple[str | None, ...], str] = {}

    @property
    def file_columns(self) -> Sequence[str]:
        """The columns that stay in the files, in the schema's order."""
        return self._rest

    def split(self, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yield pairs of a directory and its rows, in order and without the partition columns.

        The directory is empty without partition columns, and does not end in "/". Pass only rows
        for which `refusals` has no reason.
        """
        if not self._columns:
            yield "", rows
            return
        groups, values = self._groups(rows)
        unpartitioned = rows.select(self._rest)
        if len(values) == 1:
            yield self._directory(values[0]), unpartitioned
            return
        order = np.argsort(groups, kind="stable")
        ends = np.cumsum(np.bincount(groups, minlength=len(values)))
        taken = take_batch(unpartitioned, order)
        begin = 0
        for value, end in zip(values, ends.tolist(), strict=True):
            yield self._directory(value), taken.slice(begin, end - begin)
            begin = end

    def refusals(self, rows: pa.RecordBatch) -> dict[int, str]:
        """Return, by row, why a row's values cannot name a directory; empty if all can."""
        refusals: dict[int, str] = {}
        for name in self._columns:
            column = to_plain_column(rows.column(name))
            if arrow.is_date(column.type):
                for row in np.flatnonzero(find_rows(column, TIMES_BEYOND_PYTHON)).tolist():
                    refusals.setdefault(row, _describe_date(name))
            if not is_text(column.type):
                continue
            values = column.unique().to_pylist()
            refused = {value: why for value in values if (why := _refusal(name, value))}
            if refused:
                for row, value in enumerate(column.to_pylist()):
                    if value in refused:
                        refusals.setdefault(row, refused[value])
        return refusals

    def find_long_directories(self, rows: pa.RecordBatch, room_bytes: int) -> dict[int, str]:
        """Return, by row, why the path of its partition directory is too long."""
        # Each name is short enough by itself; only several names together can be too long.
        if len(self._columns) * (NAME_LENGTH_MAX_BYTES + 1) <= room_bytes:
            return {}
        groups, values = self._groups(rows)
        sizes = [len(self._directory(value).encode()) for value in values]
        return {
            row: (
                f"partition columns {', '.join(map(repr, self._columns))}: the values make a"
                f" directory of {sizes[group]} bytes, and below the sink's own {room_bytes} is the"
                " most; choose a shorter directory for the sink, or shorten the values before it"
            )
            for row, group in enumerate(groups.tolist())
            if sizes[group] > room_bytes
        }

    def _groups(
        self, rows: pa.RecordBatch
    ) -> tuple[NDArray[np.int64], list[tuple[str | None, ...]]]:
        """Return for each row the index of its partition, and the values of each partition."""
        groups = np.zeros(rows.num_rows, np.int64)
        values: list[tuple[str | None, ...]] = [()]
        for name in self._columns:
            codes, texts = _encode(rows.column(name))
            # The product is at most rows times values, because the groups are renumbered for each
            # column.
            combinations, groups = np.unique(groups * len(texts) + codes, return_inverse=True)
            groups = groups.reshape(-1)
            values = [
                (*values[combined // len(texts)], texts[combined % len(texts)])
                for combined in combinations.tolist()
            ]
        return groups, values

    def _directory(self, values: tuple[str | None, ...]) -> str:
        known = self._directories.get(values)
        if known is None:
            if len(self._directories) >= _CACHE_MAX:
                self._directories.clear()
            known = "/".join(
                f"{escape(name)}={NULL_DIRECTORY if value is None else escape(value)}"
                for name, value in zip(self._columns, values, strict=True)
            )
            self._directories[values] = known
        return known


def escape(text: str) -> str:
    """Return `text`, escaped for a directory name."""
    return _ESCAPED.sub(lambda match: f"%{ord(match[0]):02X}", text)


def _refusal(column: str, value: str | None) -> str | None:
    if value is None:
        return None
    if value in ("", NULL_DIRECTORY):
        return (
            f"partition column {column!r}: the value {value!r} would be read back as a null; "
            "replace it before the sink"
        )
    size_bytes = len(f"{escape(column)}={escape(value)}".encode())
    if size_bytes > NAME_LENGTH_MAX_BYTES:
        return (
            f"partition column {column!r}: the value {value[:40]!r}… makes a directory name of "
            f"{size_bytes} bytes, and {NAME_LENGTH_MAX_BYTES} is the most"
        )
    return None


def _describe_date(column: str) -> str:
    return (
        f"partition column {column!r}: readers take dates of the years 1 to 9999 from the name of a"
        " directory, and the row has another one"
    )


def _encode(column: pa.Array) -> tuple[NDArray[np.int64], list[str | None]]:
    """Return the index of each row's value, and the values as texts."""
    column = to_plain_column(column)
    kind = column.type
    encoded = column.dictionary_encode(null_encoding="encode")
    values = encoded.dictionary.cast(pa.date32()) if arrow.is_date64(kind) else encoded.dictionary
    codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return codes, values.cast(pa.string()).to_pylist()


def _require_columns(columns: Sequence[str], schema: pa.Schema) -> None:
    for name in columns:
        if len(schema.get_all_field_indices(name)) != 1:
            raise ConfigError(
                f"partition_by names {name!r}, and the rows' columns are {schema.names}"
            )
        if name.startswith(("_", ".")):
            raise ConfigError(
                f"partition_by names {name!r}: readers pass over directories that begin with '_' "
                "or '.'; rename the column"
            )
        kind = to_plain_type(schema.field(name).type)
        if not (
            is_text(kind) or arrow.is_integer(kind) or arrow.is_boolean(kind) or arrow.is_date(kind)
        ):
            raise ConfigError(
                f"partition_by names {name!r} of type {schema.field(name).type}: text, integers, "
                "booleans and dates can name a directory; cast it before the sink"
            )
    if columns and len(columns) == len(schema.names):
        raise ConfigError("partition_by names every column, so the files would have none")
