"""Writes the records of a schedule into its topics while the job runs, at an even pace."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from confluent_kafka import KafkaError, Producer
from tests.chaos.input_writer import InputWriter, Pace
from tests.chaos.schedule import Schedule
from typing_extensions import override

from onceflow.integration.workload import Payments, ProduceError

_STEP_S = 0.05
_FLUSH_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True)
class _Stream:
    """The records of one topic, with the partition of each: all records of an account share it."""

    topic: str
    records: Sequence[tuple[int, bytes]]


class Producing(InputWriter):
    """Writes the records of a schedule into its topics.

    `is_done` raises ProduceError if the broker refused a record, or did not take all of them in
    time.
    """

    def __init__(
        self, schedule: Schedule, bootstrap_servers: str, topics: Sequence[str], pace: Pace
    ) -> None:
        """Describe it. Entering the context begins."""
        super().__init__(pace)
        self._schedule = schedule
        self._streams = [
            _Stream(topic, _draw_records(schedule, number)) for number, topic in enumerate(topics)
        ]
        self._error: KafkaError | None = None
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap_servers,
                "enable.idempotence": True,
                "acks": "all",
                "linger.ms": 10,
                "on_delivery": self._note_refusal,
                "log_level": 0,
            }
        )

    @override
    def _write(self) -> None:
        began = time.monotonic()
        sent = 0
        while sent < self._schedule.records and not self._abandoned.wait(_STEP_S):
            due = int(self._schedule.records * self._pace.find_due_part(time.monotonic() - began))
            for stream in self._streams:
                for partition, record in stream.records[sent:due]:
                    self._producer.produce(stream.topic, record, partition=partition)
            sent = due
            self._producer.poll(0)
        deadline = time.monotonic() + _FLUSH_TIMEOUT_S
        while (left := self._producer.flush(_STEP_S)) and not self._abandoned.is_set():
            if time.monotonic() > deadline:
                raise ProduceError(f"{left} records were not acknowledged in {_FLUSH_TIMEOUT_S} s")
        if self._error is not None:
            raise ProduceError(f"the broker refused a record: {self._error}")

    def _note_refusal(self, error: KafkaError | None, _message: object) -> None:
        self._error = self._error or error


def _draw_records(schedule: Schedule, number: int) -> list[tuple[int, bytes]]:
    payments = Payments(
        schedule.records, schedule.accounts, schedule.partitions, 1_000 * schedule.seed + number
    )
    return [
        (account % schedule.partitions, record)
        for chunk in payments.chunks()
        for account, record in zip(chunk.accounts.tolist(), chunk.json(), strict=True)
    ]
