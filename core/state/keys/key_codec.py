"""The encoding of keys given as Python values. Part of the checkpoint format.

    str  "s" UTF-8           bytes  "b" bytes         bool     "t" or "f"
    int  "i" 8 bytes, or "I" decimal digits if it has more than 64 bits with its sign
    date "d" 8 bytes: days since 1970-01-01           Decimal  "D" its digits as text
    datetime "n" (without zone) or "z" (with one, kept in UTC) and 8 bytes: microseconds since 1970
    tuple "(" and for each element a 4-byte length and its bytes

Numbers are big-endian with the sign bit flipped, so that their bytes sort as the numbers do.

Keys of a stream have one type, so equal keys have equal bytes. The scale of a decimal counts,
because the key's hash is computed from its digits.

Keys of a map may mix these types. `encode_map_key` drops a decimal's trailing zeros, so 1.0 and
1.00 are one key; True, 1 and Decimal(1) are three keys. In Python these three are equal:
`to_stored_map_key` returns the objects that represent keys in memory.
"""

from __future__ import annotations

import struct
import types
import typing
from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.errors import BadStateValue, ConfigError, StateCorrupt
from onceflow.core.state.keys import key_groups
from onceflow.core.state.keys.key_index import to_fixed_binary

_SIGN = 1 << 63
_EPOCH = datetime(1970, 1, 1)
_UTC_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_pack_u64 = struct.Struct(">Q").pack
_pack_u32 = struct.Struct(">I").pack


def encode_key(key: Any) -> bytes:
    """Return the bytes of `key`.

    Raises:
        BadStateValue: `key` is None or of a type that cannot be a key.
    """
    encode = _ENCODERS.get(key.__class__)
    if encode is None:
        encode = next((_ENCODERS[kind] for kind in _ENCODERS if isinstance(key, kind)), _refuse)
    return encode(key)


def encode_map_key(key: Any) -> bytes:
    """Return the bytes of a key of a map state. Equal keys of one type have equal bytes.

    Raises:
        BadStateValue: `key` is None or of a type that cannot be a key.
    """
    if isinstance(key, Decimal):
        return b"D" + str(_without_zeros(key)).encode()
    if issubclass(type(key), tuple):
        return b"(" + b"".join(add_length(encode_map_key(part)) for part in key)
    return encode_key(key)


def _without_zeros(number: Decimal) -> Decimal:
    """Return an equal decimal with the fewest digits possible, at any precision."""
    digits = key_groups.to_unscaled(number)
    if digits == 0:
        return Decimal(0)
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    while digits % 10 == 0:
        # With integers, because Decimal.normalize() rounds to the context's precision.
        digits, exponent = digits // 10, exponent + 1
    return Decimal((digits < 0, tuple(map(int, str(abs(digits)))), exponent))


class EncodedMapKey(tuple[bytes, None]):
    """A map key that is compared by its bytes, because Python's equality differs from theirs.

    The second element makes it unequal to each tuple that is a key itself.
    """

    __slots__ = ()


_PLAIN_CLASSES: frozenset[type[Any]] = frozenset({str, int, bytes, date})
"""The classes whose values are equal if and only if their bytes are."""


def _is_plain(key: Any) -> bool:
    if key.__class__ is tuple:
        return bool(key) and _PLAIN_CLASSES.issuperset(map(type, key))
    return key.__class__ in _PLAIN_CLASSES


def to_stored_map_key(key: Any) -> Any:
    """Return the object that represents a map key in dicts: equal if and only if the bytes are.

    Raises:
        BadStateValue: `key` is None or of a type that cannot be a key.
    """
    if key.__class__ in _PLAIN_CLASSES or _is_plain(key):
        return key
    data = encode_map_key(key)
    # True equals 1 as a dict's key, and a subclass equals its base. The round trip through bytes
    # shows whether a plain value can represent the key. If not, its bytes do.
    value = decode_key(data)
    return value if _is_plain(value) else EncodedMapKey((data, None))


def from_stored_map_key(stored: Any) -> Any:
    """Return the map key that `stored` represents."""
    return decode_key(stored[0]) if stored.__class__ is EncodedMapKey else stored


def encode_stored_map_key(stored: Any) -> bytes:
    """Return `encode_map_key` of the map key that `stored` represents."""
    return stored[0] if stored.__class__ is EncodedMapKey else encode_key(stored)


def _encode_int(key: int) -> bytes:
    if -_SIGN <= key < _SIGN:
        # Adding 2**63 flips the sign bit, so that the bytes of negative numbers sort before those
        # of positive ones.
        return b"i" + _pack_u64(key + _SIGN)
    return b"I" + str(int(key)).encode()


def _encode_tuple(key: tuple[Any, ...]) -> bytes:
    return b"(" + b"".join(add_length(encode_key(part)) for part in key)


def _encode_decimal(key: Decimal) -> bytes:
    # Called for its errors: NaN and infinity have no digits to hash, so they cannot be keys.
    key_groups.to_unscaled(key)
    return b"D" + str(key).encode()


def check_map_key_type(python_type: Any, label: str) -> None:
    """Raise ConfigError unless values of `python_type` can be keys of a map.

    A type that is no class (`Any`, a union) passes: its values are checked one by one.
    """
    kind = typing.get_origin(python_type) or python_type
    if kind is tuple:
        for part in typing.get_args(python_type):
            check_map_key_type(part, label)
        return
    is_class = isinstance(kind, type) and kind not in (Any, types.EllipsisType, types.UnionType)
    if is_class and not issubclass(kind, tuple(_ENCODERS)):
        raise ConfigError(
            f"{label} has keys of type {kind.__name__}, which cannot be a key; use keys of str,"
            " bytes, int, bool, date, datetime, Decimal or a tuple of them"
        )


def _refuse(key: Any) -> bytes:
    raise BadStateValue(
        f"a key of type {type(key).__name__} cannot be hashed or stored: {key!r:.60}"
    )


def _encode_instant(key: datetime) -> bytes:
    microseconds, nanoseconds = divmod(key_groups.nanoseconds_of(key), 1000)
    if nanoseconds:
        raise BadStateValue(
            f"timestamp key {key} has nanoseconds: cast the column to timestamp[us]"
        )
    return (b"n" if key.tzinfo is None else b"z") + _pack_u64(microseconds + _SIGN)


_ENCODERS: dict[type[Any], Callable[[Any], bytes]] = {
    str: lambda key: b"s" + key.encode(),
    bool: lambda key: b"t" if key else b"f",
    int: _encode_int,
    bytes: lambda key: b"b" + key,
    tuple: _encode_tuple,
    datetime: _encode_instant,
    date: lambda key: b"d" + _pack_u64(key_groups.days_of(key) + _SIGN),
    Decimal: _encode_decimal,
}
"""The encoders by class. A subclass is before its base: a bool is an int, a datetime is a date."""


def decode_key(data: bytes) -> Any:
    """Return the key that `encode_key` encoded as `data`.

    Raises:
        StateCorrupt: The bytes are no key.
    """
    try:
        return _DECODERS[data[:1]](data[1:])
    except (KeyError, ValueError, struct.error, InvalidOperation, OverflowError) as error:
        raise StateCorrupt(
            f"a snapshot holds {data!r:.80}, which cannot be read as a key: {error}; restore an"
            " older checkpoint"
        ) from error


def _number(body: bytes) -> int:
    (number,) = struct.unpack(">Q", body)
    return int(number) - _SIGN


def _decode_parts(body: bytes) -> list[Any]:
    parts: list[Any] = []
    position = 0
    while position < len(body):
        part, position = split_length(body, position)
        parts.append(decode_key(part))
    return parts


_DECODERS: dict[bytes, Callable[[bytes], Any]] = {
    b"s": bytes.decode,
    b"b": lambda body: body,
    b"t": lambda _: True,
    b"f": lambda _: False,
    b"i": _number,
    b"I": int,
    b"d": lambda body: date.fromordinal(_number(body) + _EPOCH.toordinal()),
    b"n": lambda body: _EPOCH + timedelta(microseconds=_number(body)),
    b"z": lambda body: _UTC_EPOCH + timedelta(microseconds=_number(body)),
    b"D": lambda body: Decimal(body.decode()),
    b"(": lambda body: tuple(_decode_parts(body)),
}


def add_length(data: bytes) -> bytes:
    """Return `data` with its 4-byte big-endian length before it."""
    return _pack_u32(len(data)) + data


def split_length(data: bytes, position: int = 0) -> tuple[bytes, int]:
    """Return the bytes behind the length at `position`, and their end position.

    Raises:
        ValueError: There are fewer bytes than the length says.
    """
    start = position + 4
    end = start + int.from_bytes(data[position:start], "big")
    if start > len(data) or end > len(data):
        raise ValueError(f"{len(data)} bytes instead of the announced {end}")
    return data[start:end], end


def hash_python_keys(keys: Sequence[Any]) -> key_groups.Hashes:
    """Return `hash_key` of each key. Vectorised if all keys have one type, as those of a stream do.

    Raises:
        BadStateValue: See `hash_key`.
    """
    kind = _only_class(keys)
    try:
        if kind in _ARROW_TYPES:
            return key_groups.hash_keys([pa.array(keys, _ARROW_TYPES[kind])])
        if kind is tuple and len(set(map(len, keys))) == 1 and keys[0]:
            first, *following = zip(*keys, strict=True)
            # Tuples of one length are columns: their hashes are combined column by column, like
            # those of several key columns.
            hashes = hash_python_keys(first)
            for column in following:
                key_groups.combine_hashes(hashes, hash_python_keys(column))
            return hashes
    except (pa.ArrowInvalid, OverflowError):
        pass  # integers beyond 64 bits, one by one
    return np.fromiter(map(key_groups.hash_key, keys), np.uint64, len(keys))


def encode_python_keys(keys: Sequence[Any]) -> pa.Array:
    """Return `encode_key` of each key as a large_binary array, vectorised like `hash_python_keys`.

    Raises:
        BadStateValue: See `encode_key`.
    """
    kind = _only_class(keys)
    if kind in (str, bytes):
        tag = pa.scalar(b"s" if kind is str else b"b", pa.large_binary())
        bodies = pa.array(keys, _ARROW_TYPES[kind]).cast(pa.large_binary())
        none = pa.scalar(b"", pa.large_binary())
        tagged: pa.Array = pc.binary_join_element_wise(tag, bodies, none)
        return tagged
    if kind is int:
        try:
            numbers = np.array(keys, np.int64).view(np.uint64) ^ np.uint64(_SIGN)
        except OverflowError:
            return pa.array(list(map(encode_key, keys)), pa.large_binary())
        # An array of 9-byte records holds the tag and the big-endian number of each key, so numpy
        # writes at once what `_encode_int` packs key by key.
        records = np.zeros(len(keys), np.dtype([("tag", "S1"), ("number", ">u8")]))
        records["tag"], records["number"] = b"i", numbers
        return to_fixed_binary(records)
    return pa.array(list(map(encode_key, keys)), pa.large_binary())


def _only_class(keys: Sequence[Any]) -> type[Any] | None:
    classes = set(map(type, keys))
    return classes.pop() if len(classes) == 1 else None


_ARROW_TYPES: dict[type[Any] | None, pa.DataType] = {
    str: pa.large_string(),
    bytes: pa.large_binary(),
    int: pa.int64(),
    bool: pa.bool_(),
}
