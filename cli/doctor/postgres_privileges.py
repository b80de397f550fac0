"""What a role may do in a Postgres, and what it may not yet."""

from __future__ import annotations

from typing import Any

from onceflow.cli.doctor.databases import DatabaseQuestion
from onceflow.cli.doctor.findings import Area, Finding
from onceflow.sinks.postgres.catalog import identifier, literal, quoted
from onceflow.sinks.postgres.connection import PostgresSession
from onceflow.sinks.sql.errors import StatementRefused
from onceflow.sinks.sql.tables import TableName


def one_row(session: PostgresSession, statement: str, *values: str) -> tuple[Any, ...]:
    """Return the one row of `statement`.

    Raises:
        SqlError: The server refuses it.
    """
    for value in values:
        statement = statement.replace("%s", literal(value), 1)
    rows = session.query(statement)
    if not rows:
        raise StatementRefused("the server answered a SELECT of one row with none")
    return rows[0]


class Privileges:
    """Looks by the connection of a role; changes nothing."""

    def __init__(self, question: DatabaseQuestion, connection: PostgresSession) -> None:
        self._question = question
        self._connection = connection
        self._area = Area("database")

    def ledger(self) -> list[Finding]:
        """Look whether onceflow's own tables may be made and written."""
        schema = self._question.ledger_schema or "onceflow"
        role, there, in_schema, in_database, database = one_row(
            self._connection,
            "SELECT current_user::text, n.oid IS NOT NULL, "
            "coalesce(has_schema_privilege(n.oid, 'USAGE, CREATE'), false), "
            "has_database_privilege(current_database(), 'CREATE'), current_database()::text "
            "FROM (SELECT 1) AS one LEFT JOIN pg_catalog.pg_namespace AS n ON n.nspname = %s",
            schema,
        )
        name, grantee = quoted(schema), quoted(role)
        missing = self._missing_on_bookkeeping(schema) if there else None
        if missing:
            tables = ", ".join(missing)
            grant = (
                f"GRANT USAGE ON SCHEMA {name} TO {grantee}; "
                f"GRANT SELECT, INSERT, UPDATE, DELETE ON {tables} TO {grantee}"
            )
            text = f"role {role} may not write {tables}"
            return [self._area.problem(text, "onceflow's own tables", grant)]
        if missing is not None or in_schema or (in_database and not there):
            return [self._area.ok(f"role {role} may keep the ledger in schema {schema}")]
        grant = (
            f"GRANT USAGE, CREATE ON SCHEMA {name} TO {grantee}"
            if there
            else f"CREATE SCHEMA {name} AUTHORIZATION {grantee}"
        )
        text = f"role {role} may not keep the ledger in schema {schema} of database {database}"
        return [self._area.problem(text, "a place for two small tables", grant)]

    def _missing_on_bookkeeping(self, schema: str) -> list[str] | None:
        """Return the tables of ours that may not be written; None when they are not there yet."""
        tables = [f"{quoted(schema)}.{name}" for name in ("onceflow_ledger", "onceflow_sinks")]
        rows = [
            (table, *one_row(self._connection, "SELECT c.oid, coalesce("
            "has_schema_privilege(c.relnamespace, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')"
            " AND has_table_privilege(c.oid, 'INSERT') AND has_table_privilege(c.oid, 'UPDATE')"
            " AND has_table_privilege(c.oid, 'DELETE'), false) FROM (SELECT 1) AS one LEFT JOIN "
            "(pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace)"
            " ON n.nspname = %s AND c.relname = %s", schema, table.split(".")[-1]))
            for table in tables
        ]  # fmt: skip
        if any(oid is None for _, oid, _ in rows):
            return None
        return [table for table, _, may in rows if not may]

    def table(self) -> list[Finding]:
        """Look at the table that rows are to go to, if one is named."""
        given = self._question.table
        if given is None:
            return []
        area, name = Area(f"table {given}"), identifier(TableName.parse(given))
        refusal = self._hidden_schema(area, given)
        if refusal is not None:
            return [refusal]
        (oid,) = one_row(self._connection, "SELECT pg_catalog.to_regclass(%s)::oid", name)
        if oid is None:
            create = f"CREATE TABLE {name} (…), or PostgresSink(…, create=True)"
            return [area.problem("it does not exist", "the table", create)]
        return [self._table_there(area, name, oid)]

    def _table_there(self, area: Area, name: str, oid: int) -> Finding:
        role, persistence, kind, insert, *by_key = one_row(
            self._connection,
            "SELECT current_user::text, relpersistence::text, relkind::text,"
            " has_table_privilege(oid, 'INSERT') OR has_any_column_privilege(oid, 'INSERT'),"
            " has_table_privilege(oid, 'SELECT'), has_table_privilege(oid, 'UPDATE'),"
            " has_table_privilege(oid, 'DELETE') FROM pg_catalog.pg_class WHERE oid = %s",
            str(oid),
        )
        if not insert:
            grant = f"GRANT SELECT, INSERT, UPDATE, DELETE ON {name} TO {quoted(role)}"
            return area.problem(f"role {role} may not insert", "INSERT", grant)
        if persistence == "u":
            needed = "a logged table: a crash of the server empties this one"
            return area.problem("it is unlogged", needed, f"ALTER TABLE {name} SET LOGGED")
        if kind not in "rp":
            return area.problem(f"it is a relation of kind {kind!r}", "a table", "name a table")
        more = [
            what for what, may in zip(("select", "update", "delete"), by_key, strict=True) if may
        ]
        return area.ok(f"role {role} may {', '.join(['insert', *more])}")

    def _hidden_schema(self, area: Area, table: str) -> Finding | None:
        """Return the problem with a schema that has `table` and may not be used."""
        schema, _, bare = table.rpartition(".")
        # Of a name without a schema: the server passes over those that the role may not use.
        searched = "string_to_array(translate(current_setting('search_path'), ' \"', ''), ',')"
        found = self._connection.query(
            "SELECT n.nspname::text, current_user::text FROM pg_catalog.pg_namespace AS n "
            "JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid "
            "WHERE NOT has_schema_privilege(n.oid, 'USAGE') "
            f"AND c.relname = {literal(bare)} "
            + (
                f"AND n.nspname = {literal(schema)}"
                if schema
                else f"AND n.nspname = ANY({searched})"
            )
        )
        if not found:
            return None
        schema, role = map(str, found[0])
        grant = f"GRANT USAGE ON SCHEMA {quoted(schema)} TO {quoted(role)}"
        return area.problem(f"role {role} may not look into schema {schema}", "USAGE", grant)
