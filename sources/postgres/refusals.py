"""The consequence of each error of a server, by its SQLSTATE.

A job whose server cannot be reached waits for it. A job whose server repeats the same refusal
forever must end, and name the reason. This table assigns each SQLSTATE to a consequence:

    PASSES    the server recovers without help: the job starts again
    IN_USE    another reader has the slot: the job starts again
    LOST      the slot no longer has the changes that follow: the job ends
    DATA      the server cannot send a value of the table: the job ends
    SETTING   a setting or a privilege is wrong: the first start fails, a running job tries again a
              few times
    UNKNOWN   every other refusal: the job starts again, and ends when the SQLSTATE repeats

Source: PostgreSQL 18, appendix A, and the errors of src/backend/replication.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from onceflow.clients.postgres.catalog import literal
from onceflow.clients.postgres.replication import StreamRefused, format_lsn
from onceflow.clients.sql.session import SqlError
from onceflow.core.errors import (
    BadRecord,
    ConfigError,
    OffsetOutOfRange,
    OnceflowError,
    SourceUnavailable,
)
from onceflow.core.protocol.failures import make_fingerprint
from onceflow.sources.postgres.position import SlotPosition


class Refusal(Enum):
    """The consequence of an error of the server; see the module."""

    PASSES = "passes"
    IN_USE = "in use"
    LOST = "lost"
    DATA = "data"
    SETTING = "setting"
    UNKNOWN = "unknown"


REFUSALS: Mapping[str, Refusal] = MappingProxyType(
    {
        # The connection, a transaction that must be repeated, a full or stopping server.
        "08": Refusal.PASSES,
        "25": Refusal.PASSES,
        "40": Refusal.PASSES,
        "53": Refusal.PASSES,
        "55P03": Refusal.PASSES,
        "57": Refusal.PASSES,
        "58": Refusal.PASSES,
        "55006": Refusal.IN_USE,
        # The slot was invalidated, or belongs to another database.
        "55000": Refusal.LOST,
        # The slot or the publication does not exist. Servers before 18 refuse a publication for
        # ever that did not exist when a change was written.
        "42704": Refusal.LOST,
        # A WAL segment was removed, or a file of the slot.
        "58P01": Refusal.LOST,
        # A value has no form in UTF-8 or is larger than a message; data is damaged; an extension
        # of the server failed.
        "22": Refusal.DATA,
        "38": Refusal.DATA,
        "39": Refusal.DATA,
        "54": Refusal.DATA,
        "XX001": Refusal.DATA,
        "XX002": Refusal.DATA,
        # The login, a privilege, an option of the plugin, a command that the server does not know.
        "0A": Refusal.SETTING,
        "22023": Refusal.SETTING,
        "28": Refusal.SETTING,
        "3D": Refusal.SETTING,
        "3F": Refusal.SETTING,
        "42": Refusal.SETTING,
        "F0": Refusal.SETTING,
    }
)
"""The consequence by the beginning of the SQLSTATE. The longest beginning counts."""

_CODE_LENGTH = 5
_RIGHT_MISSING = "42501"
_GRANT = (
    ": grant the privilege to the user. If row-level security applies to the user: ALTER ROLE …"
    " BYPASSRLS"
)


def classify_refusal(code: str) -> Refusal:
    """Return the consequence of an error with SQLSTATE `code`."""
    for length in range(_CODE_LENGTH, 1, -1):
        refusal = REFUSALS.get(code[:length])
        if refusal is not None:
            return refusal
    return Refusal.UNKNOWN


def to_stream_error(refused: StreamRefused, position: SlotPosition, where: str) -> OnceflowError:
    """Return the error of a source whose stream the server refuses to begin or to continue."""
    at = f"slot {position.slot} at {format_lsn(position.lsn)}: {where}"
    refusal = classify_refusal(refused.code)
    match refusal:
        case Refusal.PASSES:
            return SourceUnavailable(f"{at}: {refused}")
        case Refusal.IN_USE:
            return SourceUnavailable(
                f"slot {position.slot} is in use by another reader: {refused}. Stop that reader; to"
                " see it: SELECT active_pid FROM pg_replication_slots WHERE slot_name ="
                f" {literal(position.slot)}"
            )
        case Refusal.LOST:
            return OffsetOutOfRange(
                f"slot {position.slot} cannot continue at {format_lsn(position.lsn)}: {refused}."
                f" {position.copy_anew}"
            )
        case Refusal.DATA:
            return BadRecord(
                f"{at} cannot send the next change: {_with_code(refused)}. If the row or the server"
                f" cannot be repaired: {position.copy_anew}"
            )
        case Refusal.SETTING:
            return ConfigError(f"{at} refuses to send changes: {_with_code(refused)}")
        case Refusal.UNKNOWN:
            return _unknown(f"{at}: {_with_code(refused)}", refused.code)


def to_session_error(error: SqlError, where: str) -> OnceflowError:
    """Return the error of a source whose statement the server refuses."""
    refusal = classify_refusal(error.code)
    match refusal:
        case Refusal.PASSES | Refusal.IN_USE:
            return SourceUnavailable(f"{where}: {error}")
        case Refusal.DATA:
            return BadRecord(f"{where} cannot read a value of the table: {error}")
        case Refusal.SETTING:
            is_right = error.code == _RIGHT_MISSING
            advice = _GRANT if is_right else ""
            return ConfigError(f"{where}: {error}{advice}")
        case Refusal.LOST | Refusal.UNKNOWN:
            text = f"{where}: {error}"
            # Without a code, the connection was lost.
            return _unknown(text, error.code) if error.code else SourceUnavailable(text)


def _with_code(refused: StreamRefused) -> str:
    return f"{refused} (SQLSTATE {refused.code})"


def _unknown(text: str, code: str) -> SourceUnavailable:
    """Return an error with the fingerprint of `code`.

    The job ends when attempts fail with the same fingerprint again and again.
    """
    return SourceUnavailable(text, fingerprint=make_fingerprint("", code, ""))
