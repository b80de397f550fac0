"""Writes the events of a job to the logger `onceflow.events`, one line per event.

It is a listener of the job. It logs events of attempts and checkpoints at level info, and events of
single subtasks at level debug. Failures are logged where they occur, as warnings or errors. Only an
aborted checkpoint is logged here, because no other code logs it.
"""

from __future__ import annotations

import logging

from typing_extensions import assert_never

from onceflow.core.runtime.events.job_events import (
    AttemptBegan,
    AttemptEnded,
    AttemptRunning,
    CheckpointAcked,
    CheckpointCommitted,
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointTriggered,
    CommitRefused,
    EventsDropped,
    JobEnded,
    JobEvent,
    JobRestarting,
    JobStarted,
    LagMeasured,
    LeftoversAborted,
    SavepointCompleted,
    SavepointRestored,
    SinkBlocked,
    SinksRecovered,
    SlotJoined,
    SlotLeft,
    SlotReported,
    SlotsDeployed,
    SlotsJoined,
    SplitsDiscovered,
    StateDropped,
    SubtaskCommitted,
)
from onceflow.core.runtime.events.status import JobStatus

_log = logging.getLogger("onceflow.events")


def is_event_log_on() -> bool:
    """Return True if the logger is enabled for these lines."""
    return _log.isEnabledFor(logging.INFO)


def log_event(event: JobEvent, status: JobStatus) -> None:  # noqa: C901, PLR0912 - dispatches
    """Log one event."""
    common = {"job": status.job, "attempt": status.attempt}

    def write(level: int, text: str, *arguments: object, **fields: object) -> None:
        _log.log(level, text, *arguments, extra={**common, **fields})

    match event:
        case JobStarted():
            write(logging.INFO, "the job has started")
        case AttemptBegan(attempt, restored):
            text = "attempt %d continues from checkpoint %d"
            write(logging.INFO, text, attempt, restored, checkpoint=restored)
        case SlotJoined(slot, pid, _, host):
            write(logging.INFO, "slot %d has joined: process %d on %s", slot, pid, host, slot=slot)
        case SlotLeft(slot, error):
            write(logging.INFO, "slot %d has left", slot, slot=slot, cause=error)
        case SinksRecovered(sinks):
            for sink in sinks:
                write(
                    logging.INFO,
                    "recovery has committed %d and rolled back %d transactions of sink %s",
                    sink.committed,
                    sink.aborted,
                    sink.uid,
                    sink=sink.uid,
                )
        case AttemptRunning():
            write(logging.INFO, "every slot runs")
        case AttemptEnded(attempt, error):
            write(logging.INFO, "attempt %d has ended", attempt, cause=error)
        case CheckpointTriggered(checkpoint, kind):
            text = "checkpoint %d is triggered: %s"
            write(logging.INFO, text, checkpoint, kind.value, checkpoint=checkpoint)
        case CheckpointAcked(checkpoint, subtask):
            fields = {"checkpoint": checkpoint, "subtask": str(subtask)}
            write(logging.DEBUG, "%s has acked checkpoint %d", subtask, checkpoint, **fields)
        case CheckpointCompleted(checkpoint):
            last = status.last_checkpoint
            took_ms = last.duration_ms if last and last.checkpoint == checkpoint else 0.0
            text = "checkpoint %d is decided after %.0f ms"
            write(logging.INFO, text, checkpoint, took_ms, checkpoint=checkpoint)
        case CheckpointFailed(checkpoint, reason):
            text = "checkpoint %d was abandoned: %s"
            write(logging.WARNING, text, checkpoint, reason, checkpoint=checkpoint)
        case SavepointCompleted(checkpoint, location):
            text = "savepoint %d is complete: %s"
            write(logging.INFO, text, checkpoint, location, checkpoint=checkpoint)
        case SubtaskCommitted(subtask, checkpoint):
            fields = {"checkpoint": checkpoint, "subtask": str(subtask)}
            write(logging.DEBUG, "%s has committed to checkpoint %d", subtask, checkpoint, **fields)
        case JobEnded(state):
            write(logging.INFO, "the job has %s", state.value)
        case (
            SlotsJoined()
            | SlotsDeployed()
            | SlotReported()
            | StateDropped()
            | SplitsDiscovered()
            | LagMeasured()
            | SinkBlocked()
            | CommitRefused()
            | CheckpointCommitted()
            | SavepointRestored()
            | LeftoversAborted()
            | JobRestarting()
            | EventsDropped()
        ):
            pass  # Too frequent to be read, or logged where they occur.
        case _:
            assert_never(event)
