"""Metadata columns of Postgres changes are refused by name where they cannot be added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from onceflow.clients.postgres.catalog import PostgresType
from onceflow.clients.sql.tables import TableName
from onceflow.core.errors import ConfigError
from onceflow.sources import PostgresChanges
from onceflow.sources.postgres.metadata import Metadata, extend_schema, require_free_names
from onceflow.sources.postgres.table import SourceColumn, SourceTable

_COLUMN = SourceColumn(
    "_xid", PostgresType("int4", "int4"), pa.int32(), 23, can_be_large=False, is_binary_text=True
)
_TABLE = SourceTable(
    TableName("public", "t"),
    7,
    "f",
    (_COLUMN,),
    (),
    stops_at_new_columns=True,
    ignored_columns=frozenset(),
)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (["_lsn", "_offset"], "metadata='_offset': choose one of _lsn, _committed_at, _xid"),
        (["_lsn", "_table", "_lsn"], "metadata= names '_lsn' twice"),
        ("_lsn", r"metadata=…\) takes a list"),
    ],
)
def test_other_names_are_refused(metadata: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PostgresChanges("postgresql://db/shop", table="t", metadata=metadata)


def test_a_column_of_the_table_with_such_a_name_is_refused_only_if_both_are_read() -> None:
    with pytest.raises(ConfigError, match="names '_xid', and table public.t has a column of this"):
        require_free_names(_TABLE, [Metadata.LSN, Metadata.XID])
    require_free_names(_TABLE, [Metadata.LSN])
    require_free_names(replace(_TABLE, columns=()), [Metadata.XID])


@pytest.mark.parametrize("chosen", [(), (Metadata.TABLE, Metadata.XID)])
def test_metadata_columns_are_the_last_ones(chosen: Sequence[Metadata]) -> None:
    schema = extend_schema(pa.schema([("id", pa.int32())]), chosen)
    assert schema.names == ["id", *(column.value for column in chosen)]
