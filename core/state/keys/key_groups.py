"""The hash of a key and its key group. Part of the checkpoint format, so fixed for ever.

Every key column is a run of bytes: UTF-8 for strings, the bytes themselves for binary, and 8 bytes
little-endian, modulo 2**64, for an integer of any width, a boolean (0 or 1), a date (days since
1970-01-01) or a timestamp (nanoseconds since then, in UTC where it has a zone). A decimal is its
unscaled integer in 16 bytes. With all arithmetic modulo 2**64 and n the number of bytes:

    mix(x) = the 64-bit finalizer of MurmurHash3:
        x ^= x >> 33;  x *= 0xFF51AFD7ED558CCD;  x ^= x >> 33;  x *= 0xC4CEB9FE1A85EC53
        x ^= x >> 33
    start(n) = (n + 1) * 0x9E3779B97F4A7C15
    n <= 128:  h = start(n); for each 8-byte little-endian word w, the last one padded with zero
               bytes, one zero word if n = 0:  h = mix(h ^ w)
    n > 128:   h = mix(start(n) ^ XXH3_64(bytes))
    several columns:  h = hash(first)
        for each next column c:  h = mix(h * 0x9E3779B97F4A7C15 + hash(c))
    key group = h mod max parallelism

Test vectors:
    ""             9CA066F1A4AB2EEA      1 (any integer type), true     4F91F7E85AD5CE00
    "a"            2E49A6DD9FC6417A      -1                             2D16C656A8713C98
    "acct-000123"  AD79AD3ADF74D4A2      ("a", 1)                       90AB2D0FB53B2FB3
    "x" * 200      1EE2BF3C26F6F354      1970-01-02T00:00:00            B04CCCA011A0D7C2

Exactness never rests on this hash: code that uses it as identity compares the keys as well.

Source: MurmurHash3 (Austin Appleby, public domain); XXH3_64 as specified with xxHash 0.8, seed 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from onceflow.core.errors import BadStateValue, ConfigError
from onceflow.core.protocol.ids import PARALLELISM_MAX
from onceflow.core.state.keys import key_columns

Hashes: TypeAlias = npt.NDArray[np.uint64]

_M1, _M2, _GOLDEN = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 0x9E3779B97F4A7C15
_U1, _U2, _U_GOLDEN, _U33 = np.uint64(_M1), np.uint64(_M2), np.uint64(_GOLDEN), np.uint64(33)
_2_64 = (1 << 64) - 1
BYTES_MIXED_MAX = 128
_EPOCH, _UTC_EPOCH = datetime(1970, 1, 1), datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)


def hash_keys(arrays: Sequence[pa.Array], names: Sequence[str] | None = None) -> Hashes:
    """Return the 64-bit hash of each row's key, over one or more key columns of one length.

    Raises:
        BadStateValue: A key is null; names the column, by `names` if given, else by its position.
        ConfigError: A column has a type that cannot be a key.
    """
    return hash_key_columns(key_columns.read_key_columns(arrays, names))


def hash_key_columns(columns: Sequence[key_columns.KeyColumn]) -> Hashes:
    """Return the 64-bit hash of each row's key, for columns that are already read."""
    hashes = _hash_column(columns[0])
    for column in columns[1:]:
        combine_hashes(hashes, _hash_column(column))
    return hashes


def combine_hashes(hashes: Hashes, following: Hashes) -> None:
    """Combine the hashes of the previous columns with those of the `following` column, in place."""
    hashes *= _U_GOLDEN
    hashes += following
    _mix(hashes)


def key_groups(hashes: Hashes, max_parallelism: int) -> npt.NDArray[np.uint16]:
    """Return the key group of each hash.

    Raises:
        ConfigError: `max_parallelism` is not 1 to 32,768.
    """
    check_max_parallelism(max_parallelism)
    if max_parallelism & (max_parallelism - 1) == 0:
        # For a power of two the remainder is the low bits; a division costs several times as much.
        return (hashes & np.uint64(max_parallelism - 1)).astype(np.uint16)
    return (hashes % np.uint64(max_parallelism)).astype(np.uint16)


def check_max_parallelism(max_parallelism: int) -> None:
    """Raise ConfigError unless `max_parallelism` is a possible number of key groups."""
    if not 1 <= max_parallelism <= PARALLELISM_MAX:
        raise ConfigError(f"max parallelism {max_parallelism} must be 1 to {PARALLELISM_MAX}")


def hash_key(key: Any) -> int:
    """Return the hash of one key, given as the Python value of its column, or a tuple of several.

    Equals the result of `hash_keys` for the column of the value.

    Raises:
        BadStateValue: The key is None or of a type that no key column has.
    """
    if issubclass(type(key), tuple):
        if not key:
            raise BadStateValue(
                "an empty tuple was given as a key; give one value for each key column"
            )
        hashed = hash_key(key[0])
        for part in key[1:]:
            hashed = _mix_one((hashed * _GOLDEN + hash_key(part)) & _2_64)
        return hashed
    data = _key_bytes(key)
    hashed = ((len(data) + 1) * _GOLDEN) & _2_64
    if len(data) > BYTES_MIXED_MAX:
        return _mix_one(hashed ^ xxhash.xxh3_64_intdigest(data))
    for start in range(0, max(len(data), 1), 8):
        hashed = _mix_one(hashed ^ int.from_bytes(data[start : start + 8], "little"))
    return hashed


def key_group_of(key: Any, max_parallelism: int) -> int:
    """Return the key group of one key.

    Raises:
        BadStateValue: See `hash_key`.
        ConfigError: See `key_groups`.
    """
    check_max_parallelism(max_parallelism)
    return hash_key(key) % max_parallelism


def _key_bytes(key: Any) -> bytes:
    match key:
        case str():
            return key.encode()
        case bytes():
            return key
        case int():
            return (key & _2_64).to_bytes(8, "little")
        case datetime():
            return (nanoseconds_of(key) & _2_64).to_bytes(8, "little")
        case date():
            return (days_of(key) & _2_64).to_bytes(8, "little")
        case Decimal():
            return (to_unscaled(key) & ((1 << 128) - 1)).to_bytes(16, "little")
        case _:
            raise BadStateValue(
                f"a key of type {type(key).__name__} ({key!r:.60}) cannot be hashed; use keys of"
                " a string, an integer, a boolean, a date, a timestamp, a decimal or a tuple of"
                " them"
            )


def nanoseconds_of(instant: datetime) -> int:
    """Return nanoseconds since 1970, in UTC if `instant` has a zone.

    Includes pandas' nanoseconds.
    """
    since = instant - (_EPOCH if instant.tzinfo is None else _UTC_EPOCH)
    extra: int = getattr(instant, "nanosecond", 0)
    return (since // _MICROSECOND) * 1000 + extra


def days_of(day: date) -> int:
    """Return days since 1970-01-01."""
    return day.toordinal() - _EPOCH.toordinal()


def to_unscaled(number: Decimal) -> int:
    """Return the digits of `number` as a signed integer, ignoring its exponent.

    Raises:
        BadStateValue: `number` is infinite or not a number.
    """
    if not number.is_finite():
        raise BadStateValue(f"a decimal key must be finite, got {number}")
    sign, digits, _ = number.as_tuple()
    unscaled = int("".join(map(str, digits)) or "0")
    return -unscaled if sign else unscaled


def _mix_one(x: int) -> int:
    x ^= x >> 33
    x = (x * _M1) & _2_64
    x ^= x >> 33
    x = (x * _M2) & _2_64
    return x ^ (x >> 33)


def _mix(x: key_columns.Words) -> None:
    x ^= x >> _U33
    x *= _U1
    x ^= x >> _U33
    x *= _U2
    x ^= x >> _U33


def _hash_column(column: key_columns.KeyColumn) -> Hashes:
    if isinstance(column, key_columns.BytesKeys):
        return _hash_bytes(column)
    hashes = np.full(len(column), ((8 * len(column.words) + 1) * _GOLDEN) & _2_64, np.uint64)
    for plane in column.words:
        # An instant has one hash, whatever its unit.
        hashes ^= plane if column.hash_factor == 1 else plane * np.uint64(column.hash_factor)
        _mix(hashes)
    return hashes


def _hash_bytes(column: key_columns.BytesKeys) -> Hashes:
    lengths = column.lengths
    hashes = (lengths + 1).astype(np.uint64)
    hashes *= _U_GOLDEN
    if len(lengths) == 0:
        return hashes
    shortest, longest = int(lengths.min()), int(lengths.max())
    for index in range(min((longest + 7) // 8, BYTES_MIXED_MAX // 8) or 1):
        if 8 * index < shortest and longest <= BYTES_MIXED_MAX:
            hashes ^= column.word(index)
            _mix(hashes)
        else:
            _mix_word(column, index, hashes)
    for row in np.flatnonzero(lengths > BYTES_MIXED_MAX).tolist():
        digest = xxhash.xxh3_64_intdigest(column.bytes_of(row))
        hashes[row] = _mix_one(int(hashes[row]) ^ digest)
    return hashes


def _mix_word(column: key_columns.BytesKeys, index: int, hashes: Hashes) -> None:
    """Mix word `index` into the hashes of the rows that have it. An empty key has one zero word."""
    lengths = column.lengths
    has = (lengths > 8 * index) & (lengths <= BYTES_MIXED_MAX)
    rows: key_columns.Ints = np.flatnonzero(has)
    mixed = hashes[rows] ^ column.word(index, rows)
    _mix(mixed)
    hashes[rows] = mixed
    if index == 0:
        empty = np.flatnonzero(lengths == 0)
        if len(empty):
            mixed = hashes[empty]
            _mix(mixed)
            hashes[empty] = mixed
