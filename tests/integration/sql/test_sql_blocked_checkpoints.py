"""A checkpoint that times out while its sink waits for somebody's lock names who holds it."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.sql.databases import Database, MariaDB, MySQL, Postgres
from tests.support.counting_source import CountingSource
from tests.support.ledger import SETTINGS
from tests.support.waiting import await_true

from onceflow import Checkpointing, JobState, LocalProcesses, NoRestart, Pipeline
from onceflow.core.api.pipeline import Job
from onceflow.core.errors import CheckpointError
from onceflow.core.runtime.events.job_events import JobEvent, SinkBlocked
from onceflow.core.runtime.events.status import JobStatus

_HOLDERS: dict[type[Database], str] = {
    Postgres: r"session \d+ of role '\w+' \(application 'monthly report', idle in transaction,"
    r" command INSERT since 2",
    MySQL: r"connection \d+ of user '\w+' from '.*' \(command Sleep\), whose transaction",
    MariaDB: r"connection \d+ of user '\w+' from '.*' \(command Sleep\), whose transaction",
}
_TIMEOUT_S = 3.0


@pytest.fixture
def table(database: Database) -> Iterator[str]:
    """A table whose row 0 somebody has inserted and not committed yet."""
    database.query("CREATE TABLE rates (id BIGINT PRIMARY KEY, account VARCHAR(9), amount BIGINT)")
    sink = database.sink(table="rates")
    with sink.settings.endpoint.connect("monthly report") as other:
        other.begin()
        other.execute("INSERT INTO rates (id) VALUES (0)")
        yield "rates"
        other.roll_back()


def _start(directory: Path, sink: Any, tolerable_failures: int = 0) -> Job:
    pipeline = Pipeline(
        LocalProcesses(),
        name="blocked",
        parallelism=1,
        checkpointing=Checkpointing(
            storage=str(directory),
            interval="50 ms",
            timeout=_TIMEOUT_S,
            tolerable_failures=tolerable_failures,
        ),
        restart=NoRestart(),
        settings=SETTINGS,
    )
    source = CountingSource(0, endless=True, pause_s=0.005)
    pipeline.read(source, uid="records").write(sink, uid="rows")
    return pipeline.start()


def test_checkpoint_that_times_out_names_the_sink_and_who_holds_its_rows(
    tmp_path: Path, database: Database, table: str
) -> None:
    job = _start(tmp_path, database.sink(table=table, write_mode="upsert", primary_key=("id",)))
    told: list[SinkBlocked] = []
    seen = threading.Event()

    def listen(event: JobEvent, status: JobStatus) -> None:
        if isinstance(event, SinkBlocked) and event.blockers:
            assert status.blockers == {event.uid: event.blockers}
            assert f"sink rows waits for {event.blockers[0]}" in str(status)
            told.append(event)
            seen.set()

    job.add_listener(listen)
    with pytest.raises(CheckpointError) as failure:
        job.wait(90)
    assert job.status().state is JobState.FAILED
    assert seen.is_set()
    (holder,) = told[0].blockers
    assert re.match(_HOLDERS[type(database)], holder), holder
    reason = f"no ack of .* within {_TIMEOUT_S} s; sink rows waits for {re.escape(holder)}"
    assert re.search(reason, str(failure.value)), failure.value
    assert re.search(reason, job.status().failures[-1].reason)


def test_blocker_is_forgotten_when_its_transaction_ends(
    tmp_path: Path, postgres_database: str
) -> None:
    database = Postgres(postgres_database)
    database.query("CREATE TABLE rates (id BIGINT, account TEXT, amount BIGINT)")
    sink = database.sink(table="rates")
    with sink.settings.endpoint.connect("nightly vacuum") as other:
        job = _start(tmp_path, sink, tolerable_failures=1000)
        job.wait_for(checkpoints=2)
        other.begin()
        other.execute("LOCK TABLE rates IN ACCESS EXCLUSIVE MODE")
        await_true(lambda: job.status().blockers != {})
        assert "application 'nightly vacuum'" in job.status().blockers["rows"][0]
        other.roll_back()
        await_true(lambda: job.status().blockers == {})
    assert job.stop(60).state is JobState.STOPPED
