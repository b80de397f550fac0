"""The example from Kafka to an Iceberg table: kills, a savepoint, another parallelism, SQL."""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc
import pytest
from examples import kafka_to_iceberg as example
from pyiceberg.catalog import load_catalog
from tests.support.lake_reader import iceberg_settings, query_by_spark

from onceflow.testing import KafkaServer, TopicFactory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def test_table_has_what_the_topic_has_and_a_row_too_many_is_seen(
    onceflow_kafka: KafkaServer, kafka_topic: TopicFactory, tmp_path: Path
) -> None:
    servers, topic = onceflow_kafka.bootstrap_servers, kafka_topic(example.PARTITIONS)
    directory = str(tmp_path)
    example.survive(servers, topic, directory)
    found = example.compare(servers, topic, directory)
    payments = found.pop("payments")
    assert payments > 4 * example.MORE
    assert found == {"missing": 0, "surplus": 0, "wrong_balances": 0}
    topic_rows = example.read_topic(servers, topic)
    (by_spark,) = query_by_spark(
        iceberg_settings(example.catalog_of(directory)),
        "SELECT count(*) AS rows, count(DISTINCT id) AS ids, sum(amount) AS amount"
        f" FROM `default`.{example.TABLE}",
    )
    amount = pc.sum(topic_rows["amount"]).as_py()
    assert by_spark == {"rows": payments, "ids": payments, "amount": amount}
    with load_catalog("default", **example.catalog_of(directory)) as catalog:
        table = catalog.load_table(example.TABLE)
        table.append(table.scan("account = 'a7' and n = 1").to_arrow())
    spoilt = example.compare(servers, topic, directory)
    assert (spoilt["missing"], spoilt["surplus"]) == (0, 1)
    assert spoilt["wrong_balances"] > 0
