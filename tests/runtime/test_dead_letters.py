"""Bad rows go where the user said, exactly once with the rest; rows of a key meet at their sink."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter, defaultdict
from pathlib import Path

import pyarrow as pa
import pytest
from tests.support.clusters import SLOWLY_ON_SPARK, AnyCluster
from tests.support.counting_source import CountingSource, amount_of
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS
from tests.support.picky_sink import REFUSED_AMOUNT, PickySink

from onceflow import Checkpointing, FixedDelay, JobState, NoRestart, Pipeline, Stream
from onceflow.core.errors import BadRow, ConfigError

RECORDS = 20_000
REFUSED = [n for n in range(RECORDS) if amount_of(n) == REFUSED_AMOUNT]
NO_ACCOUNT = [n for n in range(RECORDS) if n % 997 == 5 and n not in REFUSED]


def without_some_accounts(rows: pa.RecordBatch) -> pa.RecordBatch:
    accounts = [
        None if record_id % 997 == 5 else account
        for record_id, account in zip(
            rows["id"].to_pylist(), rows["account"].to_pylist(), strict=True
        )
    ]
    return rows.set_column(1, "account", pa.array(accounts, pa.string()))


def pipeline_in(cluster: AnyCluster, directory: Path, source: CountingSource) -> Pipeline:
    return Pipeline(
        cluster,
        name="letters",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
    )


def records_of(pipeline: Pipeline, source: CountingSource) -> Stream:
    return pipeline.read(source, uid="records").map_batches(without_some_accounts, uid="spoil")


@SLOWLY_ON_SPARK
@pytest.mark.parametrize(
    "key",
    [
        pytest.param((), id="unrouted", marks=pytest.mark.slow),
        pytest.param(("account",), id="routed"),
    ],
)
def test_dead_letters_are_there_exactly_once_with_the_rest_though_slots_are_killed(
    cluster: AnyCluster, tmp_path: Path, key: tuple[str, ...]
) -> None:
    source = CountingSource(RECORDS, pause_s=0.01, ends_with=str(tmp_path / "killed"))
    good, bad = PickySink(str(tmp_path / "good"), key), DirectorySink(str(tmp_path / "bad"))
    pipeline = pipeline_in(cluster, tmp_path, source)
    records_of(pipeline, source).write(good, uid="ledger", dead_letters=bad)
    job = pipeline.start()
    for kill in range(2):
        deadline = time.monotonic() + 90
        while (status := job.status()).checkpoints_completed < 3 * (kill + 1) or (
            status.state is not JobState.RUNNING
        ):
            assert time.monotonic() < deadline, job.status()
            assert not job.status().state.ended, job.status().last_error
            time.sleep(0.01)
        os.kill(job.status().slots[kill].pid, signal.SIGKILL)
        while job.status().restores <= kill:
            assert time.monotonic() < deadline, job.status()
            assert not job.status().state.ended, job.status().last_error
            time.sleep(0.01)
    (tmp_path / "killed").touch()
    assert job.wait(120).state is JobState.FINISHED

    expected = set(range(RECORDS)) - set(REFUSED) - set(NO_ACCOUNT)
    assert Counter(row["id"] for row in good.rows()) == Counter(expected)
    letters = bad.rows()
    reasons = Counter((json.loads(row["value"])["id"], row["reason"]) for row in letters)
    assert reasons == Counter(
        [(n, "refused: amount") for n in REFUSED] + [(n, "refused: no account") for n in NO_ACCOUNT]
    )
    assert {row["operator"] for row in letters} == {"ledger"}
    assert good.prepared() == []
    assert bad.prepared() == []


def test_rows_of_one_key_are_all_written_by_one_subtask(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(2_000)
    sink = PickySink(str(tmp_path / "good"), ("account",))
    pipeline = pipeline_in(cluster, tmp_path, source)
    pipeline.read(source, uid="records").write(sink, uid="ledger", on_bad_row="drop")
    status = pipeline.run(60)
    writers: dict[str, set[int]] = defaultdict(set)
    for row in sink.rows():
        writers[row["account"]].add(row["subtask"])
    assert len(writers) == source.accounts
    assert {len(subtasks) for subtasks in writers.values()} == {1}
    # Both subtasks have work: rows are routed, not gathered.
    assert set().union(*writers.values()) == {0, 1}
    assert status.rejected == sum(amount_of(n) == REFUSED_AMOUNT for n in range(2_000))


def test_a_bad_row_fails_the_job_by_name_where_nothing_else_is_said(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(2_000)
    sink = PickySink(str(tmp_path / "good"))
    pipeline = Pipeline(
        cluster,
        name="fails",
        parallelism=1,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=None),
        restart=NoRestart(),
        settings=SETTINGS,
    )
    pipeline.read(source, uid="records").write(sink, uid="ledger")
    with pytest.raises(BadRow, match="refused: amount"):
        pipeline.run(60)
    assert sink.rows() == []


def test_policies_that_contradict_each_other_are_refused_when_the_pipeline_is_built(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(10)
    sink = PickySink(str(tmp_path / "good"))
    pipeline = pipeline_in(cluster, tmp_path, source)
    stream = pipeline.read(source, uid="records")
    with pytest.raises(ConfigError, match="needs dead_letters="):
        stream.write(sink, uid="a", on_bad_row="dead_letter")
    with pytest.raises(ConfigError, match="exclude each other"):
        stream.write(sink, uid="b", on_bad_row="drop", dead_letters=sink)
    with pytest.raises(ConfigError, match="choose one of fail, drop, dead_letter"):
        stream.write(sink, uid="c", on_bad_row="ignore")
    with pytest.raises(ConfigError, match="'nobody'.*id, account, amount"):
        stream.write(PickySink(str(tmp_path / "x"), ("nobody",)), uid="d")
    with pytest.raises(ConfigError, match="go together"):
        pipeline.read(source, uid="other", dead_letters=sink)
