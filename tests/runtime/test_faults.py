"""Bad input and broken surroundings: a clear error, no row lost, none doubled."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.clusters import ON_BOTH, AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.forgetful_sink import ForgetfulSink
from tests.support.ledger import assert_exactly_once, ledger, ledger_process
from tests.support.small_disk import grow_disk, mount_small_disk
from tests.support.waiting import await_true

from onceflow import FileSystemStorage, FixedDelay, HeapBackend, JobState, NoRestart, RocksDBBackend
from onceflow.core import errors
from onceflow.core.protocol.checkpoints.snapshots import handles_of

REPOSITORY = Path(__file__).parents[2]


@ON_BOTH
def test_a_null_key_is_refused_by_name_and_not_retried(cluster: AnyCluster, tmp_path: Path) -> None:
    source = CountingSource(100)
    pipeline, sink = ledger(cluster, tmp_path / "unused", source)
    records = pipeline.read(source, uid="more").map(
        lambda r: r | {"account": None if r["id"] == 7 else r["account"]}
    )
    from onceflow import count

    records.key_by("account").running(n=count(), uid="counts").write(sink, uid="counted")
    with pytest.raises(errors.BadRecord, match=r"key_by\('account'\).*'id': 7"):
        pipeline.run(60)


def test_a_key_column_that_cannot_be_hashed_is_refused_when_it_is_named(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(100)
    pipeline, _ = ledger(cluster, tmp_path / "unused", source)
    records = pipeline.read(source, uid="more").map(
        lambda record: record, schema="id BIGINT, ratio DOUBLE, tags ARRAY<STRING>"
    )
    for column in ("ratio", "tags"):
        with pytest.raises(
            errors.ConfigError, match=f"key column '{column}' has type .* cannot be a key"
        ):
            records.key_by("id", column)


@pytest.mark.servers
def test_of_two_drivers_of_one_job_the_older_stops_and_no_row_is_doubled(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(40_000, pause_s=0.01)
    # The older one's input never ends: it must be told to stop.
    endless = replace(source, ends_with=str(tmp_path / "never"))
    pipeline, sink = ledger(cluster, tmp_path, endless)
    older = pipeline.start()
    older.wait_for(checkpoints=2)
    with ledger_process(cluster, tmp_path, source) as newer:
        with pytest.raises(errors.Fenced, match="Attempt 2 .* owns the job"):
            older.wait(120)
        assert newer.wait(120) == 0
    assert_exactly_once(sink, source)


def test_a_driver_that_was_overtaken_in_recovery_says_so_when_its_sink_has_forgotten_its_commits(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    """The answer "lost" of its sink is true only for its own old view of the log."""
    source = CountingSource(6_000)
    plain = ForgetfulSink(str(tmp_path / "out"))
    half = source.held_in_the_middle()
    first = ledger(cluster, tmp_path, half, sink=plain, interval=None)[0].start()
    # One checkpoint, with rows: an empty one after it would leave nothing to be lost.
    first.wait_for(records=half.records)
    first.checkpoint()
    first.wait_for(checkpoints=1)
    first.cancel()
    held = tmp_path / "held"
    older = ledger(cluster, tmp_path, source, sink=replace(plain, held=str(held)))[0].start()
    await_true(lambda: held.with_suffix(".waits").exists() and len(older.status().slots) == 2)
    # Later checkpoints have the sink forget the proof of the first one.
    end = tmp_path / "end"
    rest = replace(source, ends_with=str(end))
    newer = ledger(cluster, tmp_path, rest, sink=plain, interval=None)[0].start()
    for checkpoints in (1, 2):
        newer.checkpoint()
        newer.wait_for(checkpoints=checkpoints)
    end.touch()
    assert newer.wait(60).state is JobState.FINISHED
    assert list((tmp_path / "out" / "forgotten").iterdir()) != []
    held.touch()
    with pytest.raises(errors.Fenced, match="attempt 2 is fenced"):
        older.wait(60)
    plain.remember()
    assert_exactly_once(plain, source)


Damage = Callable[[Path], None]


def _flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _cut_off_a_byte(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("checkpoints", [1, 3], ids=["own-file", "shared-file"])
@pytest.mark.parametrize(
    "damage",
    [
        _flip_a_bit,
        pytest.param(_cut_off_a_byte, marks=pytest.mark.slow),
        pytest.param(Path.unlink, marks=pytest.mark.slow),
    ],
)
def test_a_damaged_state_file_is_refused_by_name(
    cluster: AnyCluster, tmp_path: Path, damage: Damage, checkpoints: int
) -> None:
    """The file is one of the last checkpoint alone, or one that later checkpoints share."""
    source = CountingSource(20_000, accounts=5_000)
    _run_with_checkpoints(cluster, tmp_path, source, checkpoints)
    file = _find_largest_state_file(tmp_path / "checkpoints")
    # The first checkpoint of a heap writes files of its own. With nothing changed since, the
    # second one writes files for others to share, and later ones name those.
    assert file.parent.name == "shared" if checkpoints > 1 else "chk-1" in file.parts
    damage(file)
    pipeline, sink = ledger(cluster, tmp_path, source, backend=HeapBackend())
    with pytest.raises(errors.CheckpointCorrupt, match=file.name):
        pipeline.run(60)
    assert len(sink.rows()) == source.records


def _run_with_checkpoints(
    cluster: AnyCluster, directory: Path, source: CountingSource, checkpoints: int
) -> None:
    """Run the job to its end, with so many checkpoints, all of them after the last record."""
    end = directory / "end"
    held = replace(source, ends_with=str(end))
    pipeline, _ = ledger(
        cluster, directory, held, interval=None, backend=HeapBackend(), inline_threshold_bytes=1
    )
    job = pipeline.start()
    job.wait_for(records=source.records)
    for number in range(1, checkpoints):
        job.checkpoint()
        job.wait_for(checkpoints=number)
    end.touch()
    assert job.wait(60).checkpoints_completed == checkpoints


def _find_largest_state_file(storage: Path) -> Path:
    """Return the largest file that the last checkpoint of the job names."""
    log = FileSystemStorage(str(storage)).open("ledger").log.read()
    handles = handles_of(log.completed[-1].snapshots)
    return storage / "ledger" / max(handles, key=lambda handle: handle.size_bytes).path


def test_a_damaged_decision_log_is_refused_by_name(cluster: AnyCluster, tmp_path: Path) -> None:
    source = CountingSource(500)
    ledger(cluster, tmp_path, source)[0].run(60)
    record = max((tmp_path / "checkpoints").rglob("log/*.json"))
    data = bytearray(record.read_bytes())
    data[len(data) // 2] ^= 1
    record.write_bytes(data)
    pipeline, sink = ledger(cluster, tmp_path, source)
    with pytest.raises(errors.CheckpointCorrupt, match=record.name):
        pipeline.run(60)
    assert_exactly_once(sink, source)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    disk = tmp_path / "checkpoints"
    with mount_small_disk(disk, "512k"):
        yield disk


def test_a_full_disk_fails_checkpoints_and_not_rows(
    cluster: AnyCluster, tmp_path: Path, small_disk: Path
) -> None:
    """The job ends by its own rule; with space again it goes on, each row once."""
    source = CountingSource(20_000, accounts=20_000)
    filler = small_disk / "filler"
    slowly = replace(source, pause_s=0.05)
    pipeline, sink = ledger(cluster, tmp_path, slowly, restart=NoRestart(), interval=0.1)
    job = pipeline.start()
    job.wait_for(checkpoints=2)
    with pytest.raises(OSError, match="No space"), filler.open("wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    with pytest.raises((errors.CheckpointError, errors.StorageError), match=r"(?i)disk|space"):
        job.wait(60)
    filler.unlink()
    grow_disk(small_disk, "64m")
    pipeline, sink = ledger(cluster, tmp_path, source)
    assert pipeline.run(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)


def test_a_full_scratch_disk_is_named_with_the_setting_that_moves_the_state(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    """The job ends by its own rule; with space again it goes on, each row once."""
    source = CountingSource(20_000, accounts=20_000)
    disk = tmp_path / "state"
    backend = RocksDBBackend(directory=str(disk), cache_entries=1_000)
    with mount_small_disk(disk, "300k"):
        slowly = replace(source, pause_s=0.01)
        pipeline, _ = ledger(cluster, tmp_path, slowly, backend=backend, restart=NoRestart())
        with pytest.raises(errors.StateError) as failed:
            pipeline.run(60)
        message = str(failed.value)
        assert re.search(rf"{disk}.*No space left on device", message)
        assert re.search(rf"the disk of {disk}\S* has 0\.\d MiB of 0\.3 MiB free", message)
        assert "RocksDBBackend(directory=…)" in message
        grow_disk(disk, "64m")
        pipeline, sink = ledger(cluster, tmp_path, source, backend=backend)
        assert pipeline.run(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)


def test_a_scratch_disk_without_room_for_a_restore_is_named(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(20_000, accounts=20_000)
    endless = replace(source, ends_with=str(tmp_path / "never"))
    pipeline, _ = ledger(cluster, tmp_path, endless, backend=RocksDBBackend())
    job = pipeline.start()
    job.wait_for(checkpoints=10)
    job.stop(60)
    disk = tmp_path / "state"
    backend = RocksDBBackend(directory=str(disk))
    with mount_small_disk(disk, "100k"):
        pipeline, _ = ledger(cluster, tmp_path, source, backend=backend, restart=NoRestart())
        with pytest.raises(
            (errors.StateError, errors.StorageError),
            match=rf"{disk}.*RocksDBBackend\(directory=…\)",
        ):
            pipeline.run(60)
    pipeline, sink = ledger(cluster, tmp_path, source, backend=RocksDBBackend())
    assert pipeline.run(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)


def test_state_whose_operator_is_gone_is_not_dropped_silently(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(500)
    ledger(cluster, tmp_path, source)[0].run(60)
    from onceflow import Checkpointing, Pipeline

    pipeline = Pipeline(
        cluster, name="ledger", checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"))
    )
    stream = pipeline.read(source, uid="records")
    stream.write(DirectorySink(str(tmp_path / "out")), uid="ledger")
    with pytest.raises(errors.StateIncompatible, match="state of balance"):
        pipeline.run(60)


def test_storage_that_cannot_be_written_is_named_before_anything_runs(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").write_text("a file, not a directory")
    pipeline, _ = ledger(
        cluster, tmp_path, CountingSource(10), restart=FixedDelay(attempts=1, delay_s=0)
    )
    with pytest.raises((errors.ConfigError, errors.StorageError), match="checkpoints"):
        pipeline.run(60)
