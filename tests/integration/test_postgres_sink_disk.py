"""The Postgres sink while the server's disk is full: a file system in a namespace of its own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from tests.integration.postgres_sink_kit import Job, ids_in, prepared, query

from onceflow.core.errors import SinkError
from onceflow.core.protocol.committables import Committed, RetryLater
from onceflow.core.storage import FileStagingArea
from onceflow.integration.servers import EmbeddedPostgres
from onceflow.integration.servers.postgres import Launcher
from onceflow.sinks import PostgresSink


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
    tiny: EmbeddedPostgres, tmp_path: Path, mode: Literal["two_phase", "ledger"]
) -> None:
    staging = FileStagingArea.in_directory(str(tmp_path), "job.ledger")
    name = f"full_{mode}"
    query(tiny.url, f"CREATE DATABASE {name}")
    url = tiny.database_url(name)
    many = range(100_000)
    sink = PostgresSink(url, table="ledger", commit_mode=mode)
    with Job(sink, staging=staging) as job:
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
