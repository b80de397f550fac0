"""The settings that the Kafka source and the Kafka sink have in common, with librdkafka's options.

Options that need no conversion are fields of both the description, which users create, and the
settings, which are its final form.

Options have librdkafka's names, with or without Spark's prefix. Source and sink each set some
options themselves. They refuse such an option, and the error names the argument that does the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from onceflow.clients.kafka.registry import RegistrySettings, registry_settings, schema_kind
from onceflow.core.errors import ConfigError
from onceflow.core.setting_values import choice_of
from onceflow.core.spi.options import DURATION, OptionRules, OptionValue, option

DEFAULTS: Mapping[str, OptionValue] = {
    "allow.auto.create.topics": False,
    # The client finds a broker that comes back within a second; librdkafka's own maximum is 10 s.
    "reconnect.backoff.max.ms": 1000,
    "socket.keepalive.enable": True,
}
"""The settings of every client, unless the user overrides them."""

_PEM = "export the certificates as PEM and give ssl.ca.location"
_TLS_VERSIONS = "OpenSSL chooses the TLS version here; omit it"

LIBRDKAFKA = OptionRules(
    what="Kafka option",
    prefix="kafka.",
    owned={},
    owner="onceflow",
    foreign={
        "sasl.jaas.config": "give sasl.mechanism, sasl.username and sasl.password instead",
        "sasl.login.callback.handler.class": "for OAUTHBEARER give sasl.oauthbearer.method=oidc and"
        " sasl.oauthbearer.client.id, .client.secret and .token.endpoint.url",
        "sasl.client.callback.handler.class": "give sasl.mechanism and its own settings instead",
        "sasl.login.class": "give sasl.mechanism and its own settings instead",
        "ssl.truststore.location": _PEM,
        "ssl.truststore.password": _PEM,
        "ssl.truststore.type": _PEM,
        "ssl.truststore.certificates": "give ssl.ca.pem instead",
        "ssl.keystore.type": "give the PKCS#12 file itself in ssl.keystore.location",
        "ssl.keystore.key": "give ssl.key.pem instead",
        "ssl.keystore.certificate.chain": "give ssl.certificate.pem instead",
        "ssl.protocol": _TLS_VERSIONS,
        "ssl.enabled.protocols": _TLS_VERSIONS,
        "ssl.engine.factory.class": "give ssl.ca.location, ssl.certificate.location,"
        " ssl.key.location",
        "security.providers": "omit it",
        "default.api.timeout.ms": "give deadline_s= instead",
        "request.timeout.ms": "give socket.timeout.ms or deadline_s= instead",
    },
    foreign_client="the Java client",
    foreign_files={
        ".jks": "a Java keystore: convert it with `keytool"
        " -importkeystore -deststoretype PKCS12`, or export PEM files and give"
        " ssl.ca.location, ssl.certificate.location and ssl.key.location",
    },
    secret_parts=(
        *("password", "secret", "key.pem", "token", "assertion"),
        "sasl.oauthbearer.config",
    ),
)
"""The rules for every client. Source and sink add the options that they set themselves."""


KEY_COLUMN = "_key"
"""The column with a record's key.

A sink that writes this column as the key omits it from the value.
"""


class KeyFormat(Enum):
    """A format that says how columns become a record's key, and how a key becomes a column."""

    STRING = "string"
    """A text in UTF-8, from one column."""
    RAW = "raw"
    """The bytes of the key. A sink accepts one column of bytes or text."""
    AVRO = "avro"
    """A key by a schema of the registry, under the subject of the keys.

    A struct or several columns are a record; any other column is one value.
    """
    PROTOBUF = "protobuf"
    """A key by a schema of the registry; always a message."""
    JSON_SCHEMA = "json-schema"
    """A key by a schema of the registry; an object, or any other value."""

    @property
    def registered(self) -> bool:
        """True if keys begin with the id of a schema that the registry keeps."""
        return schema_kind(self.value) is not None


@dataclass(frozen=True, kw_only=True, repr=False)
class ClusterOptions:
    """The addresses of the brokers, and the time to wait for them."""

    bootstrap_servers: str = field(
        kw_only=False, metadata=option("`host:port[,host:port]`", spark="kafka.bootstrap.servers")
    )
    deadline_s: float = field(
        default=60.0,
        metadata=option(
            "How long a call waits for brokers and schema registry before it fails",
            DURATION,
            spark="deadline",
        ),
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class TopicOptions(ClusterOptions):
    """The names in a schema registry of the schemas of a topic."""

    subject: str | None = field(
        default=None,
        metadata=option(
            "Subject of the values' schema in the registry. Default: `<topic>-value`",
            spark="valueSubject",
        ),
    )
    message: str | None = field(
        default=None,
        metadata=option(
            "Protobuf: name of the message in the subject's latest schema, with or without its"
            " package or outer message. Default: the first message of the schema",
            spark="valueMessage",
        ),
    )
    key_subject: str | None = field(
        default=None,
        metadata=option(
            "Subject of the keys' schema in the registry. Default: `<topic>-key`",
            spark="keySubject",
        ),
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class TopicDescription(TopicOptions):
    """The options that Kafka's source and sink have in common, as users write them."""

    schema_registry: str | Mapping[str, OptionValue] | None = field(
        default=None,
        metadata=option(
            "Address of Confluent's schema registry, or of one that speaks as it does; or options"
            " of its client by Confluent's names, with `url` among them",
            spark="schema.registry.*",
        ),
    )
    options: Mapping[str, OptionValue] | None = field(
        default=None,
        metadata=option(
            "Settings of librdkafka; Spark's `kafka.` before a name is taken off. A value may refer"
            " to a secret, `${env:NAME}` or `${file:/path}`, which each process looks up",
            spark="kafka.*",
        ),
    )

    def resolve_topic_settings(self, rules: OptionRules, key_format: object) -> dict[str, Any]:
        """Return the fields of `TopicSettings` that need conversion, except the topics.

        Raises:
            ConfigError: An option is not for the client, or is given twice.
        """
        registry = self.schema_registry
        return {
            "options": rules.accept(self.options or {}),
            "registry": None if registry is None else registry_settings(registry),
            "key_format": None
            if key_format is None
            else choice_of(KeyFormat, key_format, setting="key_format"),
        }


def read_kafka_url(url: str) -> dict[str, object]:
    """Return the options that `kafka://host:port[,host:port]/topic` stands for.

    Raises:
        ConfigError: The URL is not of this form. User and password are options.
    """
    scheme, _, location = url.partition("://")
    servers, _, topic = location.partition("/")
    if scheme != "kafka" or not servers or "@" in servers or "?" in location:
        raise ConfigError(
            "url: give kafka://host:port[,host:port]/topic; user and password are options of the"
            " client, sasl.username and sasl.password"
        )
    options: dict[str, object] = {"bootstrap_servers": servers}
    return options | {"topic": topic} if topic else options


def list_names(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the names in `given`, which is one name or several."""
    return (given,) if isinstance(given, str) else tuple(given or ())


@dataclass(frozen=True, kw_only=True, repr=False)
class KafkaCluster(ClusterOptions):
    """The brokers' addresses and the options of their clients; picklable."""

    options: dict[str, str] = field(default_factory=dict[str, str])
    """The client options, by librdkafka's names. They may hold secrets."""

    @property
    def where(self) -> str:
        """The cluster, for messages."""
        return f"Kafka at {self.bootstrap_servers}"


@dataclass(frozen=True, kw_only=True, repr=False)
class TopicSettings(TopicOptions, KafkaCluster):
    """The topics and the schemas of their records."""

    operation: ClassVar[str] = "Read"
    """The operation that an ACL must allow, in addition to Describe."""

    topics: tuple[str, ...]
    """The names of the topics."""
    registry: RegistrySettings | None = None
    key_format: KeyFormat | None = None

    def check_cluster(self) -> None:
        """Raise ConfigError if the settings of brokers, topics or deadline are not usable."""
        if not self.bootstrap_servers.strip():
            raise ConfigError("bootstrap_servers is empty; give host:port[,host:port]")
        if len(set(self.topics)) != len(self.topics):
            raise ConfigError(f"topic={self.topics!r} names a topic twice; name each once")
        if not self.deadline_s > 0:
            raise ConfigError(f"deadline_s={self.deadline_s} is not positive")

    def check_value_format(self, name: str, *, asks_registry: bool) -> None:
        """Raise ConfigError if the registry settings do not suit the value format `name`.

        `asks_registry` says whether values of the format may have schemas there.
        """
        if self.message is not None and name != "protobuf":
            raise ConfigError(f"format={name!r} has no messages; omit message=")
        if asks_registry:
            return
        if (self.registry is not None and not self.has_registered_keys) or self.subject is not None:
            raise ConfigError(
                f"format={name!r} uses no schema registry; omit schema_registry= and subject=, or"
                " give format='avro', 'protobuf' or 'json-schema'"
            )

    def check_key_format(self) -> None:
        """Raise ConfigError if the settings of keys contradict each other."""
        if self.key_format is None:
            if self.key_subject is not None:
                raise ConfigError("key_subject= needs key_format=, which is not given")
            return
        setting = f"key_format={self.key_format.value!r}"
        if self.key_format.registered:
            self.require_registry(setting)
            if self.key_subject is None and len(self.topics) != 1:
                raise ConfigError(f"{setting} has one subject for all topics: give key_subject=")
        elif self.key_subject is not None:
            raise ConfigError(f"{setting} has no schema; omit key_subject=")

    def require_registry(self, setting: str) -> RegistrySettings:
        """Return the settings of the registry that `setting` needs.

        Raises:
            ConfigError: No registry is given.
        """
        if self.registry is None:
            raise ConfigError(f"{setting} needs schema_registry=, e.g. 'http://localhost:8081'")
        return self.registry

    @property
    def has_registered_keys(self) -> bool:
        """True if keys begin with the id of a schema that the registry keeps."""
        return self.key_format is not None and self.key_format.registered

    @property
    def value_subject(self) -> str:
        """The subject of the values."""
        return self.subject or f"{self.topics[0]}-value"

    @property
    def subject_of_keys(self) -> str:
        """The subject of the keys."""
        return self.key_subject or f"{self.topics[0]}-key"

    @property
    def what(self) -> str:
        """The topics, for messages."""
        return f"topic {', '.join(self.topics)}"

    @property
    def where(self) -> str:
        """The topics and their cluster, for messages."""
        return f"Kafka {self.what} at {self.bootstrap_servers}"
