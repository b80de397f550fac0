"""The sinks while the server's disk is full: a real file system, in a namespace of its own."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from tests.integration.sql.databases import Database, SqlJob, SqlServer

from onceflow.core.errors import SinkError
from onceflow.core.protocol.committables import Committed, RetryLater
from onceflow.core.storage import FileStagingArea
from onceflow.integration.servers import EmbeddedMariaDB, EmbeddedMySQL, EmbeddedPostgres
from onceflow.integration.servers.postgres import Launcher

_AS_SOMEBODY = "unshare --user --map-user=1000 --map-group=1000"


def _within(directory: Path, also: str = "") -> tuple[str, ...]:
    """Return what runs a command where `directory` is a file system of 16 MB."""
    where = shlex.quote(str(directory))
    script = f'mount -t tmpfs -o size=16m,mode=0700 tiny {where} && exec {also} "$@"'
    return ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh")


def _postgres(directory: Path) -> EmbeddedPostgres:
    class Within(Launcher):
        def prefix(self) -> tuple[str, ...]:
            return _within(directory, _AS_SOMEBODY)

    return EmbeddedPostgres(launcher=Within())


def _mysql(directory: Path) -> EmbeddedMySQL:
    class Tiny(EmbeddedMySQL):
        def _command(self) -> Sequence[str | Path]:
            known = f"--innodb-directories={directory}"
            return [*_within(directory), *super()._command(), "--user=root", known]

    return Tiny()


def _mariadb(directory: Path) -> EmbeddedMariaDB:
    class Tiny(EmbeddedMariaDB):
        def _command(self) -> Sequence[str | Path]:
            return [*_within(directory), *super()._command(), "--user=root"]

    return Tiny()


@dataclass(frozen=True)
class _Dialect:
    server: Callable[[Path], SqlServer]
    """Makes a server that has one small directory for tables, not started."""
    place: str
    """What a CREATE TABLE ends with so that the table is in that directory."""
    said: str
    """What is said when it is full."""
    code: str
    before: tuple[str, ...] = ()
    """What to tell the server of the directory."""
    also: str = ""
    """What else runs it."""


_DIALECTS = {
    "postgres": _Dialect(
        _postgres,
        "TABLESPACE tiny",
        "No space left on device",
        "53100",
        before=("CREATE TABLESPACE tiny LOCATION '{directory}'",),
        also=_AS_SOMEBODY,
    ),
    "mysql": _Dialect(_mysql, "DATA DIRECTORY = '{directory}'", "ledger' is full", "1114"),
    "mariadb": _Dialect(_mariadb, "DATA DIRECTORY = '{directory}'", "ledger' is full", "1114"),
}


@dataclass(frozen=True)
class _Tiny:
    """A server and its small directory."""

    server: SqlServer
    directory: Path
    dialect: _Dialect

    @property
    def filler(self) -> Path:
        return Path(f"/proc/{self.server.pid}/root{self.directory}/filler")


@pytest.fixture(scope="module")
def tiny(kind: type[Database]) -> Iterator[_Tiny]:
    with tempfile.TemporaryDirectory(prefix="onceflow-tiny-") as name:
        directory, dialect = Path(name).resolve(), _DIALECTS[kind.name]
        tried = [*_within(directory, dialect.also), "true"]
        if (
            shutil.which("unshare") is None
            or subprocess.run(tried, capture_output=True, timeout=10, check=False).returncode
        ):
            pytest.skip("this kernel lets nobody mount a file system of their own")
        with dialect.server(directory) as server:
            for statement in dialect.before:
                kind(server.url).query(statement.format(directory=directory))
            yield _Tiny(server, directory, dialect)


@pytest.mark.parametrize("mode", ["two_phase", "ledger"])
def test_full_disk_fails_for_now_and_loses_nothing(
    kind: type[Database], tiny: _Tiny, tmp_path: Path, mode: Literal["two_phase", "ledger"]
) -> None:
    staging = FileStagingArea.in_directory(str(tmp_path), "job.ledger")
    database, many = kind.create(tiny.server, f"full_{uuid.uuid4().hex[:16]}"), range(100_000)
    database.query(
        "CREATE TABLE ledger (id bigint, account text, amount bigint) "
        + tiny.dialect.place.format(directory=tiny.directory)
    )
    # 4 MB are left. With half of it MariaDB 10.11 does not refuse the rows, but crashes.
    tiny.filler.write_bytes(bytes(12 << 20))
    with SqlJob(database.sink(table="ledger", commit_mode=mode), staging=staging) as job:
        committer = job.check().committer()
        assert committer.commit(job.prepare(1, [1])) == Committed()
        if mode == "two_phase":
            with pytest.raises(SinkError, match=f"{tiny.dialect.said}.*{tiny.dialect.code}"):
                job.prepare(2, many)
        else:
            outcome = committer.commit(job.prepare(2, many))
            assert isinstance(outcome, RetryLater)
            assert tiny.dialect.said in outcome.reason
        assert database.ids_in() == [1]
        assert database.prepared() == []
        # What the operator does. The next attempt, or the next try, goes on.
        tiny.filler.unlink()
        if mode == "two_phase":
            job.check(2).prepare(2, many, attempt=2)
            committer = job.committer(2)
        (committable,) = committer.in_doubt()
        assert committer.commit(committable) == Committed()
    counted = database.query("SELECT COUNT(*), COUNT(DISTINCT id) FROM ledger")
    assert counted == [(100_001, 100_000)]
    database.query("DROP TABLE ledger")
