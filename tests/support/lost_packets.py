"""Runs a job whose database is behind a cable that loses packets, and measures how long it stalls.

    unshare --net python -m tests.support.lost_packets DIRECTORY KIND DIRECTION OUTAGE_S

KIND is postgres or mysql; DIRECTION is requests or replies. DIRECTORY/outcome.json tells the rest.
If OUTAGE_S is 0, no job runs: packets are lost for good in the middle of one transfer of rows.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from tests.integration.sql.databases import Database, MySQL, Postgres
from tests.support.lossy_cable import CLIENT, SERVER, LossyCable
from tests.support.servers.database_packages import offer_packages
from tests.support.sql_job_process import RECORDS, make_pipeline, make_sink
from tests.support.waiting import await_status
from typing_extensions import override

from onceflow import JobState
from onceflow.clients.mysql.connection import MySQLSession
from onceflow.clients.postgres.connection import own
from onceflow.clients.sql.session import ConnectionLost
from onceflow.core.runtime.cluster.local_processes import fork_own_host
from onceflow.integration.servers import EmbeddedMySQL, EmbeddedPostgres

_TIMEOUT_S = 150.0


@dataclass(frozen=True)
class Outcome:
    """The measurements of a run, and the rows that were read."""

    noticed_s: float
    """From the first lost packet to the first failed attempt; infinite without one."""
    resumed_s: float
    """From the last lost packet to the next completed checkpoint."""
    last_error: str
    """As it was when the network was whole again."""
    all_rows_once: bool
    prepared: int


class _FarPostgres(EmbeddedPostgres):
    """Runs at the server's end of the cable."""

    def __init__(self, cable: LossyCable) -> None:
        trusted = f"host all all {CLIENT}/32 trust"
        super().__init__({"listen_addresses": SERVER}, hba_lines=[trusted])
        self._cable = cable

    @property
    @override
    def host(self) -> str:
        return SERVER

    @override
    def _command(self) -> Sequence[str | Path]:
        return [*self._cable.server_prefix, *super()._command()]


class _FarMySQL(EmbeddedMySQL):
    """Runs at the server's end of the cable."""

    def __init__(self, cable: LossyCable) -> None:
        super().__init__({"performance-schema": "OFF"})
        self._cable = cable

    @property
    @override
    def host(self) -> str:
        return SERVER

    @override
    def _command(self) -> Sequence[str | Path]:
        return [*self._cable.server_prefix, *super()._command(), f"--bind-address={SERVER}"]


def main() -> None:
    """Run the job through one outage to its end."""
    place, kind, direction, outage_s = sys.argv[1:]
    directory = Path(place)
    fork_own_host()
    offer_packages()
    with LossyCable() as cable:
        server = _FarPostgres(cable) if kind == "postgres" else _FarMySQL(cable)
        with server:
            database_class: type[Database] = Postgres if kind == "postgres" else MySQL
            database = database_class.create(server, "lost")
            if float(outage_s):
                outcome = _run_through(cable, database, directory, direction, float(outage_s))
            else:
                outcome = _lose_in_transfer(cable, database, direction)
    (directory / "outcome.json").write_text(json.dumps(asdict(outcome)))


def _run_through(
    cable: LossyCable, database: Database, directory: Path, direction: str, outage_s: float
) -> Outcome:
    job = make_pipeline(directory, make_sink(database.url)).start()
    try:
        await_status(job, lambda now: now.checkpoints_completed > 2)
        cable.lose(direction)
        lost_at_s = time.monotonic()
        noticed_s = math.inf
        while time.monotonic() < lost_at_s + outage_s:
            if job.status().last_error:
                noticed_s = min(noticed_s, time.monotonic() - lost_at_s)
            time.sleep(0.05)
        before = job.status()
        cable.heal(direction)
        healed_at_s = time.monotonic()
        await_status(job, lambda now: now.checkpoints_completed > before.checkpoints_completed)
        resumed_s = time.monotonic() - healed_at_s
        (directory / "end").touch()
        assert job.wait(_TIMEOUT_S).state is JobState.FINISHED
    finally:
        job.cancel()
    all_rows_once = database.ids_in() == list(range(RECORDS))
    return Outcome(noticed_s, resumed_s, before.last_error, all_rows_once, len(database.prepared()))


def _lose_in_transfer(cable: LossyCable, database: Database, direction: str) -> Outcome:
    """Lose all packets between two rows of one statement that loads a table."""
    database.query("CREATE TABLE ledger (id int PRIMARY KEY)")
    lost_at_s = 0.0

    def give_rows() -> Iterator[memoryview]:
        nonlocal lost_at_s
        yield memoryview(b"1\n")
        cable.lose(direction)
        lost_at_s = time.monotonic()
        yield memoryview(b"2\n")

    with database.sink(table="ledger").settings.endpoint.connect("test") as session:
        session.begin()
        with pytest.raises(ConnectionLost) as lost:
            if isinstance(session, MySQLSession):
                load = "LOAD DATA LOCAL INFILE 'rows' INTO TABLE ledger (id)"
                session.send(load, cast("Any", give_rows()))
                session.receive()
            else:
                copy = own(session).copy_in("COPY ledger FROM STDIN")
                for rows in give_rows():
                    copy.write(bytes(rows))
                copy.end()
        noticed_s = time.monotonic() - lost_at_s
    cable.heal(direction)
    return Outcome(noticed_s, 0.0, str(lost.value), database.ids_in() == [], 0)


if __name__ == "__main__":
    main()
