"""The schemas by id. Other threads fetch them, so a registry that is down delays no checkpoint.

A fetched schema is kept as long as the reader. So a registry that goes down later is noticed only
when a record has a new id. An id is requested until the source's deadline. If the registry is down,
the attempt ends. If the registry does not know the id, its records are bad records.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from confluent_kafka import Message

from onceflow.clients.kafka.registry import (
    KeptSchema,
    RegistryDown,
    RegistryRefusal,
    RegistrySettings,
    SchemaRegistry,
)
from onceflow.core.errors import ConfigError, SourceUnavailable
from onceflow.formats import wire
from onceflow.formats.decoding import describe_position, read_headers
from onceflow.formats.fitting import Faults


@dataclass(frozen=True, slots=True)
class NoSchema:
    """An answer for an id that the registry does not know."""

    reason: str


@dataclass(slots=True)
class _Asked:
    position: str
    """The position of the first record with this id."""
    subject: str
    answer: KeptSchema | NoSchema | SourceUnavailable | ConfigError | None = None


class SchemaCache:
    """The schemas that one reader has met. Only the reader's thread uses it."""

    def __init__(
        self, settings: RegistrySettings, deadline_s: float, header: str, subject: str | None
    ) -> None:
        """Prepare without sending a request. Later, each id is requested for at most `deadline_s`.

        Args:
            settings: The registry.
            deadline_s: How long one id is asked for.
            header: The record header that may hold the id instead.
            subject: The subject of what is read. None: that of the first record's topic.

        Raises:
            ConfigError: The registry's client refuses an option, or is not installed.
        """
        SchemaRegistry(settings).close()
        self._settings = settings
        self._deadline_s = deadline_s
        self.header = header
        self._subject = subject
        self._asked: dict[int, _Asked] = {}
        self._expected: set[bytes] = set()
        """The headers of values whose schemas were requested."""
        self._one_at_a_time = threading.Lock()

    def expect(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> None:
        """Request the missing schemas of `values`, which are the values of `messages`."""
        headers = [
            b"" if value is None or self.has_id_in_headers(message) else value[: wire.HEADER_BYTES]
            for value, message in zip(values, messages, strict=True)
        ]
        for header in sorted(set(headers) - self._expected):
            schema_id = wire.schema_id_of(header)
            if schema_id is not None:
                self._ask(schema_id, messages[headers.index(header)])
                self._expected.add(header)

    def has_id_in_headers(self, message: Message) -> bool:
        """Return True if the schema's id is in a record header rather than in the value."""
        try:
            headers = read_headers(message)
        except ValueError:
            # Other clients write such header names, and nothing else in the record depends on them.
            return False
        return headers is not None and any(name == self.header for name, _ in headers)

    def _ask(self, schema_id: int, message: Message) -> None:
        """Request the schema unless it is known; `message` is the first record with its id."""
        if schema_id in self._asked:
            return
        ending = "-key" if self.header == wire.KEY_SCHEMA_ID else "-value"
        subject = self._subject or f"{message.topic()}{ending}"
        asked = self._asked[schema_id] = _Asked(describe_position(message), subject)
        # Use a separate thread: the reader's thread must not wait, and calls `ready` repeatedly.
        thread = threading.Thread(
            target=self._fetch, args=(schema_id, asked), name="onceflow-schema", daemon=True
        )
        thread.start()

    def ready(self) -> bool:
        """Return True if every requested schema has arrived, or is known not to exist.

        Raises:
            SourceUnavailable: The registry did not answer within the deadline.
            ConfigError: The registry refuses the user.
        """
        answers = [asked.answer for asked in self._asked.values()]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return None not in answers

    def await_ready(self) -> None:
        """Wait until `ready` returns true. Raises what `ready` raises."""
        while not self.ready():
            time.sleep(0.005)

    def __getitem__(self, schema_id: int) -> KeptSchema | NoSchema:
        """Return the registry's answer for an id that is `ready`."""
        answer = self._asked[schema_id].answer
        if isinstance(answer, KeptSchema | NoSchema):
            return answer
        raise answer or KeyError(schema_id)

    def _fetch(self, schema_id: int, asked: _Asked) -> None:
        # The deadline includes the wait for other ids: a registry that is down costs one deadline,
        # not one for each id.
        until = time.monotonic() + self._deadline_s
        where = f"{asked.position} needs schema id {schema_id}"
        with self._one_at_a_time:
            try:
                # Open a new connection: new ids are rare, and secrets may be rotated.
                with contextlib.closing(SchemaRegistry(self._settings)) as registry:
                    asked.answer = registry.schema(schema_id, asked.subject, until=until)
            except RegistryDown as error:
                asked.answer = SourceUnavailable(
                    f"{where}, but the registry did not answer for {self._deadline_s:g} s:"
                    f" {error}. Start it, or correct schema_registry="
                )
            except RegistryRefusal as error:
                asked.answer = (
                    NoSchema(
                        f"its schema id {schema_id} is not known to the registry, even after"
                        f" {self._deadline_s:g} s of tries ({error})"
                    )
                    if error.unknown
                    else ConfigError(f"{where}: {error}")
                )
            except Exception as error:
                asked.answer = SourceUnavailable(f"{where}: {type(error).__name__}: {error}")


class RegistryDecoder:
    """A decoder that needs the schemas named in the headers of values."""

    def __init__(self, schemas: SchemaCache) -> None:
        self.schemas = schemas

    def expect(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> None:
        """Request the schemas of `values`."""
        self.schemas.expect(values, messages)

    def leave_out_ids_in_headers(
        self, values: Sequence[bytes | None], messages: Sequence[Message], faults: Faults
    ) -> Sequence[bytes | None]:
        """Return `values` with None, and a fault, for those whose schema id is in a header."""
        has_id = list(map(self.schemas.has_id_in_headers, messages))
        if not any(has_id):
            return values
        why = wire.describe_id_in_headers(self.schemas.header)
        faults.update({at: why for at, is_there in enumerate(has_id) if is_there})
        pairs = zip(values, has_id, strict=True)
        return [None if is_there else value for value, is_there in pairs]

    def ready(self) -> bool:
        """Return True if the schemas have arrived. Raises the errors of `SchemaCache.ready`."""
        return self.schemas.ready()
