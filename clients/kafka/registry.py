"""A client of Confluent's schema registry, which stores schemas of record values under ids.

The meaning of an id never changes, so fetched schemas are kept. The client is confluent-kafka's
own, and its options keep their names. This module repeats each question until a deadline.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit

from onceflow.core.backoff import Backoff
from onceflow.core.errors import ConfigError
from onceflow.core.imports import naming_one_extra
from onceflow.core.spi.options import OptionRules, OptionValue

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient

_Answer = TypeVar("_Answer")

_ASK_S = 5.0
"""The timeout in seconds of one question. Questions are repeated until the deadline."""
_DENIED = frozenset({401, 403})
_NOT_FOUND = 404
_CONFLICT = 409
_CONTEXT = re.compile(r":\.[^:]*:")
_MAY_PASS = frozenset({408, 429})
_OWN_DEADLINE = "deadline_s= bounds every question"

RULES = OptionRules(
    what="schema registry option",
    prefix="schema.registry.",
    owned={
        "timeout": _OWN_DEADLINE,
        "max.retries": _OWN_DEADLINE,
        "retries.wait.ms": _OWN_DEADLINE,
        "retries.max.wait.ms": _OWN_DEADLINE,
        "cache.capacity": "schemas are cached as long as their reader runs",
        "cache.latest.ttl.sec": "the latest version is read once, at the start",
        "auto.register.schemas": "give auto_register=",
        "use.latest.version": "a source without schema= reads with the latest version",
        "value.subject.name.strategy": "give subject=",
    },
    owner="onceflow",
    foreign={
        "basic.auth.credentials.source": "give basic.auth.user.info, as user:password",
        "ssl.truststore.location": "export the certificates as PEM and give ssl.ca.location",
        "ssl.truststore.password": "export the certificates as PEM and give ssl.ca.location",
        "ssl.keystore.location": "export PEM files: ssl.certificate.location, ssl.key.location",
    },
    foreign_client="the Java client",
    foreign_files={
        ".jks": "a Java keystore: export PEM files and give ssl.ca.location,"
        " ssl.certificate.location and ssl.key.location",
    },
    secret_parts=("password", "user.info", "secret", "token"),
)


class SchemaKind(Enum):
    """The languages that schemas are written in, by the registry's names."""

    AVRO = "AVRO"
    JSON = "JSON"
    PROTOBUF = "PROTOBUF"


_KINDS: Mapping[str, SchemaKind] = {
    "avro": SchemaKind.AVRO,
    "debezium-avro": SchemaKind.AVRO,
    "json-schema": SchemaKind.JSON,
    "protobuf": SchemaKind.PROTOBUF,
}


def schema_kind(value_format: str) -> SchemaKind | None:
    """Return the language of a format's schemas, or None if they are not in a registry."""
    return _KINDS.get(value_format)


@dataclass(frozen=True, slots=True)
class NamedSchema:
    """A schema that another schema refers to by `name`."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class KeptSchema:
    """A schema as the registry keeps it."""

    id: int
    kind: SchemaKind
    text: str
    references: tuple[NamedSchema, ...] = ()
    """The schemas that it refers to, directly or indirectly.

    Each comes after those that it needs itself.
    """


@dataclass(frozen=True, slots=True)
class CompiledSchema:
    """A schema with which values are read."""

    kept: KeptSchema
    descriptors: bytes = field(default=b"", repr=False)
    """The compiled form of a Protobuf schema."""


class RegistryDown(Exception):
    """Raised if the registry did not answer before the deadline."""


class RegistryRefusal(Exception):
    """Raised if the registry refused a request."""

    def __init__(self, text: str, status: int) -> None:
        """Keep the HTTP `status`."""
        super().__init__(text, status)
        self.text = text
        self.status = status

    def __str__(self) -> str:
        return self.text

    @property
    def unknown(self) -> bool:
        """True if the registry has no such schema or subject."""
        return self.status == _NOT_FOUND

    @property
    def incompatible(self) -> bool:
        """True if the schema is not compatible with the subject's versions."""
        return self.status == _CONFLICT


@dataclass(frozen=True, slots=True, repr=False)
class RegistrySettings:
    """The address and options of the registry; picklable, printed without secrets."""

    url: str
    """One address, or several addresses separated by commas."""
    options: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        for url in self.url.split(","):
            parts = urlsplit(url.strip())
            if parts.scheme not in {"http", "https"} or not parts.hostname:
                raise ConfigError(
                    f"schema_registry: {parts.hostname or url!r} is not the URL of a registry;"
                    " write http://host:port or https://host:port"
                )
            # Refuse it rather than move it to the options: by now the address is in logs and in the
            # plan.
            if parts.username or parts.password:
                raise ConfigError(
                    f"schema_registry: the address of {parts.hostname} contains a user, and"
                    " addresses are printed in logs; give {'url': …, 'basic.auth.user.info':"
                    " '${env:NAME}'}"
                )

    def __repr__(self) -> str:
        return repr({"url": self.url, **RULES.printable(self.options)})


def registry_settings(given: str | Mapping[str, OptionValue]) -> RegistrySettings:
    """Return the settings for an address, or for client options that include `url`.

    Raises:
        ConfigError: There is no address, or an option is not for users to set.
    """
    options = RULES.accept({"url": given} if isinstance(given, str) else given)
    url = options.pop("url", "")
    if not url.strip():
        raise ConfigError("schema_registry has no url; give 'http://host:port' or {'url': …}")
    return RegistrySettings(url, options)


class SchemaRegistry:
    """A connection to the registry, for one thread at a time. The first question connects."""

    def __init__(self, settings: RegistrySettings) -> None:
        """Resolve references to secrets; send no request.

        Raises:
            ConfigError: The client refuses an option.
            MissingExtra: The client, or a package that it needs, is not installed.
        """
        self._settings = settings
        with naming_one_extra("schema-registry"):
            from confluent_kafka.schema_registry import SchemaRegistryClient
        options: dict[str, Any] = {
            **RULES.resolve_secrets(settings.options),
            "url": settings.url,
            # This is the timeout of one question; `until` limits all of its repetitions.
            "timeout": _ASK_S,
            # The client's own retries ignore the deadline.
            "max.retries": 0,
        }
        try:
            self._client: SchemaRegistryClient = SchemaRegistryClient(options)
        except (ValueError, TypeError, OSError) as error:
            raise ConfigError(
                f"schema_registry {settings.url}: Confluent's client refuses the options that"
                f" were given for it: {self._without_secrets(error)}"
            ) from None

    def schema(self, schema_id: int, subject: str, *, until: float) -> KeptSchema:
        """Return the schema of `schema_id`.

        If the registry does not know the id, the question is repeated: the registry may lag behind
        its writers.

        Args:
            schema_id: The id in a value's header.
            subject: The subject of the values: each context of a registry counts ids of its own.
            until: The deadline, as a time of `time.monotonic`.

        Raises:
            RegistryRefusal: The registry still does not know the id at the deadline, or refuses the
                user.
            RegistryDown: The registry did not answer before `until`.
        """
        what = f"schema id {schema_id}"
        if _find_context(subject):
            what = f"{what} of subject {subject!r}"
        ask = partial(self._ask_schema, schema_id, subject)
        schema = self._answer(ask, what, until, unknown_passes=True)
        return self._to_kept_schema(schema_id, schema, _find_context(subject), until)

    def _ask_schema(self, schema_id: int, subject: str) -> Any:
        from confluent_kafka.schema_registry import SchemaRegistryError

        try:
            return self._client.get_schema(schema_id, subject)
        except SchemaRegistryError as error:
            if error.http_status_code != _NOT_FOUND or _find_context(subject):
                raise
        # A registry may search only this subject's schemas, and writers may name subjects after the
        # record's type. Outside of contexts an id means one schema.
        return self._client.get_schema(schema_id)

    def latest(self, subject: str, *, until: float) -> KeptSchema:
        """Return the latest version of `subject`.

        Raises:
            RegistryRefusal: There is no such subject, or the registry refuses the user.
            RegistryDown: No answer arrived before `until`.
        """
        ask = partial(self._client.get_latest_version, subject)
        version = self._answer(ask, f"subject {subject!r}", until)
        schema_id = int(version.schema_id or 0)
        return self._to_kept_schema(schema_id, version.schema, _find_context(subject), until)

    def register(self, subject: str, kind: SchemaKind, text: str, *, until: float) -> int:
        """Return the id of `text` under `subject`. Register it if it is not registered yet.

        A repeated call returns the same id.

        Raises:
            RegistryRefusal: The schema is not compatible with the subject's versions, is not valid,
                or the user may not register it.
            RegistryDown: No answer arrived before `until`.
        """
        from confluent_kafka.schema_registry import Schema

        schema = Schema(text, kind.value)
        what = f"registering under {subject!r}"
        return int(self._answer(lambda: self._client.register_schema(subject, schema), what, until))

    def look_up(self, subject: str, kind: SchemaKind, text: str, *, until: float) -> int:
        """Return the id that `text` has under `subject`.

        Raises:
            RegistryRefusal: The schema is not registered there.
            RegistryDown: No answer arrived before `until`.
        """
        from confluent_kafka.schema_registry import Schema

        schema = Schema(text, kind.value)
        what = f"looking the schema up under {subject!r}"
        version = self._answer(lambda: self._client.lookup_schema(subject, schema), what, until)
        return int(version.schema_id or 0)

    def close(self) -> None:
        """Close the connections."""
        cast("Any", self._client).__exit__()  # its close() came with confluent-kafka 2.16

    def _to_kept_schema(
        self, schema_id: int, schema: Any, context: str, until: float
    ) -> KeptSchema:
        # Older registries omit the type for Avro, the only type that they had.
        kind = SchemaKind(schema.schema_type or "AVRO")
        references: dict[str, NamedSchema] = {}
        self._follow(schema, context, references, until)
        return KeptSchema(schema_id, kind, str(schema.schema_str), tuple(references.values()))

    def _follow(
        self, schema: Any, context: str, references: dict[str, NamedSchema], until: float
    ) -> None:
        for reference in schema.references or ():
            # Two branches of a tree of schemas often need the same schema.
            if reference.name in references:
                continue
            # A reference without a context belongs to the context of the schema that contains it.
            subject = (
                reference.subject
                if _find_context(reference.subject)
                else f"{context}{reference.subject}"
            )
            what = f"subject {subject!r} version {reference.version}"
            ask = partial(self._client.get_version, subject, reference.version)
            inner = self._answer(ask, what, until).schema
            self._follow(inner, _find_context(subject), references, until)
            # Add it after the schemas that it needs: a compiler reads them in this order.
            references[reference.name] = NamedSchema(reference.name, str(inner.schema_str))

    def _answer(
        self,
        ask: Callable[[], _Answer],
        what: str,
        until: float,
        *,
        unknown_passes: bool = False,
    ) -> _Answer:
        from confluent_kafka.schema_registry import SchemaRegistryError

        backoff = Backoff(until=until)
        where = f"schema registry {self._settings.url}: {what}"
        while True:
            try:
                return ask()
            except SchemaRegistryError as error:
                status = error.http_status_code
                reason = f"{where}: {self._without_secrets(error)}"
                # Check this first: repeating does not make a password right, and many attempts may
                # lock the user out.
                if status in _DENIED:
                    advice = "Check basic.auth.user.info and the user's rights"
                    raise RegistryRefusal(f"{reason}. {advice}", status) from None
                # 408 is the registry's own timeout, and 429 means too many requests. Other 4xx are
                # permanent.
                passes = status >= 500 or status in _MAY_PASS
                if not passes and not (unknown_passes and status == _NOT_FOUND):
                    raise RegistryRefusal(reason, status) from None
                if not backoff.pause():
                    # Only if the registry never answered may the job try again later.
                    if passes:
                        raise RegistryDown(reason) from None
                    raise RegistryRefusal(reason, status) from None
            except Exception as error:
                # This is an error of one of several HTTP libraries: refused, cut off, timed out, or
                # TLS.
                reason = f"{where}: {type(error).__name__}: {self._without_secrets(error)}"
                if not backoff.pause():
                    raise RegistryDown(reason) from None

    def _without_secrets(self, error: Exception) -> str:
        return RULES.without_secrets(str(error), self._settings.options)


def _find_context(subject: str) -> str:
    """Return the prefix of `subject` that names a context, like `:.name:`; empty if it has none."""
    match = _CONTEXT.match(subject)
    return match[0] if match else ""


def deadline(timeout_s: float) -> float:
    """Return the time of `time.monotonic` in `timeout_s` seconds from now."""
    return time.monotonic() + timeout_s
