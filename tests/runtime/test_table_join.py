"""Joins with a table in memory, in a job whose slots are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pyarrow as pa
import pytest
from tests.runtime.test_batch_iterators import begin
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource

from onceflow.core.errors import ConfigError


def test_records_are_joined_once_while_slots_are_killed(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(10_000, accounts=50, pause_s=0.002, ends_with=str(tmp_path / "killed"))
    accounts = [str(number) for number in range(0, 300_000, 2)]
    # Two rows an account, and many accounts that never come: some 10 MB for each slot.
    table = pa.table(
        {"account": accounts * 2, "limit": [1] * len(accounts) + [2] * len(accounts)}
    ).append_column("note", pa.array(["a note of some length"] * 2 * len(accounts)))
    pipeline, records, sink = begin(cluster, tmp_path, source)
    records.join(table, on="account", how="left").write(sink, uid="out")
    job = pipeline.start()
    for kill in range(2):
        job.wait_for(checkpoints=2 * (kill + 1))
        os.kill(job.status().slots[kill].pid, signal.SIGKILL)
    (tmp_path / "killed").touch()
    assert job.wait(60).restores >= 1
    rows = sorted((row["id"], row["limit"] or 0) for row in sink.rows())
    expected = [
        (one, limit)
        for one in range(source.records)
        for limit in ((1, 2) if one % 50 % 2 == 0 else (0,))
    ]
    assert rows == expected


def test_a_table_that_is_too_large_is_refused_before_anything_runs(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    pipeline, records, sink = begin(cluster, tmp_path, CountingSource(10))
    table = pa.table({"account": [str(number) for number in range(10_000)]})
    records.join(table, on=["account"], bytes_max=10_000).write(sink, uid="out")
    with pytest.raises(ConfigError, match=r"join\(on=\['account'\]\): the table has 10000 rows"):
        pipeline.start()
    assert not (tmp_path / "checkpoints" / "iterators" / "log").exists()
