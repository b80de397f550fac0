"""Writes the records of a schedule into its topics while the job runs, at an even pace."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from confluent_kafka import KafkaError, Producer
from tests.chaos.schedule import Schedule
from typing_extensions import Self

from onceflow.integration.workload import Payments, ProduceError

_STEP_S = 0.05
_EVEN_PART = 0.6
_THINNING_PART = 0.3
_THINNING_S = 20.0
_FLUSH_TIMEOUT_S = 90.0


class Pace:
    """The pace of an input: an even flow that thins out, and never ends while there are faults.

    So rows are on their way at each fault, however long the job takes to recover.
    """

    def __init__(self, producing_s: float) -> None:
        """Thin out after `producing_s` seconds."""
        self._producing_s = producing_s
        self._released = threading.Event()

    def release(self) -> None:
        """Let all the rest come at once: the faults are over."""
        self._released.set()

    def find_due_part(self, elapsed_s: float) -> float:
        """Return the part of the input that is due."""
        if self._released.is_set():
            return 1.0
        even = min(1.0, elapsed_s / self._producing_s) * _EVEN_PART
        late_s = max(0.0, elapsed_s - self._producing_s)
        return even + _THINNING_PART * (1 - math.exp(-late_s / _THINNING_S))


@dataclass(frozen=True, slots=True)
class _Stream:
    """The records of one topic, with the partition of each: all records of an account share it."""

    topic: str
    records: Sequence[tuple[int, bytes]]


class Producing:
    """Produces on a thread of its own; a context manager that waits for no record at its end."""

    def __init__(
        self, schedule: Schedule, bootstrap_servers: str, topics: Sequence[str], pace: Pace
    ) -> None:
        """Describe it. Entering the context begins."""
        self._schedule = schedule
        self._pace = pace
        self._streams = [
            _Stream(topic, _draw_records(schedule, number)) for number, topic in enumerate(topics)
        ]
        self._abandoned = threading.Event()
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
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chaos producer")
        self._result: Future[None] | None = None

    @property
    def is_done(self) -> bool:
        """True if every record is in its topic.

        Raises:
            ProduceError: The broker refused a record, or did not take all of them in time.
        """
        if self._result is None or not self._result.done():
            return False
        self._result.result()
        return True

    def __enter__(self) -> Self:
        self._result = self._pool.submit(self._run)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._abandoned.set()
        self._pool.shutdown(wait=True)

    def _run(self) -> None:
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
