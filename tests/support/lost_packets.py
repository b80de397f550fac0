"""Runs a job whose database is behind a cable that loses packets, and measures how long it stalls.

    unshare --net python -m tests.support.lost_packets DIRECTORY KIND DIRECTION OUTAGE_S

KIND is postgres or mysql; DIRECTION is requests or replies. DIRECTORY/outcome.json tells the rest.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.integration.sql.databases import Database, MySQL, Postgres
from tests.support.lossy_cable import CLIENT, SERVER, LossyCable
from tests.support.servers.database_packages import offer_packages
from tests.support.sql_job_process import RECORDS, make_pipeline, make_sink
from typing_extensions import override

from onceflow import Job, JobState, JobStatus
from onceflow.core.runtime.cluster.local_processes import fork_own_host
from onceflow.integration.servers import EmbeddedMySQL, EmbeddedPostgres

_TIMEOUT_S = 150.0


@dataclass(frozen=True)
class Outcome:
    """What has been measured and read."""

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
            outcome = _run_through(cable, database, directory, direction, float(outage_s))
    (directory / "outcome.json").write_text(json.dumps(asdict(outcome)))


def _run_through(
    cable: LossyCable, database: Database, directory: Path, direction: str, outage_s: float
) -> Outcome:
    job = make_pipeline(directory, make_sink(database.url)).start()
    try:
        _await(job, lambda now: now.checkpoints_completed > 2)
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
        _await(job, lambda now: now.checkpoints_completed > before.checkpoints_completed)
        resumed_s = time.monotonic() - healed_at_s
        (directory / "end").touch()
        assert job.wait(_TIMEOUT_S).state is JobState.FINISHED
    finally:
        job.cancel()
    all_rows_once = database.ids_in() == list(range(RECORDS))
    return Outcome(noticed_s, resumed_s, before.last_error, all_rows_once, len(database.prepared()))


def _await(job: Job, holds: Callable[[JobStatus], bool]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not holds(status := job.status()):
        assert time.monotonic() < deadline, status.describe()
        assert not status.state.ended, status.describe()
        time.sleep(0.05)


if __name__ == "__main__":
    main()
