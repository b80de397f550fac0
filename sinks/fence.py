"""Who may write under a sink id: the decision log that claimed it, in its newest attempt."""

from __future__ import annotations

from dataclasses import dataclass

from onceflow.core.errors import ConfigError, Fenced
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId


@dataclass(frozen=True, slots=True)
class FenceOwner:
    """One attempt of the job that keeps its decisions in one log."""

    log_id: str
    attempt: int


def check_fence(
    sink_id: str, recorded: FenceOwner | None, claimant: FenceOwner, *, take_over: str
) -> None:
    """Return when `claimant` may write under `sink_id`, which `recorded` claimed last.

    `take_over` is the statement by which an operator hands the sink id to another job.

    Raises:
        ConfigError: Another decision log owns the sink id.
        Fenced: The same attempt or a newer one has claimed it.
    """
    if recorded is None:
        return
    if recorded.log_id != claimant.log_id:
        raise ConfigError(
            f"sink id {sink_id!r} belongs to a job with another decision log: recorded "
            f"{recorded.log_id!r} (attempt {recorded.attempt}), here {claimant.log_id!r}. Two jobs "
            "under one sink id would commit and abort each other's rows. Give this one its own "
            "(write(…, sink_id=…)), or, when the other job is stopped for good and nothing of "
            f"it is in doubt, hand its sink id over: {take_over}"
        )
    if recorded.attempt >= claimant.attempt:
        raise Fenced(
            f"attempt {claimant.attempt} may not write under sink id {sink_id!r}: attempt "
            f"{recorded.attempt} of the same job has claimed it; this one is out of date and stops"
        )


def check_sink_id(sink_id: str) -> None:
    """Return when `sink_id` can be part of a transaction's name.

    Raises:
        ConfigError: It cannot.
    """
    try:
        TransactionId(sink_id, attempt=AttemptId(1), checkpoint=CheckpointId(0), subtask=0)
    except ValueError as error:
        raise ConfigError(f"sink id {sink_id!r}: {error}") from None
