"""All that a Kafka sink is told, checked once, picklable, and printed without its secrets."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from onceflow.core.errors import ConfigError
from onceflow.sinks.kafka.options import MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX_DEFAULT, RULES

TRANSACTION_TIMEOUT_MIN_S = 1.0
"""Below it librdkafka has no time left for a single request."""


class RecordFormat(Enum):
    """How a row becomes a record."""

    JSON = "json"
    """The value is one JSON object, a field a column."""
    RAW = "raw"
    """Columns key, value and headers are written as they are; Spark's names."""


class Delivery(Enum):
    """How often a row is seen after failures."""

    EXACTLY_ONCE = "exactly_once"
    AT_LEAST_ONCE = "at_least_once"


class StaleRows(Enum):
    """What becomes of decided rows that waited longer than the broker keeps proofs of commits."""

    FAIL = "fail"
    """Nobody can tell any more whether they were committed: the job stops and says so."""
    PRODUCE = "produce"
    """They are produced: doubled if they had been committed, whole if not."""


@dataclass(frozen=True, slots=True, repr=False)
class KafkaSinkSettings:
    """The settings of one `KafkaSink`, in their final form."""

    bootstrap_servers: str
    topics: tuple[str, ...]
    topic_column: str | None
    format: RecordFormat
    key: tuple[str, ...]
    partition_column: str | None
    headers_column: str | None
    delivery: Delivery
    stale_rows: StaleRows
    transaction_timeout_s: float
    deadline_s: float
    options: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if not self.bootstrap_servers.strip():
            raise ConfigError("bootstrap_servers is empty; give host:port[,host:port]")
        if not self.topics or not all(self.topics):
            raise ConfigError(f"topic={self.topics!r}: give the name of at least one topic")
        if len(set(self.topics)) != len(self.topics):
            raise ConfigError(f"topic={self.topics!r} names a topic twice")
        if len(self.topics) > 1 and self.topic_column is None:
            raise ConfigError(
                f"topic={self.topics!r}: with several topics topic_column= must name the column"
                " that says which one a row goes to"
            )
        if not self.transaction_timeout_s >= TRANSACTION_TIMEOUT_MIN_S:
            raise ConfigError(
                f"transaction_timeout_s={self.transaction_timeout_s} is under"
                f" {TRANSACTION_TIMEOUT_MIN_S:g}"
            )
        if not self.deadline_s > 0:
            raise ConfigError(f"deadline_s={self.deadline_s} is not positive")
        limit = self.options.get(MESSAGE_BYTES_MAX, "1")
        if not limit.isdecimal():
            raise ConfigError(f"Kafka option {MESSAGE_BYTES_MAX}={limit!r} is no number of bytes")

    @property
    def message_bytes_max(self) -> int:
        """How many bytes one record may have, all told; the topics must take as much."""
        return int(self.options.get(MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX_DEFAULT))

    @property
    def where(self) -> str:
        """The topics and their cluster, for messages."""
        return f"Kafka topic {', '.join(self.topics)} at {self.bootstrap_servers}"

    def __repr__(self) -> str:
        return (
            f"KafkaSink({self.bootstrap_servers!r}, topic={self.topics!r},"
            f" topic_column={self.topic_column!r}, format={self.format.value!r}, key={self.key!r},"
            f" delivery={self.delivery.value!r}, options={RULES.printable(self.options)!r})"
        )
