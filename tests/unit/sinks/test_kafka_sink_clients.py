"""Tests the sink's own safeguards where librdkafka gives no guarantee."""

from __future__ import annotations

import threading
import time

import pytest
from confluent_kafka import KafkaError, KafkaException

from onceflow.sinks.kafka import clients
from onceflow.sinks.kafka.clients import BoundedCalls


def test_a_call_that_never_returns_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_GRACE_S", 0.05)
    forever = threading.Event()
    began = time.monotonic()
    try:
        with pytest.raises(TimeoutError, match="has not returned"):
            BoundedCalls().call(lambda _: forever.wait(), 0.05)
    finally:
        forever.set()
    assert time.monotonic() - began < 60


def test_a_call_that_returns_or_raises_does_so_as_if_it_were_called_directly() -> None:
    given: list[float] = []
    BoundedCalls().call(given.append, 3.0)
    assert given == [3.0]
    error = KafkaException(KafkaError(KafkaError.REQUEST_TIMED_OUT))

    def fail(_: float) -> None:
        raise error

    with pytest.raises(KafkaException) as raised:
        BoundedCalls().call(fail, 1.0)
    assert raised.value is error


def test_all_calls_of_one_client_run_on_one_thread_which_ends_with_it() -> None:
    calls = BoundedCalls()
    threads: list[threading.Thread] = []
    for _ in range(3):
        calls.call(lambda _: threads.append(threading.current_thread()), 3.0)
    assert len(set(threads)) == 1
    calls.close()
    calls.close()
    threads[0].join(60)
    assert not threads[0].is_alive()
