"""A two-phase sink into Kafka topics, exactly once for consumers that read committed."""

from __future__ import annotations

from onceflow.sinks.kafka.sink import KafkaSink

__all__ = ["KafkaSink"]
