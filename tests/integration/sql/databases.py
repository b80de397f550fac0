"""The differences of the databases for the suite that runs on all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias
from urllib.parse import quote, urlsplit, urlunsplit

from tests.integration import mysql_sink_kit, postgres_sink_kit, sink_kit
from typing_extensions import Self, override

from onceflow.integration import servers
from onceflow.integration.servers import postgres
from onceflow.integration.servers.mysql import MySQLAdmin
from onceflow.sinks import MySQLSink, PostgresSink

SqlSink: TypeAlias = PostgresSink | MySQLSink
SqlJob: TypeAlias = sink_kit.Job[PostgresSink | MySQLSink]
SqlServer: TypeAlias = servers.EmbeddedPostgres | servers.EmbeddedMySQL | servers.EmbeddedMariaDB

PASSWORD = "hunter2/Correct:horse"
"""The password of every user that a test makes; no URL takes it as it is."""
SECRETS = (PASSWORD, quote(PASSWORD, safe=""))
"""What no output may contain."""


@dataclass(frozen=True)
class Words:
    """The statements of two-phase commit, as they go over the wire."""

    prepare: str
    commit: str
    rollback: str


class Database(ABC):
    """A database of one test's own."""

    name: ClassVar[str]
    words: ClassVar[Words]
    scheme: ClassVar[str]
    """How its URLs begin."""
    ledger: ClassVar[str]
    """The table of proofs, as statements name it."""
    fence: ClassVar[str]
    """The table of who may write, as statements name it."""
    type_word: ClassVar[str]
    """What errors say before the name of a column's type."""
    guarded_by: ClassVar[str]
    """The fixture of a database whose server asks users for their passwords."""
    said_when_down: ClassVar[str]
    """What an error says when nothing listens."""
    lock_timeout_s: ClassVar[float]
    """The shortest wait for a lock that tests ask of it; MySQL counts whole seconds."""
    _identified: ClassVar[str]
    """What stands before the password of a new user."""
    _plain: ClassVar[str] = ""
    """What a URL says so that nothing is encrypted."""

    def __init__(self, url: str) -> None:
        self.url = url

    @classmethod
    @abstractmethod
    def server(cls) -> SqlServer:
        """Return a server for databases of this kind, not started."""

    @classmethod
    @abstractmethod
    def create(cls, server: SqlServer, name: str) -> Self:
        """Return a new database on `server`."""

    @abstractmethod
    def drop(self, server: SqlServer) -> None:
        """Drop it with all that is in doubt in it."""

    @abstractmethod
    def sink(self, **settings: Any) -> SqlSink:
        """Return a sink into it."""

    @abstractmethod
    def query(self, *statements: str) -> list[tuple[Any, ...]]:
        """Return the rows of the last of `statements`, each run alone."""

    @abstractmethod
    def prepared(self) -> list[str]:
        """Return the names of all that is prepared in the database, sorted."""

    @abstractmethod
    def sessions(self) -> list[int]:
        """Return the sessions that sinks have in the database."""

    @abstractmethod
    def end_sessions(self) -> None:
        """End them, as a network or an operator does."""

    @abstractmethod
    def await_lock_wait(self) -> None:
        """Return once somebody in the database waits for a lock."""

    @abstractmethod
    def prepare(self, name: str, statement: str) -> None:
        """Prepare `statement` under `name`, as somebody else would."""

    @abstractmethod
    def settle(self, word: str, name: object) -> None:
        """Commit or roll back (`word` of `words`) what is prepared, as an operator would."""

    @property
    @abstractmethod
    def schema(self) -> str:
        """The schema of its tables, as information_schema calls it."""

    @abstractmethod
    def retype(self, column: str, kind: str, table: str = "ledger") -> None:
        """Change the type of a column. It takes nulls if it did before."""

    @abstractmethod
    def said_of_violation(self, constraint: str) -> str:
        """Return what an error says of a row that a named constraint refuses."""

    @abstractmethod
    def said_of_missing(self, table: str) -> str:
        """Return what an error says when a table is gone."""

    @abstractmethod
    def said_of_duplicate(self, value: object) -> str:
        """Return what an error says of a row whose unique value another row has."""

    @abstractmethod
    def quoted(self, name: str) -> str:
        """Return a name as statements say it whatever it consists of."""

    @abstractmethod
    @contextmanager
    def new_schema(self, name: str) -> Generator[str, None, None]:
        """Yield the name of another schema, which is dropped afterwards if it exists."""

    @contextmanager
    def user(self, *grants: str) -> Generator[Self, None, None]:
        """Yield a copy for a new user who has `PASSWORD` and no privileges but `grants`."""
        name = f"u{self.database_name[-12:]}"
        self.query(f"CREATE USER {name} {self._identified} '{PASSWORD}'")
        try:
            for grant in grants:
                self.query(f"GRANT {grant} TO {name}")
            yield self.by_login(f"{name}:{SECRETS[1]}")
        finally:
            self._drop_user(name)

    @property
    @abstractmethod
    def grants_of_job(self) -> tuple[str, ...]:
        """Return the privileges for jobs that create tables, and for existing tables."""

    @abstractmethod
    def _drop_user(self, name: str) -> None:
        """Drop a user with all privileges."""

    def by_login(self, login: str, database: str | None = None) -> Self:
        """Return it, or another database of its server, with the login that stands in the URL."""
        parts = urlsplit(self.url)
        netloc = f"{login}@{parts.netloc.rpartition('@')[2]}"
        path = parts.path if database is None else f"/{database}"
        return type(self)(urlunsplit(parts._replace(netloc=netloc, path=path)))

    def job(self, **settings: Any) -> SqlJob:
        """Return a job whose sink has `settings`."""
        return SqlJob(self.sink(**settings))

    def ids_in(self, table: str = "ledger") -> list[int]:
        """Return all ids that are visible in the table, sorted, doubles kept."""
        return [int(row[0]) for row in self.query(f"SELECT id FROM {table} ORDER BY id")]

    def tables(self) -> list[str]:
        """Return the names of its tables, sorted."""
        found = self.query(
            f"SELECT table_name FROM information_schema.tables WHERE table_schema = '{self.schema}'"
        )
        return sorted(str(row[0]) for row in found)

    def columns(self, table: str = "ledger") -> list[tuple[str, str, bool]]:
        """Return name, type and whether it takes nulls of each column of the table, in order."""
        found = self.query(
            "SELECT column_name, data_type, is_nullable FROM information_schema.columns "
            f"WHERE table_schema = '{self.schema}' AND table_name = '{table}' "
            "ORDER BY ordinal_position"
        )
        return [(str(name), str(kind), nullable == "YES") for name, kind, nullable in found]

    def ledger_rows(self) -> list[str]:
        """Return the transactions that the ledger proves committed, sorted."""
        found = self.query(f"SELECT transaction_id FROM {self.ledger}")
        return sorted(str(row[0]) for row in found)

    def through(self, port: int) -> Self:
        """Return it as it is reached by way of a proxy at `port` of this machine, unencrypted."""
        parts = urlsplit(self.url)
        login = parts.netloc.rpartition("@")[0]
        netloc = f"{login}@127.0.0.1:{port}"
        return type(self)(urlunsplit(parts._replace(netloc=netloc, query=self._plain)))

    @property
    def database_name(self) -> str:
        """Its name on its server."""
        return urlsplit(self.url).path.lstrip("/")


class Postgres(Database):
    name = "postgres"
    words = Words("PREPARE TRANSACTION", "COMMIT PREPARED", "ROLLBACK PREPARED")
    scheme = "postgresql"
    ledger = "onceflow.onceflow_ledger"
    fence = "onceflow.onceflow_sinks"
    type_word = "Postgres type"
    guarded_by = "guarded_postgres_database"
    said_when_down = "refused"
    lock_timeout_s = 0.3
    _identified = "PASSWORD"

    @override
    @classmethod
    def server(cls) -> SqlServer:
        return servers.EmbeddedPostgres()

    @override
    @classmethod
    def create(cls, server: SqlServer, name: str) -> Self:
        postgres.create_database(server.url, name)
        return cls(server.database_url(name))

    @override
    def drop(self, server: SqlServer) -> None:
        postgres.drop_database_in_doubt(server.url, self.url, self.database_name)

    @override
    def sink(self, **settings: Any) -> SqlSink:
        return PostgresSink(self.url, **settings)

    @override
    def query(self, *statements: str) -> list[tuple[Any, ...]]:
        return postgres_sink_kit.query(self.url, *statements)

    @override
    def prepared(self) -> list[str]:
        return postgres_sink_kit.prepared(self.url)

    @override
    def sessions(self) -> list[int]:
        ours = (
            "SELECT pid FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE 'onceflow%'"
        )
        return [int(row[0]) for row in self.query(ours)]

    @override
    def end_sessions(self) -> None:
        for session in self.sessions():
            self.query(f"SELECT pg_terminate_backend({session})")

    @override
    def await_lock_wait(self) -> None:
        postgres_sink_kit.await_lock_wait(self.url)

    @override
    def prepare(self, name: str, statement: str) -> None:
        # One message: all of it is one transaction.
        self.query(f"BEGIN; {statement}; PREPARE TRANSACTION '{name}'")

    @override
    def settle(self, word: str, name: object) -> None:
        self.query(f"{word} '{name}'")

    @property
    @override
    def schema(self) -> str:
        return "public"

    @override
    def retype(self, column: str, kind: str, table: str = "ledger") -> None:
        self.query(f"ALTER TABLE {table} ALTER {column} TYPE {kind}")

    @override
    def said_of_violation(self, constraint: str) -> str:
        return f"constraint {constraint};"

    @override
    def said_of_missing(self, table: str) -> str:
        return f'relation "{self.schema}.{table}" does not exist'

    @override
    def said_of_duplicate(self, value: object) -> str:
        return f"=({value}) already exists"

    @override
    def quoted(self, name: str) -> str:
        escaped = name.replace('"', '""')
        return f'"{escaped}"'

    @override
    @contextmanager
    def new_schema(self, name: str) -> Generator[str, None, None]:
        # It goes with the database.
        yield name

    @property
    @override
    def grants_of_job(self) -> tuple[str, ...]:
        return (
            f"CREATE ON DATABASE {self.database_name}",
            "ALL ON SCHEMA public",
            "ALL ON ALL TABLES IN SCHEMA public",
        )

    @override
    def _drop_user(self, name: str) -> None:
        self.query(f"DROP OWNED BY {name} CASCADE", f"DROP ROLE {name}")


class MySQL(Database):
    name = "mysql"
    words = Words("XA PREPARE", "XA COMMIT", "XA ROLLBACK")
    scheme = "mysql"
    ledger = "onceflow_ledger"
    fence = "onceflow_sinks"
    type_word = "type"
    guarded_by = "mysql_database"
    said_when_down = "cannot connect"
    lock_timeout_s = 1.0
    _identified = "IDENTIFIED BY"
    _plain = "ssl_mode=disabled"

    @override
    @classmethod
    def server(cls) -> SqlServer:
        # Its statistics, which nobody asks for here, are a third of what a start takes.
        return servers.EmbeddedMySQL({"performance-schema": "OFF"})

    @override
    @classmethod
    def create(cls, server: SqlServer, name: str) -> Self:
        with MySQLAdmin.session(server.url) as admin:
            admin.create_database(name)
        return cls(server.database_url(name))

    @override
    def drop(self, server: SqlServer) -> None:
        with MySQLAdmin.session(server.url) as admin:
            admin.end_sessions_of(self.database_name)
            admin.roll_back(admin.in_doubt())
            admin.drop_database(self.database_name)

    @override
    def sink(self, **settings: Any) -> SqlSink:
        return MySQLSink(self.url, **settings)

    @override
    def query(self, *statements: str) -> list[tuple[Any, ...]]:
        return mysql_sink_kit.query(self.url, *statements)

    @override
    def prepared(self) -> list[str]:
        return mysql_sink_kit.prepared(self.url)

    @override
    def sessions(self) -> list[int]:
        return mysql_sink_kit.sessions(self.url)

    @override
    def end_sessions(self) -> None:
        for session in self.sessions():
            self.query(f"KILL {session}")

    @override
    def await_lock_wait(self) -> None:
        mysql_sink_kit.await_lock_wait(self.url)

    @override
    def prepare(self, name: str, statement: str) -> None:
        xid = mysql_sink_kit.xid(self.url, name)
        self.query(f"XA START {xid}", statement, f"XA END {xid}", f"XA PREPARE {xid}")

    @override
    def settle(self, word: str, name: object) -> None:
        self.query(f"{word} {mysql_sink_kit.xid(self.url, name)}")

    @property
    @override
    def schema(self) -> str:
        return self.database_name

    @override
    def retype(self, column: str, kind: str, table: str = "ledger") -> None:
        nullable = {name: takes_nulls for name, _, takes_nulls in self.columns(table)}[column]
        null = "NULL" if nullable else "NOT NULL"
        self.query(f"ALTER TABLE {table} MODIFY {column} {kind} {null}")

    @override
    def said_of_violation(self, constraint: str) -> str:
        return f"Check constraint '{constraint}'"

    @override
    def said_of_missing(self, table: str) -> str:
        return f"'{self.schema}.{table}' doesn't exist"

    @override
    def said_of_duplicate(self, value: object) -> str:
        return f"Duplicate entry '{value}'"

    @override
    def quoted(self, name: str) -> str:
        escaped = name.replace("`", "``")
        return f"`{escaped}`"

    @override
    @contextmanager
    def new_schema(self, name: str) -> Generator[str, None, None]:
        found = f"{self.database_name}_{name}"
        try:
            yield found
        finally:
            self.query(f"DROP DATABASE IF EXISTS {self.quoted(found)}")

    @property
    @override
    def grants_of_job(self) -> tuple[str, ...]:
        return ("ALL ON *", "XA_RECOVER_ADMIN ON *.*")

    @override
    def _drop_user(self, name: str) -> None:
        self.query(f"DROP USER {name}")


class MariaDB(MySQL):
    name = "mariadb"
    guarded_by = "mariadb_database"

    @override
    @classmethod
    def server(cls) -> SqlServer:
        return servers.EmbeddedMariaDB()

    @override
    def said_of_violation(self, constraint: str) -> str:
        return f"CONSTRAINT `{constraint}` failed"

    @property
    @override
    def grants_of_job(self) -> tuple[str, ...]:
        # Everybody may list what is prepared.
        return ("ALL ON *",)


DATABASES: tuple[type[Database], ...] = (Postgres, MySQL, MariaDB)
