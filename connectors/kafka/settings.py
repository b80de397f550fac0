"""What the Kafka source and the Kafka sink are told alike, checked once, with the same words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from onceflow.core.errors import ConfigError

if TYPE_CHECKING:
    from onceflow.connectors.kafka.keys import KeyFormat
    from onceflow.connectors.kafka.registry import RegistrySettings


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Cluster:
    """Where brokers are and how clients of theirs are set; picklable."""

    bootstrap_servers: str
    deadline_s: float
    """How long brokers and registry may be silent."""
    options: dict[str, str] = field(default_factory=dict[str, str])
    """Of the client, by librdkafka's names; may hold secrets."""

    @property
    def where(self) -> str:
        """The cluster, for messages."""
        return f"Kafka at {self.bootstrap_servers}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TopicSettings(Cluster):
    """Topics, and the schemas of their records."""

    operation: ClassVar[str] = "Read"
    """What an ACL has to allow, besides Describe."""

    topics: tuple[str, ...]
    """By name."""
    registry: RegistrySettings | None = None
    subject: str | None = None
    """Of the values' schema; None: <topic>-value."""
    message: str | None = None
    """In Protobuf, which message of the schema a value is; None: the first."""
    key_format: KeyFormat | None = None
    key_subject: str | None = None
    """Of the keys' schema; None: <topic>-key."""

    def check_cluster(self) -> None:
        """Raise ConfigError unless brokers, topics and deadline can be used."""
        if not self.bootstrap_servers.strip():
            raise ConfigError("bootstrap_servers is empty; give host:port[,host:port]")
        if len(set(self.topics)) != len(self.topics):
            raise ConfigError(f"topic={self.topics!r} names a topic twice")
        if not self.deadline_s > 0:
            raise ConfigError(f"deadline_s={self.deadline_s} is not positive")

    def check_value_format(self, name: str, *, asks_registry: bool) -> None:
        """Raise ConfigError unless the settings of the registry go with value format `name`.

        `asks_registry` says whether values of the format may have schemas there.
        """
        if self.message is not None and name != "protobuf":
            raise ConfigError(f"format={name!r} has no messages; leave message= away")
        if asks_registry:
            return
        if (self.registry is not None and not self.has_registered_keys) or self.subject is not None:
            raise ConfigError(
                f"format={name!r} asks no schema registry; leave schema_registry= and subject="
                " away, or give format='avro', 'protobuf' or 'json-schema'"
            )

    def check_key_format(self) -> None:
        """Raise ConfigError unless the settings of keys go together."""
        if self.key_format is None:
            if self.key_subject is not None:
                raise ConfigError("key_subject= goes with key_format=, and none is given")
            return
        setting = f"key_format={self.key_format.value!r}"
        if self.key_format.registered:
            self.require_registry(setting)
            if self.key_subject is None and len(self.topics) != 1:
                raise ConfigError(f"{setting} has one subject for all topics: give key_subject=")
        elif self.key_subject is not None:
            raise ConfigError(f"{setting} has no schema; leave key_subject= away")

    def require_registry(self, setting: str) -> RegistrySettings:
        """Return where the registry is that `setting` needs.

        Raises:
            ConfigError: None is given.
        """
        if self.registry is None:
            raise ConfigError(f"{setting} needs schema_registry=, e.g. 'http://localhost:8081'")
        return self.registry

    @property
    def has_registered_keys(self) -> bool:
        """Whether keys begin with the id of a schema that a registry keeps."""
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
