"""The flags of `onceflow doctor` and its exit status.

0  nothing is wrong; there may be warnings
1  there are problems
2  usage
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import pyarrow as pa
import typer
from rich.console import Console

from onceflow.cli.doctor.machine import check_java, check_python
from onceflow.cli.doctor.query import check_query
from onceflow.cli.doctor.spark import SparkQuestion, check_spark
from onceflow.cli.doctor.storage import check_storage, missing_directories
from onceflow.cli.terminal import load_sink, load_source, print_listing, read_options, read_password
from onceflow.connectors.catalog import SINKS, SOURCES
from onceflow.core.arrow.schema_text import schema_of
from onceflow.core.errors import ConfigError, OnceflowError
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.secret_references import follow_references
from onceflow.core.spi import CommitterContext, Sink, Source
from onceflow.core.spi.connector import Area, Finding, Level, Questions, ServerAccess
from onceflow.core.storage import FileStagingArea

CommitMode: TypeAlias = Literal["auto", "two_phase", "ledger"]
Url: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Database: postgresql://user@host/db or mysql://user@host/db.",
        envvar="ONCEFLOW_DOCTOR_URL",
        show_envvar=True,
    ),
]
SourceName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Your own source: module:name of the source, or of a function that returns it."
    ),
]
SinkName: TypeAlias = Annotated[
    str | None, typer.Option(help="Your own sink: module:name, as for --source. Needs --schema.")
]
Columns: TypeAlias = Annotated[
    str | None, typer.Option(help="Columns of the rows for --sink: 'id bigint, name string'.")
]
KafkaOptions: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="File of client options, one name=value a line (security.protocol …)."),
]
EXIT_PROBLEMS = 1
EXIT_USAGE = 2
MARGIN_S = 5.0
"""The additional time for a check to report that it was killed at its own timeout."""

_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


@dataclass(frozen=True, slots=True)
class Check:
    """A check of one area. An exception of the check becomes a problem of the area."""

    area: str
    look: Questions


@dataclass(frozen=True, slots=True)
class Examined:
    """The options that select what is checked."""

    master: str | None = None
    storage: str | None = None
    checkpoint_location: str | None = None
    kafka: str | None = None
    topics: tuple[str, ...] = ()
    group: str | None = None
    kafka_options: Path | None = None
    url: str | None = field(default=None, repr=False)
    password_file: Path | None = None
    table: str | None = None
    ledger_schema: str | None = None
    commit_mode: CommitMode = "auto"
    source: str | None = None
    sink: str | None = None
    schema: str | None = None
    parallelism: int = 1
    timeout_s: float = 60.0
    spark: bool = True

    def checks(self) -> list[Check]:
        """Return the selected checks.

        Raises:
            ConfigError: The options are invalid or incomplete.
        """
        checks = [
            Check("java", partial(check_java, self.timeout_s)),
            Check("python", check_python),
        ]
        # Determine this before any check runs, because two checks create directories there.
        missing = missing_directories(self.storage) if self.storage is not None else ()
        if self.spark:
            question = SparkQuestion(
                self.master, self.parallelism, self.storage, self.timeout_s, missing
            )
            checks.append(Check("spark", partial(check_spark, question)))
        if self.storage is not None:
            checks.append(Check("storage", partial(check_storage, self.storage, missing)))
        if self.checkpoint_location is not None:
            checks.append(Check("query", partial(check_query, self.checkpoint_location)))
        if self.kafka is not None:
            checks.append(Check("kafka", self._kafka(self.kafka)))
        elif self.topics or self.group or self.kafka_options:
            raise ConfigError("--topic, --group and --kafka-options need --kafka host:port")
        if self.url is not None:
            # Resolve references before parsing the scheme: the whole URL may be a secret.
            url = follow_references(self.url, setting="--url")
            checks.append(Check("database", self._database(url)))
        if self.source is not None:
            source = load_source(self.source)
            checks.append(Check("source", partial(validate_source, source)))
            if (questions := examine_source(source, self.parallelism)) is not None:
                checks.append(Check("server of the source", questions))
        checks += self._sink_checks()
        return checks

    def _sink_checks(self) -> list[Check]:
        if self.sink is None:
            if self.schema is None:
                return []
            raise ConfigError("--schema needs --sink module:name, whose rows have these columns")
        if self.schema is None:
            raise ConfigError("--sink needs --schema, the columns of its rows: 'id bigint, …'")
        rows = schema_of(self.schema, setting="--schema")
        return [Check("sink", partial(validate_sink, load_sink(self.sink), rows))]

    def _kafka(self, servers: str) -> Questions:
        options = read_options(self.kafka_options, "--kafka-options") if self.kafka_options else {}
        if self.group is not None:
            options["group.id"] = self.group
        diagnosis = SOURCES.find("kafka").diagnosis
        if diagnosis is None:
            raise ConfigError(
                "--kafka: the installed source connector 'kafka' has no checks; check it with"
                " --source module:name"
            )
        access = ServerAccess(f"kafka://{servers}", None, options, self.timeout_s)
        return diagnosis(access, self.topics, self.parallelism)

    def _database(self, url: str) -> Questions:
        try:
            diagnosis = SINKS.find_by_url(url).diagnosis
        except ConfigError as error:
            raise ConfigError(f"--url: {error}") from None
        if diagnosis is None:
            raise ConfigError(
                f"--url: the connector of {url.partition('://')[0]}:// has no checks; check it"
                " with --sink module:name"
            )
        options: dict[str, str] = {"commit_mode": self.commit_mode}
        if self.ledger_schema is not None:
            options["ledger_schema"] = self.ledger_schema
        password = read_password(self.password_file) if self.password_file else None
        access = ServerAccess(url, password, options, self.timeout_s)
        return diagnosis(access, (self.table,) if self.table else (), self.parallelism)


def examine_source(source: Source, parallelism: int) -> Questions | None:
    """Return the checks of the source's server by its connector, or None if it has no checks."""
    for name in SOURCES.names():
        # A connector that cannot be loaded is not the connector of `source`, which exists.
        with suppress(ConfigError):
            connector = SOURCES.find(name)
            if connector.source is type(source) and connector.examine is not None:
                return connector.examine(source, parallelism)
    return None


def examine_sink(sink: Sink, parallelism: int) -> Questions | None:
    """Return the checks of the sink's server by its connector, or None if it has no checks."""
    for name in SINKS.names():
        with suppress(ConfigError):
            connector = SINKS.find(name)
            if connector.sink is type(sink) and connector.examine is not None:
                return connector.examine(sink, parallelism)
    return None


def validate_source(source: Source) -> Sequence[Finding]:
    """Call `validate` of the source, as each start does. Return its error as a finding."""
    try:
        source.validate()
    except OnceflowError as error:
        return [Area("source").problem(str(error), "", "")]
    return [Area("source").ok(f"{type(source).__name__} can be read from here")]


def validate_sink(sink: Sink, rows: pa.Schema) -> Sequence[Finding]:
    """Call `validate` of the sink for `rows`, as each start does. Return its error as a finding."""
    with tempfile.TemporaryDirectory(prefix="onceflow-doctor-") as directory:
        context = CommitterContext(
            job="doctor",
            uid="sink",
            sink_id="doctor",
            attempt=AttemptId(1),
            staging=FileStagingArea.in_directory(directory, "doctor"),
        )
        try:
            sink.validate(context, rows)
        except OnceflowError as error:
            return [Area("sink").problem(str(error), "", "")]
    return [Area("sink").ok(f"{type(sink).__name__} accepts rows of these columns")]


def doctor(
    master: Annotated[
        str | None,
        typer.Option(help="Spark master whose executors are checked, too. Default: local."),
    ] = None,
    storage: Annotated[
        str | None, typer.Option(help="Checkpoint storage to check, here and on executors.")
    ] = None,
    checkpoint_location: Annotated[
        str | None,
        typer.Option(help="Checkpoint location of a query, to print the query's position."),
    ] = None,
    kafka: Annotated[str | None, typer.Option(help="Brokers: host:port[,host:port].")] = None,
    topic: Annotated[
        list[str] | None, typer.Option(help="Topic that must exist. May be repeated.")
    ] = None,
    group: Annotated[
        str | None, typer.Option(help="Consumer group that the Kafka user must be allowed to use.")
    ] = None,
    kafka_options: KafkaOptions = None,
    url: Url = None,
    password_file: Annotated[
        Path | None, typer.Option(help="File that holds the database's password.")
    ] = None,
    table: Annotated[str | None, typer.Option(help="Table that must be writable.")] = None,
    ledger_schema: Annotated[
        str | None, typer.Option(help="Schema or database of onceflow's own tables.")
    ] = None,
    commit_mode: Annotated[
        CommitMode, typer.Option(help="Commit mode of the sink: auto, two_phase or ledger.")
    ] = "auto",
    source: SourceName = None,
    sink: SinkName = None,
    schema: Columns = None,
    parallelism: Annotated[int, typer.Option(help="Parallelism of the planned job.", min=1)] = 2,
    timeout: Annotated[
        float, typer.Option(help="Time limit of each check, in seconds.", min=1.0)
    ] = 60.0,
    spark: Annotated[bool, typer.Option(help="Whether to start a Spark session.")] = True,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Check what a job needs, and name a fix for each problem.

    Looks at Java, Python and Spark always, and at storage, a query, Kafka, a database and your own
    source and sink where they are named. Changes nothing. Exit status: 0 nothing is wrong, 1 there
    are problems, 2 usage.
    """
    examined = Examined(
        master=master, storage=storage, checkpoint_location=checkpoint_location, kafka=kafka,
        topics=tuple(topic or ()), group=group, kafka_options=kafka_options, url=url,
        password_file=password_file, table=table, ledger_schema=ledger_schema,
        commit_mode=commit_mode, source=source, sink=sink, schema=schema, parallelism=parallelism,
        timeout_s=timeout, spark=spark,
    )  # fmt: skip
    try:
        checks = examined.checks()
    except OnceflowError as error:
        Console(stderr=True).print(
            f"onceflow doctor: {error}", markup=False, style="red", soft_wrap=True
        )
        raise typer.Exit(EXIT_USAGE) from error
    findings = examine(checks, timeout + MARGIN_S)
    is_well = all(finding.level is not Level.PROBLEM for finding in findings)
    if json_:
        print(json.dumps({"ok": is_well, "findings": [result.as_json() for result in findings]}))
    else:
        print_findings(findings)
    if not is_well:
        raise typer.Exit(EXIT_PROBLEMS)


def examine(checks: Sequence[Check], timeout_s: float) -> tuple[Finding, ...]:
    """Run all checks. Return their findings in the order of `checks`, within `timeout_s`.

    A check that hangs remains on its daemon thread, which ends with the process.
    """
    # Start all checks at once, so that a server that hangs does not delay the other checks.
    running = [_Running(check) for check in checks]
    deadline = time.monotonic() + timeout_s
    return tuple(
        finding for started in running for finding in started.findings(deadline, timeout_s)
    )


class _Running:
    def __init__(self, check: Check) -> None:
        self._check = check
        self._found: Sequence[Finding] = ()
        # A daemon thread: a client library may block forever, and the command must still end.
        self._thread = threading.Thread(target=self._run, name=f"doctor {check.area}", daemon=True)
        self._thread.start()

    def findings(self, deadline: float, timeout_s: float) -> Sequence[Finding]:
        """Return the findings, or a problem if the check has not finished by `deadline`."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            return (
                Area(self._check.area).problem(
                    f"no answer within {timeout_s:g} s",
                    "an answer",
                    "check whether it hangs or is overloaded; or give a longer --timeout",
                ),
            )
        return self._found

    def _run(self) -> None:
        try:
            self._found = self._check.look()
        except Exception as error:  # one failure must not hide the other checks
            self._found = (
                Area(self._check.area).problem(
                    f"the check failed: {type(error).__name__}: {error}", "", ""
                ),
            )


def print_findings(findings: Sequence[Finding]) -> None:
    """Print `findings` for people, and their number for each level."""
    console = Console(highlight=False)
    if console.is_terminal:
        rows = [
            (
                (finding.level.value, _COLOURS[finding.level]),
                (finding.area, "bold"),
                (finding.found, ""),
                (finding.needed, ""),
            )
            for finding in findings
        ]
        print_listing(console, ("", "what", "found", "needed"), rows)
        # Print remedies outside the table: a statement that is wrapped cannot be copied.
        for finding in (finding for finding in findings if finding.remedy):
            console.print(f"{finding.area}: ", style="bold", end="", markup=False)
            console.print(finding.remedy, style="cyan", markup=False, soft_wrap=True)
    else:
        for line in (line for finding in findings for line in _lines_of(finding)):
            console.print(line, markup=False, soft_wrap=True)
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    console.print(
        f"{counts[Level.PROBLEM]} problem(s), {counts[Level.WARNING]} warning(s),"
        f" {counts[Level.OK]} ok"
    )


def _lines_of(finding: Finding) -> list[str]:
    # One line each, so that scripts can split them. Errors of servers may contain line breaks.
    lines = [f"{finding.level.value:<8} {finding.area}: {' '.join(finding.found.split())}"]
    lines += [f"{'':<8} needed: {finding.needed}"] if finding.needed else []
    return lines + ([f"{'':<8} fix:    {finding.remedy}"] if finding.remedy else [])
