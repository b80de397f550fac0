"""Ledger mode and changes by key while servers die, hang, fill up, and connections break."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.integration.postgres_sink_kit import Job, await_lock_wait, ids_in, prepared, query
from tests.integration.sink_kit import rows
from tests.integration.word_proxy import WordProxy

from onceflow.core.errors import PreCommitFailed, SinkError
from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    CommitOutcome,
    Committed,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.storage import FileStagingArea
from onceflow.integration.servers import EmbeddedPostgres
from onceflow.integration.servers.postgres import Launcher
from onceflow.sinks import PostgresSink
from onceflow.sinks.sql import ChangeBuffer


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres() as server:
        yield server


@pytest.fixture
def url(server: EmbeddedPostgres, request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of a new database on the server that may be killed."""
    name = f"f{abs(hash(request.node.name)):x}"
    query(server.url, f"CREATE DATABASE {name}")
    yield server.database_url(name)
    for gid in prepared(server.database_url(name)):
        query(server.database_url(name), f"ROLLBACK PREPARED '{gid}'")
    query(server.url, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def staging(tmp_path: Path) -> FileStagingArea:
    return FileStagingArea.in_directory(str(tmp_path), "job.ledger")


def _ledger(url: str, staging: FileStagingArea, **settings: Any) -> Job:
    usual: dict[str, Any] = {"create": True, "commit_mode": "ledger", **settings}
    return Job(PostgresSink(url, table="ledger", **usual), staging=staging)


@pytest.fixture
def proxy(server: EmbeddedPostgres) -> Iterator[WordProxy]:
    proxy = WordProxy(("127.0.0.1", server.port))
    yield proxy
    proxy.close()


def _through(proxy: WordProxy, url: str) -> str:
    return f"postgresql://postgres@127.0.0.1:{proxy.port}/{url.rpartition('/')[2]}"


# The BEGIN has the word too, as READ COMMITTED.
_COMMIT = "COMMIT\0"


def test_commit_that_landed_but_was_reported_failed_is_not_applied_twice(
    proxy: WordProxy, url: str, staging: FileStagingArea
) -> None:
    with _ledger(url, staging) as job, _ledger(_through(proxy, url), staging) as remote:
        committable = job.check().prepare(1, [1, 2])
        committer = remote.committer()
        proxy.lose_reply(_COMMIT)
        assert committer.commit(committable) == AlreadyCommitted()
        assert proxy.resets == 1
        assert committer.commit(committable) == AlreadyCommitted()
        assert list(committer.in_doubt()) == []
    assert ids_in(url) == [1, 2]


def test_commit_that_never_arrived_is_done_again(
    proxy: WordProxy, url: str, staging: FileStagingArea
) -> None:
    with _ledger(url, staging) as job, _ledger(_through(proxy, url), staging) as remote:
        committable = job.check().prepare(1, [1, 2])
        proxy.lose_request(_COMMIT)
        assert remote.committer().commit(committable) == Committed()
        assert proxy.resets == 1
    assert ids_in(url) == [1, 2]


@pytest.mark.parametrize("arrives", [True, False])
def test_connection_that_breaks_within_the_apply_changes_nothing(
    proxy: WordProxy, url: str, staging: FileStagingArea, arrives: bool
) -> None:
    with _ledger(url, staging) as job, _ledger(_through(proxy, url), staging) as remote:
        committable = job.check().prepare(1, [1, 2])
        (proxy.lose_reply if arrives else proxy.lose_request)("onceflow_ledger")
        assert remote.committer().commit(committable) == Committed()
        assert proxy.resets == 1
    assert ids_in(url) == [1, 2]


def test_abort_whose_reply_was_lost_is_done_again(
    proxy: WordProxy, url: str, staging: FileStagingArea
) -> None:
    with _ledger(url, staging) as job, _ledger(_through(proxy, url), staging) as remote:
        committable = job.check().prepare(1, [1])
        proxy.lose_reply("onceflow_ledger")
        assert remote.committer().abort(committable) == Aborted()
        assert proxy.resets == 1
        assert list(job.committer().in_doubt()) == []
    assert ids_in(url) == []


def test_staged_rows_wait_for_a_server_that_is_down(
    server: EmbeddedPostgres, url: str, staging: FileStagingArea
) -> None:
    with _ledger(url, staging, connect_timeout_s=0.5) as job:
        writer = job.check().writer()
        writer.write(rows([1]))
        server.kill()
        try:
            committable = writer.pre_commit(CheckpointId(1))
            assert committable is not None, "nothing of the server is needed to stage rows"
            assert isinstance(job.committer().commit(committable), RetryLater)
        finally:
            server.start()
        assert job.committer().commit(committable) == Committed()
    assert ids_in(url) == [1]


def test_frozen_server_does_not_hang_the_committer(
    server: EmbeddedPostgres, url: str, staging: FileStagingArea
) -> None:
    with _ledger(url, staging, statement_timeout_s=0.5, connect_timeout_s=2.0) as job:
        first, second = job.check().prepare(1, [1]), job.prepare(2, [2])
        committer = job.committer()
        assert committer.commit(first) == Committed()
        began = time.monotonic()
        server.pause()
        try:
            assert isinstance(committer.commit(second), Unknown)
        finally:
            server.unpause()
        assert time.monotonic() - began < 15
        outcome = _until_settled(lambda: committer.commit(second))
        assert outcome in (Committed(), AlreadyCommitted())
    assert ids_in(url) == [1, 2]


def test_committed_rows_outlive_the_server(
    server: EmbeddedPostgres, url: str, staging: FileStagingArea
) -> None:
    with _ledger(url, staging) as job:
        committable = job.check().prepare(1, [1])
        assert job.committer().commit(committable) == Committed()
        server.kill()
        server.start()
        assert job.committer().commit(committable) == AlreadyCommitted()
    assert ids_in(url) == [1]


def _by_key(url: str, staging: FileStagingArea, mode: str) -> Job:
    return _ledger(url, staging, commit_mode=mode, write_mode="upsert", primary_key=("id",))


def _entangled(url: str, act: Callable[[], object]) -> object:
    """Return what `act` returns, which puts 1 before 2, while another session does 2 before 1.

    Who waits longer than its deadlock timeout is the victim, and the other session has a long one.
    """
    with psycopg.connect(url) as other, ThreadPoolExecutor(2) as pool:
        other.execute("SET deadlock_timeout = '60s'")
        other.execute("UPDATE ledger SET amount = 0 WHERE id = 2")
        acting = pool.submit(act)
        await_lock_wait(url)
        waiting = pool.submit(other.execute, "UPDATE ledger SET amount = 0 WHERE id = 1")
        try:
            return acting.result(30)
        finally:
            waiting.result(30)
            other.rollback()


def test_deadlock_victim_in_pre_commit_fails_the_checkpoint_and_leaves_nothing(
    url: str, staging: FileStagingArea
) -> None:
    with _by_key(url, staging, "two_phase") as job:
        job.check().committer().commit(job.prepare(1, [1, 2]))
        writer = job.writer()
        writer.write(rows([2, 1]))
        with pytest.raises(PreCommitFailed, match=r"deadlock detected.*40P01"):
            _entangled(url, lambda: writer.pre_commit(CheckpointId(2)))
        assert prepared(url) == []
        job.check(2).committer(2).commit(job.prepare(2, [1, 2, 3], attempt=2))
    assert ids_in(url) == [1, 2, 3]


def test_deadlock_victim_in_commit_is_committed_later(url: str, staging: FileStagingArea) -> None:
    with _by_key(url, staging, "ledger") as job:
        committer = job.check().committer()
        committer.commit(job.prepare(1, [1, 2]))
        committable = job.prepare(2, [2, 1, 3])
        outcome = _entangled(url, lambda: committer.commit(committable))
        assert isinstance(outcome, RetryLater)
        assert "deadlock detected" in outcome.reason
        assert ids_in(url) == [1, 2]
        assert committer.commit(committable) == Committed()
    assert ids_in(url) == [1, 2, 3]


class _TinyDisk(Launcher):
    """Runs the server in a mount namespace in which one directory is a file system of 4 MB."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def prefix(self) -> tuple[str, ...]:
        mount = f"mount -t tmpfs -o size=4m,mode=0700 tiny '{self._directory}'"
        inner = "exec unshare --user --map-user=1000 --map-group=1000"
        return (
            "unshare", "--user", "--map-root-user", "--mount",
            "sh", "-c", f'{mount} && {inner} "$@"', "sh",
        )  # fmt: skip

    def allowed(self) -> bool:
        if shutil.which("unshare") is None:
            return False
        done = subprocess.run([*self.prefix(), "true"], capture_output=True, timeout=10)
        return done.returncode == 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A server whose tablespace `tiny` is nearly full."""
    directory = tmp_path_factory.mktemp("tiny")
    launcher = _TinyDisk(directory)
    if not launcher.allowed():
        pytest.skip("this kernel lets nobody mount a file system of their own")
    with EmbeddedPostgres(launcher=launcher) as server:
        query(server.url, f"CREATE TABLESPACE tiny LOCATION '{directory}'")
        yield server


@pytest.mark.parametrize("mode", ["two_phase", "ledger"])
def test_full_disk_fails_for_now_and_loses_nothing(
    tiny: EmbeddedPostgres, staging: FileStagingArea, mode: str
) -> None:
    name = f"full_{mode}"
    query(tiny.url, f"CREATE DATABASE {name}")
    url = tiny.database_url(name)
    many = range(100_000)
    with _ledger(url, staging, commit_mode=mode, create=False) as job:
        query(url, "CREATE TABLE ledger (id bigint, account text, amount bigint) TABLESPACE tiny")
        committer = job.check().committer()
        assert committer.commit(job.prepare(1, [1])) == Committed()
        if mode == "two_phase":
            with pytest.raises(SinkError, match=r"No space left on device.*53100"):
                job.prepare(2, many)
        else:
            outcome = committer.commit(job.prepare(2, many))
            assert isinstance(outcome, RetryLater)
            assert "No space left on device" in outcome.reason
        assert ids_in(url) == [1]
        assert prepared(url) == []
        # What the operator does: more room. The next attempt, or the next try, goes on.
        query(url, "ALTER TABLE ledger SET TABLESPACE pg_default")
        if mode == "two_phase":
            job.check(2).prepare(2, many, attempt=2)
            committer = job.committer(2)
        (committable,) = committer.in_doubt()
        assert committer.commit(committable) == Committed()
    assert query(url, "SELECT count(*), count(DISTINCT id) FROM ledger") == [(100_001, 100_000)]


def test_writer_of_changes_that_loses_its_connection_between_barriers_goes_on(
    server: EmbeddedPostgres, url: str, staging: FileStagingArea
) -> None:
    """Nothing of them is at the server before the barrier."""
    with _by_key(url, staging, "two_phase") as job:
        writer = job.check().writer()
        writer.write(rows([1]))
        server.restart()
        writer.write(rows([2]))
        committable = writer.pre_commit(CheckpointId(1))
        assert committable is not None
        assert job.committer().commit(committable) == Committed()
    assert ids_in(url) == [1, 2]


def test_more_changes_than_fit_into_memory_are_applied_once(
    url: str, staging: FileStagingArea, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[object] = []
    opened: Any = tempfile.TemporaryFile

    def open_counted(**given: Any) -> Any:
        files.append(given)
        return opened(**given)

    defaults: Any = ChangeBuffer.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "memory_bytes_max", 50_000)
    monkeypatch.setattr(tempfile, "TemporaryFile", open_counted)
    with _by_key(url, staging, "two_phase") as job:
        writer = job.check().writer()
        for start in range(0, 40_000, 5_000):
            writer.write(rows(range(start, start + 10_000)))
        committable = writer.pre_commit(CheckpointId(1))
        assert committable is not None
        assert job.committer().commit(committable) == Committed()
    assert len(files) > 3, "they did not fit"
    assert ids_in(url) == list(range(45_000))


def _until_settled(ask: Callable[[], CommitOutcome]) -> CommitOutcome:
    deadline = time.monotonic() + 60
    while True:
        outcome = ask()
        if not isinstance(outcome, (RetryLater, Unknown)) or time.monotonic() > deadline:
            return outcome
        time.sleep(0.05)
