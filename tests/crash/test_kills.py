"""SIGKILL, SIGSTOP and cut cables in the middle of a run, for every process and server of it."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from urllib.parse import urlsplit, urlunsplit

import pytest
from tests.crash.ledger_audit import Audit
from tests.crash.ledger_driver import PAYMENTS, Backend, LedgerSpec, LedgerStatus
from tests.crash.ledger_runs import LedgerDriver, LedgerRun

from onceflow.integration.faults import TcpProxy, kill_process, kill_tree, parent_of
from onceflow.integration.judge import Verdict
from onceflow.integration.servers.kafka import EmbeddedKafka
from onceflow.integration.servers.postgres import EmbeddedPostgres

pytestmark = pytest.mark.spark

Judge = Callable[[LedgerRun], Verdict]

SEED = int(os.environ.get("ONCEFLOW_TEST_SEED", "7"))
BACKENDS = ["heap", pytest.param("rocksdb", marks=pytest.mark.slow)]
# What dies is not Spark's; what runs in a slot is the same there.
SLOWLY_ON_SPARK = pytest.mark.parametrize(
    "ledger_driver", ["local", pytest.param("spark", marks=pytest.mark.slow)], indirect=True
)


def await_any_moment(run: LedgerRun, seed: int = SEED) -> LedgerStatus:
    """Return at a seeded moment of some checkpoint after the first one."""
    print(f"seed {seed}; ONCEFLOW_TEST_SEED sets the first one")  # noqa: T201
    before = run.status()
    run.await_checkpoint(before.checkpoints + 2 if before else 2)
    time.sleep(random.Random(seed).uniform(0, run.spec.interval_s))
    return run.running()


def await_standstill(run: LedgerRun) -> None:
    """Return once the job has decided no checkpoint for 2.5 s.

    The status tells the last decisions late on a busy machine.
    """
    deadline = time.monotonic() + 60
    before = run.running()
    while True:
        time.sleep(2.5)
        status = run.running()
        if status.checkpoints == before.checkpoints:
            return
        assert time.monotonic() < deadline, status
        before = status


def assert_finished_exactly_once(run: LedgerRun, judge: Judge) -> LedgerStatus:
    status = run.finish()
    assert status.state == "finished", status
    audit = Audit(run.spec)
    assert audit.visible().transactions == audit.decided().keys()
    verdict = judge(run)
    assert verdict.ok, verdict
    return status


@SLOWLY_ON_SPARK
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.only_proof
def test_slots_killed_one_after_the_other_neither_lose_nor_double_a_row(
    ledger_driver: LedgerDriver, ledger_spec: LedgerSpec, judge: Judge, backend: Backend
) -> None:
    run = ledger_driver.run(replace(ledger_spec, backend=backend))
    for kill in range(2):
        status = await_any_moment(run, SEED + kill)
        kill_process(status.slots[kill][0])
        run.until("a new attempt runs", lambda s: s.restores > kill and s.state == "running")
    assert assert_finished_exactly_once(run, judge).restores == 2


@SLOWLY_ON_SPARK
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_driver_is_replaced_by_one_that_goes_on(
    ledger_driver: LedgerDriver, ledger_spec: LedgerSpec, judge: Judge, backend: Backend
) -> None:
    run = ledger_driver.run(replace(ledger_spec, backend=backend))
    before = await_any_moment(run)
    ledger_driver.kill()
    run.restart_driver()
    status = assert_finished_exactly_once(run, judge)
    assert status.driver != before.driver
    assert status.attempt > before.attempt
    assert status.restored_checkpoint >= before.checkpoints


@pytest.mark.servers
def test_a_killed_python_daemon_takes_all_slots_with_it_and_the_job_goes_on(
    ledger_driver: LedgerDriver, ledger_spec: LedgerSpec, judge: Judge
) -> None:
    run = ledger_driver.run(ledger_spec)
    _, daemon = await_any_moment(run).slots[0]
    kill_tree(daemon)
    assert assert_finished_exactly_once(run, judge).restores >= 1


@pytest.fixture(scope="module")
def cluster_driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LedgerDriver]:
    driver = LedgerDriver(tmp_path_factory.mktemp("cluster"), "local-cluster[2,1,1024]")
    yield driver
    driver.end()


@pytest.mark.slow  # a cluster of JVMs; that of tests/spark has its executors killed, too
def test_a_killed_executor_jvm_is_replaced_and_the_job_goes_on(
    cluster_driver: LedgerDriver, ledger_spec: LedgerSpec, judge: Judge
) -> None:
    run = cluster_driver.run(ledger_spec)
    _, daemon = await_any_moment(run).slots[1]
    executor = parent_of(daemon)
    assert executor is not None
    kill_process(executor)
    assert assert_finished_exactly_once(run, judge).restores >= 1


@SLOWLY_ON_SPARK
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.only_proof
def test_a_killed_postgres_comes_back_with_every_row_once(
    ledger_driver: LedgerDriver,
    ledger_spec: LedgerSpec,
    judge: Judge,
    backend: Backend,
    onceflow_postgres: EmbeddedPostgres,
) -> None:
    run = ledger_driver.run(replace(ledger_spec, backend=backend))
    await_any_moment(run)
    onceflow_postgres.kill()
    try:
        run.until("the sink is missed", lambda status: status.state != "running")
    finally:
        onceflow_postgres.start()
    assert assert_finished_exactly_once(run, judge).restores >= 1


@SLOWLY_ON_SPARK
@pytest.mark.servers
def test_a_killed_kafka_comes_back_and_every_record_is_read_once(
    ledger_driver: LedgerDriver,
    ledger_spec: LedgerSpec,
    judge: Judge,
    payments_kafka: EmbeddedKafka,
) -> None:
    run = ledger_driver.run(ledger_spec)
    await_any_moment(run)
    payments_kafka.kill()
    try:
        # What the consumers have fetched ahead flows on; the rest must wait for the broker.
        run.release()
        time.sleep(2.0)
        assert Audit(run.spec).visible().rows < PAYMENTS.records
        run.running()
    finally:
        payments_kafka.start()
    assert_finished_exactly_once(run, judge)


@SLOWLY_ON_SPARK
@pytest.mark.servers
def test_a_frozen_postgres_delays_every_row_and_doubles_none(
    ledger_driver: LedgerDriver,
    ledger_spec: LedgerSpec,
    judge: Judge,
    onceflow_postgres: EmbeddedPostgres,
) -> None:
    run = ledger_driver.run(ledger_spec)
    await_any_moment(run)
    onceflow_postgres.pause()
    try:
        await_standstill(run)
    finally:
        onceflow_postgres.unpause()
    assert_finished_exactly_once(run, judge)


@pytest.fixture
def network(postgres_database: str) -> Iterator[tuple[TcpProxy, str]]:
    """The network between the job and Postgres, and the URL that goes through it."""
    parts = urlsplit(postgres_database)
    assert parts.hostname is not None
    assert parts.port is not None
    with TcpProxy(parts.hostname, parts.port) as proxy:
        user = f"{parts.username}@" if parts.username else ""
        yield proxy, urlunsplit(parts._replace(netloc=f"{user}127.0.0.1:{proxy.port}"))


@SLOWLY_ON_SPARK
@pytest.mark.servers
def test_a_cut_network_to_postgres_that_heals_leaves_every_row_once(
    ledger_driver: LedgerDriver,
    ledger_spec: LedgerSpec,
    judge: Judge,
    network: tuple[TcpProxy, str],
) -> None:
    proxy, url = network
    run = ledger_driver.run(replace(ledger_spec, postgres_url=url))
    await_any_moment(run)
    proxy.refuse()
    run.until("the sink is missed", lambda status: status.state != "running")
    proxy.heal()
    assert assert_finished_exactly_once(run, judge).restores >= 1


@SLOWLY_ON_SPARK
@pytest.mark.servers
def test_a_silent_network_to_postgres_delays_every_row_and_doubles_none(
    ledger_driver: LedgerDriver,
    ledger_spec: LedgerSpec,
    judge: Judge,
    network: tuple[TcpProxy, str],
) -> None:
    proxy, url = network
    run = ledger_driver.run(replace(ledger_spec, postgres_url=url))
    await_any_moment(run)
    proxy.pause()
    time.sleep(3)
    proxy.heal()
    assert_finished_exactly_once(run, judge)
