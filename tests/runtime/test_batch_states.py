"""A function of whole batches and the states of their keys, through kills and rescaling."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.runtime.test_recovery import BACKENDS
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS, assert_exactly_once

from onceflow import (
    BatchStates,
    Checkpointing,
    FixedDelay,
    JobState,
    KeyedBatch,
    KeyedBatchFunction,
    NoRestart,
    Pipeline,
    StateBackend,
    ValueStateDescriptor,
)
from onceflow.core.errors import UserFunctionError


class Balance(KeyedBatchFunction):
    """Adds what `running(balance=sum_("amount"), n=count())` does."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema.append(pa.field("balance", pa.int64())).append(
            pa.field("n", pa.int64())
        )

    def open(self, state: BatchStates) -> None:
        self._balance = state.value_state(ValueStateDescriptor("balance", int, default=0))
        self._payments = state.value_state(ValueStateDescriptor("payments", int, default=0))

    def process(self, batch: KeyedBatch) -> pa.RecordBatch:
        amounts = batch.sort_by_key("amount")
        sums = np.cumsum(amounts)
        before = sums[batch.firsts] - amounts[batch.firsts]
        sums += batch.spread(self._balance.get_many().to_numpy() - before)
        self._balance.put_many(batch.lasts(sums))
        counts = np.arange(1, len(sums) + 1)
        counts += batch.spread(self._payments.get_many().to_numpy() - batch.firsts)
        self._payments.put_many(batch.lasts(counts))
        with_sums = batch.rows.append_column("balance", pa.array(batch.in_row_order(sums)))
        return with_sums.append_column("n", pa.array(batch.in_row_order(counts)))


def balances(
    cluster: AnyCluster,
    directory: Path,
    source: CountingSource,
    function: KeyedBatchFunction,
    *,
    backend: StateBackend | None = None,
    parallelism: int = 2,
    restart: bool = True,
) -> tuple[Pipeline, DirectorySink]:
    sink = DirectorySink(str(directory / "out"))
    pipeline = Pipeline(
        cluster,
        name="batches",
        parallelism=parallelism,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        state_backend=backend,
        restart=FixedDelay(attempts=20, delay_s=0.01) if restart else NoRestart(),
        settings=SETTINGS,
    )
    records = pipeline.read(source, uid="records")
    made = records.key_by("account").process_batches(function, uid="balance")
    made.write(sink, uid="out")
    return pipeline, sink


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_of_batches_are_exactly_once_through_kills_and_rescaling(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend
) -> None:
    source = CountingSource(20_000, pause_s=0.002, ends_with=str(tmp_path / "ends"))
    for parallelism in (2, 3):
        pipeline, sink = balances(
            cluster, tmp_path, source, Balance(), backend=backend, parallelism=parallelism
        )
        job = pipeline.start()
        job.wait_for(checkpoints=job.status().checkpoints_completed + 2)
        os.kill(job.status().slots[0].pid, signal.SIGKILL)
        job.wait_for(checkpoints=job.status().checkpoints_completed + 2)
        if parallelism == 2:
            assert job.stop(60).state is JobState.STOPPED
        else:
            (tmp_path / "ends").touch()
            assert job.wait(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)


class TooShort(Balance):
    """Puts a value too few."""

    def process(self, batch: KeyedBatch) -> pa.RecordBatch:
        self._balance.put_many(pa.array([1] * (batch.key_count - 1)))
        return batch.rows


class WrongColumns(Balance):
    """Returns what its schema does not say."""

    def process(self, batch: KeyedBatch) -> pa.RecordBatch:
        return batch.rows


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (
            TooShort(),
            r"'balance'.*was given \d+ values, but the batch has \d+ keys",
        ),
        (WrongColumns(), r"'balance' returned .*its schema has .*'n'"),
    ],
    ids=["too short", "wrong columns"],
)
def test_mistakes_with_batches_are_told_by_name(
    cluster: AnyCluster, tmp_path: Path, function: KeyedBatchFunction, says: str
) -> None:
    source = CountingSource(100)
    pipeline, _ = balances(cluster, tmp_path, source, function, restart=False)
    with pytest.raises(UserFunctionError, match=says):
        pipeline.run(60)
