"""All that a Kafka source is told, checked once, picklable, and printed without its secrets."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from enum import Enum

import pyarrow as pa

from onceflow.core.errors import ConfigError
from onceflow.sources.kafka.offsets import Offsets
from onceflow.sources.kafka.options import RULES

BATCH_ROWS_MAX = 1_000_000


class ValueFormat(Enum):
    """How a record becomes a row."""

    JSON = "json"
    """The value is one JSON object; its fields are the columns of the schema."""
    RAW = "raw"
    """Key and value as bytes, with Spark's columns about where the record lay."""


class BadRecords(Enum):
    """What happens to a record that cannot be decoded."""

    FAIL = "fail"
    """The job stops and names it."""
    DROP = "drop"
    """It is left out, counted and logged."""
    DEAD_LETTER = "dead_letter"
    """It goes to the sink of dead letters with its reason and origin."""


@dataclass(frozen=True, slots=True, repr=False)
class KafkaSettings:
    """The settings of one `KafkaSource`, in their final form."""

    bootstrap_servers: str
    topics: tuple[str, ...]
    """By name; empty with a pattern."""
    format: ValueFormat
    columns: pa.Schema
    """What the value holds; empty for `RAW`."""
    starting: Offsets
    ending: Offsets | None
    on_bad_record: BadRecords
    include_metadata: bool
    group_id: str | None
    commit_offsets: bool
    fail_on_data_loss: bool
    batch_rows: int
    batch_bytes: int
    deadline_s: float
    options: dict[str, str] = field(default_factory=dict[str, str])
    topic_pattern: str | None = None
    partition_discovery_interval_s: float | None = None

    def __post_init__(self) -> None:
        if not self.bootstrap_servers.strip():
            raise ConfigError("bootstrap_servers is empty; give host:port[,host:port]")
        if self.topics and self.topic_pattern is not None:
            raise ConfigError(
                f"topic={self.topics!r} and topic_pattern={self.topic_pattern!r}: give one of the"
                " two"
            )
        if not all(self.topics) or (not self.topics and self.topic_pattern is None):
            raise ConfigError(
                f"topic={self.topics!r}: give the name of at least one topic, or topic_pattern="
            )
        try:
            re.compile(self.topic_pattern or "")
        except re.error as error:
            raise ConfigError(
                f"topic_pattern={self.topic_pattern!r} is no regular expression: {error}"
            ) from error
        if len(set(self.topics)) != len(self.topics):
            raise ConfigError(f"topic={self.topics!r} names a topic twice")
        if not 1 <= self.batch_rows <= BATCH_ROWS_MAX:
            raise ConfigError(f"batch_rows={self.batch_rows} is not 1 to {BATCH_ROWS_MAX}")
        if self.batch_bytes < 1:
            raise ConfigError(f"batch_bytes={self.batch_bytes} is not positive")
        if self.deadline_s <= 0:
            raise ConfigError(f"deadline_s={self.deadline_s} is not positive")
        if self.partition_discovery_interval_s == 0:
            raise ConfigError(
                "partition_discovery_interval=0 is not positive; None asks only at each start"
            )

    @property
    def what(self) -> str:
        """What is read, for messages."""
        if self.topic_pattern is not None:
            return f"topics matching {self.topic_pattern!r}"
        return f"topic {', '.join(self.topics)}"

    def reads(self, topic: str) -> bool:
        """Return whether `topic` is named, or matched whole by the pattern."""
        if self.topic_pattern is not None:
            return re.fullmatch(self.topic_pattern, topic) is not None
        return topic in self.topics

    def __repr__(self) -> str:
        shown = {item.name: getattr(self, item.name) for item in fields(self)}
        shown["columns"] = ", ".join(f"{column.name}: {column.type}" for column in self.columns)
        shown["options"] = RULES.printable(self.options)
        return f"KafkaSource({', '.join(f'{name}={value!r}' for name, value in shown.items())})"
