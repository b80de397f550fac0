"""Our own sinks keep every clause of the contract, on real servers that are killed and cut off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.conformance.sink_targets import KafkaTarget, MySQLTarget, PostgresTarget

from onceflow.integration.conformance import SinkConformance, SinkTarget
from onceflow.integration.servers import kinds

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def postgres() -> Iterator[kinds.OwnDatabase]:
    with kinds.make_postgres() as server:
        PostgresTarget(server).create()
        yield server


class TestPostgresTwoPhase(SinkConformance):
    @pytest.fixture
    def sink_target(self, postgres: kinds.OwnDatabase) -> SinkTarget:
        return PostgresTarget(postgres, {"commit_mode": "two_phase"})


class TestPostgresLedger(SinkConformance):
    @pytest.fixture
    def sink_target(self, postgres: kinds.OwnDatabase) -> SinkTarget:
        return PostgresTarget(postgres, {"commit_mode": "ledger"})


@pytest.mark.slow
class TestPostgresUpsert(SinkConformance):
    @pytest.fixture
    def sink_target(self, postgres: kinds.OwnDatabase) -> SinkTarget:
        return PostgresTarget(postgres, {"commit_mode": "two_phase", "write_mode": "upsert"})


@pytest.fixture(scope="module")
def mysql() -> Iterator[kinds.OwnDatabase]:
    with kinds.make_mysql() as server:
        MySQLTarget(server).create()
        yield server


class TestMySQLTwoPhase(SinkConformance):
    @pytest.fixture
    def sink_target(self, mysql: kinds.OwnDatabase) -> SinkTarget:
        return MySQLTarget(mysql, {"commit_mode": "two_phase"})


@pytest.mark.slow
class TestMySQLLedger(SinkConformance):
    @pytest.fixture
    def sink_target(self, mysql: kinds.OwnDatabase) -> SinkTarget:
        return MySQLTarget(mysql, {"commit_mode": "ledger"})


@pytest.fixture(scope="module")
def mariadb() -> Iterator[kinds.OwnDatabase]:
    with kinds.make_mariadb() as server:
        MySQLTarget(server).create()
        yield server


class TestMariaDBTwoPhase(SinkConformance):
    @pytest.fixture
    def sink_target(self, mariadb: kinds.OwnDatabase) -> SinkTarget:
        return MySQLTarget(mariadb, {"commit_mode": "two_phase"})


@pytest.mark.slow
class TestMariaDBLedger(SinkConformance):
    @pytest.fixture
    def sink_target(self, mariadb: kinds.OwnDatabase) -> SinkTarget:
        return MySQLTarget(mariadb, {"commit_mode": "ledger"})


@pytest.fixture(scope="module")
def broker() -> Iterator[kinds.OwnKafka]:
    with kinds.make_kafka() as server:
        yield server


class TestKafka(SinkConformance):
    @pytest.fixture
    def sink_target(self, broker: kinds.OwnKafka) -> Iterator[SinkTarget]:
        target = KafkaTarget(broker)
        yield target
        target.close()
