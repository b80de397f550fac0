"""The options that name targets and the decision log, shared by all `txn` commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from onceflow.cli.terminal import load_sink, read_options, read_password
from onceflow.connectors.catalog import SINKS
from onceflow.core.commit import by_hand
from onceflow.core.errors import ConfigError
from onceflow.core.secret_references import follow_references
from onceflow.core.spi.connector import ResourceManager, ServerAccess
from onceflow.core.storage import FileSystemStorage, JobStorage, checkpoint_storage


@dataclass(frozen=True, slots=True)
class Where:
    """The options that name the targets and the decision log."""

    url: Annotated[
        str | None,
        typer.Option(
            help="Every sink id in a database (postgresql://user@host/db, mysql://…, sqlite:///…),"
            " on brokers (kafka://host:port; needs --storage), in a directory or bucket"
            " (file:///…, s3://…). The password may also be in --password-file, PGPASSWORD or"
            " MYSQL_PWD, or be '${env:NAME}' or '${file:/path}' here.",
            envvar="ONCEFLOW_TXN_URL",
            show_envvar=True,
        ),
    ] = field(default=None, repr=False)
    password_file: Annotated[
        Path | None,
        typer.Option(help="File that contains the database's password and nothing else."),
    ] = None
    ledger_schema: Annotated[
        str | None,
        typer.Option(
            help="Schema or database of onceflow's own tables. Default: as in the sink's options."
        ),
    ] = None
    options: Annotated[
        Path | None,
        typer.Option(
            help="File of client options for --url, one name=value a line: security.protocol of"
            " Kafka, key and secret of a bucket."
        ),
    ] = None
    sink: Annotated[
        str | None,
        typer.Option(
            "--sink", help="Any sink: module:name of the sink, or of a function that returns it."
        ),
    ] = None
    sink_id: Annotated[
        str | None, typer.Option(help="Sink id of --sink. Transaction ids begin with it.")
    ] = None
    storage: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint storage of the job, with the decision log. Default: ONCEFLOW_STORAGE"
            " of the environment, else ONCEFLOW_CHECKPOINTING_STORAGE.",
            envvar=["ONCEFLOW_STORAGE", "ONCEFLOW_CHECKPOINTING_STORAGE"],
            show_envvar=False,
        ),
    ] = None
    job: Annotated[
        str | None,
        typer.Option("--job", help="Name of the job. Needed if the storage holds several."),
    ] = None
    checkpoint_location: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint location of a Structured Streaming query, whose transactions are"
            " listed instead of a job's. Needs --url or --sink. --storage is then the query's"
            " option stagingLocation and --sink-id its option sinkId, if it has them."
        ),
    ] = None
    txn_app_id: Annotated[
        str | None,
        typer.Option(
            help="Option txnAppId of Spark's batch writes, whose transactions are listed instead of"
            " a job's. Needs --url of a database, for all its tables, or --sink. --storage is then"
            " the writes' option stagingLocation, if they have it."
        ),
    ] = None
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="How long to wait for a server, in seconds.", min=0.1)
    ] = 10.0

    def open(self) -> by_hand.TransactionSettler:
        """Return the settler for these options. Does not connect yet.

        Raises:
            ConfigError: The options name no target, are incomplete, or contradict each other.
        """
        if self.checkpoint_location is not None:
            return self._of_query(self.checkpoint_location)
        if self.txn_app_id is not None:
            return self._of_writes(self.txn_app_id)
        storage = self._storage()
        managers: list[ResourceManager] = []
        if self.url:
            managers.append(self._database(self.url))
        if self.sink:
            if not self.sink_id:
                raise ConfigError("--sink needs --sink-id, the name by which its job writes")
            managers.append(by_hand.SinkResourceManager(load_sink(self.sink), self.sink_id))
        # If the sink itself is given, it lists its staged rows and can resolve them.
        if storage is not None and not self.sink:
            managers.append(by_hand.StagedResourceManager(storage))
        if not managers:
            raise ConfigError(
                "give the target: --url postgresql://user@host/database (add --password-file),"
                " kafka://host:port or file:///directory, or --sink module:name --sink-id ID,"
                " and --storage DIR [--job NAME] for the verdict of the decision log"
            )
        return by_hand.InDoubtTransactions(managers, storage)

    def _of_query(self, location: str) -> by_hand.TransactionSettler:
        # Import here, because transactions of jobs do not need Spark.
        from onceflow.connectors.spark.streaming.checkpoint_location import CheckpointLocation
        from onceflow.connectors.spark.streaming.query_transactions import query_transactions

        if self.job is not None:
            raise ConfigError(
                "--job belongs to a pipeline, and --checkpoint-location to a query: give one of"
                " them"
            )
        if bool(self.url) == bool(self.sink):
            raise ConfigError(
                "--checkpoint-location needs the query's target: --url postgresql://user@host/db,"
                " or --sink module:name"
            )
        directory = CheckpointLocation(location)
        sink_id = self.sink_id or directory.sink_id()
        if self.url:
            manager = self._database(self.url)
        else:
            manager = by_hand.SinkResourceManager(load_sink(self.sink or ""), sink_id)
        return query_transactions(directory, manager, sink_id=sink_id, staging=self.storage or "")

    def _of_writes(self, app: str) -> by_hand.TransactionSettler:
        from onceflow.connectors.spark.streaming.query_transactions import write_transactions
        from onceflow.sinks.sql.connector import SqlResourceManager

        if self.job is not None:
            raise ConfigError(
                "--job belongs to a pipeline, and --txn-app-id to batch writes: give one of them"
            )
        manager = self._database(self.url) if self.url else None
        if self.sink:
            manager = by_hand.SinkResourceManager(load_sink(self.sink), self.sink_id or "")
        if not isinstance(manager, (SqlResourceManager, by_hand.SinkResourceManager)) or (
            self.url and self.sink
        ):
            raise ConfigError(
                "--txn-app-id needs the target of the writes: --url postgresql://user@host/db, or"
                " another database, or --sink module:name"
            )
        return write_transactions(app, manager, staging=self.storage or "")

    def _database(self, given: str) -> ResourceManager:
        url = follow_references(given, setting="--url")
        try:
            connector = SINKS.find_by_url(url)
        except ConfigError as error:
            raise ConfigError(f"--url: {error}") from None
        if connector.resource_manager is None:
            raise ConfigError(
                f"--url: {url.partition('://')[0]}:// cannot list its transactions in doubt; give"
                " the sink: --sink module:name --sink-id ID"
            )
        password = read_password(self.password_file) if self.password_file else None
        options = read_options(self.options, "--options") if self.options else {}
        options |= {"ledger_schema": self.ledger_schema} if self.ledger_schema else {}
        return connector.resource_manager(ServerAccess(url, password, options, self.timeout_s))

    def _storage(self) -> JobStorage | None:
        if self.storage is None:
            if self.job is not None:
                raise ConfigError("--job needs --storage, where its decision log is")
            return None
        described = checkpoint_storage(self.storage)
        root = str(described.root if isinstance(described, FileSystemStorage) else self.storage)
        if isinstance(described, FileSystemStorage) and not Path(root).is_dir():
            raise ConfigError(
                f"--storage {root}: this machine has no such directory. Give the storage of the"
                " job's Checkpointing(storage=…), on a machine where that directory is mounted"
            )
        # The name does not matter here: `jobs` lists all jobs of the storage.
        jobs = described.open("any").jobs()
        job = self.job or (jobs[0] if len(jobs) == 1 else "")
        if job not in jobs:
            there = ", ".join(jobs) or "none"
            problem = f"has no job {job}" if job else "holds more than one job, or none: add --job"
            raise ConfigError(f"--storage {root} {problem} (jobs there: {there})")
        return described.open(job)


def add_where_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with the options of `Where` instead of its first parameter."""
    types = get_type_hints(Where, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(
            where_field.name, kind, default=where_field.default, annotation=types[where_field.name]
        )
        for where_field in fields(Where)
    ]
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    @wraps(command)
    def with_options(**given: Any) -> None:
        where = Where(**{option.name: given.pop(option.name) for option in options})
        command(where, **given)

    # typer reads the options from the signature.
    parameters = [*options, *(parameter.replace(kind=kind) for parameter in own)]
    vars(with_options)["__signature__"] = inspect.Signature(parameters)
    return with_options
