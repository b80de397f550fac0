"""The decoder of pgoutput: each message from its bytes, and no message skipped unknown."""

from __future__ import annotations

import struct

import pytest

from onceflow.clients.postgres import pgoutput
from onceflow.clients.postgres.pgoutput import UNCHANGED, decode
from onceflow.core.errors import BadRecord

_RELATION = struct.pack("!I", 16384)


def _row(*values: bytes) -> bytes:
    return struct.pack("!H", len(values)) + b"".join(values)


def _binary(value: bytes) -> bytes:
    return b"b" + struct.pack("!I", len(value)) + value


def _text(value: bytes) -> bytes:
    return b"t" + struct.pack("!I", len(value)) + value


def test_a_transaction_begins_and_ends_with_its_lsns() -> None:
    assert decode(b"B" + struct.pack("!QqI", 2**40, -5, 754)) == pgoutput.TransactionBegin(
        2**40, -5, 754
    )
    commit = b"C\0" + struct.pack("!QQq", 2**40, 2**40 + 48, 7)
    assert decode(commit) == pgoutput.TransactionCommit(2**40, 2**40 + 48, 7)


def test_a_relation_names_its_columns_and_their_types() -> None:
    data = (
        b"R" + _RELATION + b"public\0" + "tö\"b".encode() + b"\0d" + struct.pack("!H", 2)
        + b"\1id\0" + struct.pack("!Ii", 20, -1) + b"\0n\0" + struct.pack("!Ii", 1700, 655366)
    )  # fmt: skip
    columns = (
        pgoutput.RelationColumn("id", 20, -1, True),
        pgoutput.RelationColumn("n", 1700, 655366, False),
    )
    assert decode(data) == pgoutput.Relation(16384, "public", 'tö"b', "d", columns)


def test_null_and_an_unchanged_large_value_are_told_apart() -> None:
    data = b"I" + _RELATION + b"N" + _row(b"n", b"u", _binary(b"\0\1"), _text(b"x"), _binary(b""))
    assert decode(data) == pgoutput.Insert(16384, (None, UNCHANGED, b"\0\1", "x", b""))


def test_an_update_tells_an_old_key_from_an_old_row() -> None:
    new = b"N" + _row(_binary(b"2"), _binary(b"b"))
    key = b"K" + _row(_binary(b"1"), b"n")
    old = b"O" + _row(_binary(b"1"), _binary(b"a"))
    after = (b"2", b"b")
    assert decode(b"U" + _RELATION + new) == pgoutput.Update(16384, None, None, after)
    changed_key = pgoutput.Update(16384, (b"1", None), None, after)
    assert decode(b"U" + _RELATION + key + new) == changed_key
    assert decode(b"U" + _RELATION + old + new) == pgoutput.Update(16384, None, (b"1", b"a"), after)
    assert decode(b"D" + _RELATION + key) == pgoutput.Delete(16384, (b"1", None), None)
    assert decode(b"D" + _RELATION + old) == pgoutput.Delete(16384, None, (b"1", b"a"))


def test_truncates_origins_types_and_messages_are_decoded() -> None:
    truncate = b"T" + struct.pack("!IBII", 2, 3, 16384, 16385)
    assert decode(truncate) == pgoutput.Truncate((16384, 16385))
    assert decode(b"O" + struct.pack("!Q", 9) + b"far\0") == pgoutput.TransactionOrigin(9, "far")
    assert decode(b"Y" + _RELATION + b"public\0mood\0") == pgoutput.Type(16384, "public", "mood")
    message = b"M\1" + struct.pack("!Q", 9) + b"app\0" + struct.pack("!I", 2) + b"hi"
    assert decode(message) == pgoutput.Message(True, 9, "app", b"hi")


def test_a_stray_stream_abort_is_ignored() -> None:
    """PostgreSQL 18 sends it although streaming is off."""
    assert decode(b"A" + struct.pack("!II", 754, 754)) is None


@pytest.mark.parametrize("data", [b"", b"Z123", b"S\0\0\0\1", b"b\0"])
def test_an_unknown_message_is_an_error(data: bytes) -> None:
    with pytest.raises(BadRecord, match="empty|does not know"):
        decode(data)


def test_a_message_that_was_cut_anywhere_is_an_error() -> None:
    """A cut row must not read as a shorter one."""
    whole = b"U" + _RELATION + b"K" + _row(_binary(b"1"), b"n") + b"N" + _row(_text(b"2"), b"u")
    assert isinstance(decode(whole), pgoutput.Update)
    for end in range(1, len(whole)):
        with pytest.raises(BadRecord, match="cannot be read"):
            decode(whole[:end])
    with pytest.raises(BadRecord, match="1 bytes after its end"):
        decode(whole + b"\0")
