"""A broker that may forget to end a transaction is named, by what it says of itself."""

from __future__ import annotations

import pytest

from onceflow.core.spi.connector import Level, ServerAccess
from onceflow.integration.servers import EmbeddedKafka
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.sources.kafka.diagnosis import questions_of_kafka

_ISSUE = "KAFKA-20734"


def _warned(servers: str) -> list[str]:
    findings = questions_of_kafka(ServerAccess(f"kafka://{servers}"), (), 1)()
    return [
        finding.found
        for finding in findings
        if finding.level is Level.WARNING and _ISSUE in finding.needed
    ]


def test_a_broker_that_ends_its_transactions_is_not_warned_of(onceflow_kafka: KafkaServer) -> None:
    assert _warned(onceflow_kafka.bootstrap_servers) == []


@pytest.mark.slow
def test_a_broker_that_may_forget_to_end_a_transaction_is_warned_of() -> None:
    with EmbeddedKafka(version="4.3.0") as broker:
        assert _warned(broker.bootstrap_servers) == ["Kafka 4.3 or newer"]
