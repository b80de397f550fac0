"""The flags of `onceflow txn` and its exit status.

0  done; or nothing is in doubt; or something is, and --check was not asked for
1  refused, by the log or by the target; with --check: something is in doubt
2  usage: what the options name is not there or not enough
3  a target or the storage could not be reached, or could not tell now
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from onceflow.cli.terminal import console, load_sink, read_options, read_password, say
from onceflow.cli.txn.settling import (
    EXIT_REFUSED,
    UsageError,
    Wish,
    as_json,
    parsed,
    print_transaction,
    print_transactions,
    settle,
    status_of,
)
from onceflow.connectors.catalog import SINKS
from onceflow.core.connector import ServerAccess
from onceflow.core.errors import ConfigError, OnceflowError
from onceflow.core.in_doubt import (
    InDoubtTransactions,
    ResourceManager,
    SinkResourceManager,
    StagedResourceManager,
    TransactionSettler,
)
from onceflow.core.protocol.in_doubt import Resolution
from onceflow.core.secret_references import followed
from onceflow.core.storage import FileSystemStorage, JobStorage, checkpoint_storage

txn = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help=(
        "Transactions in doubt: pre-committed, and neither committed nor rolled back. A job's next"
        " start settles its own; this shows them, and settles by hand what cannot wait."
        " Exit status: 0 done, 1 refused (list --check: something is in doubt), 2 usage,"
        " 3 a target or the storage cannot be reached."
    ),
)

Url: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Every sink id in a database (postgresql://user@host/db, mysql://…, sqlite:///…), on"
        " brokers (kafka://host:port; needs --storage), in a directory or bucket (file:///…, s3://…)."
        " The password may also be in --password-file, PGPASSWORD or MYSQL_PWD, or be"
        " '${env:NAME}' or '${file:/path}' here.",
        envvar="ONCEFLOW_TXN_URL",
        show_envvar=True,
    ),
]
PasswordFile: TypeAlias = Annotated[
    Path | None, typer.Option(help="File that holds the database's password and nothing else.")
]
LedgerSchema: TypeAlias = Annotated[
    str | None, typer.Option(help="Schema or database of onceflow's own tables, if not the usual.")
]
Options: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="File of client options for --url, one name=value a line: security.protocol of Kafka,"
        " key and secret of a bucket."
    ),
]
SinkName: TypeAlias = Annotated[
    str | None, typer.Option("--sink", help="Any sink: module:name of it or of what makes it.")
]
SinkId: TypeAlias = Annotated[
    str | None, typer.Option(help="The sink id of --sink; transaction ids begin with it.")
]
Storage: TypeAlias = Annotated[
    str | None, typer.Option(help="Checkpoint storage of the job: its decision log decides.")
]
CheckpointLocation: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="checkpointLocation of a query of Structured Streaming, instead of a job's --storage:"
        " its sink id and its decisions. With --url or --sink; --storage is then its option"
        " stagingLocation, and --sink-id its option sinkId, where it has them."
    ),
]
JobName: TypeAlias = Annotated[
    str | None, typer.Option("--job", help="The job's name; needed when storage holds several.")
]
Timeout: TypeAlias = Annotated[float, typer.Option(help="Seconds to wait for a server.", min=0.1)]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Ids: TypeAlias = Annotated[
    list[str] | None, typer.Argument(help="Transaction ids, as `list` shows them.")
]
Everything: TypeAlias = Annotated[
    bool, typer.Option("--all", help="Instead of ids: everything that the log allows.")
]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Force: TypeAlias = Annotated[
    bool,
    typer.Option("--force", help="Do it although the log or a running job says otherwise."),
]
Fence: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--fence",
        help="First take the job over, so that a driver which still runs decides nothing more and"
        " ends. The job then starts again as usual.",
    ),
]


@txn.command("list")
def list_(
    url: Url = None,
    password_file: PasswordFile = None,
    ledger_schema: LedgerSchema = None,
    options: Options = None,
    sink: SinkName = None,
    sink_id: SinkId = None,
    storage: Storage = None,
    job: JobName = None,
    checkpoint_location: CheckpointLocation = None,
    timeout: Timeout = 10.0,
    check: Annotated[
        bool, typer.Option("--check", help="Exit status 1 when something is in doubt.")
    ] = False,
    json_: Json = False,
) -> None:
    """Show everything in doubt, and what the decision log says about it."""
    where = Where(
        url,
        password_file,
        ledger_schema,
        options,
        sink,
        sink_id,
        storage,
        job,
        checkpoint_location,
        timeout,
    )
    with _opened(where) as transactions:
        found = transactions.in_doubt()
        if json_:
            print(json.dumps({"transactions": [as_json(one) for one in found]}))
        else:
            print_transactions(console(), found)
            if found and storage is None and checkpoint_location is None:
                say("Add --storage DIR --job NAME to see what the decision log says.")
    if check and found:
        raise typer.Exit(EXIT_REFUSED)


@txn.command()
def show(
    transaction: Annotated[str, typer.Argument(help="Its id.")],
    url: Url = None,
    password_file: PasswordFile = None,
    ledger_schema: LedgerSchema = None,
    options: Options = None,
    sink: SinkName = None,
    sink_id: SinkId = None,
    storage: Storage = None,
    job: JobName = None,
    checkpoint_location: CheckpointLocation = None,
    timeout: Timeout = 10.0,
    json_: Json = False,
) -> None:
    """Show one transaction with all that is known about it. Exit status 1: there is none."""
    where = Where(
        url,
        password_file,
        ledger_schema,
        options,
        sink,
        sink_id,
        storage,
        job,
        checkpoint_location,
        timeout,
    )
    with _opened(where) as transactions:
        found = transactions.find(parsed(transaction))
        if found is None:
            say(f"{transaction} is not in doubt here, and the log does not list it")
            raise typer.Exit(EXIT_REFUSED)
        if json_:
            print(json.dumps(as_json(found)))
        else:
            print_transaction(console(), found)


@txn.command()
def commit(
    ids: Ids = None,
    url: Url = None,
    password_file: PasswordFile = None,
    ledger_schema: LedgerSchema = None,
    options: Options = None,
    sink: SinkName = None,
    sink_id: SinkId = None,
    storage: Storage = None,
    job: JobName = None,
    checkpoint_location: CheckpointLocation = None,
    timeout: Timeout = 10.0,
    everything: Everything = False,
    yes: Yes = False,
    force: Force = False,
    fence: Fence = False,
    json_: Json = False,
) -> None:
    """Make the rows of transactions visible, if the decision log decided so."""
    where = Where(
        url,
        password_file,
        ledger_schema,
        options,
        sink,
        sink_id,
        storage,
        job,
        checkpoint_location,
        timeout,
    )
    with _opened(where) as transactions:
        wish = Wish(Resolution.COMMIT, tuple(ids or ()), everything, yes, force, fence)
        settle(transactions, wish, json_)


@txn.command()
def abort(
    ids: Ids = None,
    url: Url = None,
    password_file: PasswordFile = None,
    ledger_schema: LedgerSchema = None,
    options: Options = None,
    sink: SinkName = None,
    sink_id: SinkId = None,
    storage: Storage = None,
    job: JobName = None,
    checkpoint_location: CheckpointLocation = None,
    timeout: Timeout = 10.0,
    everything: Everything = False,
    yes: Yes = False,
    force: Force = False,
    fence: Fence = False,
    json_: Json = False,
) -> None:
    """Roll transactions back, if the decision log did not decide them."""
    where = Where(
        url,
        password_file,
        ledger_schema,
        options,
        sink,
        sink_id,
        storage,
        job,
        checkpoint_location,
        timeout,
    )
    with _opened(where) as transactions:
        wish = Wish(Resolution.ABORT, tuple(ids or ()), everything, yes, force, fence)
        settle(transactions, wish, json_)


@contextmanager
def _opened(where: Where) -> Generator[TransactionSettler, None, None]:
    """Yield what `where` names, and end with the exit status of whatever goes wrong."""
    try:
        try:
            transactions = where.open()
        except ConfigError as error:
            raise UsageError(str(error)) from error
        with transactions:
            yield transactions
    except OnceflowError as error:
        say(f"onceflow txn: {error}", style="red")
        raise typer.Exit(status_of(error)) from error


@dataclass(frozen=True, slots=True)
class Where:
    """The options by which transactions are found."""

    url: str | None = field(default=None, repr=False)
    password_file: Path | None = None
    ledger_schema: str | None = None
    options: Path | None = None
    sink: str | None = None
    sink_id: str | None = None
    storage: str | None = None
    job: str | None = None
    checkpoint_location: str | None = None
    timeout_s: float = 10.0

    def open(self) -> TransactionSettler:
        """Return what looks there; connects to nothing yet.

        Raises:
            ConfigError: The options name nothing, or not well enough.
        """
        if self.checkpoint_location is not None:
            return self._of_query(self.checkpoint_location)
        storage = self._storage()
        places: list[ResourceManager] = []
        if self.url:
            places.append(self._database(self.url))
        if self.sink:
            if not self.sink_id:
                raise ConfigError("--sink needs --sink-id, the name by which its job writes")
            places.append(SinkResourceManager(load_sink(self.sink), self.sink_id))
        if storage is not None and not self.sink:
            places.append(StagedResourceManager(storage))
        if not places:
            raise ConfigError(
                "name where to look: --url postgresql://user@host/database (add --password-file),"
                " kafka://host:port or file:///directory,"
                " or --sink module:name --sink-id ID, and --storage DIR [--job NAME] for what the"
                " decision log says"
            )
        return InDoubtTransactions(places, storage)

    def _of_query(self, location: str) -> TransactionSettler:
        # Jobs need nothing of Spark's.
        from onceflow.connectors.spark.checkpoint_location import CheckpointLocation
        from onceflow.connectors.spark.query_transactions import QueryTransactions

        if self.job is not None:
            raise ConfigError("--job is a pipeline's, and --checkpoint-location a query's")
        if bool(self.url) == bool(self.sink):
            raise ConfigError(
                "--checkpoint-location needs the query's target: --url postgresql://user@host/db,"
                " or --sink module:name"
            )
        place = CheckpointLocation(location)
        sink_id = self.sink_id or place.sink_id()
        if self.url:
            manager = self._database(self.url)
        else:
            manager = SinkResourceManager(load_sink(self.sink or ""), sink_id)
        return QueryTransactions(place, manager, sink_id=sink_id, staging=self.storage or "")

    def _database(self, given: str) -> ResourceManager:
        url = followed(given, setting="--url")
        try:
            connector = SINKS.find_by_url(url)
        except ConfigError as error:
            raise ConfigError(f"--url: {error}") from None
        if connector.resource_manager is None:
            raise ConfigError(
                f"--url: {url.partition('://')[0]}:// cannot list what is in doubt there; name the"
                " sink: --sink module:name --sink-id ID"
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
            raise ConfigError(f"--storage {root}: there is no such directory on this machine")
        jobs = described.open("any").jobs()
        job = self.job or (jobs[0] if len(jobs) == 1 else "")
        if job not in jobs:
            there = ", ".join(jobs) or "none"
            said = f"has no job {job}" if job else "holds more than one job, or none: add --job"
            raise ConfigError(f"--storage {root} {said} (jobs there: {there})")
        return described.open(job)
