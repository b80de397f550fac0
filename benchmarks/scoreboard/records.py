"""The records of a run: their producer, and the totals that a plain model computes from them."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from confluent_kafka import KafkaError, Producer
from typing_extensions import Self

from onceflow.integration.workload import Payments, ProduceError

RecordFormat = Literal["json", "json with a schema"]

PARTITIONS = 2
ACCOUNTS = 1_000
FIRST_RECORDS = 200
"""The records that are sent before the others, to see when rows become visible."""
_STEP_S = 0.05
_FLUSH_TIMEOUT_S = 60.0
_SCHEMA = {
    "type": "struct",
    "optional": False,
    "fields": [
        {"field": "id", "type": "int64", "optional": False},
        {"field": "account", "type": "string", "optional": False},
        {"field": "amount", "type": "int64", "optional": False},
        {"field": "ts", "type": "int64", "optional": False},
    ],
}
"""The schema that the JSON converter of Kafka Connect expects in each record."""


@dataclass(frozen=True, slots=True)
class Model:
    """The contents of both tables if every record had its effect exactly once."""

    payments: dict[int, tuple[str, int]]
    """Account and amount by id."""
    totals: dict[str, tuple[int, int]]
    """Sum of amounts and number of payments by account."""
    last_ids: tuple[int, ...]
    """The id of the last payment of each partition."""


def describe_payments(records: int, seed: int) -> Payments:
    """Return the parameters of the payments of a run."""
    return Payments(records, ACCOUNTS, PARTITIONS, seed)


def compute_model(payments: Payments) -> Model:
    """Return the contents of both tables, computed record by record."""
    rows: dict[int, tuple[str, int]] = {}
    totals: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    last_ids: dict[int, int] = {}
    for chunk in payments.chunks():
        for id_, number, amount in zip(
            chunk.ids.tolist(), chunk.accounts.tolist(), chunk.amounts.tolist(), strict=True
        ):
            account = f"acct-{number:06d}"
            rows[id_] = account, amount
            total, n = totals[account]
            totals[account] = total + amount, n + 1
            last_ids[number % PARTITIONS] = id_
    return Model(rows, dict(totals), tuple(last_ids.values()))


class Producing:
    """Sends the first records at once, and the others at an even pace after `begin`.

    Key and partition follow from the account, so all records of an account are in one partition.
    """

    def __init__(
        self,
        payments: Payments,
        producing_s: float,
        bootstrap_servers: str,
        topic: str,
        record_format: RecordFormat,
    ) -> None:
        self._topic = topic
        self._producing_s = producing_s
        self._records = [
            (number % PARTITIONS, f"acct-{number:06d}".encode(), _encode(value, record_format))
            for chunk in payments.chunks()
            for number, value in zip(chunk.accounts.tolist(), chunk.json(), strict=True)
        ]
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
        self._error: KafkaError | None = None
        self._begun = threading.Event()
        self._abandoned = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scoreboard producer")
        self._result: Future[None] | None = None

    @property
    def is_done(self) -> bool:
        """True if every record is in the topic.

        Raises:
            ProduceError: The broker refused a record, or did not acknowledge it in time.
        """
        if self._result is None or not self._result.done():
            return False
        self._result.result()
        return True

    def begin(self) -> None:
        """Let the other records follow."""
        self._begun.set()

    def __enter__(self) -> Self:
        self._result = self._pool.submit(self._run)
        return self

    def __exit__(self, *failure: object) -> None:
        self._abandoned.set()
        self._begun.set()
        self._pool.shutdown(wait=True)

    def _run(self) -> None:
        self._send(0, FIRST_RECORDS)
        self._producer.flush(_FLUSH_TIMEOUT_S)
        self._begun.wait()
        began = time.monotonic()
        sent, total = FIRST_RECORDS, len(self._records)
        while sent < total and not self._abandoned.wait(_STEP_S):
            part = min(1.0, (time.monotonic() - began) / self._producing_s)
            due = FIRST_RECORDS + int((total - FIRST_RECORDS) * part)
            self._send(sent, due)
            sent = due
        if not self._abandoned.is_set() and (left := self._producer.flush(_FLUSH_TIMEOUT_S)):
            raise ProduceError(f"{left} records were not acknowledged in {_FLUSH_TIMEOUT_S:g} s")
        if self._error is not None:
            raise ProduceError(f"the broker refused a record: {self._error}")

    def _send(self, first: int, end: int) -> None:
        for partition, key, value in self._records[first:end]:
            self._producer.produce(self._topic, value, key=key, partition=partition)
        self._producer.poll(0)

    def _note_refusal(self, error: KafkaError | None, _message: object) -> None:
        self._error = self._error or error


def _encode(value: bytes, record_format: RecordFormat) -> bytes:
    if record_format == "json":
        return value
    return json.dumps({"schema": _SCHEMA, "payload": json.loads(value)}).encode()
