"""Checkpoint storage on a real HDFS: lost replies, a NameNode that is killed, whole jobs."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.integration.word_proxy import WordProxy
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.ledger import assert_exactly_once, ledger
from tests.support.servers.hdfs import EmbeddedHdfs
from tests.unit.storage.storage_samples import decision

from onceflow import HdfsStorage, Job, JobState
from onceflow.cli.doctor.storage import check_storage, missing_directories
from onceflow.core.errors import ConfigError, Fenced, StorageError
from onceflow.core.storage import FileSystemStorage, checkpoint_storage
from onceflow.core.storage.filesystems import filesystem
from onceflow.core.storage.filesystems.bucket_settings import Patience
from onceflow.core.storage.filesystems.hdfs import HdfsFiles
from onceflow.core.storage.filesystems.webhdfs import HdfsSettings

pytestmark = pytest.mark.timeout(900)  # a JVM has to start, and the first time to be fetched

CREATION = "renameoptions=NONE"
PATIENT = Patience(request_timeout_s=30, retry_timeout_s=120)
IMPATIENT = Patience(request_timeout_s=2, retry_timeout_s=1)


@pytest.fixture(scope="module")
def hdfs() -> Iterator[EmbeddedHdfs]:
    server = EmbeddedHdfs().start(timeout_s=180)
    yield server
    server.stop()


@pytest.fixture
def path() -> str:
    return f"/{uuid.uuid4().hex}"


@pytest.fixture
def network(hdfs: EmbeddedHdfs) -> Iterator[WordProxy]:
    """A network before the NameNode that breaks on a word."""
    host, _, port = hdfs.url.removeprefix("webhdfs://").partition(":")
    proxy = WordProxy((host, int(port)))
    yield proxy
    proxy.close()


def files_at(url: str, patience: Patience = PATIENT, user: str = "root") -> HdfsFiles:
    return HdfsFiles(HdfsSettings(url, user, patience=patience))


def test_a_creation_whose_reply_is_lost_is_known_by_what_stands_there(
    hdfs: EmbeddedHdfs, network: WordProxy, path: str
) -> None:
    files = files_at(f"webhdfs://127.0.0.1:{network.port}{path}")
    network.lose_reply(CREATION)
    assert files.create_if_absent("log/1", b"mine") in (
        filesystem.Created(),
        filesystem.AlreadyExists(b"mine"),
    )
    assert network.resets == 1
    network.lose_reply(CREATION)
    assert files.create_if_absent("log/1", b"another's") == filesystem.AlreadyExists(b"mine")
    direct = files_at(f"{hdfs.url}{path}")
    assert (direct.read("log/1"), direct.list("log")) == (b"mine", ("1",))
    assert direct.list_unfinished("log") == ()


def test_a_creation_that_never_arrived_is_made_or_known_to_be_unknown(
    hdfs: EmbeddedHdfs, network: WordProxy, path: str
) -> None:
    files = files_at(f"webhdfs://127.0.0.1:{network.port}{path}")
    network.lose_request(CREATION)
    try:
        outcome = files.create_if_absent("log/1", b"mine")
    except filesystem.CreationUnknown:
        outcome = files.create_if_absent("log/1", b"mine")
    assert outcome in (filesystem.Created(), filesystem.AlreadyExists(b"mine"))
    assert files_at(f"{hdfs.url}{path}").read("log/1") == b"mine"


def test_a_log_in_hdfs_has_one_owner(hdfs: EmbeddedHdfs, path: str) -> None:
    storage = HdfsStorage(f"{hdfs.url}{path}", user="root")
    storage.open("job").check_creates()
    first = storage.open("job").log.claim("first")
    first.append(decision(1, first.attempt))
    storage.open("job").log.claim("second")
    with pytest.raises(Fenced, match="Attempt 2 .*owns the job"):
        first.append(decision(2, first.attempt))


def test_refusals_are_told_with_what_to_do(hdfs: EmbeddedHdfs, path: str) -> None:
    files_at(f"{hdfs.url}{path}").write("f", (b"x",))
    stranger = files_at(f"{hdfs.url}{path}", user="stranger")
    with pytest.raises(filesystem.StorageRefused, match=r"AccessControlException.*hdfs dfs -chown"):
        stranger.write("g", (b"x",))
    with pytest.raises(ConfigError, match="webhdfs://namenode:9870/path"):
        FileSystemStorage("hdfs://namenode/path")
    with pytest.raises(ConfigError, match="token holds a secret"):
        HdfsStorage(hdfs.url + path, token="plain")
    assert isinstance(checkpoint_storage(f"{hdfs.url}{path}"), HdfsStorage)


def test_the_doctor_finds_it_fit_and_leaves_nothing(
    hdfs: EmbeddedHdfs, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HADOOP_USER_NAME", "root")
    url = f"{hdfs.url}{path}"
    assert missing_directories(url) == ()
    first, *_ = check_storage(url, ())
    assert "creates if absent in" in str(first)
    assert files_at(url).list("") == ()


@pytest.mark.slow
def test_a_name_node_in_standby_or_gone_is_passed_over(hdfs: EmbeddedHdfs, path: str) -> None:
    alive = hdfs.url.removeprefix("webhdfs://")
    files = files_at(f"webhdfs://127.0.0.1:9,{alive}{path}")
    assert files.create_if_absent("log/1", b"mine") == filesystem.Created()
    with pytest.raises(StorageError, match="tried for 1 s"):
        files_at(f"webhdfs://127.0.0.1:9{path}", IMPATIENT).read("log/1")


def test_a_job_goes_on_after_a_killed_slot(
    cluster: AnyCluster,
    tmp_path: Path,
    hdfs: EmbeddedHdfs,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HADOOP_USER_NAME", "root")
    with job_in(hdfs, path, cluster, tmp_path) as job:
        kill_a_slot(job)


@pytest.mark.slow
def test_a_job_goes_on_after_a_killed_slot_and_a_killed_name_node(
    cluster: AnyCluster,
    tmp_path: Path,
    hdfs: EmbeddedHdfs,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HADOOP_USER_NAME", "root")
    with job_in(hdfs, path, cluster, tmp_path) as job:
        kill_a_slot(job)
        hdfs.kill()
        hdfs.start(timeout_s=120)
        job.wait_for(checkpoints=job.status().checkpoints_completed + 2)


@contextmanager
def job_in(
    hdfs: EmbeddedHdfs, path: str, cluster: AnyCluster, directory: Path
) -> Generator[Job, None, None]:
    """Run a job whose checkpoints are in `hdfs`; after the block its rows are there once."""
    source = CountingSource(20_000, pause_s=0.001, ends_with=str(directory / "read all"))
    storage = HdfsStorage(f"{hdfs.url}{path}", inline_threshold_bytes=100)
    pipeline, sink = ledger(cluster, directory, source, storage=storage)
    job = pipeline.start()
    yield job
    (directory / "read all").touch()
    assert job.wait(120).state is JobState.FINISHED
    assert_exactly_once(sink, source)


def kill_a_slot(job: Job) -> None:
    job.wait_for(checkpoints=2)
    attempt = job.status().attempt
    os.kill(job.status().slots[0].pid, signal.SIGKILL)
    job.wait_for(checkpoints=job.status().checkpoints_completed + 2)
    assert job.status().attempt > attempt
