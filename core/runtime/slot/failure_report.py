"""What a slot says of its failure, in words and as a fingerprint that equal mistakes share."""

from __future__ import annotations

import hashlib
import traceback

from onceflow.core.errors import OnceflowError, UserFunctionError
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.runtime.messages import Failed


def failed_message(attempt: AttemptId, slot: int, error: BaseException) -> Failed:
    """Return what a slot tells the driver of `error`, whatever its class does when asked."""
    try:
        text = str(error)
    except Exception as unspoken:
        text = f"{type(error).__name__}, whose text cannot be had: {type(unspoken).__name__}"
    return Failed(
        attempt,
        slot,
        type(error).__name__,
        text or type(error).__name__,
        "".join(traceback.format_exception(error)),
        error.retry if isinstance(error, OnceflowError) else "job",
        fingerprint_of(error),
    )


def fingerprint_of(error: BaseException) -> str:
    """Return what is equal for equal mistakes of the program or its data; empty for all else."""
    match error:
        case UserFunctionError():
            return error.fingerprint
        case OnceflowError(domain=domain, fingerprint=fingerprint):
            return fingerprint or (_digest(error) if domain == "user" else "")
        case TypeError() | AttributeError() | NameError() | ImportError() | NotImplementedError():
            return _digest(error)
        case _:
            return ""


def _digest(error: BaseException) -> str:
    text = "".join(traceback.format_exception_only(error))
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
