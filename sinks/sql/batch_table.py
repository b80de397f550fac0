"""Spark's batch decisions in a table next to the ledger, in the database that they decide about.

onceflow_batches   one row per decided batch: its attempt, and every transaction that it names

The owner's row in onceflow_sinks serializes claims and decisions of a sink id. A claim writes the
row. A decision locks it and checks the owner, in the transaction that inserts the batch's row. That
transaction also applies staged rows, which become visible with the decision. If the table refuses a
row, the batch fails before it is decided. Committed after the decision are: prepared transactions,
rows that are staged because a twin is prepared, and transactions of other databases.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgspec
from typing_extensions import override

from onceflow.clients.sql.session import (
    AccessDenied,
    ConnectionLost,
    DuplicateKey,
    LockTimeout,
    RowRefused,
    Session,
    SqlError,
    TableMissing,
    refusal,
)
from onceflow.clients.sql.tables import TableName
from onceflow.core import errors
from onceflow.core.backoff import Backoff
from onceflow.core.decoding import json_decoder
from onceflow.core.protocol import batches
from onceflow.core.protocol.batches import forgotten_before
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, TransactionId
from onceflow.core.spi import CommitterContext, Sink
from onceflow.core.spi.batch_decisions import BatchDecisions, Claimant
from onceflow.core.spi.staging import StagingArea, is_staged
from onceflow.sinks.base.checks import FenceOwner
from onceflow.sinks.sql.ledger import BATCHES, LEDGER, SINKS
from onceflow.sinks.sql.settings import CommitMode, SqlSettings
from onceflow.sinks.sql.sink import SqlSink
from onceflow.sinks.sql.staged_commits import StagedCommits

_T = TypeVar("_T")
CLAIM_TRIES_MAX = 16
"""The limit of lost races in a row: more than the number of runs of one job that start at once."""
_WHO = "the last run that claimed it cannot be read"
_DECIDED = "its decided batches cannot be read"
_COLUMNS = "source, number, attempt, fingerprint, run, committables, settled"


@dataclass(frozen=True, slots=True)
class DecidedPart:
    """A sink whose database contains the decisions."""

    settings: SqlSettings
    staging: StagingArea | None
    replaces: bool = False
    """True if the rows of a decision replace all rows of the table."""


class SqlBatchDecisions(BatchDecisions):
    """The decisions in one database. A lost session is opened again.

    If the database is down, a call waits for it, up to `reconnect_timeout_s`. But before the first
    session, only a decision waits. All other calls fail at once: the address may be wrong.
    """

    def __init__(
        self,
        settings: SqlSettings,
        sink_id: str,
        owner: str,
        parts: Mapping[str, DecidedPart] | None = None,
        *,
        reconnect_timeout_s: float = 0.0,
    ) -> None:
        """Connect to nothing yet. `owner` is recorded as log_id in onceflow_sinks.

        `parts` are the sinks, by sink id, whose staged rows a decision applies.
        """
        self._reconnect_timeout_s = reconnect_timeout_s
        self._parts = {
            part_id: (part, self._build_staged_commits(part_id, part, owner))
            for part_id, part in (parts or {}).items()
        }
        self._settings = settings
        self._ledger = settings.ledger
        self._dialect = settings.dialect
        self._sink_id = sink_id
        self._owner = owner
        self._session: Session | None = None
        self._has_connected = False
        self._has_table = False
        self._commit_mode: CommitMode | None = settings.commit_mode

    def __str__(self) -> str:
        return f"{self._ledger.sinks} at {self._settings.endpoint}"

    @override
    def claim(
        self, open_sink: Callable[[AttemptId], None], *, after: AttemptId | None = None
    ) -> batches.BatchClaim:
        # Read the newest attempt, then claim the next. `Fenced` reports a claim made in between.
        for _ in range(CLAIM_TRIES_MAX):
            newest = self._ask(self._newest, _WHO)
            if after is not None and newest != after:
                self.check_newest(after)
            attempt = AttemptId(newest + 1)
            try:
                open_sink(attempt)
            except errors.Fenced:
                # Another run was faster. Try again: that run may claim once, and decide.
                continue
            return self._ask(partial(self._load_claim, attempt), _DECIDED)
        raise errors.Fenced(
            f"sink id {self._sink_id!r}: {CLAIM_TRIES_MAX} times another run claimed it first;"
            " stop all runs but one"
        )

    @override
    def read_claim(self) -> batches.BatchClaim:
        attempt = AttemptId(self._ask(self._newest, _WHO))
        return batches.BatchClaim(attempt, self._ask(self._all_if_any, _DECIDED) if attempt else ())

    @override
    def claimant(self) -> Claimant:
        claim = self._ask(
            lambda: self._ledger.newest_claim(self._open_session(), self._sink_id), _WHO
        )
        return (
            Claimant(AttemptId(0)) if claim is None else Claimant(AttemptId(claim[0]), *claim[1:])
        )

    @override
    def fence(self) -> None:
        newest = self.read_claim().attempt
        if self.claim_next(newest) is None:
            raise errors.Fenced(
                f"sink id {self._sink_id!r}: its attempt was {newest}, which could not be raised;"
                " run the command again"
            )

    @override
    def claim_next(self, after: AttemptId) -> batches.BatchClaim | None:
        try:
            session = self._open_session()
            updated = session.execute(
                f"UPDATE {self._ledger.sinks} SET attempt = attempt + 1, "
                f"claimed_at = CURRENT_TIMESTAMP WHERE sink_id = {self._literal(self._sink_id)} "
                f"AND log_id = {self._literal(self._owner)} AND attempt = {int(after)}"
            )
            return self._load_claim(AttemptId(after + 1)) if updated == 1 else None
        except (SqlError, errors.SinkError):
            # It is unknown whether the claim succeeded; `claim` finds out.
            return None

    @override
    def with_committables(self, claim: batches.BatchClaim) -> batches.BatchClaim:
        """Read the decisions again. A claim reads the committables only of unsettled decisions."""
        decisions = self._ask(lambda: self._all(self._open_session(), _COLUMNS), _DECIDED)
        return replace(claim, decisions=decisions)

    @override
    def decide(self, decision: batches.BatchDecision) -> batches.BatchDecision:
        return self._record(decision, lambda _: None)

    @override
    def decide_with_rows(self, decision: batches.BatchDecision) -> batches.BatchDecision:
        return self._record(decision, partial(self._apply_staged, decision))

    def _record(
        self, decision: batches.BatchDecision, with_it: Callable[[Session], None]
    ) -> batches.BatchDecision:
        """Record `decision` unless the batch is decided already. Return the recorded decision.

        `with_it` runs in the transaction that records it.
        """
        endpoint = self._settings.endpoint
        backoff: Backoff | None = None
        lost = ""
        while True:
            try:
                self._wait_for_server(f"{decision.batch} is not decided")
                return self._decide(decision, with_it)
            except ConnectionLost as error:
                lost = str(error)
            # A BadRow is a SinkError, too, and final: the table refuses the row again each time.
            except errors.BadRow:
                raise
            except (errors.SinkError, errors.ConfigError) as error:
                # Nothing was sent, so nothing can be decided. After a lost reply the server must be
                # asked again.
                if not lost:
                    raise
                lost = f"{lost}; then {error}"
            except SqlError as error:
                raise errors.SinkError(
                    f"{decision.batch} is not decided at {endpoint}: {error}"
                ) from error
            # Count the time from the first lost reply, because applying rows takes time.
            backoff = backoff or Backoff(until=time.monotonic() + self._reconnect_timeout_s)
            if not backoff.pause():
                raise errors.CommitOutcomeUnknown(
                    f"the decision of {decision.batch}, attempt {decision.attempt} of sink id"
                    f" {self._sink_id}, was sent to {endpoint}, but not answered ({lost}); the"
                    " next run finds out whether it was committed"
                )

    @override
    def mark_committed(self, decision: batches.BatchDecision) -> None:
        batch = decision.batch
        of_source = (
            f"sink_id = {self._literal(self._sink_id)} AND source = {self._literal(batch.source)}"
        )
        try:
            session = self._open_session()
            with session.transaction():
                # A crash may lose the mark. Then the next claim settles the batch again, which is
                # harmless.
                for statement in self._dialect.before_pruning:
                    session.execute(statement)
                session.execute(
                    f"UPDATE {self._table} SET settled = 1 WHERE {of_source} "
                    f"AND number = {int(batch.number)}"
                )
                session.execute(
                    f"DELETE FROM {self._table} WHERE {of_source} AND settled = 1 "
                    f"AND attempt < {int(forgotten_before(decision))}"
                )
        except (SqlError, errors.SinkError, errors.ConfigError) as error:
            self._dialect.log.warning(
                "sink %s: the end of %s could not be recorded: %s", self._sink_id, batch, error
            )

    @property
    @override
    def can_give_up(self) -> bool:
        return True

    @override
    def give_up(self, transaction: TransactionId) -> None:
        self._ask(lambda: self._give_up(transaction), f"{transaction} stays decided")

    @override
    def task_sink(self, sink: Sink) -> Sink:
        """Return `sink` with the commit mode that `open` chose, so no task has to choose it."""
        if not isinstance(sink, SqlSink) or self._commit_mode is None:
            return sink
        return replace(sink, commit_mode=self._commit_mode.value)

    @override
    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    # --- steps --------------------------------------------------------------------------------

    def _newest(self) -> int:
        """Return the newest attempt under the sink id; 0 before the first.

        Raises:
            ConfigError: The sink id belongs to another owner, or this owner wrote under another
                sink id.
        """
        session = self._open_session()
        try:
            owner = self._ledger.owner(session, self._sink_id)
            if owner is not None:
                self._require_ours(owner)
                return owner.attempt
            others = session.query(
                f"SELECT sink_id FROM {self._ledger.sinks} "
                f"WHERE log_id = {self._literal(self._owner)}"
            )
        except TableMissing:
            return 0
        if others:
            raise errors.ConfigError(
                f"{self._owner} has written under sink id {others[0][0]!r}, but would now write"
                f" under {self._sink_id!r}, where its earlier decisions are not known. If its"
                f" checkpoint was moved, give it option sinkId={others[0][0]}"
            )
        return 0

    def _require_ours(self, owner: FenceOwner) -> None:
        if owner.log_id == self._owner:
            return
        raise errors.ConfigError(
            f"sink id {self._sink_id!r} at {self._settings.endpoint} belongs to {owner.log_id} "
            f"(attempt {owner.attempt}), and this is {self._owner}. If that one still runs, or is "
            "to run again, give this one a sink id of its own (option sinkId). If it is gone for "
            "good, its checkpoint was deleted for instance, and nothing of it is in doubt, hand "
            f"its sink id over: {self._ledger.take_over(self._sink_id)}"
        )

    def _load_claim(self, attempt: AttemptId) -> batches.BatchClaim:
        session = self._open_session()
        if not self._has_table:
            self._ensure_table(session)
            if self._settings.commit_mode is None:
                recorded = self._ledger.commit_mode(session, self._sink_id)
                self._commit_mode = CommitMode(recorded) if recorded else None
            self._has_table = True
        # The lists of settled batches are long and not needed, so they are not read.
        unsettled = _COLUMNS.replace(
            "committables", "CASE WHEN settled = 1 THEN '[]' ELSE committables END"
        )
        return batches.BatchClaim(attempt, self._all(session, unsettled))

    def _all(self, session: Session, columns: str) -> tuple[batches.BatchDecision, ...]:
        rows = session.query(
            f"SELECT {columns} FROM {self._table} "
            f"WHERE sink_id = {self._literal(self._sink_id)} ORDER BY attempt"
        )
        return tuple(self._decision(row) for row in rows)

    def _all_if_any(self) -> tuple[batches.BatchDecision, ...]:
        try:
            return self._all(self._open_session(), _COLUMNS)
        except TableMissing:
            return ()

    def _decide(
        self, decision: batches.BatchDecision, with_it: Callable[[Session], None]
    ) -> batches.BatchDecision:
        session = self._open_session()
        try:
            session.begin()
            # The lock comes first, so that no claim can happen between the check and the insert.
            owners = session.query(
                f"SELECT attempt FROM {self._ledger.sinks} "
                f"WHERE sink_id = {self._literal(self._sink_id)} "
                f"AND log_id = {self._literal(self._owner)}{self._dialect.locks_row}"
            )
            owner = AttemptId(int(owners[0][0])) if owners else None
            existing = self._existing(session, decision.batch)
            match batches.check_decision(decision, owner=owner, existing=existing):
                case batches.Stands(standing):
                    return standing
                case batches.Overtaken(reason):
                    session.roll_back()
                    raise errors.Fenced(f"sink id {self._sink_id!r}: {reason}: {self.claimant()}")
                case batches.Decide():
                    with_it(session)
            session.execute(
                f"INSERT INTO {self._table} (sink_id, {_COLUMNS}) VALUES ({self._row(decision)})"
            )
            session.commit()
            return decision
        # The owner's row is locked, so only a process without that lock can have inserted the
        # batch.
        except DuplicateKey as error:
            raise errors.SinkError(f"{decision.batch}: decided twice at once: {error}") from error
        finally:
            session.roll_back()

    def _apply_staged(self, decision: batches.BatchDecision, session: Session) -> None:
        """Apply the rows that are staged for this database, in the open transaction."""
        for part_id, (part, staged) in self._parts.items():
            own = [
                listed for listed in decision.committables if listed.transaction.sink_id == part_id
            ]
            try:
                if part.replaces:
                    self._delete_rows(session, part.settings.table)
                for committable in filter(is_staged, own):
                    staged.apply(session, committable)
            except RowRefused as error:
                raise errors.BadRow(
                    f"{decision.batch} is not decided, and nothing of it is written: the database"
                    f" refuses its rows: {error}"
                ) from error
            except LockTimeout as error:
                raise errors.SinkError(
                    f"{decision.batch} is not decided, and nothing of it is written: its staged"
                    " rows wait for the locks of another transaction, or of another task that has"
                    f" rows of the same key (then repartition by the key): {error}"
                ) from error

    def _delete_rows(self, session: Session, name: TableName) -> None:
        """Delete all rows of a table, not by TRUNCATE: that shows readers an empty table."""
        table = self._dialect.find_table(session, name)
        if table is None:
            raise errors.SinkError(
                f"table {name}, whose rows are to be replaced, is gone from"
                f" {self._settings.endpoint}; create it again, and repeat the write"
            )
        if cascades := self._dialect.cascades_of(session, table.name):
            raise errors.ConfigError(
                f"table {name} is to be replaced, and rows of other tables would go or change"
                f" with its rows, by foreign key {', '.join(cascades)}. Nothing was changed."
                " Give that key ON DELETE NO ACTION; or append, with writeMode=upsert"
            )
        session.execute(f"DELETE FROM {self._dialect.identifier(table.name)}")

    def _give_up(self, transaction: TransactionId) -> None:
        session = self._open_session()
        for decision in self._all_if_any():
            kept = [
                committable
                for committable in decision.committables
                if committable.transaction != transaction
            ]
            # Rewrite only the decision that lists the transaction.
            if len(kept) == len(decision.committables):
                continue
            batch = decision.batch
            of_batch = (
                f"WHERE sink_id = {self._literal(self._sink_id)} AND "
                f"source = {self._literal(batch.source)} AND number = {int(batch.number)}"
            )
            listed = self._literal(_encode_committables(kept, self._sink_id))
            session.execute(
                f"UPDATE {self._table} SET committables = {listed} {of_batch}"
                if kept
                else f"DELETE FROM {self._table} {of_batch}"
            )

    def _existing(self, session: Session, batch: batches.BatchId) -> batches.BatchDecision | None:
        rows = session.query(
            f"SELECT {_COLUMNS} FROM {self._table} "
            f"WHERE sink_id = {self._literal(self._sink_id)} "
            f"AND source = {self._literal(batch.source)} AND number = {int(batch.number)}"
        )
        return self._decision(rows[0]) if rows else None

    def _row(self, decision: batches.BatchDecision) -> str:
        batch = decision.batch
        texts = (self._sink_id, batch.source), (decision.fingerprint, decision.run)
        first, then = (", ".join(map(self._literal, pair)) for pair in texts)
        listed = self._literal(_encode_committables(decision.committables, self._sink_id))
        return f"{first}, {int(batch.number)}, {int(decision.attempt)}, {then}, {listed}, 0"

    def _decision(self, row: Sequence[Any]) -> batches.BatchDecision:
        source, number, attempt, fingerprint, run, committables, is_committed = row
        attempt = AttemptId(int(attempt))
        return batches.BatchDecision(
            batches.BatchId(str(source), int(number)),
            attempt,
            str(fingerprint),
            str(run),
            _decode_committables(str(committables), self._sink_id, attempt),
            is_committed=bool(is_committed),
        )

    def _build_staged_commits(self, part_id: str, part: DecidedPart, owner: str) -> StagedCommits:
        # The attempt has no effect if the caller owns the transaction.
        context = CommitterContext(
            job=owner,
            uid=part_id,
            sink_id=part_id,
            attempt=AttemptId(1),
            log_id=owner,
            staging=part.staging,
        )
        return StagedCommits(part.settings, context, self._open_session)

    def _ensure_table(self, session: Session) -> None:
        name = TableName(self._ledger.schema, BATCHES)
        if self._dialect.find_table(session, name) is not None:
            return
        from onceflow.sinks.sql.ddl import batches_creation

        statement = batches_creation(self._dialect, self._ledger.schema)
        try:
            # Several queries may start at once, and on some servers CREATE TABLE IF NOT EXISTS
            # alone races.
            with self._dialect.one_at_a_time(session):
                session.execute(statement)
        except AccessDenied as error:
            user = self._dialect.look_at_server(session).user
            raise errors.ConfigError(
                f"{name} cannot be created at {self._settings.endpoint}: {error}. Run as the owner "
                f"of {self._ledger.sinks}: {statement}; GRANT SELECT, INSERT, UPDATE, DELETE ON"
                f" {self._table} TO {user}"
            ) from error

    @property
    def _table(self) -> str:
        return self._dialect.identifier(TableName(self._ledger.schema, BATCHES))

    def _ask(self, ask: Callable[[], _T], text: str) -> _T:
        """Return the result of `ask`. If the connection is lost, call `ask` once more.

        Waits for a server that is down, if it was ever reached.

        Raises:
            ConfigError: The user lacks a privilege. The text contains the statement that grants it.
            SinkError: The server cannot be asked now.
        """
        where = f"sink {self._sink_id}: {self._settings.endpoint}: {text}"
        try:
            if self._has_connected:
                self._wait_for_server(text)
            try:
                return ask()
            except ConnectionLost:
                self._wait_for_server(text)
                return ask()
        except AccessDenied as error:
            if remedy := self._grants():
                raise errors.ConfigError(f"{where}: {error}. Run: {remedy}") from error
            raise refusal(error, where) from error
        except SqlError as error:
            raise refusal(error, where) from error

    def _grants(self) -> str:
        """Return the statements that allow the user to write onceflow's tables.

        Empty if not needed.
        """
        session = self._open_session()
        server = self._dialect.look_at_server(session)
        tables = (LEDGER, SINKS, BATCHES)
        return server.bookkeeping(session, self._ledger.schema, tables).remedy

    def _wait_for_server(self, text: str) -> None:
        """Connect unless there is a session; retry while the server refuses for now.

        Raises:
            ConfigError: The server refuses for good.
            SinkError: The server was down for `reconnect_timeout_s`; the text begins with `text`.
        """
        backoff: Backoff | None = None
        while True:
            try:
                self._open_session()
            except errors.SinkError as error:
                # Count the time from the first refusal, because a refusal may take long, too.
                backoff = backoff or Backoff(until=time.monotonic() + self._reconnect_timeout_s)
                if not backoff.pause():
                    raise errors.SinkError(
                        f"{text}: {error}. It was tried for {self._reconnect_timeout_s:g} s"
                    ) from error
            else:
                return

    def _open_session(self) -> Session:
        if self._session is None or not self._session.is_open:
            self._session = self._settings.endpoint.connect(f"onceflow {self._sink_id} batches")
            self._has_connected = True
        return self._session

    def _literal(self, value: str) -> str:
        return self._dialect.literal(value)


def _encode_committables(committables: Sequence[Committable], sink_id: str) -> str:
    rows = [
        [
            committable.transaction.checkpoint,
            committable.transaction.subtask,
            committable.transaction.sequence,
            committable.rows,
            base64.b64encode(committable.payload).decode(),
            # In a group of sinks, all after the first have sink ids of their own.
            "" if committable.transaction.sink_id == sink_id else committable.transaction.sink_id,
        ]
        for committable in committables
    ]
    return msgspec.json.encode(rows).decode()


_ROWS = json_decoder(list[tuple[int, int, int, int, str, str]])


def _decode_committables(text: str, sink_id: str, attempt: AttemptId) -> tuple[Committable, ...]:
    rows = _ROWS.decode(text)
    return tuple(
        Committable(
            TransactionId(part or sink_id, attempt, checkpoint, subtask, sequence),
            rows,
            base64.b64decode(payload),
        )
        for checkpoint, subtask, sequence, rows, payload, part in rows
    )
