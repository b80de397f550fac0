"""`onceflow doctor` against real servers: set up right, set up wrong, and not answering."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType
from tests.integration.doctor_kit import PASSWORD, examine, worst
from tests.integration.pgbouncer import PgBouncer, find_pgbouncer
from tests.integration.postgres_sink_kit import prepared, query

from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers import EmbeddedKafka, EmbeddedPostgres
from onceflow.integration.servers.kinds import KafkaServer

# --- Postgres -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def misconfigured() -> Iterator[EmbeddedPostgres]:
    """A server that prepares nothing, syncs nothing, and knows the roles `writer` and `reader`."""
    with EmbeddedPostgres(
        {"max_prepared_transactions": "0", "fsync": "off", "max_connections": "12"},
        hba_lines=["host all writer,reader,+strangers 127.0.0.1/32 scram-sha-256"],
    ) as server:
        query(server.url, "CREATE ROLE strangers")
        query(server.url, f"CREATE ROLE writer LOGIN PASSWORD '{PASSWORD}'")
        query(server.url, f"CREATE ROLE reader LOGIN PASSWORD '{PASSWORD}'")
        query(server.url, "ALTER ROLE reader SET default_transaction_read_only = on")
        query(server.url, "CREATE TABLE payments (id bigint)")
        query(server.url, "CREATE UNLOGGED TABLE fleeting (id bigint)")
        yield server


def url_of(server: EmbeddedPostgres, role: str) -> str:
    return f"postgresql://{role}:{PASSWORD}@127.0.0.1:{urlsplit(server.url).port}/postgres"


def test_what_two_phase_commit_lacks_is_named_with_the_statement(
    misconfigured: EmbeddedPostgres,
) -> None:
    _, findings = examine("--url", misconfigured.url, "--commit-mode", "two_phase")
    remedies = {one["found"]: (one["level"], one["remedy"]) for one in worst(findings)}
    level, remedy = remedies["max_prepared_transactions = 0"]
    assert level == "problem"
    assert "ALTER SYSTEM SET max_prepared_transactions = 64" in remedy
    level, remedy = remedies["fsync = off"]
    assert (level, "ALTER SYSTEM SET fsync = on" in remedy) == ("warning", True)
    # The other mode needs none, and `auto` takes it.
    _, findings = examine("--url", misconfigured.url, "--commit-mode", "auto")
    (finding,) = [one for one in worst(findings) if "max_prepared" in one["found"]]
    assert finding["level"] == "warning"
    _, findings = examine("--url", misconfigured.url, "--commit-mode", "ledger")
    assert not [one for one in worst(findings) if "max_prepared" in one["found"]]


@pytest.fixture
def stranger(misconfigured: EmbeddedPostgres) -> str:
    """A role of this try's own, which may log in and nothing else."""
    role = f"writer_{uuid.uuid4().hex[:8]}"
    query(misconfigured.url, f"CREATE ROLE {role} LOGIN PASSWORD '{PASSWORD}' IN ROLE strangers")
    return role


def test_the_statement_fixes_it(misconfigured: EmbeddedPostgres, stranger: str) -> None:
    query(misconfigured.url, "DROP SCHEMA IF EXISTS onceflow CASCADE")
    url = url_of(misconfigured, stranger)
    _, findings = examine("--url", url, "--table", "payments")
    remedies = {
        one["area"]: one["remedy"] for one in worst(findings) if f"role {stranger}" in one["found"]
    }
    assert set(remedies) == {"database", "table payments"}
    for remedy in remedies.values():
        query(misconfigured.url, remedy)
    _, findings = examine("--url", url, "--table", "payments")
    assert not [one for one in worst(findings) if f"role {stranger}" in one["found"]]
    # Somebody else has made our tables, and grants nothing.
    query(misconfigured.url, "CREATE TABLE onceflow.onceflow_ledger (x int)")
    query(misconfigured.url, "CREATE TABLE onceflow.onceflow_sinks (x int)")
    _, findings = examine("--url", url)
    (finding,) = [one for one in worst(findings) if f"role {stranger}" in one["found"]]
    query(misconfigured.url, finding["remedy"])
    _, findings = examine("--url", url)
    assert not [one for one in worst(findings) if f"role {stranger}" in one["found"]]


def test_each_refused_login_has_the_statement_that_fixes_it(
    misconfigured: EmbeddedPostgres, stranger: str
) -> None:
    bank = f"bank_{stranger}"

    def remedy(url: str) -> str:
        (finding,) = worst(examine("--url", url, "--timeout", "10")[1])
        return finding["remedy"].removeprefix("correct the url, or: ")

    url = url_of(misconfigured, stranger).replace("/postgres", f"/{bank}")
    assert remedy(url) == f'CREATE DATABASE "{bank}" OWNER "{stranger}"'
    query(misconfigured.url, f"CREATE DATABASE {bank}")
    query(misconfigured.url, f"REVOKE CONNECT ON DATABASE {bank} FROM public")
    grant = remedy(url)
    assert grant == f'GRANT CONNECT ON DATABASE "{bank}" TO "{stranger}"'
    query(misconfigured.url, grant)
    # Nobody may look into the schema that has the table.
    inside = misconfigured.database_url(bank)
    query(inside, "CREATE TABLE ledger (id bigint)")
    query(inside, "REVOKE ALL ON SCHEMA public FROM public")
    for table in ("ledger", "public.ledger"):
        (finding,) = [
            one
            for one in examine("--url", url, "--table", table)[1]
            if one["area"] == f"table {table}"
        ]
        assert finding["remedy"] == f"GRANT USAGE ON SCHEMA public TO {stranger}"
    query(inside, finding["remedy"])
    _, findings = examine("--url", url, "--table", "ledger")
    (finding,) = [finding for finding in findings if finding["area"] == "table ledger"]
    assert finding["remedy"].startswith("GRANT SELECT, INSERT")
    strange = url_of(misconfigured, "nobody")
    assert remedy(strange) == "CREATE ROLE \"nobody\" LOGIN PASSWORD '…'"


def test_roles_tables_and_connections_that_will_not_do(misconfigured: EmbeddedPostgres) -> None:
    _, findings = examine("--url", url_of(misconfigured, "reader"))
    assert any(
        "ALTER ROLE" in finding["remedy"] and "read-only" in finding["found"]
        for finding in findings
    )
    _, findings = examine("--url", misconfigured.url, "--table", "fleeting", "--parallelism", "8")
    said = {one["area"]: one["remedy"] for one in worst(findings)}
    assert said["table fleeting"] == 'ALTER TABLE "public"."fleeting" SET LOGGED'
    assert any("connections are free" in one["found"] for one in worst(findings))
    _, findings = examine("--url", misconfigured.url, "--table", "nowhere")
    assert ("table nowhere", "it does not exist") in [
        (one["area"], one["found"]) for one in worst(findings)
    ]


@pytest.mark.skipif(find_pgbouncer() is None, reason="pgbouncer is not installed")
def test_a_pooler_in_between_is_noticed(postgres_database: str) -> None:
    parts = urlsplit(postgres_database)
    assert parts.port is not None
    with (
        tempfile.TemporaryDirectory(prefix="pgbouncer-") as directory,
        PgBouncer(parts.port, Path(directory)) as pooler,
    ):
        status, findings = examine("--url", pooler.url(parts.path[1:]))
        (finding,) = worst(findings)
        assert (status, finding["level"]) == (0, "warning")
        assert finding["found"] == "the connection goes through a connection pooler"
        assert "commit_mode='ledger'" in finding["remedy"]
        for mode, ends, level in (("two_phase", 0, "warning"), ("ledger", 0, "ok")):
            status, findings = examine("--url", pooler.url(parts.path[1:]), "--commit-mode", mode)
            (finding,) = [finding for finding in findings if "goes through" in finding["found"]]
            assert (status, finding["level"]) == (ends, level)
    assert not [
        one for one in examine("--url", postgres_database)[1] if "goes through" in one["found"]
    ]


def test_what_is_left_prepared_is_told_with_its_age(postgres_database: str) -> None:
    for gid in ("payments.out/1/7/0/0", "of somebody else"):
        with psycopg.connect(postgres_database, autocommit=True) as connection:
            connection.execute("BEGIN")
            connection.execute(f"PREPARE TRANSACTION '{gid}'".encode())
    status, findings = examine("--url", postgres_database)
    assert status == 0
    (others,) = [finding for finding in findings if "of others prepared" in finding["found"]]
    assert (others["level"], "'of somebody else'" in others["remedy"]) == ("warning", True)
    (ours,) = [finding for finding in findings if "of ours prepared" in finding["found"]]
    assert (ours["level"], "payments.out/1/7/0/0" in ours["found"]) == ("ok", True)
    assert len(prepared(postgres_database)) == 2


def test_a_paused_database_does_not_keep_the_other_checks_from_being_told(tmp_path: Path) -> None:
    with EmbeddedPostgres() as server:
        server.pause()
        began = time.monotonic()
        try:
            status, findings = examine(
                "--url", server.url, "--storage", str(tmp_path), "--timeout", "4"
            )
        finally:
            server.unpause()
        assert time.monotonic() - began < 90
        by_area = {finding["area"]: finding["level"] for finding in findings}
        assert (status, by_area) == (1, {"database": "problem", "storage": "ok"})


# --- Kafka ----------------------------------------------------------------------------------------


def test_a_broker_that_is_set_up_right_has_nothing_to_fix(
    onceflow_kafka: KafkaServer, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(2)
    status, findings = examine(
        "--kafka", onceflow_kafka.bootstrap_servers, "--topic", topic, "--group", "payments"
    )
    assert (status, worst(findings)) == (0, [])
    said = " ".join(finding["found"] for finding in findings)
    for part in ("1 broker(s), cluster", "2 partitions", "allowed to read and write",
                 "may be read", "transactions up to 900 s"):  # fmt: skip
        assert part in said


def test_a_missing_topic_comes_with_the_command_that_makes_it(
    onceflow_kafka: KafkaServer, kafka_topic: TopicFactory
) -> None:
    narrow = kafka_topic(1)
    status, findings = examine(
        *("--kafka", onceflow_kafka.bootstrap_servers, "--parallelism", "3"),
        *("--topic", "onceflow-not-there", "--topic", narrow),
    )
    assert status == 1
    by_area = {one["area"]: one for one in worst(findings)}
    missing = by_area["topic onceflow-not-there"]
    assert (missing["level"], missing["found"]) == ("problem", "it does not exist")
    assert "--create --topic onceflow-not-there --partitions 3" in missing["remedy"]
    few = by_area[f"topic {narrow}"]
    assert (few["level"], "--alter" in few["remedy"]) == ("warning", True)


@pytest.mark.servers
def test_a_broker_on_which_no_transaction_can_begin_is_a_problem() -> None:
    with EmbeddedKafka(
        {
            "transaction.state.log.replication.factor": "3",
            "transaction.max.timeout.ms": "30000",
            "offsets.retention.minutes": "60",
        }
    ) as server:
        status, findings = examine("--kafka", server.bootstrap_servers)
        found = {one["found"].split(" = ")[0]: one for one in worst(findings)}
        assert (status, set(found)) == (
            1,
            {
                "transaction.state.log.replication.factor",
                "transaction.max.timeout.ms",
                "offsets.retention.minutes",
            },
        )
        server.pause()
        began = time.monotonic()
        try:
            status, findings = examine("--kafka", server.bootstrap_servers, "--timeout", "4")
        finally:
            server.unpause()
        assert time.monotonic() - began < 90
        (finding,) = worst(findings)
        assert (status, "no broker answers" in finding["found"]) == (1, True)


def test_a_closed_port_and_wrong_credentials_are_told(
    onceflow_kafka: KafkaServer, tmp_path: Path
) -> None:
    status, findings = examine("--kafka", "127.0.0.1:1", "--timeout", "10")
    (finding,) = worst(findings)
    assert (status, "Connection refused" in finding["found"]) == (1, True)
    options = tmp_path / "client.properties"
    options.write_text(
        "# as for the Java client\nkafka.security.protocol=SASL_PLAINTEXT\n"
        f"sasl.mechanism=PLAIN\nsasl.username=u\nsasl.password={PASSWORD}\n"
    )
    status, findings = examine(
        *("--kafka", onceflow_kafka.bootstrap_servers, "--kafka-options", str(options)),
        *("--timeout", "5"),
    )
    (finding,) = worst(findings)
    assert (status, finding["area"]) == (1, "kafka")
    assert "--kafka-options" in finding["remedy"]


@pytest.mark.slow  # a broker of its own
@pytest.mark.servers
def test_what_the_brokers_rules_forbid_is_told_with_the_command_that_allows_it() -> None:
    with EmbeddedKafka(
        {
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            # Only what has rules of its own is restricted, and the client is nobody.
            "allow.everyone.if.no.acl.found": "true",
        }
    ) as server:
        servers = server.bootstrap_servers
        open_topic, closed_topic = (server.create_topic(name) for name in ("open", "closed"))
        admin: Any = AdminClient({"bootstrap.servers": servers, "log_level": 0})
        rules = [
            AclBinding(
                kind, name, ResourcePatternType.LITERAL, principal, "*", operation,
                AclPermissionType.ALLOW,
            )
            for kind, name, principal, operation in (
                (ResourceType.TOPIC, closed_topic, "User:ANONYMOUS", AclOperation.DESCRIBE),
                (ResourceType.GROUP, "closed", "User:other", AclOperation.READ),
            )
        ]  # fmt: skip
        for future in admin.create_acls(rules).values():
            future.result(timeout=60)
        deadline = time.monotonic() + 90
        while True:  # rules reach the broker a moment after they are accepted
            status, findings = examine(
                *("--kafka", servers, "--topic", open_topic, "--topic", closed_topic),
                *("--group", "closed", "--parallelism", "1"),
            )
            if status or time.monotonic() > deadline:
                break
        found = {one["area"]: one for one in worst(findings)}
        assert (status, sorted(found)) == (1, ["group closed", "topic closed"]), findings
        assert found["topic closed"]["found"] == "Read is not allowed"
        assert "--operation Read --topic closed" in found["topic closed"]["remedy"]
        assert "--operation Read --group closed" in found["group closed"]["remedy"]
