"""What every dialect claims and looks at on the driver before an attempt writes anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.spi import CommitterContext
from onceflow.sinks.fence import FenceOwner, check_fence
from onceflow.sinks.sql.connection import ConnectionT
from onceflow.sinks.sql.database import Database
from onceflow.sinks.sql.failures import ErrorT
from onceflow.sinks.sql.settings import CommitMode
from onceflow.sinks.sql.tables import FitT, Table, TableT
from onceflow.sinks.sql.write_mode import ChangeRules


def claim(
    database: Database[ConnectionT, ErrorT, TableT, FitT],
    connection: ConnectionT,
    context: CommitterContext,
    mode: CommitMode,
) -> None:
    """Return when this attempt, and no older one, may write under the sink id in `mode`.

    Raises:
        ConfigError: Another job owns the sink id.
        Fenced: This attempt or a newer one has claimed it.
    """
    ledger = database.settings.ledger
    claimant = FenceOwner(context.log_id, context.attempt)
    while not ledger.claim(connection, context.sink_id, context.job, claimant, mode.value):
        # Goes on only if the row that stood in the way is gone meanwhile, or older.
        check_fence(
            context.sink_id,
            ledger.owner(connection, context.sink_id),
            claimant,
            take_over=ledger.take_over(context.sink_id),
        )


def required_table(
    database: Database[ConnectionT, ErrorT, TableT, FitT],
    connection: ConnectionT,
    context: CommitterContext,
    schema: pa.Schema,
    prepared: Callable[[], Sequence[TransactionId]],
) -> TableT:
    """Return the target table, which takes rows of `schema`; made or altered when asked for.

    Only while nothing is `prepared`: columns are added by the writers, after recovery, if need be.

    Raises:
        ConfigError: There is none, or it does not take the rows.
    """
    settings, tables = database.settings, database.tables
    table = tables.found(connection, settings.table)
    if table is None:
        if not settings.create:
            raise tables.missing(settings.table, schema)
        _require_nothing(prepared(), database, context)
        table = tables.created(connection, settings.table, schema, settings.rules)
    tables.require_writable(table)
    if settings.evolve:
        waiting = prepared()
        if waiting:
            database.log.info(
                "sink %s: columns are added after recovery: %s transactions are prepared",
                context.sink_id,
                len(waiting),
            )
            schema = _known_columns(table, schema, settings.rules)
        else:
            table = tables.evolved(connection, table, schema, settings.rules)
    tables.matched(table, schema, settings.rules)
    return table


def _known_columns(table: Table, schema: pa.Schema, rules: ChangeRules) -> pa.Schema:
    control = {rules.operation_column, rules.table_column}
    return pa.schema(
        [one for one in schema if one.name in control or table.column(one.name) is not None]
    )


def _require_nothing(
    prepared: Sequence[TransactionId],
    database: Database[ConnectionT, ErrorT, TableT, FitT],
    context: CommitterContext,
) -> None:
    if prepared:
        raise ConfigError(
            f"table {database.settings.table} is to be created, and {len(prepared)} transactions "
            f"of sink {context.sink_id} are in doubt, the first {prepared[0]}: tables are created "
            "only while nothing is prepared. Start the job once with the table it had before, or "
            f"finish them by {database.endings(prepared[0])}"
        )
