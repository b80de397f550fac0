"""Records are joined with a table of MySQL or MariaDB that changes, each value exactly."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import closing
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.integration.mysql_sink_kit import query
from tests.runtime.test_union import begin
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.held_up import await_checkpoint, kill_a_slot

from onceflow.core.errors import BadRecord, ConfigError
from onceflow.integration.servers import EmbeddedMariaDB, EmbeddedMySQL
from onceflow.integration.servers.mysql import MySQLAdmin
from onceflow.sources import MySQLTable

pytestmark = pytest.mark.servers
Server = EmbeddedMySQL | EmbeddedMariaDB
ACCOUNTS = (
    """
    CREATE TABLE accounts (
        id int PRIMARY KEY, name varchar(20) CHARACTER SET utf8mb4, vip tinyint(1),
        number bigint unsigned UNIQUE, balance decimal(20, 5), ratio float,
        opened timestamp(6) NULL, born date, raw varbinary(9), code char(3) CHARACTER SET latin1,
        KEY (name), KEY (vip, id)
    )
    """,
    """
    INSERT INTO accounts VALUES
        (1, 'Ada', 1, 18446744073709551615, 123456789012345.67891, 0.1,
            '1999-12-31 23:59:59.999999', '1815-12-10', x'00ff22', 'é'),
        (2, 'ada', 0, 9223372036854775807, -0.00001, NULL, NULL, NULL, '', NULL),
        (3, 'O''Brien\\\\"\\n', NULL, 7, NULL, NULL, NULL, NULL, NULL, NULL)
    """,
)


@pytest.fixture(scope="module", params=[EmbeddedMySQL, EmbeddedMariaDB])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with request.param() as running:
        yield running


@pytest.fixture
def database(server: Server) -> str:
    name = f"d{uuid.uuid4().hex[:12]}"
    with MySQLAdmin.session(server.url) as admin:
        admin.create_database(name)
    url = server.database_url(name)
    query(url, *ACCOUNTS)
    return url


def look_up(table: MySQLTable, **keys: list[Any]) -> list[dict[str, Any]]:
    table.describe(tuple(keys))
    types = {"id": pa.int64(), "number": pa.uint64(), "vip": pa.bool_()}
    asked = pa.RecordBatch.from_pydict(
        {name: pa.array(values, types.get(name, pa.string())) for name, values in keys.items()}
    )
    with closing(table.open(tuple(keys), "a test")) as reader:
        return reader.read(asked).to_pylist()


@pytest.mark.parametrize(
    ("keys", "ids"),
    [
        ({"id": [1, 3, 7, 2**40, -(2**63)]}, {1, 3}),
        ({"number": [2**64 - 1, 7]}, {1, 3}),
        ({"name": ["Ada", "O'Brien\\\"\n", "x\0", "'", "😀"]}, {1, 3}),
        ({"vip": [False], "id": [2]}, {2}),
        ({"id": []}, set[int]()),
    ],
    ids=["integer", "unsigned", "text", "two columns", "nothing to ask"],
)
def test_rows_are_found_by_each_kind_of_key(
    database: str, keys: dict[str, list[Any]], ids: set[int]
) -> None:
    asked = set(zip(*keys.values(), strict=True))
    rows = look_up(MySQLTable(database, table="accounts"), **keys)
    # The server may find more, such as "ada" for "Ada"; the operator compares the keys.
    assert {row["id"] for row in rows if tuple(row[name] for name in keys) in asked} == ids


def test_values_are_those_that_the_server_has(database: str) -> None:
    first, second, third = look_up(MySQLTable(database, table="accounts"), id=[1, 2, 3])
    assert first == {
        "id": 1,
        "name": "Ada",
        "vip": True,
        "number": Decimal(2**64 - 1),
        "balance": Decimal("123456789012345.67891"),
        "ratio": pa.scalar(0.1, pa.float32()).as_py(),
        "opened": datetime(1999, 12, 31, 23, 59, 59, 999999, timezone.utc),
        "born": date(1815, 12, 10),
        "raw": b"\x00\xff\x22",
        "code": "é",
    }
    assert (second["raw"], second["vip"], second["balance"]) == (b"", False, Decimal("-0.00001"))
    assert third == dict.fromkeys(third) | {"id": 3, "name": "O'Brien\\\"\n", "number": Decimal(7)}


def test_a_value_without_an_exact_form_is_refused(database: str) -> None:
    table = MySQLTable(database, table="accounts", schema="id INT, balance DECIMAL(10, 2)")
    assert look_up(table, id=[3]) == [{"id": 3, "balance": None}]
    with pytest.raises(BadRecord, match=r"accounts: a value does not fit .*balance"):
        look_up(table, id=[1])
    query(database, "UPDATE accounts SET vip = 7 WHERE id = 2")
    with pytest.raises(BadRecord, match="vip: bool"):
        look_up(MySQLTable(database, table="accounts"), id=[2])


def test_a_table_that_cannot_be_looked_up_is_refused(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    table = MySQLTable(database, table="accounts")
    with pytest.raises(ConfigError, match=r"lookup_join\(on='balance'\): .*decimal"):
        table.describe(("balance",))
    with pytest.raises(ConfigError, match="character set latin1"):
        table.describe(("code",))
    with pytest.raises(ConfigError, match="table nobody does not exist"):
        MySQLTable(database, table="nobody").describe(("id",))
    with pytest.raises(ConfigError, match="no column 'nothing'"):
        MySQLTable(database, table="accounts", schema="nothing INT").describe(("id",))
    with caplog.at_level(logging.WARNING):
        table.describe(("id", "vip"))
        assert not caplog.messages
        table.describe(("id", "name"))
    assert "CREATE INDEX" in caplog.text


def test_a_column_of_another_type_stops_the_lookups(database: str) -> None:
    table = MySQLTable(database, table="accounts", schema="id INT, born DATE, name STRING")
    keys = pa.RecordBatch.from_pydict({"id": [1]})
    table.describe(("id",))
    with closing(table.open(("id",), "a test")) as reader:
        query(database, "ALTER TABLE accounts ADD COLUMN later int, DROP COLUMN raw")
        assert reader.read(keys).num_rows == 1
        query(database, "ALTER TABLE accounts MODIFY born datetime")
        with pytest.raises(ConfigError, match="column .born. of table .*accounts .*again"):
            reader.read(keys)
        query(database, "ALTER TABLE accounts DROP COLUMN born")
        with pytest.raises(ConfigError, match="Unknown column 'born'"):
            reader.read(keys)


def test_records_are_joined_once_with_the_rows_of_their_time(
    database: str, cluster: AnyCluster, tmp_path: Path
) -> None:
    query(database, "CREATE TABLE limits (account varchar(9) PRIMARY KEY, limited int)")
    query(database, *(f"INSERT INTO limits VALUES ('{number}', 1)" for number in range(9)))
    changed = tmp_path / "changed"
    source = CountingSource(2_000, accounts=10, pause_s=0.005, ends_with=str(changed))
    pipeline, sink = begin(cluster, tmp_path), DirectorySink(str(tmp_path / "out"))
    records = pipeline.read(source, uid="records")
    table = MySQLTable(database, table="limits")
    records.lookup_join(table, "account", "left", ttl=0.05).write(sink, uid="out")
    job = pipeline.start()
    await_checkpoint(job)
    kill_a_slot(job, 0)
    query(database, "UPDATE limits SET limited = 2", "INSERT INTO limits VALUES ('9', 3)")
    with MySQLAdmin.session(database) as admin:
        admin.end_sessions_of(database.rpartition("/")[2])
    changed.touch()
    job.wait(60)
    rows = sorted(sink.rows(), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(source.records))
    by_account: dict[str, set[Any]] = {}
    for row in rows:
        by_account.setdefault(row["account"], set()).add(row["limited"])
    assert by_account.pop("9") <= {None, 3}
    assert set[Any]().union(*by_account.values()) == {1, 2}
