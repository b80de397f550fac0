"""Errors of formats name options; `test_spark_options` has what tables themselves refuse."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Message
from pyspark.sql.types import LongType, StructField, StructType

from onceflow.connectors.spark.formats import KafkaFormat, SQLiteFormat
from onceflow.connectors.spark.options import sql_reads
from onceflow.connectors.spark.options.files import FILES_READ, FILES_WRITE
from onceflow.connectors.spark.options.kafka import KAFKA_READ, KAFKA_READ_STREAM, KAFKA_WRITE
from onceflow.connectors.spark.options.option_table import OptionTable
from onceflow.connectors.spark.options.postgres_changes import CHANGES_READ
from onceflow.connectors.spark.options.sql_reads import MYSQL_READ, POSTGRES_READ
from onceflow.connectors.spark.options.words import OptionWords, Speaker, in_option_words
from onceflow.core.errors import ConfigError, OnceflowError, SinkError
from onceflow.sinks import FileSink, KafkaSink, MySQLSink, PostgresSink, SQLiteSink
from onceflow.sources import KafkaSource, PostgresChanges
from onceflow.sources.kafka.messages import bad_record_error

Table = OptionTable[Any]
_SQL = {"url": "jdbc:postgresql://db/shop", "dbtable": "orders", "user": "u"}
_KAFKA = {"kafka.bootstrap.servers": "b:9092"}
TABLES: tuple[tuple[Table, Callable[..., object], Mapping[str, str]], ...] = (
    (sql_reads.describe_postgres_writes(), PostgresSink, _SQL),
    (sql_reads.describe_mysql_writes(), MySQLSink, {**_SQL, "url": "jdbc:mysql://db/shop"}),
    (sql_reads.describe_sqlite_writes(), SQLiteSink, {"url": "/tmp/a.db", "dbtable": "orders"}),
    (KAFKA_WRITE, KafkaSink, {**_KAFKA, "topic": "t"}),
    (KAFKA_READ, KafkaSource, {**_KAFKA, "subscribe": "t"}),
    (KAFKA_READ_STREAM, KafkaSource, {**_KAFKA, "subscribe": "t"}),
    (FILES_WRITE, FileSink, {"path": "/tmp/out"}),
    (FILES_READ, FileSink, {"path": "/tmp/out"}),
    (POSTGRES_READ, PostgresSink, _SQL),
    (MYSQL_READ, MySQLSink, {**_SQL, "url": "jdbc:mysql://db/shop"}),
    (
        CHANGES_READ,
        PostgresChanges,
        {"url": "postgresql://db/shop", "table": "t", "slot": "s", "changesLocation": "/tmp/c"},
    ),
)
VALUES = (
    *("", "x", "-1", "0", "1", "true", "a,b", "a,a", "a.b.c.d", "[", "http://u@h", "latest"),
    *("upsert", "ledger", "raw", "json", "avro", "string", "1 ms", '{"t": 1}'),
)
OF_CLIENTS = ("kafka.acks", "kafka.group.id", "kafka.enable.idempotence", "schema.registry.url")


def mistakes(table: Table, base: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """Every option with every value, with none beside it and with every other one."""
    names = [option.name for option in table.options]
    names += [name for name in OF_CLIENTS if any(map(name.startswith, table.clients))]
    good = {"valueFormat": "avro", "keyFormat": "avro", "primaryKey": "a", "writeMode": "upsert"}
    for name in names:
        yield {one: text for one, text in base.items() if one != name}
        for value in VALUES:
            yield {**base, name: value}
    for one, other in combinations(names, 2):
        for value in ("raw", "1"):
            yield {**base, one: good.get(one, value), other: good.get(other, value)}


def arguments_in(text: str, target: Callable[..., object], table: Table) -> list[str]:
    """Return what `text` calls as Python does."""
    known = {option.name for option in table.options}
    names = {*inspect.signature(target).parameters, *(option.argument for option in table.options)}
    return [
        name
        for name in sorted(names - known)
        if re.search(rf"\b{name}\b" if "_" in name else rf"(?<![\w.]){name}=", text)
    ]


@pytest.mark.parametrize(
    ("table", "target", "base"),
    TABLES,
    ids=[f"{table.format}-{table.direction}" for table, _, _ in TABLES],
)
def test_no_mistake_in_options_is_told_in_the_words_of_python(
    table: Table, target: Callable[..., object], base: Mapping[str, str]
) -> None:
    told: set[str] = set()
    for given in mistakes(table, base):
        try:
            table.make(given)
        except ConfigError as error:
            told.add(str(error))
    assert len(told) > len(table.options)
    assert {text: found for text in told if (found := arguments_in(text, target, table))} == {}
    assert [text for text in told if re.search(r"True|False|\('|…\)", text)] == []


_OF_SEVERAL_TABLES = frozenset(
    {"__repr__", "_describe", "_list_publication_tables", "_parse_names", "adapt_position"}
)
"""The functions of the source with texts about `tables=`, which the format refuses."""


def list_texts(node: ast.AST) -> Iterator[str]:
    """Yield the texts below `node`, without those of docstrings and of options' declarations."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef(name=name) if name in _OF_SEVERAL_TABLES:
                pass
            case ast.Expr(value=ast.Constant()) | ast.Call(func=ast.Name(id="option")):
                pass
            case ast.Constant(value=str(text)):
                yield text
            case ast.JoinedStr(values=parts):
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts
                )
            case _:
                yield from list_texts(child)


def test_no_error_of_postgres_changes_names_an_option_that_spark_lacks() -> None:
    modules = sorted(Path(str(files("onceflow.sources.postgres"))).glob("*.py"))
    texts = {
        CHANGES_READ.words.translate(text)
        for module in modules
        if module.name != "diagnosis.py"  # which the commands of jobs use
        for text in list_texts(ast.parse(module.read_text(encoding="utf-8")))
        if " " in text
    }
    assert any("unchangedColumn=_unchanged" in text for text in texts)
    found = {
        text: names
        for text in texts
        for target in (PostgresChanges, PostgresSink)
        if (names := arguments_in(text, target, CHANGES_READ))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Pass create=True, or run: CREATE TABLE", "Pass createTable=true, or run: CREATE TABLE"),
        ("or PostgresSink(…, create=True)", "or option createTable=true"),
        ("PostgresSink(commit_mode='ledger')", "option commitMode=ledger"),
        ("by which write_mode='upsert' finds rows", "by which writeMode=upsert finds rows"),
        ("primary_key names id", "primaryKey names id"),
        ("primary_key=('a', 'b') is", "primaryKey=a,b is"),
        ("a longer lock_timeout_s waits", "a longer lockTimeout waits"),
        (
            "sink s subtask 1, table t: checkpoint 600 was not pre-committed: duplicate key",
            "sink s partition 1, table t: its rows were not pre-committed: duplicate key",
        ),
        # What is run or names a column stays as it is.
        ("ALTER TABLE s ADD COLUMN commit_mode varchar(16)",) * 2,
        ("column 'primary_key' is missing; \"write_mode\" too",) * 2,
        ("UPDATE s SET commit_mode = 'ledger'",) * 2,
    ],
)
def test_arguments_become_options_and_sql_and_names_of_columns_stay(said: str, told: str) -> None:
    assert sql_reads.describe_postgres_writes().words.translate(said) == told


def test_options_of_clients_are_named_with_their_prefix() -> None:
    said = "give options={'message.max.bytes': 2000}, and schema_registry='http://h'"
    told = "give kafka.message.max.bytes=2000, and schema.registry.url=http://h"
    assert KAFKA_WRITE.words.translate(said) == told


def test_an_option_of_the_java_client_is_refused_with_options_that_the_format_has() -> None:
    given = {**_KAFKA, "topic": "t", "kafka.sasl.jaas.config": "x"}
    with pytest.raises(ConfigError, match=r"option 'kafka\.sasl\.jaas\.config'") as refused:
        KAFKA_WRITE.make(given)
    advised = re.findall(r"[\w.]*sasl[\w.]+", str(refused.value).partition("give ")[2])
    assert advised == ["kafka.sasl.mechanism", "kafka.sasl.username", "kafka.sasl.password"]


def test_a_record_that_cannot_be_decoded_is_told_with_what_a_format_can_do() -> None:
    record = Message(topic="t", partition=0, offset=7, value=b"{")
    told = KAFKA_READ.words.translate(str(bad_record_error(record, "no JSON")))
    assert "or leave them out, counted and logged, with onBadRecord=drop" in told
    assert "dead_letter" not in told


class Reader(Speaker):
    """Fails as Spark's readers do, at once or later."""

    @in_option_words
    def plan(self) -> None:
        try:
            raise SinkError("no column b: evolve=True adds it")
        except SinkError as error:
            raise ConfigError("it needs create=True") from error

    @in_option_words
    def read(self) -> Iterator[int]:
        yield 1
        raise SinkError("primary_key=('id',) is not unique")


def test_what_spark_calls_tells_errors_and_their_causes_so_in_every_process() -> None:
    reader = pickle.loads(
        pickle.dumps(Reader().speaking(sql_reads.describe_postgres_writes().words))
    )
    with pytest.raises(ConfigError, match="it needs createTable=true") as caught:
        reader.plan()
    assert "evolveTable=true adds it" in str(caught.value.__cause__)
    rows = reader.read()
    assert next(rows) == 1
    with pytest.raises(SinkError, match="primaryKey=id is not unique"):
        next(rows)


@pytest.mark.timeout(10)
def test_an_error_that_is_its_own_cause_is_told_and_ends() -> None:
    error = SinkError("gone")
    error.__cause__ = error
    with pytest.raises(SinkError, match="gone"), OptionWords().translate_errors():
        raise error


def test_a_sink_of_ones_own_speaks_as_it_does() -> None:
    with pytest.raises(OnceflowError, match="primary_key=1"), OptionWords().translate_errors():
        raise SinkError("primary_key=1")


def test_the_columns_that_a_read_has_are_asked_for_in_options_words(tmp_path: Path) -> None:
    given = {"kafka.bootstrap.servers": "b:9092", "subscribe": "t", "valueformat": "json"}
    with pytest.raises(ConfigError, match="valueFormat=json needs valueSchema="):
        KafkaFormat(given).schema()


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (None, "table orders does not exist in .*createTable=true"),
        ("CREATE TABLE orders (a int)", "it has no column 'id' .*evolveTable=true"),
        ("CREATE TABLE orders (id int)", "by which writeMode=upsert finds rows"),
    ],
)
def test_a_table_that_does_not_fit_is_told_in_options_words_when_the_write_is_planned(
    tmp_path: Path, table: str | None, told: str
) -> None:
    with closing(sqlite3.connect(tmp_path / "a.db")) as database:
        database.execute(table or "CREATE TABLE other (a int)")
    where = {"url": str(tmp_path / "a.db"), "dbtable": "orders", "stagingLocation": str(tmp_path)}
    given = {**where, "writeMode": "upsert", "primaryKey": "id"}
    rows = StructType([StructField("id", LongType(), False)])
    with pytest.raises(ConfigError, match=told) as caught:
        SQLiteFormat(given).writer(rows, overwrite=False)
    assert arguments_in(str(caught.value), SQLiteSink, sql_reads.describe_sqlite_writes()) == []
