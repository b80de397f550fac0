"""The operators of a keyed stream that choose records of each key by their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import pyarrow as pa

from onceflow.core.api import users_mistakes
from onceflow.core.argument_types import check_arguments
from onceflow.core.errors import ConfigError
from onceflow.core.plan.aggregates import Aggregate, check_kept_ttl, running_schema
from onceflow.core.plan.work import (
    AggregateLastRows,
    Deduplicate,
    Emission,
    Keep,
    KeepTop,
    Order,
    Work,
)
from onceflow.core.setting_values import choice_of
from onceflow.core.state import StateTtlConfig
from onceflow.core.state.states.kept_rows import check_rows_can_be_kept

TOP_N_MAX = 1_000
"""The largest number of records that `top_n` keeps for each key."""
OVER_ROWS_MAX = 100
"""The largest number of records in a frame of `over`. State has a column for each, and a result
costs as much as adding each of them."""

StreamT = TypeVar("StreamT")


class RankedRecords(Generic[StreamT]):
    """The methods of a keyed stream that choose records by order. A part of `KeyedStream`."""

    _key: tuple[str, ...]

    @property
    def schema(self) -> pa.Schema:
        """The schema of the records."""
        raise NotImplementedError

    @check_arguments
    def deduplicate(
        self,
        *,
        uid: str,
        keep: str = "first",
        by: str | None = None,
        ttl: StateTtlConfig | None = None,
    ) -> StreamT:
        """Keep one record of each key: the first or the last one, in the order of the column `by`.

        Without `by`, the order is that of arrival. `keep="first"` then emits the first record of
        each key and drops all others, so that any sink may follow. In all other cases, a record
        that is emitted replaces the one before: write them to a sink with upserts of the key. At
        most one record is emitted for each key and batch. Vectorised, like `running`.

        Of equal values of `by`, the record that arrived first is the first one, and the one that
        arrived last is the last one. A key that has had no record for `ttl` by the slot's clock is
        forgotten. `uid` names the state in checkpoints.

        Raises:
            ConfigError: `keep` is something else, `by` does not exist, is part of the key or has no
                order, or `ttl` allows expired values to be returned.
        """
        chosen = choice_of(Keep, keep, setting="keep")
        if by is not None:
            users_mistakes.require_order(by, self.schema, self._key, "deduplicate")
        check_kept_ttl(ttl, "deduplicate")
        return self._then(Deduplicate(self._key, chosen, by, ttl), uid, self.schema)

    @check_arguments
    def top_n(
        self, n: int, *, by: str | Order | Sequence[str | Order], uid: str, rank: str = "rank"
    ) -> StreamT:
        """Keep the first `n` records of each key in the order of `by`, and add the column `rank`.

        `by` is a column, `desc("price")` for the greatest value first, or several of them:
        `[desc("price"), "date_time"]`. Of records that are equal in all of them, the one that
        arrived first comes first. The result has a record for each rank of a key, from 1, whenever
        another record gets this rank. Write it to a sink with upserts whose primary key is the key
        and `rank`. Vectorised, like `running`. `uid` names the state in checkpoints.

        Raises:
            ConfigError: `n` is not between 1 and 1,000, a column of `by` is missing, part of the
                key or without order, the stream has `rank`, or state cannot keep a column.
        """
        if not 1 <= n <= TOP_N_MAX:
            raise ConfigError(f"top_n({n}): give a number of records from 1 to {TOP_N_MAX}")
        orders = users_mistakes.read_orders(by, self.schema, self._key, "top_n")
        if rank in self.schema.names:
            raise ConfigError(f"top_n(rank={rank!r}): the stream has this column already")
        check_rows_can_be_kept(self.schema, "top_n()")
        schema = self.schema.append(pa.field(rank, pa.int64()))
        return self._then(KeepTop(self._key, n, orders), uid, schema)

    @check_arguments
    def over(
        self,
        rows: int,
        *,
        uid: str,
        by: str | Order | Sequence[str | Order] | None = None,
        ttl: StateTtlConfig | None = None,
        emit: str = "record",
        **aggregates: Aggregate,
    ) -> StreamT:
        """Add a column for each aggregate: its value over the last `rows` records of the key.

        The current record is included. Without `by`, the last records are those that arrived last.
        With `by`, columns as in `top_n`, they are the last ones so far in the order of these
        columns, so that the last result of a key does not depend on the order of arrival. Of
        records that are equal in all of them, the one that arrived last is the last one.

        If a key has had no record for `ttl` by the slot's clock, it starts again. `emit="batch"`
        emits only the last record of each key and batch. Vectorised, like `running`. `uid` names
        the state in checkpoints.

        Raises:
            ConfigError: `rows` is not between 2 and 100, there is no aggregate, a name is in use, a
                column cannot be aggregated, a column of `by` is missing, part of the key or without
                order, or `ttl` or `emit` is not allowed.
        """
        if not 2 <= rows <= OVER_ROWS_MAX:
            raise ConfigError(
                f"over(rows={rows}): give a number of records from 2 to {OVER_ROWS_MAX}; for all"
                " records of a key use running(), for more than these use process()"
            )
        users_mistakes.require_aggregates(aggregates, "over")
        orders = (
            () if by is None else users_mistakes.read_orders(by, self.schema, self._key, "over")
        )
        check_kept_ttl(ttl, "over")
        emission = choice_of(Emission, emit, setting="emit")
        schema = running_schema(self.schema, aggregates, "over")
        work = AggregateLastRows(self._key, rows, orders, dict(aggregates), ttl, emission)
        return self._then(work, uid, schema)

    def _then(self, work: Work, uid: str, schema: pa.Schema) -> StreamT:
        raise NotImplementedError
