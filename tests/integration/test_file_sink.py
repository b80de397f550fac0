"""Tests the contents of a local directory after each step of the file sink."""

from __future__ import annotations

import datetime as dt
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.integration.file_sink_kit import (
    FileJob,
    hidden_files,
    public_files,
    rows,
    seen_ids,
    seen_rows,
)
from tests.integration.sink_kit import SCHEMA, committables

from onceflow.core.errors import ConfigError, Fenced
from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    CommitOutcome,
    Committed,
    Lost,
)
from onceflow.core.protocol.ids import CheckpointId
from onceflow.sinks import FileSink
from onceflow.sinks.files import list_committed_files


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def job(directory: Path) -> Iterator[FileJob]:
    with FileJob(FileSink(str(directory))) as job:
        yield job.check()


# -- hidden until commit ---------------------------------------------------------------------------


def test_rows_are_seen_after_their_commit_and_not_before(job: FileJob, directory: Path) -> None:
    writer = job.writer()
    writer.write(rows(range(5)))
    assert public_files(directory) == []
    (committable,) = writer.pre_commit(CheckpointId(1))
    assert committable.rows == 5
    assert public_files(directory) == []
    assert seen_rows(directory) == []
    writer.close()
    assert job.committer().commit(committable) == Committed()
    (name,) = public_files(directory)
    assert re.fullmatch(r"part-job\.files-1-1-0-0-00000-[0-9a-f]{12}\.zstd\.parquet", name)
    assert seen_rows(directory) == rows(range(5)).to_pylist()


def test_patterns_that_take_everything_with_the_suffix_find_nothing_hidden(
    job: FileJob, directory: Path
) -> None:
    """DuckDB's `**/*.parquet` does not pass over names that begin with an underscore."""
    writer = job.writer()
    writer.write(rows([1]))
    writer.pre_commit(CheckpointId(1))
    writer.write(rows([2]))
    assert list(directory.rglob("*.parquet")) == []
    assert hidden_files(directory, "open") != []


def test_checkpoint_without_rows_leaves_nothing(job: FileJob, directory: Path) -> None:
    writer = job.writer()
    assert writer.pre_commit(CheckpointId(1)) == ()
    writer.write(rows([]))
    assert writer.pre_commit(CheckpointId(2)) == ()
    assert committables(job.committer().in_doubt()) == []
    assert hidden_files(directory, "open") == []


def test_a_new_decision_log_replaces_no_file_of_the_one_that_is_gone(directory: Path) -> None:
    """As after "The checkpoint storage is gone" in docs/operations.md, which counts anew."""
    for log_id, ids in (("log-1", range(5)), ("log-2", range(5, 10))):
        with FileJob(FileSink(str(directory)), log_id=log_id) as job:
            writer = job.check().writer()
            writer.write(rows(ids))
            (committable,) = writer.pre_commit(CheckpointId(1))
            job.committer().commit(committable)
        shutil.rmtree(directory / "_onceflow" / job.sink_id)
    assert seen_ids(directory) == list(range(10))


def test_what_was_written_and_not_pre_committed_is_deleted_on_close(
    job: FileJob, directory: Path
) -> None:
    writer = job.writer()
    writer.write(rows([1]))
    (first,) = writer.pre_commit(CheckpointId(1))
    writer.write(rows([2]))
    writer.close()
    writer.close()
    assert len(hidden_files(directory, "open")) == 1
    assert job.committer().commit(first) == Committed()
    assert seen_ids(directory) == [1]
    assert hidden_files(directory, "open") == []


def test_large_checkpoint_rolls_files_and_keeps_the_order_of_rows(directory: Path) -> None:
    with FileJob(FileSink(str(directory), max_rows_per_file=400)) as job:
        writer = job.check().writer()
        for first in range(0, 1000, 250):
            writer.write(rows(range(first, first + 250)))
        (committable,) = writer.pre_commit(CheckpointId(1))
        job.committer().commit(committable)
    names = public_files(directory)
    assert [pq.read_table(directory / name).num_rows for name in names] == [400, 400, 200]
    read = pa.concat_tables(pq.read_table(directory / name) for name in names)
    assert read.column("id").to_pylist() == list(range(1000))


def test_file_is_ended_after_roll_bytes(directory: Path) -> None:
    with FileJob(FileSink(str(directory), roll_bytes=1)) as job:
        writer = job.check().writer()
        big = pa.array(["x" * 100] * 700_000)
        batch = pa.record_batch(
            [pa.array(range(700_000)), big, pa.array(range(700_000))], SCHEMA.names
        )
        for _ in range(2):
            writer.write(batch.cast(SCHEMA))
        (committable,) = writer.pre_commit(CheckpointId(1))
        job.committer().commit(committable)
    assert len(public_files(directory)) == 2


# -- idempotence, proofs ---------------------------------------------------------------------------


def test_second_commit_is_told_from_the_first_and_changes_nothing(
    job: FileJob, directory: Path
) -> None:
    committable = job.prepare(1, range(3))
    assert job.committer().commit(committable) == Committed()
    assert job.committer(attempt=2).commit(committable) == AlreadyCommitted()
    assert seen_ids(directory) == [0, 1, 2]


def test_file_that_a_reader_took_away_is_neither_lost_nor_brought_back(
    job: FileJob, directory: Path
) -> None:
    committable = job.prepare(1, range(3))
    committer = job.committer()
    committer.commit(committable)
    (directory / public_files(directory)[0]).unlink()
    assert committer.commit(committable) == AlreadyCommitted()
    assert committer.abort(committable) == AlreadyCommitted()
    assert public_files(directory) == []


def test_staged_file_that_somebody_deleted_is_lost_and_nothing_is_published(
    directory: Path,
) -> None:
    with FileJob(FileSink(str(directory), partition_by=("account",))) as job:
        committable = job.check().prepare(1, range(9))
        victim = directory / "_onceflow" / "job.files" / "open"
        next(iter(sorted(victim.iterdir()))).unlink()
        outcome = job.committer().commit(committable)
        assert isinstance(outcome, Lost)
        assert "of 3 rows is gone" in outcome.reason
        assert public_files(directory) == []


def test_staged_file_that_was_cut_short_is_lost(job: FileJob, directory: Path) -> None:
    committable = job.prepare(1, range(9))
    (victim,) = (directory / "_onceflow" / "job.files" / "open").iterdir()
    os.truncate(victim, victim.stat().st_size - 1)
    assert isinstance(job.committer().commit(committable), Lost)
    assert public_files(directory) == []


def test_deleted_manifest_without_proof_is_lost(job: FileJob, directory: Path) -> None:
    committable = job.prepare(1, range(3))
    (manifest,) = (directory / "_onceflow" / "job.files" / "staged").iterdir()
    manifest.unlink()
    outcome = job.committer().commit(committable)
    assert isinstance(outcome, Lost)
    assert "job.files/1/1/0/0" in outcome.reason


def test_aborted_rows_are_gone_and_were_never_seen(job: FileJob, directory: Path) -> None:
    committable = job.prepare(1, range(3))
    committer = job.committer()
    assert committer.abort(committable) == Aborted()
    assert committer.abort(committable) == Aborted()
    assert committables(committer.in_doubt()) == []
    assert hidden_files(directory, "open") == []
    assert isinstance(committer.commit(committable), Lost)
    assert public_files(directory) == []


def test_abort_of_what_was_committed_says_so(job: FileJob, directory: Path) -> None:
    committable = job.prepare(1, range(3))
    committer = job.committer()
    committer.commit(committable)
    assert committer.abort(committable) == AlreadyCommitted()
    assert seen_ids(directory) == [0, 1, 2]


def test_proofs_are_pruned_below_the_given_checkpoint_only(job: FileJob, directory: Path) -> None:
    committer = job.committer()
    todo = [job.prepare(checkpoint, [checkpoint]) for checkpoint in (1, 2, 3)]
    for committable in todo:
        committer.commit(committable)
    committer.prune(CheckpointId(3))
    assert hidden_files(directory, "committed") == ["1-3-0-0"]
    committer.prune(CheckpointId(2))
    assert hidden_files(directory, "pruned") == ["0000000003"]
    assert committer.commit(todo[2]) == AlreadyCommitted()
    assert seen_ids(directory) == [1, 2, 3]


# -- in doubt, fence -------------------------------------------------------------------------------


def test_in_doubt_lists_exactly_this_sinks_transactions(job: FileJob, directory: Path) -> None:
    first = job.prepare(1, [1])
    begin = dt.datetime.now(dt.timezone.utc)
    second = job.prepare(2, [2], attempt=2, subtask=1)
    with FileJob(job.sink, sink_id="job.files2") as other:
        other.check().prepare(1, [9])
        assert committables(other.committer().in_doubt()) == ["job.files2/1/1/0/0"]
    committer = job.committer(attempt=3)
    assert committables(committer.in_doubt()) == ["job.files/1/1/0/0", "job.files/2/2/1/0"]
    committer.commit(first)
    assert committables(committer.in_doubt()) == ["job.files/2/2/1/0"]
    assert committer.find_prepare_time(first) is None
    staged_at = committer.find_prepare_time(second)
    assert staged_at is not None
    assert begin <= staged_at <= dt.datetime.now(dt.timezone.utc)
    committer.abort(second)
    assert committables(committer.in_doubt()) == []
    assert seen_ids(directory) == [1]


def test_an_abort_that_died_half_way_is_in_doubt_until_it_is_done_again(
    job: FileJob, directory: Path
) -> None:
    committable = job.prepare(1, range(3))
    own = directory / "_onceflow/job.files"
    (manifest,) = (own / "staged").iterdir()
    (own / "aborting").mkdir()
    manifest.rename(own / "aborting" / manifest.name)
    committer = job.committer()
    assert committables(committer.in_doubt()) == ["job.files/1/1/0/0"]
    assert committer.abort(committable) == Aborted()
    assert committables(committer.in_doubt()) == []
    assert hidden_files(directory, "open") == []


@pytest.mark.parametrize("sink_id", [".hidden", "_Hidden", "UPPER", "a.b-c_d", "x" * 32, ".."])
def test_any_sink_id_is_kept_apart_and_its_files_are_seen(directory: Path, sink_id: str) -> None:
    with FileJob(FileSink(str(directory)), sink_id=sink_id) as job:
        committable = job.check().prepare(1, [1, 2])
        committer = job.committer()
        assert [one.transaction for one in committer.in_doubt()] == [committable.transaction]
        assert committer.commit(committable) == Committed()
    assert seen_ids(directory) == [1, 2]
    assert list_committed_files(str(directory), sink_id).paths() == public_files(directory)


def test_second_job_under_one_sink_id_is_refused(job: FileJob) -> None:
    with (
        FileJob(job.sink, log_id="log-2") as other,
        pytest.raises(ConfigError, match=r"belongs to decision log 'log-1' of job"),
    ):
        other.check(attempt=7)


def test_attempt_that_is_not_newer_is_fenced(job: FileJob) -> None:
    for attempt in (1, 0):
        with pytest.raises(Fenced, match="attempt 1 of the same job"):
            job.check(attempt=attempt)
    job.check(attempt=5)
    with pytest.raises(Fenced, match="attempt 5"):
        job.check(attempt=4)


def test_of_many_who_claim_one_attempt_one_wins(job: FileJob) -> None:
    outcomes: list[str] = []
    barrier = threading.Barrier(8)

    def claim() -> None:
        barrier.wait()
        try:
            job.check(attempt=2)
        except Fenced:
            outcomes.append("fenced")
        else:
            outcomes.append("claimed")

    _at_once([claim] * 8)
    assert sorted(outcomes) == ["claimed"] + ["fenced"] * 7


def test_of_two_new_jobs_with_one_sink_id_one_wins(tmp_path: Path) -> None:
    for round_ in range(20):
        sink = FileSink(str(tmp_path / str(round_)))
        outcomes: list[str] = []
        barrier = threading.Barrier(2)

        def claim(log_id: str) -> None:
            barrier.wait()
            try:
                FileJob(sink, log_id=log_id).check(attempt=3)
            except ConfigError:
                outcomes.append("refused")
            else:
                outcomes.append("claimed")

        _at_once([partial(claim, "log-a"), partial(claim, "log-b")])
        assert sorted(outcomes) == ["claimed", "refused"]


def test_next_attempt_deletes_what_killed_writers_left_and_nothing_else(
    job: FileJob, directory: Path
) -> None:
    kept = job.prepare(1, [1])
    killed = job.writer()
    killed.write(rows([2]))
    killed.pre_commit(CheckpointId(2))
    killed.write(rows([3]))
    assert len(hidden_files(directory, "open")) == 3
    job.check(attempt=2)
    assert len(hidden_files(directory, "open")) == 2
    assert committables(job.committer().in_doubt()) == ["job.files/1/1/0/0", "job.files/1/2/0/0"]
    assert job.committer().commit(kept) == Committed()
    assert seen_ids(directory) == [1]


# -- two at once -----------------------------------------------------------------------------------


def test_committers_at_once_publish_each_row_once(directory: Path) -> None:
    with FileJob(FileSink(str(directory), partition_by=("account",), max_rows_per_file=2)) as job:
        job.check()
        for checkpoint in range(1, 11):
            committable = job.prepare(checkpoint, range(checkpoint * 20, checkpoint * 20 + 20))
            outcomes: list[CommitOutcome] = []
            barrier = threading.Barrier(4)

            def commit(job: FileJob = job) -> None:
                committer = job.committer()
                barrier.wait()
                outcomes.append(committer.commit(committable))

            _at_once([commit] * 4)
            assert outcomes.count(Committed()) == 1, outcomes
            assert outcomes.count(AlreadyCommitted()) == 3, outcomes
    assert seen_ids(directory) == list(range(20, 220))


def test_of_a_commit_and_an_abort_at_once_one_wins(directory: Path) -> None:
    seen: set[int] = set()
    with FileJob(FileSink(str(directory), partition_by=("account",))) as job:
        job.check()
        for checkpoint in range(1, 31):
            committable = job.prepare(checkpoint, range(checkpoint * 9, checkpoint * 9 + 9))
            outcomes: dict[str, Any] = {}
            barrier = threading.Barrier(2)

            def run(name: str, job: FileJob = job) -> None:
                committer = job.committer()
                barrier.wait()
                outcomes[name] = getattr(committer, name)(committable)

            _at_once([partial(run, "commit"), partial(run, "abort")])
            committed = isinstance(outcomes["commit"], (Committed, AlreadyCommitted))
            assert committed == (outcomes["abort"] == AlreadyCommitted()), outcomes
            assert committed or isinstance(outcomes["commit"], Lost), outcomes
            if committed:
                seen |= set(range(checkpoint * 9, checkpoint * 9 + 9))
    assert seen_ids(directory) == sorted(seen)


def test_reader_that_lists_while_many_commit_reads_only_whole_files(directory: Path) -> None:
    """Reads the directory over and over; any file cut short, or row too early, fails it."""
    checkpoints = 40
    with FileJob(FileSink(str(directory), partition_by=("account",))) as job:
        job.check()
        todo = [job.prepare(n, range(n * 30, n * 30 + 30)) for n in range(1, checkpoints + 1)]
        committer = job.committer()
        done = threading.Event()

        def commit() -> None:
            try:
                for committable in todo:
                    committer.commit(committable)
            finally:
                done.set()

        thread = threading.Thread(target=commit)
        thread.start()
        looks = 0
        while not done.is_set() or looks == 0:
            listed = list_committed_files(str(directory), job.sink_id)
            for path in public_files(directory):
                assert pq.read_table(directory / path, partitioning=None).num_rows == 10
            whole = [pq.read_table(directory / p, partitioning=None) for p in listed.paths()]
            found = sorted(i for one in whole for i in one.column("id").to_pylist())
            assert found == list(range(30, 30 + len(found)))
            assert len(found) % 30 == 0, "a transaction in part"
            looks += 1
        thread.join()
    assert seen_ids(directory) == list(range(30, 30 + 30 * checkpoints))


def _at_once(calls: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


# -- whole checkpoints -----------------------------------------------------------------------------


def test_whole_checkpoints_are_those_that_all_subtasks_have_published(
    job: FileJob, directory: Path
) -> None:
    url = str(directory)
    committer = job.committer()
    first = [job.prepare(1, [subtask], subtask=subtask) for subtask in (0, 1)]
    second = [job.prepare(2, [10 + subtask], subtask=subtask) for subtask in (0, 1)]
    for committable in (*first, second[0]):
        committer.commit(committable)
    listed = list_committed_files(url, job.sink_id)
    assert len(listed.paths()) == 3
    assert listed.paths_of_whole_checkpoints() == []
    # The engine calls it when no retained checkpoint lists anything of checkpoint 1.
    committer.prune(CheckpointId(2))
    listed = list_committed_files(url, job.sink_id)
    assert len(listed.paths()) == 3
    whole = [pq.read_table(directory / path) for path in listed.paths_of_whole_checkpoints()]
    assert sorted(row["id"] for one in whole for row in one.to_pylist()) == [0, 1]
