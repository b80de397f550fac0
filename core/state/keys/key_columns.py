"""The key columns of a batch, as 8-byte words and as the Python values that functions get.

The words are read from Arrow buffers, and not row by row.

`FixedKeys` have one or two words a row: integers, dates as days, instants in the column's unit,
decimals. `BytesKeys` have a run of bytes a row: strings and binary. Word w of a run is its bytes 8w
to 8w + 7, little-endian, and the last word is padded with zero bytes.

Invariants:
    two keys of one column are equal  <=>  all their words (and, for bytes, their lengths) are equal
    len(BytesKeys.data) >= start + length + 8 for every row: a word may be read past a key's end

Python values:

All operators convert their keys here, so a key has the same value for each operator and backend,
and after each restore. Each value equals `decode_key(encode_key(value))`:

    timestamps with a zone       datetimes in UTC: in their own zone, the two instants that a
                                 clock shows twice in autumn would be equal
    timestamps without a zone    datetimes
    other types                  the result of `to_pylist`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.arrow.kinds import cast_rows
from onceflow.core.errors import BadStateValue, ConfigError

Words: TypeAlias = npt.NDArray[np.uint64]
Ints: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]

PADDING_BYTES = 8
"""The number of zero bytes behind the last key, so that its last word can be loaded as 8 bytes."""
WORDS_COMPARED_MAX = 16
"""The number of words of a key that are compared for all rows at once. Bytes after these 128 are
compared row by row."""
_MASKS = np.array([(1 << (8 * n)) - 1 for n in range(9)], dtype=np.uint64)
_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_MS_A_DAY = 86_400_000


@dataclass(frozen=True, slots=True)
class FixedKeys:
    """Keys of a fixed width: `words[w][row]`."""

    words: tuple[Words, ...]
    hash_factor: int = 1
    """The factor of a word, modulo 2**64, in its hash. Instants are hashed as nanoseconds, so that
    an instant has one hash in any unit. They are compared in the column's unit, in which they fit
    into 64 bits."""

    def __len__(self) -> int:
        return len(self.words[0])

    def take(self, rows: Ints) -> FixedKeys:
        """Return the keys of `rows`."""
        return FixedKeys(tuple(plane[rows] for plane in self.words), self.hash_factor)

    def equal(self, others: FixedKeys) -> Mask:
        """Return for each row True if its key equals the key of `others` in that row."""
        same: Mask = self.words[0] == others.words[0]
        for plane, other in zip(self.words[1:], others.words[1:], strict=True):
            same &= plane == other
        return same


@dataclass(frozen=True, slots=True)
class BytesKeys:
    """Keys of any length: row i is `data[starts[i] : starts[i] + lengths[i]]`."""

    data: npt.NDArray[np.uint8]
    starts: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, rows: Ints) -> BytesKeys:
        """Return the keys of `rows`."""
        return BytesKeys(self.data, self.starts[rows], self.lengths[rows])

    def word(self, index: int, rows: Ints | None = None) -> Words:
        """Return word `index` of each row, or of `rows`.

        Each key must have at least a part of the word.
        """
        starts, lengths = self.starts, self.lengths
        if rows is not None:
            starts, lengths = starts[rows], lengths[rows]
        # One 8-byte load at any byte: numpy handles the unaligned view, at about 4 ns a row.
        loads = np.ndarray((len(self.data) - 7,), "<u8", self.data, strides=(1,))
        words: Words = loads[starts + 8 * index]
        remaining = lengths - 8 * index
        if len(remaining) and int(remaining.min()) < 8:
            # Clears the bytes of a key's last word that are behind the end of the key.
            words &= _MASKS[np.minimum(remaining, 8)]
        return words

    def equal(self, others: BytesKeys) -> Mask:
        """Return for each row True if its key equals the key of `others` in that row."""
        same: Mask = self.lengths == others.lengths
        if not len(same):
            return same
        shortest, longest = int(others.lengths.min()), int(others.lengths.max())
        # If all lengths are equal, whole columns of words are compared. Otherwise rows are selected
        # for each word: a row whose length differs would read past the end of its key.
        everywhere = bool(same.all())
        for index in range(min((longest + 7) // 8, WORDS_COMPARED_MAX)):
            if everywhere and 8 * index < shortest:
                same &= self.word(index) == others.word(index)
            else:
                rows = np.flatnonzero(same & (others.lengths > 8 * index))
                # Rows that are known to differ are not among `rows`, and stay so.
                same[rows] = self.word(index, rows) == others.word(index, rows)
        for row in np.flatnonzero(same & (others.lengths > 8 * WORDS_COMPARED_MAX)).tolist():
            same[row] = self.bytes_of(row) == others.bytes_of(row)
        return same

    def bytes_of(self, row: int) -> bytes:
        """Return the key of one row."""
        start = int(self.starts[row])
        return self.data[start : start + int(self.lengths[row])].tobytes()


KeyColumn: TypeAlias = FixedKeys | BytesKeys


def read_key_columns(
    arrays: Sequence[pa.Array], names: Sequence[str] | None = None
) -> tuple[KeyColumn, ...]:
    """Return `arrays` as words; `names` are for the error messages.

    Raises:
        BadStateValue: A key is null.
        ConfigError: There is no column, or a column has a type that cannot be a key.
    """
    if not arrays:
        raise ConfigError("a key needs at least one column; give one to key_by()")
    labels = names or [str(index) for index in range(len(arrays))]
    return tuple(_read(array, label) for array, label in zip(arrays, labels, strict=True))


def read_bytes(array: pa.Array) -> BytesKeys:
    """Return a large_binary array without nulls as words."""
    (rows,) = read_key_columns([array], ["values"])
    assert isinstance(rows, BytesKeys)
    return rows


def equal_keys(columns: Sequence[KeyColumn], others: Sequence[KeyColumn]) -> Mask:
    """Return for each row True if its key equals the key of `others` in that row."""
    # Columns of one type are read as key columns of one class.
    every = [
        column.equal(other)  # type: ignore[arg-type]
        for column, other in zip(columns, others, strict=True)
    ]
    same: Mask = np.logical_and.reduce(every)
    return same


def check_key_type(key_type: pa.DataType, label: str) -> None:
    """Raise ConfigError unless a column of `key_type` can be a key or part of one.

    Floats cannot: they have two zeros, and a NaN is not equal to itself.
    """
    try:
        _read(pa.nulls(0, key_type), label)
    except pa.ArrowNotImplementedError as error:
        raise _no_key(key_type, label) from error


def check_rows_can_be_divided(schema: pa.Schema) -> None:
    """Raise ConfigError unless Arrow can take rows of each column, as an exchange by key does.

    Arrow cannot do this for string views, for example.
    """
    # Not from a list: Arrow would import pandas, which costs the driver half a second.
    none = pa.nulls(0, pa.int64())
    for field in schema:
        try:
            pa.nulls(0, field.type).take(none)
        except pa.ArrowNotImplementedError as error:
            raise ConfigError(
                f"column {field.name!r} has type {field.type}, from which Arrow cannot select"
                " single rows. key_by() needs that to send each row to the subtask of its key:"
                f" cast the column before key_by() ({error})"
            ) from error


def _no_key(kind: pa.DataType, label: str) -> ConfigError:
    return ConfigError(
        f"key column {label!r} has type {kind}, which cannot be a key; cast it to a string, an"
        " integer, a boolean, a date, a timestamp or a decimal128"
    )


def _read(array: pa.Array, label: str) -> KeyColumn:
    if array.null_count:
        row = array.is_null().to_pylist().index(True)
        raise BadStateValue(
            f"key column {label!r} is null in row {row} of its batch: a record without a key has no"
            " state; filter such records or give them a key before key_by()"
        )
    array, kind = plain_keys(array, label), _plain_type(array.type)
    types = pa.types
    if types.is_binary(kind) or types.is_string(kind):
        return _bytes_keys(array, np.dtype("<i4"))
    if types.is_large_binary(kind) or types.is_large_string(kind):
        return _bytes_keys(array, np.dtype("<i8"))
    if types.is_decimal128(kind):
        start, stop = 2 * array.offset, 2 * (array.offset + len(array))
        # Arrow stores a decimal128 as two little-endian words, the low word first.
        flat = _buffer(array.buffers()[1], np.dtype("<u8"))[start:stop]
        return FixedKeys((flat[0::2], flat[1::2]))
    factor = _NANOSECONDS[kind.unit] if types.is_timestamp(kind) else 1
    return FixedKeys((_integers(array, label),), factor)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_fixed_size_binary(kind) or kind == pa.binary_view():
        return pa.large_binary()
    return pa.large_string() if kind == pa.string_view() else kind


def plain_keys(array: pa.Array, label: str) -> pa.Array:
    """Return keys without a dictionary. Views and fixed-size bytes become large strings or bytes.

    Raises:
        BadStateValue: A key is null.
    """
    kind = _plain_type(array.type)
    if kind == array.type:
        return array
    # Not each value type can be cast from its dictionary, but each can be decoded.
    decoded = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
    if decoded.type != kind:
        decoded = cast_rows(decoded, kind)
    if decoded.null_count:
        raise BadStateValue(
            f"key column {label!r} holds a null in its dictionary; drop such records"
        )
    return decoded


def _integers(array: pa.Array, label: str) -> Words:
    kind, types = array.type, pa.types
    if types.is_boolean(kind):
        return _words(array.cast(pa.uint8()))
    if types.is_integer(kind):
        return _words(array)
    if types.is_date32(kind):
        return _words(array.view(pa.int32()))
    if types.is_date64(kind):
        # To days, so that a date has one key in date32 and date64.
        days: Ints = array.view(pa.int64()).to_numpy() // _MS_A_DAY
        return days.view(np.uint64)
    if types.is_timestamp(kind):
        return _words(array.view(pa.int64()))
    raise _no_key(kind, label)


def _words(array: pa.Array) -> Words:
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    if values.dtype.kind == "i":
        # Sign-extended first, so that -1 of 8 bits and -1 of 64 bits become the same word.
        return values.astype(np.int64).view(np.uint64)
    return values.astype(np.uint64)


def _buffer(buffer: pa.Buffer | None, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    data: Any = b"" if buffer is None else buffer
    items: npt.NDArray[Any] = np.frombuffer(data, dtype)
    return items


def _bytes_keys(array: pa.Array, offset_type: np.dtype[Any]) -> BytesKeys:
    rows = len(array)
    _, offset_buffer, data_buffer = array.buffers()
    offsets = _buffer(offset_buffer, offset_type)[array.offset : array.offset + rows + 1]
    if rows == 0 or len(offsets) == 0:
        none = np.zeros(0, np.int64)
        return BytesKeys(np.zeros(PADDING_BYTES, np.uint8), none, none)
    wide = offsets.astype(np.int64)
    first, last = int(wide[0]), int(wide[-1])
    # The buffer of a slice holds the rows of the whole array: only the slice's bytes are copied.
    data = np.zeros(last - first + PADDING_BYTES, np.uint8)
    data[: last - first] = _buffer(data_buffer, np.dtype(np.uint8))[first:last]
    return BytesKeys(data, wide[:-1] - first, np.diff(wide))


_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_MICROSECONDS = 10**6
_EPOCH = datetime(1970, 1, 1)


def _microseconds_since_1970(instant: datetime) -> int:
    since = instant - _EPOCH
    return (since.days * 86_400 + since.seconds) * _MICROSECONDS + since.microseconds


_FIRST_US = _microseconds_since_1970(datetime.min)
_LAST_US = _microseconds_since_1970(datetime.max)


def has_own_python_keys(kind: pa.DataType) -> bool:
    """Return True if keys of a column of `kind` differ from the values that `to_pylist` returns."""
    if pa.types.is_dictionary(kind):
        return has_own_python_keys(kind.value_type)
    return pa.types.is_timestamp(kind)


def python_keys(column: pa.Array, name: str) -> list[Any]:
    """Return the key of each row of one key column, which has no nulls.

    Raises:
        BadStateValue: A timestamp has nanoseconds, or is outside of the years 1 to 9999; names the
            row.
    """
    if pa.types.is_dictionary(column.type):
        return python_keys(column.dictionary_decode(), name)
    if not pa.types.is_timestamp(column.type):
        return column.to_pylist()
    ticks: npt.NDArray[np.int64] = column.view(pa.int64()).to_numpy()
    microseconds = _as_microseconds(ticks, column.type, name)
    instants = cast("list[datetime]", microseconds.view("datetime64[us]").tolist())
    if column.type.tz is None:
        return instants
    return [instant.replace(tzinfo=timezone.utc) for instant in instants]


def _as_microseconds(
    ticks: npt.NDArray[np.int64], kind: pa.DataType, name: str
) -> npt.NDArray[np.int64]:
    ticks_a_second = _PER_SECOND[kind.unit]
    if ticks_a_second > _MICROSECONDS:
        microseconds = ticks // 1000
        _check_rows(ticks == microseconds * 1000, ticks, kind, name, "has nanoseconds")
    else:
        factor = _MICROSECONDS // ticks_a_second
        # Compared before the multiplication, which could overflow. -(-a // b) rounds up.
        within = (ticks >= -(-_FIRST_US // factor)) & (ticks <= _LAST_US // factor)
        _check_rows(within, ticks, kind, name, "is outside of the years 1 to 9999")
        microseconds = ticks * factor
    return microseconds


def _check_rows(
    fine: npt.NDArray[np.bool_],
    ticks: npt.NDArray[np.int64],
    kind: pa.DataType,
    name: str,
    reason: str,
) -> None:
    """Raise BadStateValue unless every row is `fine`."""
    if fine.all():
        return
    row = int(np.flatnonzero(~fine)[0])
    raise BadStateValue(
        f"key column {name!r} holds {int(ticks[row])} {kind.unit} since 1970 ({kind}), which"
        f" {reason}: Python has no datetime for it, which a function by record needs as its key;"
        " cast the column to another type, or filter such records, before key_by()",
        row=row,
    )


def python_row_keys(columns: Sequence[pa.Array], names: Sequence[str]) -> list[Any]:
    """Return each row's key: the value of one key column, or a tuple of several.

    Raises:
        BadStateValue: See `python_keys`.
    """
    values = [python_keys(column, name) for column, name in zip(columns, names, strict=True)]
    return values[0] if len(values) == 1 else list(zip(*values, strict=True))
