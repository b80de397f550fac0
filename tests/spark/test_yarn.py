"""A whole job on Spark on YARN, sent along with its environment: containers are killed."""

from __future__ import annotations

import contextlib
import getpass
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.integration.kafka_feed import produce
from tests.integration.postgres_sink_kit import await_lock_wait, ids_in, prepared, query
from tests.spark import yarn_job
from tests.support import packed_environment
from tests.support.program import Program
from tests.support.servers.hdfs import EmbeddedHdfs
from tests.support.servers.yarn import YarnCluster, yarn_cluster
from tests.support.standalone import SHORT_LIVED_JVM, SPARK_HOME

from onceflow import HdfsStorage
from onceflow.core.traces import VARIABLE
from onceflow.integration.faults.processes import kill_session, process_tree
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(1200)]
DEADLINE_S = 400.0
SLICES, ROWS = 4, 4_000
"""Of each partition."""
ACCOUNTS = 100
EXECUTOR = "org.apache.spark.executor.YarnCoarseGrainedExecutorBackend"
DRIVER = "org.apache.spark.deploy.yarn.ApplicationMaster"


@pytest.fixture(scope="module")
def hdfs() -> Iterator[EmbeddedHdfs]:
    server = EmbeddedHdfs().start(timeout_s=180)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def yarn(hdfs: EmbeddedHdfs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[YarnCluster]:
    with yarn_cluster(tmp_path_factory.mktemp("yarn"), hdfs.file_system) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory from which the user submits. It has the environment that is sent along."""
    directory = tmp_path_factory.mktemp("home")
    packed_environment.pack_environment(directory, packed_environment.build_wheel(directory))
    return directory


class Ledger:
    """The job's topic and its table."""

    def __init__(self, servers: str, topic: str, url: str) -> None:
        self.servers, self.topic, self.url = servers, topic, url
        self._slices = 0
        query(
            url,
            "CREATE TABLE ledger (id bigint NOT NULL, account text NOT NULL,"
            " amount bigint NOT NULL, balance bigint NOT NULL, n bigint NOT NULL)",
        )

    def feed(self) -> None:
        """Write the next slice of the topic."""
        for partition in range(2):
            first = self._slices * ROWS
            numbers = range(2 * first + partition, 2 * (first + ROWS), 2)
            produce(self.servers, self.topic, map(payment, numbers), partition=partition)
        self._slices += 1

    @contextmanager
    def held_up(self) -> Generator[None]:
        """Let no row be written meanwhile; the block begins when one waits for that."""
        with psycopg.connect(self.url) as connection:
            connection.execute("LOCK TABLE ledger IN EXCLUSIVE MODE")
            self.feed()
            await_lock_wait(self.url, DEADLINE_S)
            yield
            connection.rollback()

    def has_all_that_was_fed(self) -> bool:
        """Return whether as many rows are committed as the topic has."""
        return query(self.url, "SELECT count(*) FROM ledger") == [(2 * ROWS * self._slices,)]

    def assert_exactly_once(self) -> None:
        """Every payment once, every account's balances a chain, nothing in doubt."""
        assert ids_in(self.url) == list(range(2 * ROWS * SLICES))
        wrong = query(
            self.url,
            "SELECT id, balance, total, n, position FROM (SELECT *,"
            " sum(amount) OVER chain AS total, row_number() OVER chain AS position"
            " FROM ledger WINDOW chain AS (PARTITION BY account ORDER BY n)) AS chains"
            " WHERE balance <> total OR n <> position",
        )
        assert wrong == []
        assert prepared(self.url) == []


def payment(number: int) -> bytes:
    account, amount = number % ACCOUNTS, number * 7 % 1000
    return b'{"id": %d, "account": "acct-%d", "amount": %d}' % (number, account, amount)


@dataclass(frozen=True)
class Application:
    """An application that was submitted to YARN."""

    yarn: YarnCluster
    process: Program

    def wait_until(self, condition: Callable[[], bool]) -> None:
        self.process.wait_until(condition, DEADLINE_S)

    def kill_container(self, program: str) -> None:
        """SIGKILL all processes of a container that runs `program`; return when another does."""
        running = containers(self.yarn, program)
        kill_session(os.getsid(min(running)))
        self.wait_until(lambda: bool(containers(self.yarn, program) - running))

    def stop(self, storage: str) -> None:
        """Tell the job to stop; return when the application has ended well."""
        stop: list[str | Path] = [
            Path(sys.executable).with_name("onceflow"),
            "stop",
            "ledger",
            "--storage",
            storage,
        ]
        environment = os.environ | {"HADOOP_USER_NAME": getpass.getuser()}
        subprocess.run(stop, env=environment, check=True)
        assert self.process.wait(DEADLINE_S) == 0, self.process.tail()


def containers(yarn: YarnCluster, program: str) -> set[int]:
    """Return the JVMs in containers that run the class `program`."""
    psutil: Any = importlib.import_module("psutil")  # it has no types
    running: set[int] = set()
    for pid in process_tree(yarn.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            java, *words = psutil.Process(pid).cmdline() or [""]
            if Path(java).name == "java" and program in words:
                running.add(pid)
    return running


@contextmanager
def run_application(
    home: Path, yarn: YarnCluster, mode: str, ledger: Ledger, storage: str
) -> Generator[Application]:
    """Start the job with spark-submit; it is killed after the block if it still runs."""
    settings = {
        "spark.pyspark.python": packed_environment.ENVIRONMENT_PYTHON,
        "spark.executor.instances": "2",
        "spark.executor.memory": "512m",
        "spark.executor.memoryOverhead": "768m",
        "spark.driver.memory": "512m",
        "spark.driver.memoryOverhead": "768m",
        "spark.yarn.am.memory": "512m",
        "spark.yarn.maxAppAttempts": "2",
        "spark.yarn.jars": f"local:{SPARK_HOME}/jars/*",
        "spark.python.daemon.module": "onceflow.connectors.python_daemon",
        "spark.ui.enabled": "false",
        # Containers do not inherit it.
        **{
            f"spark.{process}.{VARIABLE}": os.environ[VARIABLE]
            for process in ("executorEnv", "yarn.appMasterEnv")
        },
        **{
            f"spark.{process}.extraJavaOptions": SHORT_LIVED_JVM
            for process in ("driver", "executor", "yarn.am")
        },
    }
    environment = {
        "PYTHONPATH": None,
        "HADOOP_CONF_DIR": str(yarn.configuration),
        "SPARK_HOME": str(SPARK_HOME),
    }
    command: list[str | Path] = [
        *(SPARK_HOME / "bin" / "spark-submit", "--master", "yarn", "--deploy-mode", mode),
        *packed_environment.SEND_ENVIRONMENT,
        *(word for each in settings.items() for word in ("--conf", "=".join(each))),
        *(yarn_job.__file__, ledger.servers, ledger.topic, ledger.url, storage),
    ]
    process = Program(home / f"{mode}.log", *command, cwd=home, environment=environment)
    try:
        yield Application(yarn, process)
    finally:
        process.kill_tree()


@pytest.mark.parametrize("mode", ["client", "cluster"])
def test_on_yarn_containers_may_be_killed_and_each_row_is_there_once(
    yarn: YarnCluster,
    hdfs: EmbeddedHdfs,
    home: Path,
    onceflow_kafka: KafkaServer,
    kafka_topic: TopicFactory,
    postgres_database: str,
    mode: str,
) -> None:
    ledger = Ledger(onceflow_kafka.bootstrap_servers, kafka_topic(2), postgres_database)
    storage = f"{hdfs.url}/{mode}"
    with run_application(home, yarn, mode, ledger, storage) as application:
        for killed in (EXECUTOR, DRIVER if mode == "cluster" else EXECUTOR):
            ledger.feed()
            application.wait_until(ledger.has_all_that_was_fed)
            with ledger.held_up():
                application.kill_container(killed)
            application.wait_until(ledger.has_all_that_was_fed)
        application.stop(storage)
    ledger.assert_exactly_once()
    assert HdfsStorage(storage, user=getpass.getuser()).open("ledger").log.read().attempt >= 3
