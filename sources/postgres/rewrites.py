"""The statements that change values of a table without a change in the stream.

`ALTER TABLE … ALTER COLUMN … TYPE` writes all rows anew, and logical decoding leaves these rows
out. If the type stays the same, the stream shows no difference: fewer digits of a numeric, or a
USING expression. A column that is dropped and added again with the same name and type loses its
values in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onceflow.clients.postgres.connection import PostgresSession
from onceflow.core.errors import BadRecord
from onceflow.sources.postgres.position import SlotPosition
from onceflow.sources.postgres.table import SourceTable

# A partitioned table has no file. Its oldest partition stands for it, because such a statement
# writes all partitions anew.
_FORMS = """
    SELECT t.oid::bigint, f.oid::bigint, f.relfilenode::bigint,
           a.attname::text, a.attnum::int, a.atttypid::bigint, a.xmin::text
    FROM pg_catalog.pg_class AS t
    LEFT JOIN LATERAL (
        SELECT c.oid, c.relfilenode FROM pg_catalog.pg_class AS c
        WHERE c.relkind = 'r' AND (c.oid = t.oid OR c.oid IN (
            SELECT relid FROM pg_catalog.pg_partition_tree(t.oid)))
        ORDER BY c.oid LIMIT 1
    ) AS f ON true
    JOIN pg_catalog.pg_attribute AS a ON a.attrelid = t.oid
    WHERE t.oid IN ({oids}) AND a.attnum > 0 AND NOT a.attisdropped
"""


@dataclass(frozen=True, slots=True)
class _Column:
    number: int
    type_number: int
    version: str
    """A value that each statement about the column changes."""


@dataclass(frozen=True, slots=True)
class TableForm:
    """The properties of a table by which a rewrite of its rows is detected."""

    file: tuple[int | None, int | None]
    """The OID of a table, and the number of the file with its rows."""
    columns: Mapping[str, _Column]

    def find_rewritten(self, before: TableForm) -> str | None:
        """Return a column whose values may have changed since the form `before`, or None.

        A column whose type has changed is skipped: the stream reports the new type.
        """
        is_rewritten = self.file[0] == before.file[0] and self.file[1] != before.file[1]
        for name, column in self.columns.items():
            earlier = before.columns.get(name)
            if earlier is None or earlier.type_number != column.type_number:
                continue
            if earlier.number != column.number or (
                is_rewritten and earlier.version != column.version
            ):
                return name
        return None


def read_forms(session: PostgresSession, tables: Sequence[SourceTable]) -> Mapping[int, TableForm]:
    """Return the forms of `tables`, with the columns that are read, by OID."""
    names = {table.oid: {column.name for column in table.columns} for table in tables}
    oids = ", ".join(map(str, names)) or "NULL"
    columns: dict[int, dict[str, _Column]] = {}
    files: dict[int, tuple[int | None, int | None]] = {}
    for oid, owner, file, name, number, type_number, version in session.query(
        _FORMS.format(oids=oids)
    ):
        files[oid] = (owner, file)
        if name in names[oid]:
            columns.setdefault(oid, {})[name] = _Column(number, type_number, version)
    return {oid: TableForm(file, columns.get(oid, {})) for oid, file in files.items()}


def require_no_rewrite(
    position: SlotPosition, before: Mapping[int, TableForm], now: Mapping[int, TableForm]
) -> None:
    """Raise BadRecord if a statement may have changed values between two queries of the forms.

    The error is raised without need if VACUUM FULL and a harmless ALTER of a column both ran
    between the two queries: they leave the same traces as a rewrite with new values.
    """
    for table in position.tables:
        earlier, present = before.get(table.oid), now.get(table.oid)
        if earlier is None or present is None:
            continue
        column = present.find_rewritten(earlier)
        if column is None:
            continue
        advice = (
            "Change the target alike, and start the job again: it reads on"
            if table.copied is None
            else f"Copied rows have values from before and after it. {position.copy_anew}"
        )
        raise BadRecord(
            f"column {column!r} of table {table.name} was dropped and added again, or an ALTER"
            f" TABLE wrote its values anew. Postgres sends no changes of these rows. {advice}"
        )
