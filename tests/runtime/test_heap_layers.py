"""Jobs whose state on the heap is written in layers, and whose processes are killed on the way."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pyarrow as pa
import pytest
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS, assert_exactly_once

from onceflow import (
    Checkpointing,
    FixedDelay,
    JobState,
    KeyedFunction,
    Pipeline,
    Record,
    StateAccess,
    Timer,
    ValueStateDescriptor,
)
from onceflow.core.crash_points import VARIABLE
from onceflow.core.protocol.checkpoints.snapshots import StateHandle, handles_of
from onceflow.core.storage import FileSystemStorage, JobStorage

ACCOUNTS = 8_000
"""More than a quarter of them are not changed between two checkpoints."""
REMINDED = 10


class Balance(KeyedFunction):
    """Adds what `running(balance=sum_("amount"), n=count())` does."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema.append(pa.field("balance", pa.int64())).append(
            pa.field("n", pa.int64())
        )

    def open(self, state: StateAccess) -> None:
        self._balance = state.value_state(ValueStateDescriptor("balance", int, default=0))
        self._payments = state.value_state(ValueStateDescriptor("payments", int, default=0))

    def process(self, record: Record) -> Record:
        self._balance.set(self._balance.get() + record["amount"])
        self._payments.set(self._payments.get() + 1)
        return record | {"balance": self._balance.get(), "n": self._payments.get()}


def balances(
    cluster: AnyCluster,
    directory: Path,
    source: CountingSource,
    parallelism: int,
    function: KeyedFunction | None = None,
) -> tuple[Pipeline, DirectorySink]:
    sink = DirectorySink(str(directory / "out"))
    pipeline = Pipeline(
        cluster,
        name="layers",
        parallelism=parallelism,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
    )
    records = pipeline.read(source, uid="records")
    accounts = records.key_by("account")
    accounts.process(function or Balance(), uid="balance").write(sink, uid="out")
    return pipeline, sink


def wait_for_layers(job: JobStorage) -> None:
    """Wait until the last checkpoint is in layers, and no file of an older attempt is left."""
    layers: list[StateHandle] = []
    older: list[str] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        last = job.log.read().completed[-1]
        layers = [h for h in handles_of(last.snapshots) if h.name.startswith("changes-")]
        names = [path.name for path in (Path(str(job)) / "shared").glob("*")]
        older = [name for name in names if not name.startswith(f"a{last.attempt}@")]
        if layers and not older:
            return
        time.sleep(0.05)
    raise AssertionError(f"{len(layers)} files of layers; of dead attempts there are {older}")


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("anywhere", marks=pytest.mark.servers),
        *(
            pytest.param(point, marks=pytest.mark.slow)
            for point in ("prepared", "acked", "committed", "replied")
        ),
    ],
)
def test_layers_are_exactly_once_and_leave_no_file_through_kills_and_rescaling(
    cluster: AnyCluster, tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = tmp_path / "points"
    points.mkdir()
    monkeypatch.setenv(VARIABLE, str(points))
    source = CountingSource(
        20_000,
        accounts=ACCOUNTS,
        batch_rows=10,
        pause_s=0.005,
        ends_with=str(tmp_path / "ends"),
    )
    job_storage = FileSystemStorage(str(tmp_path / "checkpoints")).open("layers")
    for parallelism in (2, 3):
        pipeline, sink = balances(cluster, tmp_path, source, parallelism)
        job = pipeline.start()
        job.wait_for(checkpoints=15)
        wait_for_layers(job_storage)
        restores = job.status().restores
        if point == "anywhere":
            os.kill(job.status().slots[0].pid, signal.SIGKILL)
        else:
            (points / point).touch()
        job.wait_for(checkpoints=job.status().checkpoints_completed + 6)
        assert job.status().restores > restores
        if parallelism == 2:
            assert job.stop(60).state is JobState.STOPPED
        else:
            (tmp_path / "ends").touch()
            assert job.wait(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)


class Reminder(Balance):
    """Keeps the balance of each account, and emits the first accounts once, later."""

    def __init__(self, at_ms: int) -> None:
        self._at_ms = at_ms

    def open(self, state: StateAccess) -> None:
        super().open(state)
        self._timers = state.timers()

    def process(self, record: Record) -> None:  # type: ignore[override]
        super().process(record)
        if record["id"] < REMINDED:
            self._timers.register_processing_time_timer(self._at_ms)

    def on_timer(self, timer: Timer) -> Record:
        return {"id": 0, "account": timer.key, "amount": 0, "balance": 0, "n": 0}


@pytest.mark.servers
def test_a_timer_that_fired_while_no_other_state_changed_does_not_fire_again(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(ACCOUNTS, accounts=ACCOUNTS, ends_with=str(tmp_path / "ends"))
    function = Reminder(int(time.time() * 1000) + 6_000)
    pipeline, sink = balances(cluster, tmp_path, source, 1, function)
    job = pipeline.start()
    job.wait_for(checkpoints=2)
    deadline = time.monotonic() + 60
    while len(sink.rows()) < REMINDED:
        assert time.monotonic() < deadline, f"{len(sink.rows())} of {REMINDED} rows"
        time.sleep(0.05)
    job.wait_for(checkpoints=job.status().checkpoints_completed + 3)
    os.kill(job.status().slots[0].pid, signal.SIGKILL)
    job.wait_for(checkpoints=job.status().checkpoints_completed + 3)
    assert job.status().restores == 1
    (tmp_path / "ends").touch()
    assert job.wait(60).state is JobState.FINISHED
    assert sorted(row["account"] for row in sink.rows()) == sorted(map(str, range(REMINDED)))
