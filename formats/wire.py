"""The registry's wire format: a zero byte and the schema's id precede each value.

In Protobuf, the index of the message within the schema follows.
"""

from __future__ import annotations

MAGIC = 0
"""The first byte of every value."""
HEADER_BYTES = 5
"""The length of the header: the magic byte, and the id in four bytes, big-endian."""
_NUMBER_BITS_MAX = 28
"""The maximum shift of a variable-length number. No schema has so many messages."""
TOMBSTONE = "it has no value (a tombstone)"
UNFRAMED = (
    "it does not begin with a zero byte and a schema id, so it was not written by a serializer"
    " of a schema registry"
)
VALUE_SCHEMA_ID = "__value_schema_id"
KEY_SCHEMA_ID = "__key_schema_id"
"""The record headers in which newer serializers can write a schema's id."""


def describe_id_in_headers(header: str) -> str:
    """Return why a record is bad whose schema id is in the record header `header`."""
    return (
        f"its schema id is in the record's header {header}, and not before the value: set its"
        " producer to the serializer of schema ids that writes them there (prefix), which is the"
        " default"
    )


def schema_id_of(header: bytes) -> int | None:
    """Return the id in the first bytes of a value, or None if they contain none."""
    if len(header) < HEADER_BYTES or header[0] != MAGIC:
        return None
    return int.from_bytes(header[1:HEADER_BYTES], "big")


def header_of(schema_id: int) -> bytes:
    """Return the first bytes of values that were written with `schema_id`."""
    return bytes([MAGIC]) + schema_id.to_bytes(HEADER_BYTES - 1, "big")


def message_indexes(value: bytes) -> tuple[tuple[int, ...], int]:
    """Return the path of a Protobuf value's message in its schema, and the message's start.

    After the header come the count of indexes and the indexes, each as a zigzag number of variable
    length. A single zero means the first message.

    Raises:
        ValueError: The indexes are cut off.
    """
    count, at = _number(value, HEADER_BYTES)
    if count == 0:
        return (0,), at
    indexes: list[int] = []
    for _ in range(count):
        index, at = _number(value, at)
        indexes.append(index)
    return tuple(indexes), at


def indexes_of(path: tuple[int, ...]) -> bytes:
    """Return the bytes after the header of values that are the message at `path`."""
    if path == (0,):
        return b"\0"
    return b"".join(map(_number_bytes, (len(path), *path)))


def _number(value: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        if at >= len(value) or shift > _NUMBER_BITS_MAX:
            raise ValueError("the message indexes at its start are cut short")
        byte = value[at]
        at += 1
        # Each byte holds seven bits, the lowest first. The eighth bit says that another byte
        # follows.
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            # Zigzag: 0, -1, 1, -2, … are written as 0, 1, 2, 3, …
            return (number >> 1) ^ -(number & 1), at


def _number_bytes(number: int) -> bytes:
    # This is the zigzag encoding of an index or a count, which is never negative.
    remaining = number << 1
    encoded = bytearray()
    while remaining > 0x7F:
        encoded.append(remaining & 0x7F | 0x80)
        remaining >>= 7
    return bytes([*encoded, remaining])
