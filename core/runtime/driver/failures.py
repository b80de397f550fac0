"""How an attempt fails: what slots, Spark and the user say of it, as errors of the driver."""

from __future__ import annotations

import queue
import time

from onceflow.core import errors
from onceflow.core.errors import OnceflowError, SlotFailed, SlotLost
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.runtime.driver.attempt_context import (
    AttemptEvent,
    CancelRequested,
    CheckpointRequested,
)
from onceflow.core.runtime.messages import Failed
from onceflow.core.runtime.transport.control_plane import SlotGone

_CAUSE_S = 0.3


class JobCancelled(OnceflowError):
    """Raised inside an attempt when the user has cancelled the job."""

    retry = "never"


def slot_error(failed: Failed) -> OnceflowError:
    """Return the error that a slot reported, as its own class where there is one."""
    text = f"slot {failed.slot}: {failed.message}"
    known = getattr(errors, failed.error_class, None)
    if isinstance(known, type) and issubclass(known, OnceflowError):
        return known(text, fingerprint=failed.fingerprint)
    text = f"slot {failed.slot}: {failed.error_class}: {failed.message}\n{failed.trace}"
    return SlotFailed(text, fingerprint=failed.fingerprint)


def cause_of(
    failed: Failed, attempt: AttemptId, events: queue.SimpleQueue[AttemptEvent]
) -> OnceflowError:
    """Return why an attempt fails in which a slot reports `failed`; takes from `events`.

    A slot that loses a channel may say so before the end of the slot at its other side is noticed,
    which is what happened: a short wait for that. What the user asks for meanwhile stays asked.
    """
    error = slot_error(failed)
    deadline = time.monotonic() + (_CAUSE_S if isinstance(error, SlotLost) else 0.0)
    asked: list[AttemptEvent] = []
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            event = events.get(timeout=left_s)
        except queue.Empty:
            break
        match event:
            case SlotGone(slot, of, reason) if of == attempt and slot != failed.slot:
                error = SlotLost(f"slot {slot} is lost: {reason}. Of it, {error}")
                break
            case CheckpointRequested() | CancelRequested():
                asked.append(event)
            case _:
                pass
    for event in asked:
        events.put(event)
    return error
