"""The kept records of each key in whole jobs, also after kills, and refused options."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.held_up import await_checkpoint
from tests.support.ledger import SETTINGS

from onceflow import (
    Checkpointing,
    FixedDelay,
    Job,
    JobState,
    Pipeline,
    RocksDBBackend,
    StateTtlConfig,
    Stream,
    count,
    desc,
)
from onceflow.core.errors import ConfigError, StateIncompatible


def records_of(
    cluster: AnyCluster, directory: Path, source: CountingSource
) -> tuple[Pipeline, Stream]:
    pipeline = Pipeline(
        cluster,
        name="once",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        state_backend=RocksDBBackend(cache_entries=16),
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
    )
    return pipeline, pipeline.read(source, uid="records")


def test_killed_slots_emit_each_kept_record_once(cluster: AnyCluster, tmp_path: Path) -> None:
    source = CountingSource(4_000, accounts=500, pause_s=0.002, ends_with=str(tmp_path / "ends"))
    pipeline, records = records_of(cluster, tmp_path, source)
    first, last = DirectorySink(str(tmp_path / "first")), DirectorySink(str(tmp_path / "last"))
    records.key_by("account").deduplicate(uid="first").write(first, uid="first-out")
    kept = records.key_by("account").deduplicate(keep="last", by="id", uid="last")
    kept.write(last, uid="last-out")
    top = DirectorySink(str(tmp_path / "top"))
    ranked = records.key_by("account").top_n(3, by=desc("id"), uid="top")
    ranked.write(top, uid="top-out")
    job = pipeline.start()
    for _ in range(2):
        job.wait_for(checkpoints=job.status().checkpoints_completed + 2)
        os.kill(job.status().slots[0].pid, signal.SIGKILL)
    job.wait_for(checkpoints=job.status().checkpoints_completed + 2)
    (tmp_path / "ends").touch()
    assert job.wait(120).state is JobState.FINISHED
    assert len(job.status().attempts) >= 2
    ids: dict[str, list[int]] = {}
    for record in range(source.records):
        ids.setdefault(str(record % source.accounts), []).append(record)
    assert sorted((row["account"], row["id"]) for row in first.rows()) == sorted(
        (account, records[0]) for account, records in ids.items()
    )
    newest: dict[str, int] = {}
    for row in last.rows():
        newest[row["account"]] = max(newest.get(row["account"], -1), row["id"])
    assert newest == {account: records[-1] for account, records in ids.items()}
    # Each record that gets a rank is better than the one before.
    best: dict[tuple[str, int], int] = {}
    for row in top.rows():
        at = (row["account"], row["rank"])
        best[at] = max(best.get(at, -1), row["id"])
    assert best == {
        (account, number): record
        for account, records in ids.items()
        for number, record in enumerate(records[:-4:-1], 1)
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep": "latest"}, "keep='latest': choose one of first, last"),
        ({"by": "ids"}, "by='ids'.*no such column; there are"),
        ({"by": "account"}, "by='account'.*is part of the key"),
        (
            {"ttl": StateTtlConfig(1, visibility="return_expired_if_not_cleaned_up")},
            "deduplicate.*visibility=",
        ),
    ],
    ids=["keep", "by", "key", "ttl"],
)
def test_a_wrong_option_is_refused_by_name(
    cluster: AnyCluster, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    _, records = records_of(cluster, tmp_path, CountingSource(1))
    with pytest.raises(ConfigError, match=words):
        records.key_by("account").deduplicate(uid="once", **options)


def test_another_number_or_order_is_refused_while_there_is_state(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    def start(n: int, keep: str) -> Job:
        source = CountingSource(1_000, pause_s=0.01, endless=True)
        pipeline, records = records_of(cluster, tmp_path, source)
        keyed = records.key_by("account")
        top = keyed.top_n(n, by=desc("id"), uid="top")
        top.write(DirectorySink(str(tmp_path / "top")), uid="top-out")
        kept = keyed.deduplicate(keep=keep, by="id", uid="kept")
        kept.write(DirectorySink(str(tmp_path / "kept")), uid="kept-out")
        return pipeline.start()

    job = start(3, "last")
    await_checkpoint(job)
    assert job.stop(60).state is JobState.STOPPED
    with pytest.raises(StateIncompatible, match="n was 3 records and is now 4 records"):
        start(4, "last").wait(60)
    with pytest.raises(StateIncompatible, match="keep was last and is now first"):
        start(3, "first").wait(60)


LAST_ROWS: dict[str, Any] = {"rows": 3, "n": count(), "uid": "over"}
DEFAULTS: dict[str, Any] = {"n": 3, "by": "amount", "uid": "top"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": 0}, r"top_n\(0\): give a number of records from 1 to 1000"),
        ({"by": []}, "give at least one column"),
        ({"by": ["amount", "ids"]}, "by='ids'.*no such column"),
        ({"rank": "id"}, "rank='id'.*this column already"),
    ],
    ids=["n", "no column", "column", "rank"],
)
def test_a_wrong_option_of_the_first_records_is_refused_by_name(
    cluster: AnyCluster, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    _, records = records_of(cluster, tmp_path, CountingSource(1))
    with pytest.raises(ConfigError, match=words):
        records.key_by("account").top_n(**DEFAULTS | options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows": 1}, r"over\(rows=1\): give a number of records from 2 to 100"),
        ({"by": ["ids"]}, "by='ids'.*no such column"),
        ({"amount": count()}, r"over\(amount=…\).*a column 'amount' already"),
    ],
    ids=["rows", "order", "name"],
)
def test_a_wrong_option_of_the_last_records_is_refused_by_name(
    cluster: AnyCluster, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    _, records = records_of(cluster, tmp_path, CountingSource(1))
    with pytest.raises(ConfigError, match=words):
        records.key_by("account").over(**LAST_ROWS | options)
