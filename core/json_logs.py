"""Logs of onceflow as lines of JSON, and the fields that a line has besides its text.

A line is one object: `time`, `level`, `logger`, `message`, `process`, `thread`, those of FIELDS
that are known, and `trace` where an exception is logged. Fields come, the stronger last, from

    the process     of a slot: job, attempt, slot
    the thread      of a job's driver, and of what it starts: job, attempt; of a subtask: subtask
    the arguments   a transaction or a subtask among them
    the call        `extra={"checkpoint": …}`

Text that somebody else has chosen (a record in an error, a name with a newline) is escaped by JSON,
so one event is one line whatever it says.
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
    """Have every line of this process say `fields`, instead of those that were bound before."""
    _process.clear()
    _process.update(fields)


def bind_thread_fields(**fields: object) -> None:
    """Have every line of this thread say `fields`, besides those that it says already."""
    _thread.fields = {**_read_thread_fields(), **fields}


def forget_thread_fields() -> None:
    """Have lines of this thread say nothing that was bound."""
    _thread.fields = {}


def carry_fields(work: Callable[..., None]) -> Callable[..., None]:
    """Return `work`, to run on another thread whose lines say what this thread's say now."""
    fields = _read_thread_fields()

    def carrying(*arguments: Any) -> None:
        _thread.fields = fields
        work(*arguments)

    return carrying


def configure_logs(settings: Logging) -> None:
    """Set up the loggers below `onceflow` as `settings` say; leave alone what they leave open.

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
        # The handlers of the program above would write each line once more.
        logger.propagate = False
    for name, level in settings.parse_levels().items():
        logging.getLogger(name).setLevel(level)


def configure_slot_logs(settings: Logging) -> None:
    """Set up the loggers of a slot as `configure_logs`, and write text where no handler does.

    The program's own handlers are in the driver's process. Without any handler Python would print
    the bare message, without time, level and logger.
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
    # Before Python 3.11 it takes no parameter when the program runs.
    _StreamHandler = logging.StreamHandler


class _OwnHandler(_StreamHandler):
    """Tells our handler from those of the program."""


class TextFormatter(logging.Formatter):
    """Writes a record as text: time, level, logger, of a slot also job, attempt and slot."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(process_fields)s%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and below it the traceback if there is one."""
        known = ", ".join(f"{name} {value}" for name, value in _process.items())
        record.process_fields = f"{known}: " if known else ""
        return escape_terminal_codes(super().format(record))


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON. For handlers of your own, too."""

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


# JSON leaves these as they are, and some readers of lines end one there.
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})


def _encode(line: dict[str, object]) -> str:
    try:
        encoded = msgspec.json.encode(line, enc_hook=str)
    except UnicodeEncodeError:
        # Half a surrogate pair, in a record that a message quotes.
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
    # A single mapping stands for itself: `%(name)s` in the text.
    for argument in () if isinstance(arguments, dict) else arguments or ():
        if isinstance(argument, TransactionId):
            fields["transaction"] = str(argument)
            fields["checkpoint"] = argument.checkpoint
        elif isinstance(argument, SubtaskRef):
            fields["subtask"] = str(argument)
    return fields
