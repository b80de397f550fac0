"""The MySQL sink while the server's disk is full: a real file system, in a namespace of its own."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import pytest
from tests.integration.mysql_sink_kit import Job, ids_in, prepared, query

from onceflow.core.errors import SinkError
from onceflow.core.protocol.committables import Committed, RetryLater
from onceflow.core.storage import FileStagingArea
from onceflow.integration.servers import EmbeddedMariaDB, EmbeddedMySQL
from onceflow.sinks import MySQLSink


def _within(directory: Path) -> list[str]:
    """Return what runs a command where `directory` is a file system of 16 MB."""
    where = shlex.quote(str(directory))
    script = f'mount -t tmpfs -o size=16m,mode=0700 tiny {where} && exec "$@"'
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]


class _TinyMySQL(EmbeddedMySQL):
    """Has one directory for tables that is small."""

    full: Path

    def _command(self) -> Sequence[str | Path]:
        return [*_within(self.full), *super()._command(), "--user=root",
                f"--innodb-directories={self.full}"]  # fmt: skip


class _TinyMariaDB(EmbeddedMariaDB):
    """Has one directory for tables that is small."""

    full: Path

    def _command(self) -> Sequence[str | Path]:
        return [*_within(self.full), *super()._command(), "--user=root"]


_Tiny = _TinyMySQL | _TinyMariaDB


@pytest.fixture(scope="module", params=[_TinyMySQL, _TinyMariaDB])
def tiny(request: pytest.FixtureRequest) -> Iterator[_Tiny]:
    with tempfile.TemporaryDirectory(prefix="onceflow-tiny-") as name:
        directory = Path(name).resolve()
        if (
            shutil.which("unshare") is None
            or subprocess.run(
                [*_within(directory), "true"], capture_output=True, timeout=10, check=False
            ).returncode
        ):
            pytest.skip("this kernel lets nobody mount a file system of their own")
        server: _Tiny = request.param()
        server.full = directory
        with server:
            yield server


@pytest.mark.parametrize("mode", ["two_phase", "ledger"])
def test_full_disk_fails_for_now_and_loses_nothing(
    tiny: _Tiny, tmp_path: Path, mode: Literal["two_phase", "ledger"]
) -> None:
    staging = FileStagingArea.in_directory(str(tmp_path), "job.ledger")
    query(tiny.url, f"CREATE DATABASE full_{mode}")
    url, many = tiny.database_url(f"full_{mode}"), range(100_000)
    query(
        url,
        "CREATE TABLE ledger (id bigint, account text, amount bigint) "
        f"DATA DIRECTORY = '{tiny.full}'",
    )
    filler = Path(f"/proc/{tiny.pid}/root{tiny.full}/filler")
    # 4 MB are left. With half of it MariaDB 10.11 does not refuse the rows, but crashes.
    filler.write_bytes(bytes(12 << 20))
    with Job(MySQLSink(url, table="ledger", commit_mode=mode), staging=staging) as job:
        committer = job.check().committer()
        assert committer.commit(job.prepare(1, [1])) == Committed()
        if mode == "two_phase":
            with pytest.raises(SinkError, match=r"ledger' is full.*1114"):
                job.prepare(2, many)
        else:
            outcome = committer.commit(job.prepare(2, many))
            assert isinstance(outcome, RetryLater)
            assert "ledger' is full" in outcome.reason
        assert ids_in(url) == [1]
        assert prepared(url) == []
        # What the operator does. The next attempt, or the next try, goes on.
        filler.unlink()
        if mode == "two_phase":
            job.check(2).prepare(2, many, attempt=2)
            committer = job.committer(2)
        (committable,) = committer.in_doubt()
        assert committer.commit(committable) == Committed()
    assert query(url, "SELECT COUNT(*), COUNT(DISTINCT id) FROM ledger") == [(100_001, 100_000)]
    query(url, "DROP TABLE ledger")
