"""A decoder of the messages of `pgoutput`, the logical decoding plugin of Postgres.

A message is one kind byte and fields in network byte order. The decoder reads the messages of
protocol version 1: the server sends a transaction as a whole, after its commit.

    B begin    I insert    T truncate    O origin
    C commit   U update    R relation    Y type      M logical message
               D delete

Some servers send a stray `A` (stream abort) although streaming is off (PostgreSQL 18). It belongs
to no transaction that a reader receives, so `decode` returns None for it. A message of any other
kind raises `BadRecord`, because a reader that skips it may lose rows.

Source: PostgreSQL 18, "Logical Replication Message Formats".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, TypeAlias

from onceflow.core.errors import BadRecord

_U32 = struct.Struct("!I")
_BEGIN = struct.Struct("!QqI")
_COMMIT = struct.Struct("!BQQq")
_MESSAGE = struct.Struct("!BQ")
_COLUMN_TYPE = struct.Struct("!Ii")
_TRUNCATE = struct.Struct("!IB")
_KEY_FLAG = 1
_NULL, _UNCHANGED, _TEXT, _BINARY = b"nutb"
_NEW, _OLD, _KEY = b"NOK"
_STREAM_ABORT = b"A"[0]


class Unchanged(Enum):
    """The type of `UNCHANGED`."""

    UNCHANGED = "unchanged"


UNCHANGED: Final = Unchanged.UNCHANGED
"""The mark of a large value that an update did not change, and that the server does not send."""

Value: TypeAlias = bytes | str | Literal[Unchanged.UNCHANGED] | None
"""The value of a column: bytes in the type's binary format, or a str in its text format.

None is SQL's null."""

Row: TypeAlias = tuple[Value, ...]
"""The values of a row, in the order of the columns of its relation."""


@dataclass(frozen=True, slots=True)
class TransactionBegin:
    """The beginning of a transaction; the server sends its changes after it."""

    commit_lsn: int
    """The LSN of the commit record: its start."""
    committed_us: int
    """The time of the commit in microseconds since 2000-01-01 UTC."""
    xid: int
    """The transaction's id: the lower 32 bits, of the top-level transaction."""


@dataclass(frozen=True, slots=True)
class TransactionCommit:
    """The end of a transaction."""

    commit_lsn: int
    end_lsn: int
    """The LSN after the commit record. A reader that has this transaction continues from here."""
    committed_us: int


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A column of a relation, as the publication sends it."""

    name: str
    type_number: int
    """The OID of the type."""
    modifier: int
    is_key: bool
    """True if the column is part of the replica identity."""


@dataclass(frozen=True, slots=True)
class Relation:
    """The columns of a table. It precedes the first change of the table, and follows changes."""

    number: int
    """The OID of the table, by which changes refer to it."""
    schema: str
    name: str
    identity: str
    """The replica identity: d default, n nothing, f full, i index."""
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class Insert:
    """A new row."""

    relation: int
    new: Row


@dataclass(frozen=True, slots=True)
class Update:
    """A changed row."""

    relation: int
    key: Row | None
    """The old values of the key, other columns are None; sent if the update changes the key."""
    old: Row | None
    """The whole old row; sent under REPLICA IDENTITY FULL."""
    new: Row


@dataclass(frozen=True, slots=True)
class Delete:
    """A deleted row. Either its key or the whole row is known, by the replica identity."""

    relation: int
    key: Row | None
    old: Row | None


@dataclass(frozen=True, slots=True)
class Truncate:
    """A statement that has emptied tables."""

    relations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransactionOrigin:
    """The server from which a transaction was replicated to the one that is read."""

    commit_lsn: int
    name: str


@dataclass(frozen=True, slots=True)
class Type:
    """The name of a type that is not built in."""

    number: int
    schema: str
    name: str


@dataclass(frozen=True, slots=True)
class Message:
    """A message that a program wrote with pg_logical_emit_message."""

    transactional: bool
    lsn: int
    prefix: str
    content: bytes


Decoded: TypeAlias = (
    TransactionBegin
    | TransactionCommit
    | Relation
    | Insert
    | Update
    | Delete
    | Truncate
    | TransactionOrigin
    | Type
    | Message
)


def decode(data: bytes) -> Decoded | None:
    """Return the message in `data`, or None for a stray message that carries nothing.

    Raises:
        BadRecord: The kind of the message is not known, the message is too short or too long, or a
            text is not UTF-8.
    """
    if not data:
        raise BadRecord("a message of pgoutput is empty")
    decode_kind = _DECODERS.get(data[0])
    if decode_kind is None:
        if data[0] == _STREAM_ABORT:
            return None
        raise BadRecord(
            f"pgoutput sent a message of the kind {data[:1]!r}, which this version of onceflow does"
            " not know. No row is lost: upgrade onceflow, and start the job again"
        )
    try:
        decoded, end = decode_kind(data)
    except (IndexError, struct.error, UnicodeDecodeError, ValueError) as error:
        raise BadRecord(
            f"a message of pgoutput of the kind {data[:1]!r} with {len(data)} bytes cannot be read:"
            f" {error}"
        ) from None
    if end != len(data):
        raise BadRecord(f"a message of pgoutput has {len(data) - end} bytes after its end")
    return decoded


def _read_text(data: bytes, at: int) -> tuple[str, int]:
    """Return the text before the next NUL, and the position after the NUL."""
    end = data.index(b"\0", at)
    return data[at:end].decode(), end + 1


def _read_row(data: bytes, at: int) -> tuple[Row, int]:
    """Return the values of the tuple at `at`, and the position after it.

    Raises:
        IndexError: The tuple ends too early.
    """
    count = data[at] << 8 | data[at + 1]
    at += 2
    values: list[Value] = []
    for _ in range(count):
        kind = data[at]
        at += 1
        if kind in (_BINARY, _TEXT):
            start = at + 4
            at = start + _U32.unpack_from(data, at)[0]
            if at > len(data):
                raise IndexError("a value ends too early")
            values.append(data[start:at] if kind == _BINARY else data[start:at].decode())
        elif kind == _NULL:
            values.append(None)
        elif kind == _UNCHANGED:
            values.append(UNCHANGED)
        else:
            raise BadRecord(
                f"pgoutput sent a value of the kind {bytes([kind])!r}, which this version of"
                " onceflow does not know. No row is lost: upgrade onceflow, and start the job again"
            )
    return tuple(values), at


def _begin(data: bytes) -> tuple[TransactionBegin, int]:
    return TransactionBegin(*_BEGIN.unpack_from(data, 1)), 1 + _BEGIN.size


def _commit(data: bytes) -> tuple[TransactionCommit, int]:
    _, commit_lsn, end_lsn, committed_us = _COMMIT.unpack_from(data, 1)
    return TransactionCommit(commit_lsn, end_lsn, committed_us), 1 + _COMMIT.size


def _relation(data: bytes) -> tuple[Relation, int]:
    (number,) = _U32.unpack_from(data, 1)
    schema, at = _read_text(data, 5)
    name, at = _read_text(data, at)
    identity = chr(data[at])
    count = data[at + 1] << 8 | data[at + 2]
    at += 3
    columns: list[RelationColumn] = []
    for _ in range(count):
        flags = data[at]
        column, at = _read_text(data, at + 1)
        type_number, modifier = _COLUMN_TYPE.unpack_from(data, at)
        at += _COLUMN_TYPE.size
        columns.append(RelationColumn(column, type_number, modifier, bool(flags & _KEY_FLAG)))
    # The server omits the schema of its own catalog.
    return Relation(number, schema or "pg_catalog", name, identity, tuple(columns)), at


def _insert(data: bytes) -> tuple[Insert, int]:
    (relation,) = _U32.unpack_from(data, 1)
    _require_marker(data[5], (_NEW,))
    new, at = _read_row(data, 6)
    return Insert(relation, new), at


def _update(data: bytes) -> tuple[Update, int]:
    (relation,) = _U32.unpack_from(data, 1)
    marker, at = data[5], 6
    _require_marker(marker, (_NEW, _OLD, _KEY))
    before: Row | None = None
    if marker != _NEW:
        before, at = _read_row(data, at)
        _require_marker(data[at], (_NEW,))
        at += 1
    new, at = _read_row(data, at)
    key = before if marker == _KEY else None
    old = before if marker == _OLD else None
    return Update(relation, key, old, new), at


def _delete(data: bytes) -> tuple[Delete, int]:
    (relation,) = _U32.unpack_from(data, 1)
    marker = data[5]
    _require_marker(marker, (_OLD, _KEY))
    before, at = _read_row(data, 6)
    is_key = marker == _KEY
    return Delete(relation, before if is_key else None, None if is_key else before), at


def _require_marker(marker: int, known: tuple[int, ...]) -> None:
    if marker not in known:
        raise ValueError(f"a tuple is marked {bytes([marker])!r}, and not {bytes(known)!r}")


def _truncate(data: bytes) -> tuple[Truncate, int]:
    count, _ = _TRUNCATE.unpack_from(data, 1)
    start = 1 + _TRUNCATE.size
    relations = struct.unpack_from(f"!{count}I", data, start)
    return Truncate(relations), start + 4 * count


def _origin(data: bytes) -> tuple[TransactionOrigin, int]:
    (commit_lsn,) = struct.unpack_from("!Q", data, 1)
    name, at = _read_text(data, 9)
    return TransactionOrigin(commit_lsn, name), at


def _type(data: bytes) -> tuple[Type, int]:
    (number,) = _U32.unpack_from(data, 1)
    schema, at = _read_text(data, 5)
    name, at = _read_text(data, at)
    return Type(number, schema or "pg_catalog", name), at


def _message(data: bytes) -> tuple[Message, int]:
    flags, lsn = _MESSAGE.unpack_from(data, 1)
    prefix, at = _read_text(data, 1 + _MESSAGE.size)
    (size,) = _U32.unpack_from(data, at)
    start = at + 4
    if start + size > len(data):
        raise IndexError("the content ends too early")
    return Message(bool(flags & 1), lsn, prefix, data[start : start + size]), start + size


_DECODERS: Mapping[int, Callable[[bytes], tuple[Decoded, int]]] = {
    ord("B"): _begin,
    ord("C"): _commit,
    ord("R"): _relation,
    ord("I"): _insert,
    ord("U"): _update,
    ord("D"): _delete,
    ord("T"): _truncate,
    ord("O"): _origin,
    ord("Y"): _type,
    ord("M"): _message,
}
