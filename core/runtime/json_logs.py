"""The logs of onceflow as lines of JSON, and the fields that a line has in addition to its text.

A line is one object with `time`, `level`, `logger`, `message`, `process`, `thread`, the known
fields of FIELDS, and `trace` if an exception is logged. Fields come from these sources, later ones
override earlier ones:

    the process     in a slot: job, attempt, slot
    the thread      in threads of a job's driver: job, attempt; in threads of a subtask: subtask
    the arguments   a transaction or a subtask among the arguments of the log call
    the call        `extra={"checkpoint": …}`

JSON escapes text from outside (a record in an error, a name with a newline), so one event is always
one line.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import msgspec

from onceflow.core.printable import escape_terminal_codes
from onceflow.core.protocol.ids import SubtaskRef, TransactionId
from onceflow.core.settings.pipeline_settings import Logging, LogLevel

ROOT = "onceflow"
FIELDS = (
    *("job", "attempt", "slot", "checkpoint", "subtask", "transaction"),
    *("sink", "source", "error", "cause"),
)

_process: dict[str, object] = {}
_thread = threading.local()


def bind_process_fields(**fields: object) -> None:
    """Add `fields` to every log line of this process, instead of fields bound before."""
    _process.clear()
    _process.update(fields)


def bind_thread_fields(**fields: object) -> None:
    """Add `fields` to every log line of this thread, in addition to fields bound before."""
    _thread.fields = {**_read_thread_fields(), **fields}


def forget_thread_fields() -> None:
    """Remove all bound fields from log lines of this thread."""
    _thread.fields = {}


def carry_fields(work: Callable[..., None]) -> Callable[..., None]:
    """Wrap `work` for another thread, so that its log lines have this thread's current fields."""
    fields = _read_thread_fields()

    def carrying(*arguments: Any) -> None:
        _thread.fields = fields
        work(*arguments)

    return carrying


def configure_logs(settings: Logging) -> None:
    """Set up the loggers below `onceflow`. Settings that are None change nothing.

    Called by each driver for its process, and by each slot. A second call replaces the first.
    """
    logger = logging.getLogger(ROOT)
    if settings.format is not None:
        for handler in [*logger.handlers]:
            if isinstance(handler, _OwnHandler):
                logger.removeHandler(handler)
        handler = _OwnHandler(sys.stderr)
        handler.setFormatter(JsonFormatter() if settings.format == "json" else TextFormatter())
        logger.addHandler(handler)
        # Otherwise the program's handlers would write each line a second time.
        logger.propagate = False
    for name, level in settings.parse_levels().items():
        logging.getLogger(name).setLevel(level)


def configure_slot_logs(settings: Logging) -> None:
    """Set up the loggers of a slot like `configure_logs`, with a text handler if there is none.

    The program's handlers exist only in the driver's process. Without a handler, Python would print
    only the message, without time, level and logger.
    """
    configure_logs(settings)
    logger = logging.getLogger(ROOT)
    if not logger.hasHandlers():
        handler = _OwnHandler(sys.stderr)
        handler.setFormatter(TextFormatter())
        logger.addHandler(handler)


def to_slot_settings(settings: Logging) -> Logging:
    """Return `settings` for slots, with the level that the program has set in this process."""
    logger = logging.getLogger(ROOT)
    if settings.level is not None or not logger.hasHandlers():
        return settings
    level = logger.getEffectiveLevel()
    names: tuple[tuple[int, LogLevel], ...] = (
        (logging.DEBUG, "debug"),
        (logging.INFO, "info"),
        (logging.WARNING, "warning"),
    )
    return replace(settings, level=next((name for top, name in names if level <= top), "error"))


if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[Any]
else:
    # Before Python 3.11 the class cannot be subscripted at run time.
    _StreamHandler = logging.StreamHandler


class _OwnHandler(_StreamHandler):
    """A handler class that distinguishes our handler from the program's handlers."""


class TextFormatter(logging.Formatter):
    """Writes a record as text: time, level, logger, and in a slot also job, attempt and slot."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(process_fields)s%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, followed by the traceback if there is one."""
        known = ", ".join(f"{name} {value}" for name, value in _process.items())
        record.process_fields = f"{known}: " if known else ""
        return escape_terminal_codes(super().format(record))


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON. User handlers may use it, too."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        moment = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_process,
            **_read_thread_fields(),
            **_find_in_arguments(record.args),
            **{name: record.__dict__[name] for name in FIELDS if name in record.__dict__},
            "process": record.process,
            "thread": record.threadName,
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return _encode(line)


# JSON does not escape these characters, but some line readers treat them as line ends.
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})


def _encode(line: dict[str, object]) -> str:
    try:
        encoded = msgspec.json.encode(line, enc_hook=str)
    except UnicodeEncodeError:
        # The message quotes a record with a lone surrogate.
        whole = {
            name: value.encode("utf-8", "backslashreplace").decode()
            if isinstance(value, str)
            else value
            for name, value in line.items()
        }
        encoded = msgspec.json.encode(whole, enc_hook=str)
    return encoded.decode().translate(_LINE_ENDS)


def _read_thread_fields() -> dict[str, object]:
    fields: dict[str, object] = getattr(_thread, "fields", {})
    return fields


def _find_in_arguments(arguments: Any) -> dict[str, object]:
    fields: dict[str, object] = {}
    # A single mapping provides named values: `%(name)s` in the text.
    for argument in () if isinstance(arguments, dict) else arguments or ():
        if isinstance(argument, TransactionId):
            fields["transaction"] = str(argument)
            fields["checkpoint"] = argument.checkpoint
        elif isinstance(argument, SubtaskRef):
            fields["subtask"] = str(argument)
    return fields
