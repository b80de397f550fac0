"""The tables in the pages on Spark formats are made of the data by which options are read.

`python tests/unit/connectors/test_spark_option_documents.py` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING
from enum import Enum
from functools import partial
from pathlib import Path
from typing import cast

from onceflow.connectors.spark.options import option_table, sql_reads
from onceflow.connectors.spark.options.files import FILES_READ, FILES_WRITE
from onceflow.connectors.spark.options.kafka import KAFKA_READ, KAFKA_READ_STREAM, KAFKA_WRITE
from onceflow.connectors.spark.options.postgres_changes import CHANGES_READ
from onceflow.connectors.spark.options.state import CHECKPOINTS_READ, SAVEPOINT_WRITE, STATE_READ
from onceflow.connectors.spark.versions import SparkInterface

DOCUMENTS = Path(__file__).parents[3] / "docs"
PAGES = (DOCUMENTS / "spark-formats.md", DOCUMENTS / "reference" / "spark-format-options.md")


def _default(option: option_table.SparkOption) -> str:
    default = option.default
    if default is MISSING:
        return "needed"
    value = default.value if isinstance(default, Enum) else default
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if not value:
        return ""
    if isinstance(value, tuple):
        return f"`{','.join(cast('tuple[str, ...]', value))}`"
    return f"`{value:g} s`" if isinstance(value, float) else f"`{value}`"


def _table(head: str, rows: list[str]) -> str:
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows]) + "\n"


def _rows(table: option_table.OptionTable[object]) -> list[str]:
    rows = list[str]()
    for option in table.options:
        names = ", ".join(f"`{name}`" for name in (option.name, *option.meaning.aliases))
        rows.append(f"| {names} | {_default(option)} | {table.help_of(option)} |")
    for prefix, option in table.clients.items():
        rows.append(f"| `{prefix}*` |  | {table.help_of(option)} |")
    return rows


def _options(rows: list[str]) -> str:
    return _table("| option | default | |", rows)


def _shared(first: list[str], *others: list[str]) -> list[str]:
    """Return the rows of `first` that all the other tables have, too."""
    return [row for row in first if all(row in other for other in others)]


def _versions() -> str:
    rows = [
        f"| {one.value.since[0]}.{one.value.since[1]} | {one.value.what} | {one.value.without} |"
        for one in SparkInterface
    ]
    return _table("| since Spark | what | without it |", rows)


POSTGRES = _rows(sql_reads.describe_postgres_writes())
MYSQL = _rows(sql_reads.describe_mysql_writes())
SQLITE = _rows(sql_reads.describe_sqlite_writes())
READ_STREAM, READ = _rows(KAFKA_READ_STREAM), _rows(KAFKA_READ)
DATABASES = _shared(POSTGRES, MYSQL, SQLITE)
SERVERS = [row for row in _shared(POSTGRES, MYSQL) if row not in DATABASES]
KAFKA_READS = _shared(READ_STREAM, READ)

OPTIONS = {
    "databases write": DATABASES,
    "servers write": SERVERS,
    "onceflow-postgres write": [row for row in POSTGRES if row not in DATABASES + SERVERS],
    "onceflow-mysql write": [row for row in MYSQL if row not in DATABASES + SERVERS],
    "onceflow-sqlite write": [row for row in SQLITE if row not in DATABASES],
    "onceflow-kafka reads": KAFKA_READS,
    "onceflow-kafka readStream": [row for row in READ_STREAM if row not in KAFKA_READS],
    "onceflow-kafka read": [row for row in READ if row not in KAFKA_READS],
    **{
        f"{table.format} {table.direction}": _rows(table)
        for table in (
            KAFKA_WRITE,
            CHANGES_READ,
            FILES_WRITE,
            FILES_READ,
            CHECKPOINTS_READ,
            STATE_READ,
            SAVEPOINT_WRITE,
        )
    },
}
"""The rows of each table of options. A row that several formats have alike is in one table."""
TABLES: dict[str, Callable[[], str]] = {
    **{name: partial(_options, rows) for name, rows in OPTIONS.items()},
    "every format write": lambda: _table(
        "| option | |",
        [f"| `{option.name}` | {option.says} |" for option in option_table.PROTOCOL_OPTIONS],
    ),
    "spark versions": _versions,
}


def with_tables(text: str) -> str:
    """Return `text` with each table that a comment names as the data says."""
    return re.sub(
        r"(<!-- table: (.*?) -->\n)((?:\|.*\n)*)",
        lambda match: match[1] + TABLES[match[2]](),
        text,
    )


def test_tables_of_the_pages_say_what_the_code_reads() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert [with_tables(text) for text in texts] == texts
    assert set(re.findall(r"<!-- table: (.*?) -->", "".join(texts))) == set(TABLES)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
