"""The operators of a stream that add the columns of a table."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import pyarrow as pa

from onceflow.core.argument_types import check_arguments
from onceflow.core.errors import ConfigError
from onceflow.core.plan.graph import Feed, GraphBuilder
from onceflow.core.plan.lookup_tables import (
    LOOKUP_BYTES_MAX,
    JoinedColumns,
    JoinType,
    LookupTable,
)
from onceflow.core.plan.work import JoinLookup, JoinTable
from onceflow.core.setting_values import seconds_of
from onceflow.core.spi.lookups import LookupSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

StreamT = TypeVar("StreamT")


class TableJoins(Generic[StreamT]):
    """The methods of a stream that join it with a table. A part of `Stream`."""

    _graph: GraphBuilder
    _feeds: tuple[Feed, ...]

    def join(
        self,
        table: DataFrame | pa.Table,
        on: str | Sequence[str],
        how: JoinType = "inner",
        *,
        bytes_max: int = LOOKUP_BYTES_MAX,
        uid: str | None = None,
    ) -> StreamT:
        """Add the columns of a small table to the records with equal values of the columns `on`.

        `table` is a bounded Spark DataFrame or an Arrow table. It is evaluated once at each start
        of the pipeline. All subtasks and all attempts of that start use the same rows. A record
        that matches several rows is emitted once for each row. A record that matches no row, or has
        a null in its key, is dropped (`how="inner"`) or gets nulls (`"left"`).

        Raises:
            ConfigError: A key column is missing on one side or cannot be a key, or both sides have
                another column of the same name. At the start: the table has more than `bytes_max`
                bytes in Arrow.
        """
        if how not in ("inner", "left"):
            raise ConfigError(f"join(how={how!r}): choose one of inner, left")
        keys = (on,) if isinstance(on, str) else tuple(on)
        lookup = LookupTable(table, self._feeds[0].schema, keys, bytes_max)
        schema = lookup.to_joined_schema(self._feeds[0].schema, how)
        return self._add_join(JoinTable(lookup, how), uid, schema)

    @check_arguments
    def lookup_join(
        self,
        table: LookupSource,
        on: str | Sequence[str],
        how: JoinType = "inner",
        *,
        ttl: float | str = 60.0,
        keys_max: int = 100_000,
        uid: str | None = None,
    ) -> StreamT:
        """Add the columns of a table that changes to the records with equal values of `on`.

        Each subtask looks up the keys that it does not know, many in one question, and keeps the
        rows of up to `keys_max` keys for `ttl`; with `ttl=0` it keeps none. So a record gets the
        rows that the table had at most `ttl` before, and a key without a row is known for as long.
        A record that matches several rows is emitted once for each row. A record that matches no
        row, or has a null in its key, is dropped (`how="inner"`) or gets nulls (`"left"`).

        After a failure, records since the last checkpoint are looked up again, perhaps with newer
        rows. Their results still come out exactly once.

        Raises:
            ConfigError: The table cannot be looked up by these columns, or an argument is invalid.
            SourceUnavailable: The table cannot be reached now.
        """
        if how not in ("inner", "left"):
            raise ConfigError(f"lookup_join(how={how!r}): choose one of inner, left")
        ttl_s = seconds_of(ttl, setting="ttl")
        if keys_max < 1:
            raise ConfigError(f"lookup_join(keys_max={keys_max}): give 1 or more")
        keys = (on,) if isinstance(on, str) else tuple(on)
        stream = self._feeds[0].schema
        # The object keeps what it describes, and another join may describe it at another time.
        source = copy.copy(table)
        columns = JoinedColumns.resolve(source.describe(keys), stream, keys, how, "lookup_join")
        work = JoinLookup(source, columns, ttl_s, keys_max)
        return self._add_join(work, uid, columns.to_joined_schema(stream))

    def _add_join(
        self, work: JoinTable | JoinLookup, uid: str | None, schema: pa.Schema
    ) -> StreamT:
        operator = self._graph.add(work, self._feeds, uid=uid, schema=schema)
        return self._make_stream(Feed(operator.uid, schema))

    def _make_stream(self, feed: Feed) -> StreamT:
        raise NotImplementedError
