"""A Kafka reader names the brokers that do not answer, long before its deadline ends it."""

from __future__ import annotations

import time

from onceflow.sources import KafkaSource
from onceflow.sources.kafka.client import LivenessWatch

NOBODY = "127.0.0.1:1"


def test_brokers_that_do_not_answer_are_named_with_since_when_before_the_deadline() -> None:
    source = KafkaSource(bootstrap_servers=NOBODY, topic="payments", format="raw", deadline_s=8.0)
    settings = source.settings
    began = time.monotonic()
    watch = LivenessWatch(
        settings, lambda: [("payments", 0)], group_id="ledger", client_id="ledger-watch"
    )
    assert watch.find_outage() is None
    watch.start()
    try:
        while (outage := watch.find_outage()) is None:
            assert time.monotonic() < began + 7, "no outage is told"
            time.sleep(0.02)
        assert outage.what.startswith(f"Kafka at {NOBODY} (")
        assert 0 < outage.lasted_s <= time.monotonic() - began
        assert watch.failure is None
    finally:
        watch.stop()
