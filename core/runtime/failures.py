"""How an attempt fails: what slots, Spark and the user say of it, as errors of the driver."""

from __future__ import annotations

import traceback

from onceflow.core import errors
from onceflow.core.errors import ConfigError, OnceflowError, SlotLost
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.runtime.messages import Failed


class JobCancelled(OnceflowError):
    """Raised inside an attempt when the user has cancelled the job."""

    retry = "never"


def failed_message(attempt: AttemptId, slot: int, error: BaseException) -> Failed:
    """Return what a slot tells the driver of `error`."""
    return Failed(
        attempt,
        slot,
        type(error).__name__,
        str(error) or type(error).__name__,
        "".join(traceback.format_exception(error)),
        error.retry if isinstance(error, OnceflowError) else "job",
    )


def slot_error(failed: Failed) -> OnceflowError:
    """Return the error that a slot reported, as its own class where there is one."""
    text = f"slot {failed.slot}: {failed.message}"
    known = getattr(errors, failed.error_class, None)
    if isinstance(known, type) and issubclass(known, OnceflowError):
        return known(text)
    return SlotLost(f"{text}\n{failed.trace}")


def stage_error(error: BaseException | None) -> OnceflowError:
    """Return the reason why Spark's stage ended before the job did."""
    if error is None:
        return SlotLost("every slot returned before the job was done")
    text = str(error)
    if "SPARK-24819" in text or ("barrier execution mode" in text and "slots" in text):
        return ConfigError(
            "Spark has too few free task slots for the pipeline's parallelism: " + text[:400]
        )
    return SlotLost(f"Spark ended the slots: {text[:2000]}")
