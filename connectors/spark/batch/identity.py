"""The identity of writes: owner, sink id and batch numbers from the options, and the noted target.

a query       identified by its checkpoint: the location gives the sink id, the query's id the owner
a named job   txnAppId and txnVersion, both or neither: a batch that was written is not repeated
other writes  identified by the table; the next write commits or rolls back what a killed one left

A token is valid for one table, topic or directory, which is part of the sink id, the owner and the
source of a write. So one token can write to several tables, each independent of the others.

The note of the target in a directory of decisions. A database's own decisions need no note.

    <stagingLocation>/batches-<sink id>/target.json    written before the first decision

With another target under the same sink id, a batch in the first target would count as written, and
rows that are staged for the first target would go to the second.

The batches that replace all rows of a table: `mode("overwrite")`, and output mode `complete`.

The rows are staged. The transaction that decides the batch deletes the old rows and adds the new
ones. So a reader sees either the old rows or the new rows, and a repeated batch deletes no rows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import msgspec

from onceflow.connectors.spark.batch.commits import BatchTarget
from onceflow.connectors.spark.driver_identity import describe_driver
from onceflow.connectors.spark.options.option_table import sink_options
from onceflow.connectors.spark.streaming.checkpoint_location import CheckpointLocation
from onceflow.core.decoding import json_decoder
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.ids import SINK_ID_LENGTH_MAX
from onceflow.core.spi import OnBadRow, Sink
from onceflow.core.spi.staging import StagingArea
from onceflow.core.storage.filesystems.file_location import FileLocation
from onceflow.core.storage.filesystems.local import CHECKPOINT_STORAGE
from onceflow.core.storage.layout import safe_name
from onceflow.core.storage.log.batch_log import decision_directory
from onceflow.core.storage.staging.staged_rows import FileStagingArea
from onceflow.sinks.base.checks import check_sink_id
from onceflow.sinks.sql.sink import SqlSink

_REPLACING_MODES = ("insert", "upsert")


def check_replaces(sink: Sink, mode: str, *, is_staged: bool) -> SqlSink:
    """Return `sink` if it can replace all rows of its table in one step. Asks no server.

    Raises:
        ConfigError: The sink cannot. The message names `mode`, the setting that asks for it, and an
            alternative.
    """
    if not isinstance(sink, SqlSink):
        raise ConfigError(
            f"{mode}: {type(sink).__name__} cannot delete the old rows and add the new rows in"
            f" one step. {sink.instead_of_replacing}"
        )
    if sink.commit_mode == "two_phase":
        raise ConfigError(
            f"{mode}: one transaction deletes the old rows and adds the new ones, but"
            " commitMode=two_phase has one transaction for each partition. Leave commitMode"
            " out; rows then wait in stagingLocation"
        )
    if sink.table_column is not None:
        raise ConfigError(
            f"{mode}: with tableColumn it is unknown which tables to replace. Write each table"
            " by itself"
        )
    if sink.write_mode not in _REPLACING_MODES:
        raise ConfigError(
            f"{mode}: writeMode={sink.write_mode} depends on the existing rows, but these are"
            f" replaced. Use writeMode {' or '.join(_REPLACING_MODES)}"
        )
    if not is_staged:
        raise ConfigError(
            f"{mode}: the new rows wait in files until one transaction replaces the old rows."
            " Give option stagingLocation: a directory, or the URL of a bucket, that driver and"
            " executors see"
        )
    return sink


def replace_rows(named: NamedTarget, mode: str) -> NamedTarget:
    """Return `named` as a target where each batch replaces all rows.

    Errors name the setting `mode`.

    Raises:
        ConfigError: The target cannot replace all rows in one step.
    """
    sink = check_replaces(named.target.sink, mode, is_staged=named.target.staging is not None)
    staged = replace(sink, commit_mode="ledger")
    return replace(named, target=replace(named.target, sink=staged, replaces=True))


_FILE = "target.json"
_DIGEST_LENGTH = 10
_SECRET = re.compile(r"pass|secret|token|credential|api.?key|private|auth", re.IGNORECASE)
_USER_INFO = re.compile(r"//[^/@]*@")


@dataclass(frozen=True, slots=True)
class NotedTarget:
    """The facts about the target of a write. Any process of the driver may use them."""

    directory: str
    sink_id: str
    facts: Mapping[str, str]
    """Facts by the names of options: equal for every write to the target, and no secrets."""

    def require(self) -> None:
        """Raise an error unless the sink id has this target; its first write notes it.

        Raises:
            ConfigError: The sink id has written to another target.
            StorageError: The directory cannot be read or written now.
        """
        location = FileLocation.parse(self.directory, publish="auto", options={})
        files = location.open(CHECKPOINT_STORAGE)
        directory = decision_directory(self.sink_id)
        path = f"{directory}/{_FILE}"
        noted = files.read(path)
        if noted is None:
            files.make_directory(directory)
            files.create_if_absent(path, msgspec.json.encode(dict(self.facts)))
            noted = files.read(path) or b"{}"
        facts = json_decoder(dict[str, str]).decode(noted)
        if facts == self.facts:
            return
        names = sorted(facts.keys() | self.facts.keys())
        other = [name for name in names if facts.get(name) != self.facts.get(name)]
        raise ConfigError(
            f"sink id {self.sink_id!r} has written with another value of {', '.join(other)}. Its"
            " decisions must not be used for this target. Nothing was written. If this is"
            " another target, give option sinkId a name of its own. If it is the same target,"
            f" and only such an option has changed, delete {location}/{path}; keep everything"
            " else in that directory"
        )


def own_option_digests(options: Mapping[str, str]) -> dict[str, str]:
    """Return a digest of each option of a sink of one's own, without those that name secrets."""
    return {
        name: hashlib.sha256(_USER_INFO.sub("//", value).encode()).hexdigest()[:_DIGEST_LENGTH]
        for name, value in sink_options(options).items()
        if not _SECRET.search(name)
    }


MakeSink: TypeAlias = Callable[[Mapping[str, str]], Sink]
"""A function that creates a sink from a format's options, whose names are in lower case."""

SOURCE_LENGTH_MAX = 128
"""The length of the column `source` in the table of decisions."""
APP_LENGTH_MAX = SOURCE_LENGTH_MAX - _DIGEST_LENGTH - 1
VERSION_MAX = 2**63 - 1
_BATCH_OWNER = "batch writes"


@dataclass(frozen=True, slots=True)
class NamedTarget:
    """A target, and the directory for its files, or None if no option names one."""

    target: BatchTarget
    directory: str | None
    is_write: bool = False
    """True for `DataFrame.write`, false for a query."""
    noted: NotedTarget | None = None
    """The note to check in its files before a batch is planned; None if a database has it."""


def stream_target(
    make_sink: MakeSink, options: Mapping[str, str], location: CheckpointLocation
) -> NamedTarget:
    """Return the target of the query whose checkpoint is at `location`.

    Raises:
        ConfigError: The options do not name a target, or name an invalid sink id.
        StorageError: The checkpoint cannot be read.
    """
    if token := next(
        (name for name in ("txnAppId", "txnVersion") if name.lower() in options), None
    ):
        raise ConfigError(
            f"option {token} is for `write`. A query, and each of its batches, is identified by"
            " its checkpointLocation. Leave txnAppId and txnVersion out"
        )
    query_id = location.query_id()
    sink_id = options.get("sinkid") or location.sink_id()
    directory = options.get("staginglocation") or f"{location.url}/onceflow"
    return _build_target(
        make_sink(options), options, sink_id, f"Spark query {query_id}", query_id, directory
    )


def write_target(make_sink: MakeSink, options: Mapping[str, str]) -> tuple[NamedTarget, int | None]:
    """Return the target of `DataFrame.write`, and the batch number that the user gave, or None.

    Raises:
        ConfigError: The options do not name a target, or only one of txnAppId and txnVersion is
            given.
    """
    sink = make_sink(options)
    app, version = options.get("txnappid"), options.get("txnversion")
    number = None
    if (app is None) != (version is None):
        given, missing = (
            ("txnAppId", "txnVersion") if version is None else ("txnVersion", "txnAppId")
        )
        raise ConfigError(
            f"option {given} is given without {missing}. Both together distinguish a repeated"
            " write from a new one"
        )
    if app is not None and version is not None:
        number = _version(version)
        if not 0 < len(app) <= APP_LENGTH_MAX:
            raise ConfigError(
                f"option txnAppId has {len(app)} characters; it must have 1 to {APP_LENGTH_MAX}"
            )
    directory = _staging_directory(options)
    where = locate_target(sink)
    sink_id = options.get("sinkid") or _sink_id_of_write(sink, where, app)
    if app:
        owner = f"{_BATCH_OWNER} of {app} to {where.name}"
    elif options.get("sinkid"):
        owner = f"{_BATCH_OWNER} under {sink_id} to {where.name}"
    else:
        owner = f"{_BATCH_OWNER} to {where.name}"
    # The source includes the table, because one txnAppId may number the writes to several tables.
    source = f"{app}@{_digest(where.name)}" if app else ""
    named = replace(_build_target(sink, options, sink_id, owner, source, directory), is_write=True)
    if directory is not None and not isinstance(sink, SqlSink):
        facts = where.facts if where.is_known else own_option_digests(options)
        note = NotedTarget(directory, sink_id, {"target": where.name, **facts})
        named = replace(named, noted=note)
    return named, number


def has_staging(options: Mapping[str, str]) -> bool:
    """Return True if the options of `DataFrame.write` name a place for staged rows."""
    return bool(_staging_directory(options))


def _staging_directory(options: Mapping[str, str]) -> str | None:
    given = options.get("staginglocation")
    if given is not None and not given.strip():
        raise ConfigError(
            "option stagingLocation is empty: give a directory or the URL of a bucket, or leave the"
            " option out"
        )
    return given or options.get("checkpointlocation")


def is_owner_of_app(owner: str, app: str) -> bool:
    """Return True if `owner` is the owner of writes with txnAppId `app`, to any table."""
    return owner.startswith(f"{_BATCH_OWNER} of {app} to ")


def staging_area(directory: str, sink_id: str) -> StagingArea:
    """Return the area for staged rows of `sink_id` in `directory`, which tasks must see, too.

    Raises:
        ConfigError: The place cannot hold files.
    """
    location = FileLocation.parse(directory, publish="auto", options={})
    return FileStagingArea(
        location.open(CHECKPOINT_STORAGE), f"staged/{safe_name(sink_id)}", sink_id
    )


def _build_target(
    sink: Sink,
    options: Mapping[str, str],
    sink_id: str,
    owner: str,
    source: str,
    directory: str | None,
) -> NamedTarget:
    check_sink_id(sink_id)
    staging = None if directory is None else staging_area(directory, sink_id)
    target = BatchTarget(
        sink, sink_id, owner, source, staging, _on_bad_row(options), driver=describe_driver()
    )
    return NamedTarget(target, directory)


def _on_bad_row(options: Mapping[str, str]) -> OnBadRow:
    given = options.get("onbadrow", OnBadRow.FAIL.value).lower()
    if given == OnBadRow.DEAD_LETTER.value:
        raise ConfigError(
            "onBadRow=dead_letter writes to a second table, which a format does not have: use"
            " connectors.foreach_batch, or onBadRow=fail or drop"
        )
    try:
        return OnBadRow(given)
    except ValueError:
        raise ConfigError(f"onBadRow={given!r} must be one of fail, drop") from None


def _version(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number <= VERSION_MAX:
        raise ConfigError(f"option txnVersion={text!r} must be a whole number of 0 or more")
    return number


@dataclass(frozen=True, slots=True)
class TargetLocation:
    """The location to which a sink writes. Contains no secret."""

    server: str
    """The server or its kind; one server may be spelled in several ways."""
    name: str
    """The table, topics or directory; for a user's own sink, its type."""
    facts: Mapping[str, str]
    """The facts, in addition to the name, that distinguish targets."""
    is_known: bool = True
    """True if the sink says where it writes."""
    kind: str = ""
    """The kind of object that has the name, if the name distinguishes targets of a server."""
    find_cluster: Callable[[], str] | None = None
    """A function that asks for the id of the target's cluster.

    The cluster's address may change, and it does not keep claims.
    """


def is_kafka(sink: Sink) -> bool:
    """Return True if `sink` is Kafka's. Imports no module of it."""
    return type(sink).__module__ == "onceflow.sinks.kafka.sink"


def is_files(sink: Sink) -> bool:
    """Return True if `sink` writes files. Imports no module of it."""
    return type(sink).__module__ == "onceflow.sinks.files.sink"


def locate_target(sink: Sink) -> TargetLocation:
    """Return the location to which `sink` writes. Asks a database for the table's canonical name.

    Raises:
        ConfigError: The table's name is not valid, or the server refuses the connection
            permanently.
        SinkError: The server does not answer now.
    """
    if isinstance(sink, SqlSink):
        # Omit the user: the same table is the same target, whichever user writes it.
        server = str(sink.endpoint).partition(" as user")[0]
        column = f" and tables of column {sink.table_column}" if sink.table_column else ""
        return TargetLocation(server, f"{sink.resolve_table()}{column}", {}, kind="table")
    # A sink's module imports its client, so import only the module of this sink.
    if is_kafka(sink):
        from onceflow.sinks.kafka.sink import KafkaSink

        assert isinstance(sink, KafkaSink)
        topics = [sink.topic] if isinstance(sink.topic, str) else sorted(sink.topic)
        # The same brokers may be listed in any order and case.
        servers = sorted(address.strip().lower() for address in sink.bootstrap_servers.split(","))
        facts = {"kafka.bootstrap.servers": ",".join(servers)}
        return TargetLocation(
            "KafkaSink", ",".join(topics), facts, kind="topic", find_cluster=sink.find_cluster_id
        )
    if is_files(sink):
        from onceflow.sinks.files.sink import FileSink

        assert isinstance(sink, FileSink)
        return TargetLocation("FileSink", sink.settings.location.identity, {})
    return TargetLocation("", type(sink).__name__, {}, is_known=False)


def _sink_id_of_write(sink: Sink, where: TargetLocation, app: str | None) -> str:
    """Return a sink id that is common to all writes to a table, or specific to a txnAppId."""
    if app is None and not isinstance(sink, SqlSink):
        raise ConfigError(
            f"a write to {where.name} needs a name, by which the next run finds what a killed"
            " run has left: give options txnAppId and txnVersion, or sinkId"
        )
    # Add a digest, because the readable part is cut, and two long names may begin alike.
    digest = _digest(f"{where.server}/{where.name}/{app or ''}")
    readable = re.sub(r"[^A-Za-z0-9_.-]", "_", app or where.name)
    return f"{readable[: SINK_ID_LENGTH_MAX - _DIGEST_LENGTH - 1]}-{digest}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]
