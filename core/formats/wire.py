"""The registry's wire format: a zero byte and the id of its schema stand before each value."""

from __future__ import annotations

MAGIC = 0
"""The first byte of every value."""
HEADER_BYTES = 5
"""Magic, and the id in four bytes, the highest first."""
TOMBSTONE = "it has no value (a tombstone)"
UNFRAMED = (
    "it does not begin with a zero byte and a schema id, so that no serializer of a schema registry"
    " has written it"
)


def schema_id_of(header: bytes) -> int | None:
    """Return the id that the first bytes of a value name; None when they name none."""
    if len(header) < HEADER_BYTES or header[0] != MAGIC:
        return None
    return int.from_bytes(header[1:HEADER_BYTES], "big")


def header_of(schema_id: int) -> bytes:
    """Return the first bytes of values that were written with `schema_id`."""
    return bytes([MAGIC]) + schema_id.to_bytes(HEADER_BYTES - 1, "big")
