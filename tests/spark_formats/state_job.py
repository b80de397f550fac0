"""A job with every kind of state, whose checkpoints and savepoints the tests read as rows."""

from __future__ import annotations

import time
from datetime import date, timedelta
from pathlib import Path

import pyarrow as pa
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS

from onceflow import (
    Checkpointing,
    FileSystemStorage,
    KeyedFunction,
    ListStateDescriptor,
    LocalProcesses,
    MapStateDescriptor,
    NoRestart,
    Pipeline,
    Record,
    StateTtlConfig,
    ValueStateDescriptor,
    count,
    max_,
    sum_,
)
from onceflow.core.api.pipeline import Job
from onceflow.core.plan.functions import StateAccess
from onceflow.core.state import StateBackend

RECORDS, ACCOUNTS = 2_000, 50
FIRST_DAY = date(2026, 1, 1)


class Remembers(KeyedFunction):
    """Keeps the last amount, and for an hour the ids and the amounts by day of each account."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema

    def open(self, state: StateAccess) -> None:
        self._last = state.value_state(ValueStateDescriptor[int]("last", int))
        self._seen = state.value_state(ValueStateDescriptor[dict[str, int]]("seen", dict[str, int]))
        long = StateTtlConfig("1 h")
        self._ids = state.list_state(ListStateDescriptor[int]("ids", int, ttl=long))
        self._days = state.map_state(MapStateDescriptor[date, int]("days", date, int, ttl=long))

    def process(self, record: Record) -> Record:
        number, amount = int(record["id"]), int(record["amount"])
        self._last.set(amount)
        self._seen.set({"id": number, "amount": amount})
        self._ids.add(number)
        day = FIRST_DAY + timedelta(days=number % 3)
        self._days.put(day, (self._days.get(day) or 0) + amount)
        return record


def start(directory: Path, backend: StateBackend, *, inline_threshold_bytes: int = 0) -> Job:
    """Start the job, which goes on after its records until it is stopped."""
    pipeline = Pipeline(
        LocalProcesses(directory / "logs"),
        name="remembers",
        parallelism=2,
        max_parallelism=16,
        checkpointing=Checkpointing(
            storage=FileSystemStorage(
                str(directory / "checkpoints"), inline_threshold_bytes=inline_threshold_bytes
            ),
            interval=0.2,
        ),
        state_backend=backend,
        restart=NoRestart(),
        settings=SETTINGS,
    )
    source = CountingSource(RECORDS, accounts=ACCOUNTS, ends_with=str(directory / "end"))
    records = pipeline.read(source, uid="records")
    kept = records.key_by("account").process(Remembers(), uid="remembers")
    totals = kept.key_by("account", "amount").running(
        total=sum_("amount"), n=count(), most=max_("id"), uid="totals"
    )
    totals.write(DirectorySink(str(directory / "out")), uid="out")
    return pipeline.start()


def await_all_records_in_a_checkpoint(job: Job, records: int = RECORDS) -> None:
    """Return when all `records` were read before the last completed checkpoint."""
    deadline = time.monotonic() + 60
    while job.status().records_in < records:
        assert time.monotonic() < deadline, job.status()
        assert not job.status().state.ended, job.status().last_error
        time.sleep(0.01)
    # The first one to complete may have begun before.
    enough = job.status().checkpoints_completed + 2
    while job.status().checkpoints_completed < enough:
        assert time.monotonic() < deadline, job.status()
        time.sleep(0.01)
