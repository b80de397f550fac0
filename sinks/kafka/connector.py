"""The connector of Kafka. Its resource manager lists staged records that are not yet produced.

The staged rows contain their topics, so that no sink need be named. The owner's group, which the
job wrote at its claim, contains the sink ids that belong to this Kafka.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from confluent_kafka import KafkaException
from typing_extensions import override

from onceflow.clients.kafka.settings import read_kafka_url
from onceflow.clients.kafka.topics import Topics
from onceflow.core.errors import SinkError
from onceflow.core.protocol.log.target_records import LogFacts, TargetRecord
from onceflow.core.spi import Committer, CommitterContext
from onceflow.core.spi.connector import ResourceManager, ServerAccess, SinkConnector
from onceflow.sinks.kafka import clients, fence
from onceflow.sinks.kafka.committer import KafkaCommitter
from onceflow.sinks.kafka.settings import KafkaSinkSettings
from onceflow.sinks.kafka.sink import KafkaSink


class KafkaResourceManager(ResourceManager):
    """A resource manager of one cluster, for every sink id that was claimed there."""

    def __init__(self, settings: KafkaSinkSettings) -> None:
        """Connect to nothing yet; the topics of `settings` are not used."""
        self._servers, self._settings = settings.bootstrap_servers, settings
        self._topics: Sequence[str] | None = None
        self._claims: dict[str, fence.Claim | None] = {}

    @property
    @override
    def name(self) -> str:
        return f"Kafka at {self._servers}"

    @override
    def sink_ids(self, log: LogFacts | None) -> Sequence[str]:
        if log is None:
            return ()
        return [
            sink_id for sink_id in sorted(log.sink_ids) if self.read_claimant(sink_id) == log.log_id
        ]

    @override
    def committer(self, context: CommitterContext) -> Committer:
        return KafkaCommitter(self._settings, context)

    @override
    def read_claimant(self, sink_id: str) -> str | None:
        claim = self._claim(sink_id)
        return claim.owner.log_id if claim else None

    @override
    def target_record(self, context: CommitterContext) -> TargetRecord | None:
        claim = self._claim(context.sink_id)
        commits = fence.newest_commits(self._settings, claim, context)
        return fence.record_of(claim, commits, context.sink_id)

    def _claim(self, sink_id: str) -> fence.Claim | None:
        if sink_id not in self._claims:
            texts = self._read_committed(fence.owner_group(sink_id))
            self._claims[sink_id] = fence.newest_claim(texts.values())
        return self._claims[sink_id]

    def _read_committed(self, group: str) -> Mapping[str, str]:
        deadline = time.monotonic() + self._settings.deadline_s
        reader = clients.open_group_reader(self._settings, group, clients.Isolation.DECIDED)
        try:
            return clients.read_committed_metadata(reader, self._all_topics(), deadline=deadline)
        except KafkaException as error:
            raise SinkError(f"{self.name} does not tell who owns {group}: {error}") from error
        finally:
            reader.close()

    def _all_topics(self) -> Sequence[str]:
        if self._topics is None:
            names = Topics(clients.open_brokers(self._settings)).list_names()
            self._topics = [topic for topic in names if not topic.startswith("__")]
        return self._topics


def _resource_manager(access: ServerAccess) -> ResourceManager:
    servers, options = access.url.removeprefix("kafka://"), dict(access.options)
    any_topic = "onceflow"
    sink = KafkaSink(servers, topic=any_topic, deadline_s=access.timeout_s, options=options)
    return KafkaResourceManager(sink.settings)


CONNECTOR = SinkConnector(
    sink=KafkaSink, resource_manager=_resource_manager, read_url=read_kafka_url
)
"""The connector that the catalog of connectors loads."""
