"""The serializers of values: typed, named in the snapshot, and refused if the type has changed.

A serializer's *signature* is stored with the state. A restore with a signature that does not fit is
refused by name, before any value is read.

Values of `direct_types` (numbers, text, dates) are immutable: they are stored directly and encoded
only for a snapshot. All others are encoded by `set` and decoded by `get`. So neither a snapshot nor
another reader ever shares an object with user code.

Many scalars of one class are encoded in one call.

The encoding of a list is a header and the encodings of its items, one after the other. So the items
can be cut out of it, once the length of each item is known.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any, Generic, TypeAlias, TypeVar, cast
from uuid import UUID

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.decoding import msgpack_decoder
from onceflow.core.errors import ConfigError
from onceflow.core.state.types import exact_numbers
from onceflow.core.state.types.signatures import type_name

T = TypeVar("T")

DIRECT_TYPES: tuple[type[Any], ...] = (
    int, float, str, bytes, bool, date, datetime, time, timedelta, Decimal, UUID,
)  # fmt: skip
_PLAIN_TYPES: tuple[type[Any], ...] = (int, float, str, bytes, bool)
_EXACT_FLOAT_MAX = 2.0**53
"""The limit up to which each integer is a float exactly; beyond it only some are."""
_BIG_INTEGER = 1
"""The msgpack extension code of an integer beyond 64 bits: two's complement, little-endian."""


class Serializer(ABC, Generic[T]):
    """Encodes values of one type. Pickled to the slots; stateless, so any thread may use it."""

    @property
    @abstractmethod
    def signature(self) -> str:
        """The format and type, with a version that changes if old bytes can no longer be read."""

    @property
    def direct_types(self) -> tuple[type[Any], ...]:
        """The types whose values are immutable, and equal after encoding and decoding."""
        return ()

    @abstractmethod
    def encode(self, value: T) -> bytes:
        """Return `value` as bytes.

        Raises:
            TypeError, ValueError: `value` is not of this type.
        """

    @abstractmethod
    def decode(self, data: bytes) -> T:
        """Return the value that was passed to `encode`.

        Raises:
            TypeError, ValueError: The bytes hold no value of this type.
        """

    def to_checking(self) -> Serializer[T]:
        """Return a serializer for values of another type, which refuses to round them."""
        return self


TTL_PREFIX = "ttl/1:"
"""The prefix of the signature of values that expire; the values' signature follows."""
LIST_PREFIX = "list/1:"
"""The prefix of the signature of a list; the elements' signature follows."""


class ExpiringSerializer(Serializer[Any]):
    """Encodes values together with the time of their last use, from which they expire."""

    @property
    @abstractmethod
    def cleans_snapshots(self) -> bool:
        """True if a full snapshot leaves out expired values."""

    @abstractmethod
    def stamp(self, data: bytes) -> bytes:
        """Return the bytes of a value that was stored without a time, with the time now."""

    @abstractmethod
    def are_bytes_expired(self, data: bytes) -> bool:
        """Return True if the value of these bytes has expired. Any thread."""

    @abstractmethod
    def is_expired(self, stored: Any) -> bool:
        """Return True if a stored value has expired."""


class MsgpackSerializer(Serializer[Any]):
    """MessagePack of any type that msgspec supports: builtins, dataclasses, Structs, enums, …."""

    def __init__(self, python_type: Any) -> None:
        self._type = python_type
        self._encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder(
            enc_hook=_encode_other
        ).encode
        self._decode: Callable[[bytes], Any] = msgpack_decoder(python_type).decode
        self._signature = f"msgpack/1:{type_name(python_type)}"
        self._check_integers = exact_numbers.make_integers_check(python_type)
        self._check_given = exact_numbers.make_given_check(python_type)

    def __reduce__(self) -> tuple[type[MsgpackSerializer], tuple[Any]]:
        # The encoder cannot be pickled, so each process builds its own.
        return MsgpackSerializer, (self._type,)

    @property
    def signature(self) -> str:
        """The type's name, including the fields of classes."""
        return self._signature

    @property
    def direct_types(self) -> tuple[type[Any], ...]:
        """The type itself if it is a scalar; the plain scalars for `Any`."""
        if self._type is Any:
            return _PLAIN_TYPES
        return (self._type,) if self._type in DIRECT_TYPES else ()

    def to_checking(self) -> Serializer[Any]:
        """Return a serializer that refuses to round integers, also inside of a value."""
        return _CheckingSerializer(self._type)

    def check_given(self, data: bytes, read_back: Any) -> None:
        """Raise ValueError if `read_back` lacks a field of `data`, or has a rounded integer.

        `data` is the result of `encode` for a value, and `read_back` the result of `decode` for
        `data`.
        """
        # Encoding again is many times as fast as a check of each number. It gives the same bytes
        # unless there is an integer in place of a float, a field that the type does not have, or a
        # set.
        if self._check_given is not None and self._encode(read_back) != data:
            self._check_given(data)

    def encode(self, value: Any) -> bytes:
        """Return `value` as MessagePack."""
        if value.__class__ is msgspec.msgpack.Ext and value.code == _BIG_INTEGER:
            raise ValueError(f"extension code {_BIG_INTEGER} is that of integers beyond 64 bits")
        try:
            return self._encode(value)
        except OverflowError:
            if value.__class__ is not int:
                raise ValueError("an integer inside of it has more than 64 bits") from None
            # One bit more than the digits need, for the sign.
            size = value.bit_length() // 8 + 1
            data = value.to_bytes(size, "little", signed=True)
            return self._encode(msgspec.msgpack.Ext(_BIG_INTEGER, data))

    def decode(self, data: bytes) -> Any:
        """Return the value in `data`."""
        try:
            value = self._decode(data)
        except msgspec.ValidationError:
            # Only an int or a float may have been written as an integer of more than 64 bits, which
            # msgspec does not convert.
            if self._type not in (int, float):
                raise
            value = msgspec.msgpack.decode(data)
            if not isinstance(value, msgspec.msgpack.Ext):
                raise
        if isinstance(value, msgspec.msgpack.Ext) and value.code == _BIG_INTEGER:
            number = int.from_bytes(value.data, "little", signed=True)
            return exact_numbers.to_exact_float(number) if self._type is float else number
        if self._type is float and abs(cast("float", value)) >= _EXACT_FLOAT_MAX:
            # The stored value may be an integer, which has more digits than a float.
            number = msgspec.msgpack.decode(data)
            return exact_numbers.to_exact_float(number) if isinstance(number, int) else value
        return value


class _CheckingSerializer(MsgpackSerializer):
    """Reads values that were written with another type; refuses to round an integer in them."""

    def decode(self, data: bytes) -> Any:
        """Return the value in `data`."""
        if self._check_integers is not None:
            self._check_integers(data)
        return super().decode(data)


class ListSerializer(Serializer[list[Any]]):
    """A list of values, each encoded by `element`."""

    def __init__(self, element: Serializer[Any]) -> None:
        self._element = element

    @property
    def signature(self) -> str:
        """The element's signature behind `LIST_PREFIX`."""
        return f"{LIST_PREFIX}{self._element.signature}"

    def to_checking(self) -> Serializer[list[Any]]:
        """Return a serializer that checks each element."""
        return ListSerializer(self._element.to_checking())

    def encode(self, value: list[Any]) -> bytes:
        """Return a MessagePack array of the elements' bytes."""
        return msgspec.msgpack.encode([self._element.encode(element) for element in value])

    def decode(self, data: bytes) -> list[Any]:
        """Return the elements in `data`."""
        return [self._element.decode(element) for element in _decode_bytes(data)]


_decode_bytes = msgpack_decoder(list[bytes]).decode


def _encode_other(value: Any) -> Any:
    raise TypeError(
        f"{type(value).__name__} has no MessagePack form; convert it to a Python builtin, a"
        " dataclass or a msgspec Struct, or give the state your own Serializer"
    )


def serializer_of(spec: Any) -> Serializer[Any]:
    """Return the serializer for a Python type, an Arrow type or a serializer.

    Raises:
        ConfigError: There is no serializer for the type.
    """
    if issubclass(type(spec), Serializer):
        given: Serializer[Any] = spec
        return given
    return _make_msgpack(python_type_of(spec) if isinstance(spec, pa.DataType) else spec)


@lru_cache(maxsize=256)
def _make_msgpack(python_type: Any) -> MsgpackSerializer:
    try:
        return MsgpackSerializer(python_type)
    except (TypeError, NameError) as error:
        raise ConfigError(
            f"state of type {python_type!r} has no MessagePack form ({error}); use builtins, a"
            " dataclass or a msgspec Struct, or a Serializer of your own"
        ) from error


def python_type_of(kind: pa.DataType) -> Any:
    """Return the Python type of the values of an Arrow type.

    Raises:
        ConfigError: No Python type with an encoding fits.
    """
    types_ = pa.types
    for matches, python_type in (
        (types_.is_boolean, bool),
        (types_.is_integer, int),
        (types_.is_floating, float),
        (types_.is_string, str),
        (types_.is_large_string, str),
        (types_.is_binary, bytes),
        (types_.is_large_binary, bytes),
        (types_.is_fixed_size_binary, bytes),
        (types_.is_date, date),
        (types_.is_timestamp, datetime),
        (types_.is_time, time),
        (types_.is_duration, timedelta),
        (types_.is_decimal, Decimal),
    ):
        if matches(kind):
            return python_type
    if types_.is_list(kind) or types_.is_large_list(kind):
        return types.GenericAlias(list, (python_type_of(kind.value_type) | None,))
    if types_.is_map(kind):
        pair = (python_type_of(kind.key_type), python_type_of(kind.item_type) | None)
        return types.GenericAlias(dict, pair)
    raise ConfigError(f"state of Arrow type {kind} is not supported; give a Python type instead")


Sizes: TypeAlias = npt.NDArray[np.int64]

_encode_list = msgspec.msgpack.Encoder().encode


def encode_scalars(values: Sequence[Any], kind: type[Any]) -> pa.Array | None:
    """Return the MessagePack of each of `values`, all of class `kind`, as a large_binary array.

    None if they must be encoded one by one: `kind` is no plain scalar, or a value has no
    MessagePack form, such as an integer beyond 64 bits.
    """
    measure = _MEASURES.get(kind)
    if measure is None or not values:
        return None
    try:
        sizes = measure(values)
        data = _encode_list(values)
    except (OverflowError, UnicodeEncodeError, pa.ArrowInvalid):
        return None
    ends = np.zeros(len(values) + 1, np.int64)
    np.cumsum(sizes, out=ends[1:])
    header_bytes = len(data) - int(ends[-1])
    if header_bytes != _list_header_bytes(len(values)):
        return None
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(data).slice(header_bytes)]
    return pa.Array.from_buffers(pa.large_binary(), len(values), buffers)


def _list_header_bytes(count: int) -> int:
    return 1 if count < 16 else 3 if count < 1 << 16 else 5


def _measure_ints(values: Sequence[int]) -> Sizes:
    numbers = np.array(values, np.int64)
    # One comparison for each limit above which one more byte, or twice the bytes, are needed.
    sizes = np.ones(len(values), np.int64)
    for limit, more in ((1 << 7, 1), (1 << 8, 1), (1 << 16, 2), (1 << 32, 4)):
        sizes += more * (numbers >= limit)
    for limit, more in ((-(1 << 5), 1), (-(1 << 7), 1), (-(1 << 15), 2), (-(1 << 31), 4)):
        sizes += more * (numbers < limit)
    return sizes


def _measure_texts(values: Sequence[str]) -> Sizes:
    lengths: Sizes = pc.binary_length(pa.array(values, pa.large_string())).to_numpy()
    # A text of less than 32 bytes has its length in the first byte.
    return _with_length_bytes(lengths) - (lengths < 32)


def _measure_bytes(values: Sequence[bytes]) -> Sizes:
    return _with_length_bytes(np.fromiter(map(len, values), np.int64, len(values)))


def _with_length_bytes(lengths: Sizes) -> Sizes:
    return lengths + 2 + (lengths >= 1 << 8) + 2 * (lengths >= 1 << 16)


_MEASURES: Mapping[type[Any], Callable[[Sequence[Any]], Sizes]] = {
    int: _measure_ints,
    str: _measure_texts,
    bytes: _measure_bytes,
    float: lambda values: np.full(len(values), 9, np.int64),
    bool: lambda values: np.ones(len(values), np.int64),
}
