"""The two ways to take the records that a client has fetched.

`MessageIntake` takes them as objects of the client. `NativeIntake` takes them as columns, without
an object for each record.

The native reader is an optional package that is built if a C compiler is available. It reads the
client inside confluent-kafka by a memory layout that is no public interface. So it is used only
with versions of confluent-kafka whose layout is known, and only for formats that become faster. All
other records are read as objects. A test runs the same records through both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Protocol, cast

from confluent_kafka import Consumer, KafkaError, Message

from onceflow.core.errors import ConfigError, require
from onceflow.sources.kafka.client import logger
from onceflow.sources.kafka.fetched import wrap_records
from onceflow.sources.kafka.messages import Records
from onceflow.sources.kafka.settings import KafkaSettings, ValueFormat
from onceflow.sources.kafka.value_formats import CHUNK

_NATIVE = "onceflow_kafka_native"
_CONSUMER_BYTES = {"2.16": 176}
"""The size of a Consumer, by the version of confluent-kafka whose layout was examined."""
_NATIVE_CHUNK = 2000
"""The maximum number of records in one native read; this many stay in the processor's cache."""
_NATIVE_BYTES = 2**26
"""The approximate maximum number of bytes in one native read.

The reader repeats reads until its batch is full.
"""


@dataclass(frozen=True, slots=True)
class Taken:
    """The records and events of one read from a client."""

    records: Records
    events: list[Message]
    has_more: bool
    """True if more records may be waiting."""


class Intake(Protocol):
    """A way to take the records that one client has fetched. One thread may call at a time."""

    def lead(self, partitions: Sequence[tuple[str, int]]) -> None:
        """Prepare to take records of `partitions`. Call this before they are assigned.

        This holds until the partitions are unassigned. After that, open another `Intake`.
        """
        ...

    def wait(self, wait_s: float, count_max: int, bytes_max: int) -> Taken | None:
        """Return at least one record or event, or None if none arrived within `wait_s` seconds.

        The result holds at most `count_max` records, and about `bytes_max` bytes. Also runs the
        client's callbacks.
        """
        ...

    def take(self, count_max: int, bytes_max: int) -> Taken:
        """Return records without waiting: at most `count_max`, and about `bytes_max` bytes."""
        ...

    def wake(self) -> None:
        """Make the current `wait`, or else the next one, return early if possible.

        Any thread may call.
        """
        ...

    def close(self) -> None:
        """Release the client. Call this before the client is closed."""
        ...


def open_intake(settings: KafkaSettings, consumer: Consumer, client_id: str) -> Intake:
    """Return an intake of `consumer`, which must not have an assignment yet.

    Raises:
        ConfigError: `native=True` was given, and the native reader cannot be used; the message says
            why.
    """
    why_not = "native=False" if settings.native is False else _why_not_native(settings)
    if why_not is None:
        try:
            return NativeIntake(settings, consumer, client_id)
        except RuntimeError as error:
            # The client's memory layout is not a known one, so the native reader must not use it.
            why_not = f"onceflow-kafka-native refuses this client: {error}"
            logger.warning("%s; its records are read as objects", why_not)
    if settings.native:
        raise ConfigError(
            f"native=True: {why_not}. Omit native=True, and records are read without it"
        )
    return MessageIntake(consumer)


def _why_not_native(settings: KafkaSettings) -> str | None:
    """Return the reason why records cannot be read natively, or None if they can."""
    if settings.format not in {ValueFormat.JSON, ValueFormat.RAW}:
        return f"format={settings.format.value!r} gains nothing by it; json and raw do"
    if settings.key_format is not None or settings.include_headers:
        return "it reads no columns of keys or headers"
    return why_no_native_client()


@functools.cache
def why_no_native_client() -> str | None:
    """Return why the native reader is not available in this process, or None if it is."""
    if find_spec(_NATIVE) is None:
        return "the package onceflow-kafka-native is not installed (pip install ./native)"
    if _consumer_bytes() != Consumer.__basicsize__:
        known = ", ".join(_CONSUMER_BYTES)
        return f"it knows confluent-kafka {known}, and this is {version('confluent-kafka')}"
    try:
        native = import_module(_NATIVE)
    except ImportError as error:
        return f"onceflow-kafka-native cannot be loaded: {error}"
    if not hasattr(native.Reader, "wake"):
        return "onceflow-kafka-native is older than 0.2 (pip install ./native)"
    return None


def _consumer_bytes() -> int:
    """Return the known size of a Consumer in the installed version, or 0 if it is not known."""
    return _CONSUMER_BYTES.get(".".join(version("confluent-kafka").split(".")[:2]), 0)


_ERROR: Callable[[Message], KafkaError | None] = Message.error


class MessageIntake:
    """An intake that returns records as objects of the client."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def lead(self, partitions: Sequence[tuple[str, int]]) -> None:
        """Do nothing: the client receives all records anyway."""

    def wait(self, wait_s: float, count_max: int, bytes_max: int) -> Taken | None:
        """Return one record or event, or None."""
        del count_max, bytes_max
        # `poll` waits for one message only; `consume` would wait for the full number.
        first = self._consumer.poll(wait_s)
        return None if first is None else _sort([first], has_more=True)

    def take(self, count_max: int, bytes_max: int) -> Taken:
        """Return the fetched records, without waiting."""
        del bytes_max
        count_max = min(CHUNK, count_max)
        messages = self._consumer.consume(count_max, 0)
        return _sort(messages, has_more=len(messages) == count_max)

    def wake(self) -> None:
        """Do nothing: a client that polls cannot be interrupted."""

    def close(self) -> None:
        """Do nothing: there is nothing to release besides the client."""


def _sort(messages: list[Message], *, has_more: bool) -> Taken:
    if not any(map(_ERROR, messages)):
        return Taken(messages, [], has_more)
    return Taken(
        [message for message in messages if message.error() is None],
        [message for message in messages if message.error() is not None],
        has_more,
    )


class NativeIntake:
    """An intake that returns records as columns, and events as objects of the client."""

    def __init__(self, settings: KafkaSettings, consumer: Consumer, client_id: str) -> None:
        self._consumer = consumer
        # A line feed lets all values of JSON be decoded as one text.
        self._separator = b"" if settings.format is ValueFormat.RAW else b"\n"
        self._partitions: list[tuple[str, int]] = []
        reader: Callable[..., Any] = import_module(_NATIVE).Reader
        self._reader = reader(consumer, client_id, _consumer_bytes())

    def lead(self, partitions: Sequence[tuple[str, int]]) -> None:
        """Redirect the records of `partitions` from the client's own queue to the native reader."""
        for topic, partition in partitions:
            self._reader.take_over(topic, partition)
        # Create a new list: records that were read before refer to the old one.
        self._partitions = [*self._partitions, *partitions]

    def wait(self, wait_s: float, count_max: int, bytes_max: int) -> Taken | None:
        """Return records and events, or None if none arrived. Also runs the client's callbacks."""
        # Events without a partition arrive in the client's own queue, and `consume` runs callbacks.
        events = self._consumer.consume(CHUNK, 0)
        require(all(map(_ERROR, events)), "a record was not read by the native reader")
        taken = self._read(count_max, bytes_max, 0.0 if events else wait_s)
        events += taken.events
        if not events and len(taken.records) == 0:
            return None
        return Taken(taken.records, events, has_more=True)

    def take(self, count_max: int, bytes_max: int) -> Taken:
        """Return the fetched records, without waiting."""
        return self._read(count_max, bytes_max, 0.0)

    def _read(self, count_max: int, bytes_max: int, wait_s: float) -> Taken:
        limits = (min(count_max, _NATIVE_CHUNK), min(bytes_max, _NATIVE_BYTES))
        returned = self._reader.read(*limits, math.ceil(wait_s * 1000), self._separator)
        rows, events, *columns = cast("tuple[Any, ...]", returned)
        if not rows and not events:
            return Taken([], [], has_more=False)
        records = wrap_records(tuple(columns), self._partitions, self._separator)
        return Taken(records, [_event(*event) for event in events], has_more=True)

    def wake(self) -> None:
        """Make the current `wait`, or else the next one, return at once. Any thread may call."""
        self._reader.wake()

    def close(self) -> None:
        """Return the queue to the client."""
        self._reader.close()


def _event(code: int, text: str, topic: str | None, partition: int, offset: int) -> Message:
    return Message(topic=topic, partition=partition, offset=offset, error=KafkaError(code, text))
