"""The encoding of messages between the job driver and its slots, and the reports of failures.

A message is msgpack: `[name of its class, its fields]`.
"""

from __future__ import annotations

import hashlib
import traceback
from dataclasses import replace
from typing import Any, cast, get_args

import msgspec

from onceflow.core.decoding import msgpack_decoder
from onceflow.core.errors import MessageCorrupt, OnceflowError, UserFunctionError
from onceflow.core.protocol.messages import DriverMessage, Failed, SlotMessage

_DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    message.__name__: msgpack_decoder(message)
    for message in (*get_args(SlotMessage), *get_args(DriverMessage))
}
_ENVELOPE = msgpack_decoder(tuple[str, msgspec.Raw])
_ENCODER = msgspec.msgpack.Encoder()
_PROSE = ("message", "trace", "reason")
"""The fields that hold text for people. Code never looks up anything by them."""


def encode_message(message: SlotMessage | DriverMessage) -> bytes:
    """Encode `message`. Text for people that UTF-8 cannot represent is escaped.

    Such text may quote a user's record, which may contain a lone surrogate. Names and paths are
    never changed.

    Raises:
        UnicodeEncodeError: UTF-8 cannot represent a name or a path in the message.
    """
    name = type(message).__name__
    try:
        return _ENCODER.encode([name, message])
    except UnicodeEncodeError:
        return _ENCODER.encode([name, _escape(message)])


def _escape(message: SlotMessage | DriverMessage) -> SlotMessage | DriverMessage:
    prose: dict[str, Any] = {
        name: getattr(message, name).encode("utf-8", "backslashreplace").decode()
        for name in _PROSE
        if hasattr(message, name)
    }
    return replace(message, **prose)


def decode_message(data: bytes | memoryview) -> SlotMessage | DriverMessage:
    """Decode a message.

    Raises:
        MessageCorrupt: `data` is not a message, or is a message of another version.
    """
    try:
        name, fields = _ENVELOPE.decode(data)
        message = _DECODERS[name].decode(fields)
        return cast("SlotMessage | DriverMessage", message)
    except (msgspec.MsgspecError, KeyError) as error:
        raise MessageCorrupt(
            f"unreadable message of {len(data)} bytes on the control stream ({error}); driver and"
            " executors must run the same version of onceflow"
        ) from error


def report_of_failure(slot: int, error: BaseException) -> Failed:
    """Return the report of `error` in slot `slot`, even if `str(error)` itself raises."""
    try:
        text = str(error)
    except Exception as unspoken:
        text = f"{type(error).__name__}, whose text cannot be read: {type(unspoken).__name__}"
    return Failed(
        slot,
        type(error).__name__,
        text or type(error).__name__,
        "".join(traceback.format_exception(error)),
        error.retry if isinstance(error, OnceflowError) else "job",
        fingerprint_of(error),
    )


def fingerprint_of(error: BaseException) -> str:
    """Return a text that is equal for equal mistakes of program or data; empty for other errors."""
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
