"""The file format of a record of the decision log: two lines of JSON, readable by people.

    {"format":1,"kind":"attempt_claimed"|"checkpoint_decided","record":{...}}
    {"sha256":"<of line 1 with its newline>","size_bytes":<of the same>}

The second line seals the first. It is compared as bytes, so any byte that is changed, added or cut
off is noticed. The sha256 is also the record's digest, which the next record names. Bytes are
base64; field names are those of `protocol.log` and `protocol.checkpoints.snapshots`. A change of a
field there needs a new format number here, and every released format must stay readable.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec
from typing_extensions import assert_never

from onceflow.core.decoding import json_decoder
from onceflow.core.errors import CheckpointCorrupt, StateIncompatible, require
from onceflow.core.protocol.log.rules import AttemptClaimed, CheckpointDecided, LogEntry, LogRecord

FORMAT = 1

_RECORD_REMEDY = (
    "restore the file from a backup of checkpoint storage. Or move this record and all higher"
    " records away: the job then continues from the checkpoint before them, and rows that sinks"
    " have committed since that checkpoint will be written a second time"
)

_Body = TypeVar("_Body")


class _Envelope(msgspec.Struct, frozen=True):
    format: int
    kind: str = ""
    record: msgspec.Raw = msgspec.Raw()


class _Seal(msgspec.Struct, frozen=True):
    sha256: str
    size_bytes: int


def encode_record(record: LogRecord) -> tuple[bytes, str]:
    """Return the bytes of `record`'s file and their digest. Equal records have equal bytes.

    Raises:
        InvariantViolation: Decoding the bytes would not return `record` (a float that is NaN).
    """
    match record:
        case AttemptClaimed():
            kind = "attempt_claimed"
        case CheckpointDecided():
            kind = "checkpoint_decided"
        case _:
            assert_never(record)
    body = msgspec.Raw(msgspec.json.encode(record))
    data, digest = seal(msgspec.json.encode(_Envelope(FORMAT, kind, body)))
    require(
        _reads_back(data, record),
        f"record {record.sequence} changes when it is encoded and decoded",
    )
    return data, digest


def decode_record(data: bytes, location: str) -> LogEntry:
    """Return the record in `data`, read from `location`, with its digest.

    Raises:
        CheckpointCorrupt: The bytes are not those that were written.
        StateIncompatible: Another version of onceflow wrote them.
    """
    line, digest = unseal(data, location)
    envelope = _decode(line, _Envelope, location)
    if envelope.format != FORMAT:
        raise StateIncompatible(
            f"{location} has record format {envelope.format}, and this version of onceflow reads"
            f" format {FORMAT}: run the job with the version that wrote it, or a later one"
        )
    record: LogRecord
    match envelope.kind:
        case "attempt_claimed":
            record = _decode(envelope.record, AttemptClaimed, location)
        case "checkpoint_decided":
            record = _decode(envelope.record, CheckpointDecided, location)
        case kind:
            raise CheckpointCorrupt(
                f"{location} holds a record of unknown kind {kind!r}; {_RECORD_REMEDY}"
            )
    return LogEntry(record, digest)


def seal(line: bytes) -> tuple[bytes, str]:
    """Return `line` (without newline) with its seal, and its digest."""
    sealed = line + b"\n"
    digest = hashlib.sha256(sealed).hexdigest()
    return sealed + msgspec.json.encode(_Seal(digest, len(sealed))) + b"\n", digest


def unseal(data: bytes, location: str, remedy: str = _RECORD_REMEDY) -> tuple[bytes, str]:
    """Return the line that was passed to `seal`, and its digest.

    Raises:
        CheckpointCorrupt: A byte differs from what was written; the text ends in `remedy`.
    """
    line, _, trailer = data.partition(b"\n")
    expected, digest = seal(line)
    if expected != data:
        stated = (
            trailer[:200].decode("ascii", "backslashreplace").strip()
            or "nothing, because the file is cut short"
        )
        raise CheckpointCorrupt(
            f"{location} is damaged: its first line has {len(line) + 1} bytes with sha256 {digest},"
            f" and the seal on its second says {stated}; {remedy}"
        )
    return line, digest


def _reads_back(data: bytes, record: LogRecord) -> bool:
    try:
        return decode_record(data, "a record that is about to be written").record == record
    except CheckpointCorrupt:
        return False


def _decode(data: bytes | msgspec.Raw, body: type[_Body], location: str) -> _Body:
    try:
        return json_decoder(body).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointCorrupt(
            f"{location} has the right checksum, but cannot be read as"
            f" {body.__name__.lstrip('_')}: {error}; another program wrote it. {_RECORD_REMEDY}"
        ) from error
