"""The key columns and aggregates of a table: their names and their encoding in snapshots.

The parts of a row, one after the other:

    for each column its total, little-endian: 8 bytes; a decimal has 16, an average 16 or 24, in
        the words of `wide_totals`; a column of text or bytes has the size of its value
    for each column a byte: 1 if it has seen a value
    for each column of text or bytes its value
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args
from urllib.parse import quote, unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.errors import ConfigError, StateCorrupt
from onceflow.core.state.aggregates.totals import dtype_of, start_of
from onceflow.core.state.api import descriptors
from onceflow.core.state.api.context import StateClock
from onceflow.core.state.keys.key_columns import (
    PADDING_BYTES,
    BytesKeys,
    FixedKeys,
    KeyColumn,
    check_key_type,
    read_bytes,
    read_key_columns,
)
from onceflow.core.state.keys.key_groups import Hashes, combine_hashes, hash_key_columns
from onceflow.core.state.keys.key_index import to_binary, to_fixed_binary
from onceflow.core.state.snapshots.state_meta import StateMeta, aggregates_of

Records = npt.NDArray[Any]
"""The fixed-size part of rows: fields t0, t1, … and s0, s1, …."""


def encode_totals(records: Records, texts: Sequence[pa.Array]) -> pa.Array:
    """Return a binary array of rows. `texts` are the columns of text or bytes, without nulls."""
    if not texts:
        kind = pa.binary(records.dtype.itemsize)
        return pa.Array.from_buffers(kind, len(records), [None, pa.py_buffer(records.tobytes())])
    nothing = pa.scalar(b"", pa.large_binary())
    joined: pa.Array = pc.binary_join_element_wise(to_fixed_binary(records), *texts, nothing)
    return joined


def decode_totals(
    values: pa.Array, layout: np.dtype[Any], of_bytes: Sequence[int]
) -> tuple[Records, list[pa.Array]]:
    """Return the parts that `encode_totals` joined. `of_bytes` are the columns of `texts`.

    Raises:
        StateCorrupt: The bytes are no rows of this layout.
    """
    if not of_bytes:
        return np.frombuffer(b"".join(values.to_pylist()), layout), []
    whole, size = read_bytes(values.cast(pa.large_binary())), layout.itemsize
    if not len(whole):
        return np.zeros(0, layout), [pa.array([], pa.large_binary()) for _ in of_bytes]
    records = _load_records(whole, layout)
    texts: list[pa.Array] = []
    position, ends = whole.starts + size, whole.starts + whole.lengths
    for column in of_bytes:
        lengths = records[f"t{column}"].astype(np.int64)
        # Checked before the gather, which would read beyond the row into the next one.
        if int(lengths.min()) < 0 or bool((position + lengths > ends).any()):
            raise StateCorrupt(
                "a text among totals in a snapshot is longer than its row; restore an older"
                " checkpoint"
            )
        texts.append(to_binary(BytesKeys(whole.data, position, lengths)))
        position = position + lengths
    if not np.array_equal(position, ends):
        raise StateCorrupt(
            "rows of totals do not have the columns that their snapshot names; restore an older"
            " checkpoint"
        )
    return records, texts


def read_records(values: pa.Array, layout: np.dtype[Any]) -> Records:
    """Return the fixed-size part of encoded rows, which may have texts behind it.

    Raises:
        StateCorrupt: The bytes are no rows of this layout.
    """
    rows = read_bytes(values.cast(pa.large_binary()))
    return _load_records(rows, layout) if len(rows) else np.zeros(0, layout)


def _load_records(rows: BytesKeys, layout: np.dtype[Any]) -> Records:
    size, shortest = layout.itemsize, int(rows.lengths.min())
    if shortest < size:
        raise StateCorrupt(
            f"a row of totals in a snapshot has {shortest} bytes, but needs at least {size};"
            " restore an older checkpoint"
        )
    # A view with a record at each byte, aligned or not: one gather loads the record of each row.
    data = np.append(rows.data, np.zeros(max(0, size - PADDING_BYTES), np.uint8))
    loads: Records = np.ndarray((len(data) - size + 1,), layout, data, strides=(1,))
    records: Records = loads[rows.starts]
    return records


NAMESPACE = "namespace"
"""The kind, in a signature, of a namespace: the first key column of a table, with 64 bits."""
MEMBER = "member"
"""The mark, in a signature, that the next kind is that of the members: the last key column."""


@dataclass(frozen=True, slots=True)
class AccumulatorShape:
    """The key columns and aggregates of a table, checked by the constructor.

    If `namespaced`, an int64 namespace precedes the key columns, and each namespace has its own
    totals. If there is a `member_type`, a member follows the key columns: the table then holds a
    set of members for each key, and each member has its own totals. Neither namespace nor member
    affects the key group.
    """

    name: str
    key_types: tuple[pa.DataType, ...]
    columns: tuple[descriptors.AccumulatorColumn, ...]
    namespaced: bool = False
    member_type: pa.DataType | None = None

    def __post_init__(self) -> None:
        descriptors.check_state_name(self.name)
        names = [column.name for column in self.columns]
        if not self.key_types or not names or len(set(names)) < len(names):
            raise ConfigError(
                f"accumulators {self.name!r} need a key and aggregates with different names; got"
                f" {len(self.key_types)} key columns and the aggregates {names}"
            )
        for index, key_type in enumerate(self.all_key_types):
            check_key_type(key_type, f"{index} of {self.name}")
        for column in self.columns:
            _check_column(column, self.name)

    @property
    def meta(self) -> StateMeta:
        """The description of the table in a snapshot."""
        aggregates = ",".join(f"{c.name}={c.op}({c.type}{_describe_set(c)})" for c in self.columns)
        keys = [key_kind(key_type) for key_type in self.key_types]
        if self.member_type is not None:
            keys += [MEMBER, key_kind(self.member_type)]
        kinds = ",".join([NAMESPACE, *keys] if self.namespaced else keys)
        return StateMeta(self.name, "accumulators", f"accumulators/1:[{kinds}]{aggregates}")

    @property
    def all_key_types(self) -> tuple[pa.DataType, ...]:
        """The types of the key columns, with the namespace as the first and the member as the last.

        Without a namespace or a member, its type is left out.
        """
        namespace = (pa.int64(),) if self.namespaced else ()
        member = () if self.member_type is None else (self.member_type,)
        return (*namespace, *self.key_types, *member)

    @property
    def of_bytes(self) -> tuple[int, ...]:
        """The indices of the columns of text or bytes."""
        return tuple(index for index, column in enumerate(self.columns) if column.has_bytes)

    @property
    def totals_type(self) -> np.dtype[Any]:
        """The layout of a key's encoded totals, without text and bytes."""
        return _layout([(dtype_of(column).str, column.words_of_total) for column in self.columns])

    def convert_totals(self, stored: StateMeta, values: pa.Array) -> pa.Array:
        """Convert encoded totals `values`, described by `stored`, to encoded totals of this shape.

        An aggregate that `stored` lacks starts without a value. If keys expire only with this
        shape, their last use is now.
        """
        old = list(aggregates_of(stored)[1].items())
        layout = _layout([("<i8", _count_words(what)) for _, what in old])
        of_bytes = [i for i, (_, what) in enumerate(old) if _has_bytes(what)]
        before, texts = decode_totals(values, layout, of_bytes)
        after = np.zeros(len(before), self.totals_type)
        texts_after: list[pa.Array] = []
        new = aggregates_of(self.meta)[1].items()
        for index, (column, aggregate) in enumerate(zip(self.columns, new, strict=True)):
            total = after[f"t{index}"]
            if aggregate in old:
                old_index = old.index(aggregate)
                # The layout has integers for all words; the bits of floats stay unchanged.
                total[:] = np.ascontiguousarray(before[f"t{old_index}"]).view(total.dtype)
                after[f"s{index}"] = before[f"s{old_index}"]
                if column.has_bytes:
                    texts_after.append(texts[of_bytes.index(old_index)])
            elif column == descriptors.USED:
                total[:] = StateClock().now_ms()
                after[f"s{index}"] = 1
            elif column == descriptors.LIFE:
                # Keys that were there before have the life 0.
                after[f"s{index}"] = 1
            elif column.has_bytes:
                texts_after.append(pa.array([b""] * len(before), pa.large_binary()))
            else:
                total[:] = start_of(column)
        return encode_totals(after, texts_after)

    def empty_keys(self) -> tuple[KeyColumn, ...]:
        """Return key columns of these types, without rows."""
        return read_key_columns([pa.nulls(0, key_type) for key_type in self.all_key_types])

    def keys_alone(self, columns: tuple[KeyColumn, ...]) -> tuple[KeyColumn, ...]:
        """Return the key columns without namespace and member."""
        return columns[int(self.namespaced) :][: len(self.key_types)]

    def hash_entries(self, columns: tuple[KeyColumn, ...], hashes: Hashes | None) -> Hashes:
        """Return the hash of each row's namespace, key and member.

        `hashes` are the hashes of the keys, if known.
        """
        known = hash_key_columns(self.keys_alone(columns)) if hashes is None else hashes
        if not self.namespaced and self.member_type is None:
            return known
        mixed = known.copy()
        if self.namespaced:
            namespace = columns[0]
            assert isinstance(namespace, FixedKeys)
            combine_hashes(mixed, namespace.words[0])
        if self.member_type is not None:
            combine_hashes(mixed, hash_key_columns(columns[-1:]))
        return mixed


def make_shape(
    name: str,
    key_types: Sequence[pa.DataType],
    columns: Sequence[descriptors.AccumulatorColumn],
    *,
    namespaced: bool = False,
    ttl: descriptors.StateTtlConfig | None = None,
    member_type: pa.DataType | None = None,
) -> AccumulatorShape:
    """Return the shape of a table of accumulators. If they expire, adds the column of last uses.

    Raises:
        ConfigError: A type cannot be a key, or cannot be aggregated.
    """
    kept = tuple(columns) if ttl is None else (*columns, descriptors.USED)
    return AccumulatorShape(name, tuple(key_types), kept, namespaced, member_type)


_OF_SET = " of "


def _describe_set(column: descriptors.AccumulatorColumn) -> str:
    """Return the set of a distinct count for a signature, without the signature's delimiters."""
    return f"{_OF_SET}{quote(column.set_name, safe=':')}" if column.set_name else ""


def split_set(type_name: str) -> tuple[str, str]:
    """Return the type of an aggregate in a signature, and the name of its set."""
    type_name, _, name = type_name.partition(_OF_SET)
    return type_name, unquote(name)


def _layout(totals: list[tuple[str, int]]) -> np.dtype[Any]:
    """Return the layout of a key's totals, each given by the type and number of its words."""
    fields: list[Any] = []
    for index, (kind, words) in enumerate(totals):
        word = np.dtype(kind).newbyteorder("<")
        fields.append((f"t{index}", word) if words == 1 else (f"t{index}", word, (words,)))
    return np.dtype([*fields, *((f"s{index}", np.uint8) for index in range(len(totals)))])


def _count_words(what: str) -> int:
    """Return the number of words of a total; `what` is in the form of `aggregates_of`."""
    op, _, type_name = what.partition("(")
    return descriptors.words_of_total(op, type_name)


def _check_column(column: descriptors.AccumulatorColumn, table: str) -> None:
    kind, types = column.type, pa.types
    fine = kind in (pa.int64(), pa.float64())
    if column.op in ("min", "max", "last"):
        fine = fine or types.is_timestamp(kind) or types.is_date(kind) or types.is_time(kind)
        fine = fine or kind in (pa.string(), pa.binary())
    if column.op in ("sum", "min", "max", "avg"):
        fine = fine or types.is_decimal128(kind)
    if column.op == "last":
        fine = fine or types.is_boolean(kind)
    if column.op in ("earliest", "latest"):
        fine = types.is_primitive(kind) or types.is_decimal128(kind) or _is_text_or_bytes(kind)
    if column.op in ("count", "count_distinct"):
        fine = kind == pa.int64()
    if column.op not in get_args(descriptors.AggregateOp) or not fine:
        raise ConfigError(
            f"aggregate {column.name!r} of {table!r} cannot be {column.op}({kind}): sum and avg"
            " take int64, float64 and decimal128; count gives int64; min and max take the types of"
            " sum, timestamps, dates, times, text and bytes; last takes int64, float64, timestamps,"
            " dates, times, booleans, text and bytes; earliest and latest take all of these"
        )


def _has_bytes(what: str) -> bool:
    """Return True if a total is bytes of any length; `what` is in the form of `aggregates_of`."""
    op, _, type_name = what.partition("(")
    return descriptors.has_bytes(op, type_name)


def _is_text_or_bytes(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def key_kind(key_type: pa.DataType) -> str:
    """Return the kind of a key column's values, by its name in snapshots."""
    types = pa.types
    if types.is_dictionary(key_type):
        return key_kind(key_type.value_type)
    if types.is_integer(key_type):
        return "integer"
    if types.is_decimal(key_type):
        return f"decimal({key_type.scale})"
    if types.is_timestamp(key_type):
        return f"timestamp({key_type.unit})"
    for kind, matches in (
        ("boolean", types.is_boolean),
        ("date", types.is_date),
    ):
        if matches(key_type):
            return kind
    return "string" if "string" in str(key_type) else "binary"
