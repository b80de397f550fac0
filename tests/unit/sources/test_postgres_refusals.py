"""Every refusal of a server has one consequence, and one that repeats for ever ends the job."""

from __future__ import annotations

import re

import pytest

from onceflow.clients.postgres.replication import StreamRefused
from onceflow.clients.sql.session import SqlError
from onceflow.clients.sql.tables import TableName
from onceflow.core.errors import (
    BadRecord,
    ConfigError,
    OffsetOutOfRange,
    OnceflowError,
    SourceUnavailable,
)
from onceflow.core.protocol.failures import RULES, Consequence
from onceflow.core.runtime.messages import fingerprint_of
from onceflow.sources.postgres.position import SlotPosition, TablePosition
from onceflow.sources.postgres.refusals import (
    REFUSALS,
    Refusal,
    classify_refusal,
    to_session_error,
    to_stream_error,
)

_POSITION = SlotPosition("s", "1", 1, 100, (TablePosition(TableName("public", "t"), 7, None),))
_STREAM_ERRORS: dict[Refusal, type[OnceflowError]] = {
    Refusal.PASSES: SourceUnavailable,
    Refusal.IN_USE: SourceUnavailable,
    Refusal.LOST: OffsetOutOfRange,
    Refusal.DATA: BadRecord,
    Refusal.SETTING: ConfigError,
    Refusal.UNKNOWN: SourceUnavailable,
}


def _ends(error: OnceflowError) -> bool:
    """Return True if a job ends when the same error repeats."""
    is_final = RULES[type(error).__name__].later is Consequence.FINAL
    return is_final or bool(fingerprint_of(error))


@pytest.mark.parametrize(
    ("code", "refusal", "text"),
    [
        ("42704", Refusal.LOST, 'publication "p" does not exist'),
        ("55000", Refusal.LOST, 'can no longer access replication slot "s"'),
        ("58P01", Refusal.LOST, "requested WAL segment 00000001 has already been removed"),
        ("55006", Refusal.IN_USE, 'replication slot "s" is active for PID 7'),
        ("42501", Refusal.SETTING, "permission denied to use replication slots"),
        ("22023", Refusal.SETTING, "unrecognized pgoutput option: binary"),
        ("0A000", Refusal.SETTING, "client sent proto_version=1 but server only supports 9"),
        ("28000", Refusal.SETTING, "no pg_hba.conf entry for replication connection"),
        ("3D000", Refusal.SETTING, 'database "shop" does not exist'),
        ("22P05", Refusal.DATA, "character has no equivalent in encoding UTF8"),
        ("XX001", Refusal.DATA, "invalid page in block 7"),
        ("54000", Refusal.DATA, "string buffer exceeds maximum allowed length"),
        ("53300", Refusal.PASSES, "number of requested standby connections exceeds the limit"),
        ("57014", Refusal.PASSES, "canceling statement due to user request"),
        ("57P03", Refusal.PASSES, "the database system is starting up"),
        ("58030", Refusal.PASSES, "could not read from file: Input/output error"),
        ("40001", Refusal.PASSES, "canceling statement due to conflict with recovery"),
        ("XX000", Refusal.UNKNOWN, "record with incorrect prev-link"),
        ("99999", Refusal.UNKNOWN, "an error of another program"),
    ],
)
def test_errors_of_servers_have_their_consequence(code: str, refusal: Refusal, text: str) -> None:
    assert classify_refusal(code) is refusal
    error = to_stream_error(StreamRefused(text, code), _POSITION, "database 'shop'")
    assert type(error) is _STREAM_ERRORS[refusal]
    assert text in str(error)
    assert _ends(error) is (refusal not in (Refusal.PASSES, Refusal.IN_USE))


def test_no_refusal_that_lasts_is_tried_for_ever() -> None:
    """The server's answer would be the same with each attempt, and the job would look alive."""
    assert len(REFUSALS) > 20
    for code, refusal in REFUSALS.items():
        whole = code.ljust(5, "0")
        stream = to_stream_error(StreamRefused("refused", whole), _POSITION, "the server")
        session = to_session_error(SqlError("refused", whole), "the server")
        lasts = refusal not in (Refusal.PASSES, Refusal.IN_USE)
        assert _ends(stream) is lasts, code
        assert _ends(session) is lasts, code


def test_a_lost_connection_is_always_tried_again() -> None:
    lost = to_session_error(SqlError("server closed the connection"), "the server")
    assert type(lost) is SourceUnavailable
    assert not _ends(lost)


def test_an_unknown_refusal_is_recognized_when_it_repeats_with_other_numbers() -> None:
    """LSNs, process ids and times differ between two attempts."""
    texts = ["record with incorrect prev-link 0/16B3748", "record with incorrect prev-link 0/29F"]
    errors = [
        to_stream_error(StreamRefused(text, "XX000"), _POSITION, "the server") for text in texts
    ]
    assert errors[0].fingerprint == errors[1].fingerprint
    other = to_stream_error(StreamRefused(texts[0], "XX123"), _POSITION, "the server")
    assert other.fingerprint != errors[0].fingerprint


def test_a_missing_privilege_is_asked_for() -> None:
    refused = SqlError("permission denied for table t (SQLSTATE 42501)", "42501")
    error = to_session_error(refused, "database 'shop'")
    assert re.search(r"database 'shop': permission denied.*: grant the privilege", str(error))
