"""Checkpoints, staged rows and files in Azure's storage, and by Google's interface.

Azure is Azurite, a server of Microsoft's. Google is a translation of its interface to a real S3
server, for none that can be had speaks it: `tests.support.google_front`.
"""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.integration.file_sink_kit import FileJob
from tests.integration.word_proxy import WordProxy
from tests.support.clouds import Cloud, cloud_of
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.ledger import assert_exactly_once, ledger
from tests.support.staged_sink import StagedSink
from tests.unit.storage.storage_samples import decision

from onceflow import Checkpointing, JobState, ObjectStorage, Pipeline, RocksDBBackend
from onceflow.cli.doctor.storage import check_storage
from onceflow.core.errors import ConfigError, StorageError
from onceflow.core.protocol.committables import AlreadyCommitted, Committed, Lost
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.storage.filesystems.bucket import BucketFiles
from onceflow.core.storage.filesystems.bucket_settings import (
    PART_BYTES_MIN,
    BucketSettings,
    Patience,
)
from onceflow.core.storage.filesystems.filesystem import (
    AlreadyExists,
    Created,
    CreateOutcome,
    CreationUnknown,
    StorageRefused,
)
from onceflow.sinks import FileSink

KINDS = ("azure", "google")
WORD = "the-word-that-breaks-the-network"
PATIENT = Patience(request_timeout_s=20, retry_timeout_s=60)
IMPATIENT = Patience(request_timeout_s=5, retry_timeout_s=2)
SMALL = 100
"""Bytes of state that are held inline: everything of interest becomes an object."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=KINDS)
def shared(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    """A server for all tests that do it no harm."""
    cloud = cloud_of(request.param)
    yield cloud
    cloud.close()


@pytest.fixture(params=KINDS)
def own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """A server that the test may kill; the environment leads there."""
    cloud = cloud_of(request.param)
    _lead_to(cloud, monkeypatch)
    yield cloud
    cloud.close()


@pytest.fixture
def bucket(shared: Cloud, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of an empty bucket; the environment leads there."""
    _lead_to(shared, monkeypatch)
    return shared.bucket(f"onceflow-{uuid.uuid4().hex[:16]}")


@pytest.fixture
def network(shared: Cloud, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[WordProxy]:
    """A network before the server that breaks on a word; the environment leads through it."""
    del bucket  # which leads past it
    proxy = WordProxy(("127.0.0.1", shared.port))
    _lead_to(shared, monkeypatch, proxy.port)
    yield proxy
    proxy.close()


def _lead_to(cloud: Cloud, monkeypatch: pytest.MonkeyPatch, port: int | None = None) -> None:
    for name, value in cloud.environment(port).items():
        monkeypatch.setenv(name, value)


def _files(url: str, patience: Patience = PATIENT) -> BucketFiles:
    return BucketFiles(BucketSettings(url, {}, PART_BYTES_MIN, 4, patience))


def _chunks(count: int) -> Iterator[bytes]:
    for number in range(count):
        yield number.to_bytes(4, "big") * 65_536


# --- creation -------------------------------------------------------------------------------------


def _created(files: BucketFiles, mine: bytes) -> CreateOutcome:
    """Return what became of the creation, asking again as long as nobody knows."""
    while True:
        with suppress(CreationUnknown):
            return files.create_if_absent("log/1", mine)


def test_of_drivers_that_create_one_record_at_once_one_wins(bucket: str) -> None:
    """Each has a client of its own, as each driver has."""
    outcomes: list[tuple[bytes, CreateOutcome]] = []
    start = threading.Barrier(6)

    def create(mine: bytes) -> None:
        start.wait(60)
        outcomes.append((mine, _created(_files(bucket), mine)))

    threads = [threading.Thread(target=create, args=(b"%d" % one,)) for one in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    winner = _files(bucket).read("log/1")
    assert winner is not None
    assert len(outcomes) == 6
    for mine, outcome in outcomes:
        if mine == winner:  # its reply may have been lost
            assert outcome in (Created(), AlreadyExists(winner))
        else:
            assert outcome == AlreadyExists(winner)
    ObjectStorage(f"{bucket}/x").open("ledger").check_creates()


@pytest.mark.slow
def test_a_creation_whose_reply_is_lost_is_known_by_what_stands_there(
    network: WordProxy, bucket: str
) -> None:
    files = _files(bucket)
    assert files.read("log/0") is None
    network.lose_reply(WORD)
    mine = f"attempt 1 {WORD}".encode()
    assert files.create_if_absent("log/1", mine) in (Created(), AlreadyExists(mine))
    assert network.resets == 1
    assert files.read("log/1") == mine
    # Somebody else's bytes are never taken for one's own.
    network.lose_reply(WORD)
    assert files.create_if_absent("log/1", f"attempt 2 {WORD}".encode()) == AlreadyExists(mine)
    assert (network.resets, files.read("log/1")) == (2, mine)


@pytest.mark.slow
def test_a_creation_that_never_arrived_is_made_or_known_to_be_unknown(
    network: WordProxy, bucket: str
) -> None:
    files = _files(bucket)
    network.lose_request(WORD)
    mine = f"attempt 1 {WORD}".encode()
    try:
        files.create_if_absent("log/1", mine)
    except StorageError:
        assert files.create_if_absent("log/1", mine) == Created()
    assert network.resets == 1
    assert files.read("log/1") == mine


@pytest.mark.slow
def test_a_decision_whose_reply_is_lost_is_in_the_log_once(network: WordProxy, bucket: str) -> None:
    storage = ObjectStorage(f"{bucket}/checkpoints").open("ledger")
    log = storage.log.claim("a driver")
    log.append(decision(0, log.attempt))
    network.lose_reply('"checkpoint":1')
    log.append(decision(1, log.attempt))
    assert network.resets == 1, "the reply to the decision was lost"
    log.append(decision(2, log.attempt))
    assert storage.log.read() == log.view
    assert [one.checkpoint for one in log.view.completed][-1] == CheckpointId(2)
    assert len(storage.log.sequences()) == 4


# --- large objects, and servers that die ----------------------------------------------------------


@pytest.mark.slow
def test_a_large_object_goes_in_parts_and_comes_back_whole(bucket: str) -> None:
    files = _files(bucket)
    assert files.write("large", _chunks(70)) == 70 * 262_144
    pieces = files.read_chunks("large")
    assert pieces is not None
    assert b"".join(pieces) == b"".join(_chunks(70))
    begun = BucketFiles(BucketSettings(bucket, {}, PART_BYTES_MIN, 1, PATIENT)).read_chunks("large")
    assert begun is not None
    next(begun)
    files.write("large", _chunks(71))  # another one than was begun
    with pytest.raises(StorageError):
        list(begun)


@pytest.mark.slow
def test_an_upload_whose_source_fails_shows_nothing(bucket: str) -> None:
    def fails() -> Iterator[bytes]:
        yield from _chunks(60)
        raise RuntimeError("the source is gone")

    files = _files(bucket)
    with pytest.raises(RuntimeError, match="the source is gone"):
        files.write("state/large", fails())
    assert files.list("state") == ()


@pytest.mark.slow
def test_a_server_killed_in_mid_upload_shows_nothing_and_the_next_upload_works(own: Cloud) -> None:
    bucket = own.bucket("own")

    def dies() -> Iterator[bytes]:
        for number, chunk in enumerate(_chunks(60)):
            if number == 40:
                own.server.kill()
            yield chunk

    with pytest.raises(StorageError, match=rf"cannot write {bucket}/state/large"):
        _files(bucket, IMPATIENT).write("state/large", dies())
    own.server.start()
    own.bucket("own")  # Azurite may have forgotten it
    files = _files(bucket)
    assert files.read("state/large") is None
    assert files.write("state/large", _chunks(60)) == 60 * 262_144
    assert files.size("state/large") == 60 * 262_144


@pytest.mark.slow
def test_an_upload_outlives_a_server_that_stands_still(own: Cloud) -> None:
    bucket = own.bucket("own")
    timers: list[threading.Timer] = []

    def pauses() -> Iterator[bytes]:
        for number, chunk in enumerate(_chunks(60)):
            if number == 40:
                own.server.pause()
                timers.append(threading.Timer(1.0, own.server.unpause))
                timers[0].start()
            yield chunk

    files = _files(bucket)
    files.write("state/large", pauses())
    timers[0].join(60)
    assert files.read("state/large") == b"".join(_chunks(60))


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_missing_bucket_and_refused_credentials_are_told_by_name(
    shared: Cloud, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = bucket.partition("://")[0]
    nowhere = _files(f"{scheme}://nowhere-{uuid.uuid4().hex[:8]}/x")
    for ask in (lambda: nowhere.create_if_absent("log/1", b"mine"), lambda: nowhere.read("log/1")):
        with pytest.raises(StorageRefused, match=r"create the (bucket|container) first"):
            ask()
    wrong = "bm90LXRoZS1rZXktb2YtdGhpcy1hY2NvdW50"
    monkeypatch.setenv(shared.secret, wrong)
    for call in ("create", "read"):
        with pytest.raises(StorageRefused, match=r"Auth\w+: .*; .*(correct it|renew)") as refused:
            files = _files(bucket)
            _ = files.read("log/1") if call == "read" else files.create_if_absent("log/1", b"mine")
        assert wrong not in str(refused.value)


@pytest.mark.slow
def test_an_endpoint_may_be_named_beside_the_url_and_secrets_by_reference_only(
    shared: Cloud, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = shared.environment()
    endpoint = next(value for value in environment.values() if value.startswith("http://"))
    for name in environment:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LAKE_SECRET", environment[shared.secret])
    names = {name: name.removeprefix("AZURE_STORAGE_").lower() for name in environment}
    names["GOOGLE_BEARER_TOKEN"] = "bearer_token"
    options = {names[shared.secret]: "${env:LAKE_SECRET}"}
    if "AZURE_STORAGE_ACCOUNT_NAME" in environment:
        options["account_name"] = environment["AZURE_STORAGE_ACCOUNT_NAME"]
    ObjectStorage(bucket, endpoint=endpoint, options=options).open("ledger").check_creates()
    with pytest.raises(ConfigError, match="holds a secret"):
        ObjectStorage(bucket, endpoint=endpoint, options={names[shared.secret]: "hunter2-of-all"})


@pytest.mark.slow
def test_the_doctor_asks_what_checkpoints_will_ask_and_leaves_nothing(bucket: str) -> None:
    (finding,) = check_storage(f"{bucket}/checkpoints", ())
    assert "creates if absent in" in str(finding)
    assert _files(bucket).visible_files() == []


# --- whole jobs, staged rows, files ---------------------------------------------------------------


@pytest.mark.slow
def test_a_job_with_its_state_there_survives_kills(
    cluster: AnyCluster, tmp_path: Path, bucket: str
) -> None:
    source = CountingSource(
        20_000, pause_s=0.001, accounts=3_000, ends_with=str(tmp_path / "read all")
    )
    storage = ObjectStorage(f"{bucket}/checkpoints", inline_threshold_bytes=SMALL)
    pipeline, sink = ledger(
        cluster,
        tmp_path,
        source,
        storage=storage,
        backend=RocksDBBackend(incremental=True),
        interval=0.5,
    )
    job = pipeline.start()
    for completed in (2, 4):
        job.wait_for(checkpoints=completed)
        os.kill(job.status().slots[0].pid, signal.SIGKILL)
    job.wait_for(checkpoints=6)
    (tmp_path / "read all").touch()
    assert job.wait(120).state is JobState.FINISHED
    assert job.status().restores == 2
    assert_exactly_once(sink, source)


@pytest.mark.slow
def test_rows_are_staged_there_and_applied_once(
    cluster: AnyCluster, tmp_path: Path, bucket: str
) -> None:
    source = CountingSource(20_000, pause_s=0.001, ends_with=str(tmp_path / "read all"))
    sink = StagedSink(str(tmp_path / "target.db"))
    pipeline = Pipeline(
        cluster,
        name="staged",
        parallelism=2,
        checkpointing=Checkpointing(storage=f"{bucket}/checkpoints", interval=0.5),
    )
    pipeline.read(source, uid="records").write(sink, uid="target")
    job = pipeline.start()
    job.wait_for(checkpoints=2)
    os.kill(job.status().slots[0].pid, signal.SIGKILL)
    job.wait_for(checkpoints=4)
    (tmp_path / "read all").touch()
    assert job.wait(120).state is JobState.FINISHED
    assert sink.ids() == list(range(source.records))
    assert _files(f"{bucket}/checkpoints").list("staged/staged/staged.target") == ()


@pytest.mark.slow
def test_files_are_seen_after_their_commit_and_nothing_is_left_behind(
    bucket: str, tmp_path: Path
) -> None:
    sink = FileSink(f"{bucket}/lake", partition_by=("account",))
    files = _files(f"{bucket}/lake")

    def seen() -> list[int]:
        found: list[int] = []
        for path in files.visible_files():
            data = files.read(path)
            assert data is not None
            (tmp_path / "one.parquet").write_bytes(data)
            found += pq.read_table(tmp_path / "one.parquet").column("id").to_pylist()
        return sorted(found)

    with FileJob(sink) as job:
        job.check()
        first, second = job.prepare(1, range(9)), job.prepare(2, range(9, 18))
        assert seen() == []
        committer = job.committer()
        assert committer.commit(first) == Committed()
        assert committer.commit(first) == AlreadyCommitted()
        committer.abort(second)
        assert isinstance(committer.commit(second), Lost)
        assert seen() == list(range(9))
    assert files.list("_onceflow/job.files/open") == ()
