"""The checks that all sinks share: the fence of a sink id, and the columns of rows.

Only the log that claimed a sink id may write under it, in its newest attempt.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from onceflow.core.errors import ConfigError, Fenced
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId


@dataclass(frozen=True, slots=True)
class FenceOwner:
    """An attempt of the job that keeps its decisions in one log."""

    log_id: str
    attempt: int
    job: str = ""
    """The job's name; empty if the target does not record it."""


def check_fence(
    sink_id: str, recorded: FenceOwner | None, claimant: FenceOwner, *, take_over: str
) -> None:
    """Raise an error unless `claimant` may write under `sink_id`, which `recorded` claimed last.

    `take_over` is the action by which an operator deletes the claim of the sink id from the target.

    Raises:
        ConfigError: Another decision log owns the sink id.
        Fenced: The same attempt or a newer one has claimed it.
    """
    if recorded is None:
        return
    check_owner(sink_id, recorded, claimant, take_over=take_over)
    if recorded.attempt >= claimant.attempt:
        raise Fenced(
            f"attempt {claimant.attempt} may not write under sink id {sink_id!r}: attempt"
            f" {recorded.attempt} of the same job has claimed it; this attempt is out of date and"
            " stops"
        )


def check_owner(
    sink_id: str, recorded: FenceOwner | None, claimant: FenceOwner, *, take_over: str
) -> None:
    """Raise ConfigError if another decision log than that of `claimant` owns `sink_id`."""
    if recorded is None or recorded.log_id == claimant.log_id:
        return
    facts = (
        f"sink id {sink_id!r} belongs to decision log {recorded.log_id!r} of job"
        f" {recorded.job!r} (attempt {recorded.attempt}), and this is decision log"
        f" {claimant.log_id!r} of job {claimant.job!r}"
    )
    gone = (
        "If that storage is gone for good, see 'The checkpoint storage is gone' in"
        " docs/operations.md: it says which conditions the target and the sources must meet"
        f" before you make the target forget the old log by: {take_over}"
    )
    if recorded.job == claimant.job:
        raise ConfigError(
            f"{facts}: the same job, in another checkpoint storage. This start would read its"
            " sources from the beginning and write rows that the target already has a second"
            " time, under any sink id. Nothing was written. Start the job with its former"
            f" storage. {gone}"
        )
    raise ConfigError(
        f"{facts}. Two jobs under one sink id would commit and abort each other's rows. Nothing was"
        " written. If this is the same job under a new name, start it under the old one:"
        f" Pipeline(name={recorded.job!r}), with the storage that it had. If it is another job that"
        f" has written none of that one's rows, give it a sink id of its own: write(…, sink_id=…)."
        f" {gone}"
    )


def check_sink_id(sink_id: str) -> None:
    """Raise ConfigError unless `sink_id` can be part of a transaction's name.

    Raises:
        ConfigError: It cannot.
    """
    try:
        TransactionId(sink_id, attempt=AttemptId(1), checkpoint=CheckpointId(0), subtask=0)
    except ValueError as error:
        raise ConfigError(f"sink id {sink_id!r}: {error}") from None


def require_any_column(rows: pa.Schema) -> None:
    """Raise ConfigError if `rows` has no columns: no table and no file holds such rows.

    Raises:
        ConfigError: There is no column.
    """
    if not rows.names:
        raise ConfigError("the rows have no columns, so there is nothing to write")
