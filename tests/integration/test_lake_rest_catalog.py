"""Whole jobs into tables of a real REST catalog: killed drivers, lost replies, a catalog away."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table
from tests.integration.test_lake_jobs import RECORDS, TIMEOUT_S, IcebergLakeJob
from tests.support.changing_source import ChangingSource
from tests.support.servers.rest_catalog import CatalogGateway, CommitFault, RestCatalogServer
from typing_extensions import override

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300)]

_TOKEN, _NEXT_TOKEN = "geheimer-schluessel-1", "geheimer-schluessel-2"


class RestLakeJob(IcebergLakeJob):
    """Snapshots of a table in a REST catalog, which the driver reaches through a gateway."""

    def __init__(self, directory: Path, server: RestCatalogServer, gateway: CatalogGateway) -> None:
        super().__init__(directory)
        self.server, self.gateway = server, gateway
        self.set_catalog({"uri": gateway.url})

    @override
    @contextmanager
    def table(self) -> Generator[Table | None, None, None]:
        """Ask the catalog itself, past the gateway."""
        uri = f"http://127.0.0.1:{self.server.port}"
        with closing(load_catalog("reader", uri=uri)) as catalog:
            try:
                yield catalog.load_table("shop.orders")
            except NoSuchTableError:
                yield None

    def set_catalog(self, properties: dict[str, str]) -> None:
        (self.directory / "catalog.json").write_text(json.dumps(properties))

    def assert_nothing_says(self, *secrets: str) -> None:
        """Have no file of the job have any of `secrets`: no log, no checkpoint, no table."""
        for path in self.directory.rglob("*"):
            if path.is_file() and path != self.server.log_path:
                content = path.read_bytes()
                assert not any(secret.encode() in content for secret in secrets), path

    def spoil_commit(self, fault: CommitFault) -> None:
        """Wait until `fault` begins to happen to a commit."""
        self.gateway.spoil_commit(fault)
        self.wait_until(lambda: not self.gateway.spoils)


class RestChangesJob(RestLakeJob):
    """Rows of accounts that are replaced and deleted."""

    format = "iceberg+account"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RestCatalogServer]:
    with RestCatalogServer(tmp_path / "rest") as server:
        yield server


@pytest.fixture
def gateway(server: RestCatalogServer) -> Iterator[CatalogGateway]:
    gateway = CatalogGateway(server.port)
    yield gateway
    gateway.close()


@pytest.fixture
def job(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    server: RestCatalogServer,
    gateway: CatalogGateway,
) -> Iterator[RestLakeJob]:
    made: RestLakeJob = getattr(request, "param", RestLakeJob)(tmp_path, server, gateway)
    yield made
    made.close()


def test_drivers_killed_around_their_requests_and_at_random_write_each_row_once(
    job: RestLakeJob,
) -> None:
    """The request of a killed driver is lost on its way, or the catalog carries it out."""
    for reaches_catalog in (False, True, False, True):
        driver = job.start()
        job.wait_for_commits(1, driver)
        job.spoil_commit(CommitFault(reaches_catalog, first=driver.kill))
        assert driver.wait(TIMEOUT_S) == -signal.SIGKILL
    for _ in range(2):
        driver = job.start()
        job.wait_for_commits(1, driver)
        driver.kill()
    job.finish(job.start())
    job.assert_each_row_once()
    job.assert_nothing_is_staged()


def test_a_reply_that_is_lost_or_wrong_neither_loses_nor_doubles_rows(job: RestLakeJob) -> None:
    """The gateway cuts the connection, is at a loss, or calls a commit failed that was made."""
    driver = job.start()
    job.wait_for_commits(1, driver)
    for reaches_catalog in (False, True):
        for status in (0, 409, 500, 502, 503, 504):
            job.spoil_commit(CommitFault(reaches_catalog, status))
            job.wait_for_commits(1, driver)
    job.finish(driver)
    job.assert_each_row_once()
    job.assert_nothing_is_staged()


def test_a_commit_that_comes_late_is_refused_by_the_catalog(job: RestLakeJob) -> None:
    """It is under way in the network until its driver is dead and the next one has gone on."""
    first = job.start()
    job.wait_for_commits(2, first)
    goes_on = threading.Event()
    job.spoil_commit(CommitFault(True, first=lambda: goes_on.wait(TIMEOUT_S)))
    first.kill()
    first.wait(30)
    second = job.start()
    job.wait_for_commits(2, second)
    goes_on.set()
    job.wait_for_commits(2, second)
    job.finish(second)
    job.assert_each_row_once()
    job.assert_nothing_is_staged()


@pytest.mark.parametrize("gathered", [0, 4])
def test_a_catalog_that_is_killed_and_away_for_a_while_loses_and_doubles_nothing(
    job: RestLakeJob, gathered: int
) -> None:
    """It dies in a commit, after it has made it, and comes back at the same address."""
    job.gathered = gathered
    driver = job.start()
    job.wait_for_commits(1, driver)
    staged = job.directory / "checkpoints" / "lake" / "staged"
    for reaches_catalog in (True, False):
        job.spoil_commit(CommitFault(reaches_catalog))
        job.server.kill()
        job.wait_until(lambda: len(list(staged.rglob("*.arrow"))) > 6, driver)
        job.server.start()
        job.wait_for_commits(2, driver)
    job.finish(driver)
    job.assert_each_row_once()
    job.assert_nothing_is_staged()


@pytest.mark.parametrize("job", [RestChangesJob], indirect=True)
def test_changes_by_key_are_applied_once_though_drivers_die_and_replies_are_lost(
    job: RestLakeJob,
) -> None:
    for reaches_catalog in (False, True):
        driver = job.start()
        job.wait_for_commits(1, driver)
        job.spoil_commit(CommitFault(reaches_catalog))
        job.wait_for_commits(1, driver)
        job.spoil_commit(CommitFault(reaches_catalog, first=driver.kill))
        assert driver.wait(TIMEOUT_S) == -signal.SIGKILL
    job.finish(job.start())
    rows, _ = job.read()
    assert sorted(rows["id"].to_pylist()) == ChangingSource(RECORDS).ids_at_the_end()


def test_a_token_that_is_replaced_in_its_file_is_followed_and_printed_nowhere(
    job: RestLakeJob,
) -> None:
    """Without a new start of the job, which waits while its token is refused."""
    secret = job.directory / "secret"
    secret.write_text(_TOKEN)
    job.gateway.token = _TOKEN
    job.set_catalog({"uri": job.gateway.url, "token": f"${{file:{secret}}}"})
    driver = job.start()
    job.wait_for_commits(2, driver)
    job.gateway.token, refused = _NEXT_TOKEN, job.gateway.refused
    job.wait_until(lambda: job.gateway.refused > refused + 3, driver)
    secret.write_text(_NEXT_TOKEN)
    job.wait_for_commits(2, driver)
    job.finish(driver)
    job.assert_each_row_once()
    with job.table() as table:
        assert table is not None
        summaries = [snapshot.summary for snapshot in table.snapshots()]
        attempts = {summary["onceflow.attempt"] for summary in summaries if summary is not None}
    assert attempts == {"1"}
    secret.unlink()
    job.assert_nothing_says(_TOKEN, _NEXT_TOKEN)


def test_a_credential_in_the_settings_gets_a_token_and_neither_is_written_anywhere(
    job: RestLakeJob,
) -> None:
    job.set_catalog({"uri": job.gateway.url, "credential": f"onceflow:{_TOKEN}"})
    driver = job.start()
    job.wait_for_commits(2, driver)
    assert _TOKEN not in job.ask_status()
    driver.kill()
    job.finish(job.start())
    job.assert_each_row_once()
    (job.directory / "catalog.json").unlink()
    job.assert_nothing_says(_TOKEN, "client-credentials-token")
