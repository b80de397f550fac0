"""The connector of Kafka topics."""

from __future__ import annotations

from onceflow.clients.kafka.settings import read_kafka_url
from onceflow.core.spi.connector import Questions, ServerAccess, SourceConnector
from onceflow.sources.kafka.diagnosis import questions_of_kafka
from onceflow.sources.kafka.source import KafkaSource


def _examine_source(source: KafkaSource, parallelism: int) -> Questions:
    """Return the questions about the brokers of `source` and the topics that it names."""
    settings = source.settings
    access = ServerAccess(
        f"kafka://{settings.bootstrap_servers}",
        options=settings.options,
        timeout_s=settings.deadline_s,
    )
    return questions_of_kafka(access, settings.topics, parallelism)


CONNECTOR = SourceConnector(
    source=KafkaSource,
    diagnosis=questions_of_kafka,
    examine=_examine_source,
    read_url=read_kafka_url,
)
"""The connector that the catalog finds."""
