"""Takes what a client has fetched: as its own objects, or natively, without an object a record.

The native way is a package of its own, which is never needed: it is built where there is a C
compiler. It reads the client that confluent-kafka holds, by a layout that is no public interface.
So it is used with versions of confluent-kafka whose layout is known, and only for formats that gain
by it; everything else is read the other way. A test runs the same records through both.
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

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.invariant import require
from onceflow.sources.kafka.client import logger
from onceflow.sources.kafka.fetched import wrap_records
from onceflow.sources.kafka.messages import Records
from onceflow.sources.kafka.settings import KafkaSettings, ValueFormat
from onceflow.sources.kafka.value_formats import CHUNK

_NATIVE = "onceflow_kafka_native"
_CONSUMER_BYTES = {"2.16": 176}
"""The size of a Consumer in each version of confluent-kafka whose layout was looked at."""
_NATIVE_CHUNK = 2000
"""How many records are read natively at once: few enough to stay in the processor's cache."""
_NATIVE_BYTES = 2**26
"""And about how many bytes at most; the reader asks again until its batch is full."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What was taken from a client at once."""

    records: Records
    events: list[Message]
    has_more: bool
    """Whether more may wait."""


class Intake(Protocol):
    """Takes what one client has fetched. One thread at a time."""

    def lead(self, partitions: Sequence[tuple[str, int]]) -> None:
        """Prepare to take records of `partitions`; to be called before they are assigned.

        It holds until they are unassigned, and then another `Intake` is needed.
        """
        ...

    def wait(self, wait_s: float, count_max: int, bytes_max: int) -> Taken | None:
        """Return at least one record or event; None when none came within `wait_s`.

        At most `count_max` records, and about `bytes_max`. Serves the client's callbacks.
        """
        ...

    def take(self, count_max: int, bytes_max: int) -> Taken:
        """Return what is there, without waiting: at most `count_max`, and about `bytes_max`."""
        ...

    def wake(self) -> None:
        """Have the `wait` under way, or else the next one, return early if it can. Any thread."""
        ...

    def close(self) -> None:
        """Let go of the client; to be called before it is closed."""
        ...


def open_intake(settings: KafkaSettings, consumer: Consumer, client_id: str) -> Intake:
    """Return what takes records from `consumer`, which is assigned nothing yet.

    Raises:
        ConfigError: `native=True` was given, and it cannot be had; says why.
    """
    why_not = "native=False" if settings.native is False else _why_not_native(settings)
    if why_not is None:
        try:
            return NativeIntake(settings, consumer, client_id)
        except RuntimeError as error:
            # The client does not answer as a known one does; it is not used any further.
            why_not = f"onceflow-kafka-native refuses this client: {error}"
            logger.warning("%s; its records are read as objects", why_not)
    if settings.native:
        raise ConfigError(f"native=True: {why_not}. Omit it, and records are read all the same")
    return MessageIntake(consumer)


def _why_not_native(settings: KafkaSettings) -> str | None:
    """Return why records cannot be read natively, or None when they can."""
    if settings.format not in {ValueFormat.JSON, ValueFormat.RAW}:
        return f"format={settings.format.value!r} gains nothing by it; json and raw do"
    if settings.key_format is not None or settings.include_headers:
        return "it reads no columns of keys or headers"
    return why_no_native_client()


@functools.cache
def why_no_native_client() -> str | None:
    """Return why the native reader cannot be had in this process, or None."""
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
    """Return the size of a Consumer as it is known for this version; 0 where it is not."""
    return _CONSUMER_BYTES.get(".".join(version("confluent-kafka").split(".")[:2]), 0)


_ERROR: Callable[[Message], KafkaError | None] = Message.error


class MessageIntake:
    """Takes records as the client's own objects."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def lead(self, partitions: Sequence[tuple[str, int]]) -> None:
        """Do nothing: all records come to the client."""

    def wait(self, wait_s: float, count_max: int, bytes_max: int) -> Taken | None:
        """Return one record or event, or None."""
        del count_max, bytes_max
        # `poll` waits for one message only: `consume` would wait until it has as many as it asks
        # for.
        first = self._consumer.poll(wait_s)
        return None if first is None else _sort([first], has_more=True)

    def take(self, count_max: int, bytes_max: int) -> Taken:
        """Return what is there, without waiting."""
        del bytes_max
        count_max = min(CHUNK, count_max)
        messages = self._consumer.consume(count_max, 0)
        return _sort(messages, has_more=len(messages) == count_max)

    def wake(self) -> None:
        """Do nothing: a client that polls cannot be interrupted."""

    def close(self) -> None:
        """Do nothing: the client is all there is."""


def _sort(messages: list[Message], *, has_more: bool) -> Taken:
    if not any(map(_ERROR, messages)):
        return Taken(messages, [], has_more)
    return Taken(
        [message for message in messages if message.error() is None],
        [message for message in messages if message.error() is not None],
        has_more,
    )


class NativeIntake:
    """Takes records as columns, and events as the client's own objects."""

    def __init__(self, settings: KafkaSettings, consumer: Consumer, client_id: str) -> None:
        self._consumer = consumer
        # A line feed lets all values of JSON be decoded as one text.
        self._separator = b"" if settings.format is ValueFormat.RAW else b"\n"
        self._partitions: list[tuple[str, int]] = []
        reader: Callable[..., Any] = import_module(_NATIVE).Reader
        self._reader = reader(consumer, client_id, _consumer_bytes())

    def lead(self, partitions: Sequence[tuple[str, int]]) -> None:
        """Have the records of `partitions` come here, and no longer to the client's own queue."""
        for topic, partition in partitions:
            self._reader.take_over(topic, partition)
        # A new list: records that were read before keep the one they were read with.
        self._partitions = [*self._partitions, *partitions]

    def wait(self, wait_s: float, count_max: int, bytes_max: int) -> Taken | None:
        """Return records, events, or None; serves the client's callbacks, too."""
        # What is not of one partition comes here, and its callbacks are called.
        events = self._consumer.consume(CHUNK, 0)
        require(all(map(_ERROR, events)), "a record came past the native reader")
        taken = self._read(count_max, bytes_max, 0.0 if events else wait_s)
        events += taken.events
        if not events and len(taken.records) == 0:
            return None
        return Taken(taken.records, events, has_more=True)

    def take(self, count_max: int, bytes_max: int) -> Taken:
        """Return what is there, without waiting."""
        return self._read(count_max, bytes_max, 0.0)

    def _read(self, count_max: int, bytes_max: int, wait_s: float) -> Taken:
        limits = (min(count_max, _NATIVE_CHUNK), min(bytes_max, _NATIVE_BYTES))
        returned = self._reader.read(*limits, math.ceil(wait_s * 1000), self._separator)
        rows, events, *columns = cast("tuple[Any, ...]", returned)
        if not rows and not events:
            return Taken([], [], has_more=False)
        records = wrap_records(tuple(columns), self._partitions, self._separator)
        return Taken(records, [_event(*one) for one in events], has_more=True)

    def wake(self) -> None:
        """Have the `wait` under way, or else the next one, return at once. Any thread."""
        self._reader.wake()

    def close(self) -> None:
        """Give the queue back."""
        self._reader.close()


def _event(code: int, text: str, topic: str | None, partition: int, offset: int) -> Message:
    return Message(topic=topic, partition=partition, offset=offset, error=KafkaError(code, text))
