"""The record of one sink id in a table: who claimed it, and the last committed checkpoint.

The record changes in the same atomic step that makes rows visible, so it is their proof.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from onceflow.core.errors import ConfigError
from onceflow.core.msgspec_decoders import json_decoder
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.protocol.log.memory import ATTEMPTS_MAX, Decided
from onceflow.core.protocol.log.target_records import TargetRecord
from onceflow.core.spi import CommitterContext
from onceflow.sinks.base.fence import FenceOwner, check_fence, check_owner

PREFIX = "onceflow."
"""The prefix of the names under which a table, or a version of it, stores facts about a sink id."""


class SinkRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one sink id of one table, stored as JSON."""

    log_id: str
    job: str
    attempt: int
    """The newest attempt that has claimed the sink id."""
    through: int = 0
    """The last committed checkpoint; 0 before the first."""
    claims: tuple[tuple[int, int], ...] = ()
    """The last checkpoint that was committed when each attempt claimed, by rising attempt."""

    @property
    def owner(self) -> FenceOwner:
        """The decision log that may write, and its newest attempt."""
        return FenceOwner(self.log_id, self.attempt, self.job)

    def advance(self, checkpoint: CheckpointId) -> SinkRecord:
        """Return the record for the time when `checkpoint` is committed."""
        return msgspec.structs.replace(self, through=int(checkpoint))

    def to_json(self) -> str:
        """Return the text that the table stores."""
        return msgspec.json.encode(self).decode()


def parse_record(text: str | None, location: str) -> SinkRecord | None:
    """Return the record that the table stores at `location`, or None if it stores nothing.

    Raises:
        ConfigError: The text is not a record of onceflow.
    """
    if text is None:
        return None
    try:
        return json_decoder(SinkRecord).decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{location} is {text[:200]!r}, which does not read as onceflow's record of what it has"
            f" committed there: {error}. Another program wrote it: set it to the value that the"
            " newest commit of onceflow gave it, or write to another table"
        ) from error


def describe_commit(
    sink_id: str, record: SinkRecord, before: int, transactions: Sequence[TransactionId]
) -> dict[str, str]:
    """Return the facts that a version stores about its commit.

    `before` is the checkpoint before it.
    """
    return {
        f"{PREFIX}sink-id": sink_id,
        f"{PREFIX}log-id": record.log_id,
        f"{PREFIX}attempt": str(record.attempt),
        f"{PREFIX}checkpoint": str(record.through),
        f"{PREFIX}checkpoint-before": str(before),
        f"{PREFIX}attempts": ",".join(
            sorted({str(transaction.attempt) for transaction in transactions})
        ),
    }


def has_committed(described: Mapping[str, Any], sink_id: str, transaction: TransactionId) -> bool:
    """Return True if a version with the facts `described` has committed `transaction`."""
    if described.get(f"{PREFIX}sink-id") != sink_id:
        return False
    attempts = str(described.get(f"{PREFIX}attempts") or "").split(",")
    before = int(described.get(f"{PREFIX}checkpoint-before") or 0)
    last = int(described.get(f"{PREFIX}checkpoint") or 0)
    return before < transaction.checkpoint <= last and str(transaction.attempt) in attempts


def claim_record(record: SinkRecord | None, context: CommitterContext) -> SinkRecord:
    """Return the record after the attempt of `context` has claimed the sink id.

    Raises:
        ConfigError: Another decision log owns the sink id.
        Fenced: This attempt or a newer one has claimed it.
    """
    if record is not None:
        take_over = _take_over(context.sink_id)
        check_fence(context.sink_id, record.owner, _owner_of(context), take_over=take_over)
    through = record.through if record else 0
    claims = (*(record.claims if record else ()), (int(context.attempt), through))
    return SinkRecord(
        log_id=context.log_id,
        job=context.job,
        attempt=context.attempt,
        through=through,
        claims=claims[-ATTEMPTS_MAX:],
    )


def to_target_record(record: SinkRecord | None, context: CommitterContext) -> TargetRecord:
    """Return `record` as the decision log compares it; an empty one if there is no record.

    Raises:
        ConfigError: Another decision log owns the sink id.
    """
    if record is None:
        return TargetRecord(context.sink_id)
    take_over = _take_over(context.sink_id)
    check_owner(context.sink_id, record.owner, _owner_of(context), take_over=take_over)
    return TargetRecord(
        context.sink_id,
        AttemptId(record.attempt),
        through=CheckpointId(record.through),
        claims=tuple(Decided(AttemptId(a), CheckpointId(c)) for a, c in record.claims),
    )


def _owner_of(context: CommitterContext) -> FenceOwner:
    return FenceOwner(context.log_id, context.attempt, context.job)


def _take_over(sink_id: str) -> str:
    """Return the action by which an operator deletes the claim of the sink id from the table."""
    return f"removing the table property 'onceflow.sink.{sink_id}'"
