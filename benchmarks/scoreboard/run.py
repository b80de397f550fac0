"""Runs one contestant through one schedule, on servers of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psycopg
from typing_extensions import assert_never

from benchmarks.scoreboard.contestant import Contestant, NotRun, Place, Say
from benchmarks.scoreboard.flow import Flow
from benchmarks.scoreboard.records import (
    PARTITIONS,
    Model,
    Producing,
    compute_model,
    describe_payments,
)
from benchmarks.scoreboard.schedule import DATABASE_DOWN_S, FROZEN_S, Schedule, Strike, StrikeKind
from benchmarks.scoreboard.verdict import PREPARED_AGE_S, Verdict, has_caught_up, is_complete, judge
from onceflow.integration.servers.kafka import EmbeddedKafka
from onceflow.integration.servers.postgres import EmbeddedPostgres, create_database

_TOPIC = "payments"
_DATABASE = "scoreboard"
_LOOK_S = 0.05
_START_DEADLINE_S = 240.0
_CATCH_UP_DEADLINE_S = 240.0
"""From the last record until all are in the tables."""
_CATCH_UP_LOOK_S = 1.0
_QUIET_S = PREPARED_AGE_S + 2.0
"""The time after the last row in which late doubles appear and checkpoints end transactions."""
_STRIKE_TRIES_S = 20.0
"""The time in which a victim must appear that is not there at its moment."""
_TOTALS = "CREATE TABLE totals (account text PRIMARY KEY, total bigint, n bigint)"


@dataclass(frozen=True, slots=True)
class Blow:
    """A strike that is over."""

    kind: StrikeKind
    struck: bool
    """False if there was no victim."""
    recovery_s: float | None
    """Seconds until a new row was visible, or None if there was none."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one contestant in one schedule."""

    contestant: str
    seed: int
    records: int
    seconds: float
    load: float
    """The load average of the machine at the end, over one minute."""
    blows: tuple[Blow, ...] = ()
    starts: int = 0
    """The processes that the supervisor has started."""
    verdict: Verdict | None = None
    not_run: str = ""
    """The reason why the engine was not run, or empty."""
    failure: str = ""
    """The reason why there is no verdict, or empty."""


class HarnessFailure(Exception):
    """Raised when no verdict is possible."""


def run(contestant: Contestant, schedule: Schedule, records: int, say: Say) -> Outcome:
    """Run the contestant to its verdict. No process of it is left afterwards."""
    began = time.monotonic()

    def outcome(**fields: object) -> Outcome:
        return Outcome(
            contestant.name,
            schedule.seed,
            records,
            round(time.monotonic() - began, 1),
            round(os.getloadavg()[0], 2),
            **fields,  # type: ignore[arg-type]  # each caller names fields of Outcome
        )

    try:
        contestant.install(say)
    except NotRun as error:
        return outcome(not_run=str(error))
    directory = Path(tempfile.mkdtemp(prefix=f"onceflow-scoreboard-{contestant.name}-"))
    try:
        with ExitStack() as stack:
            match_ = _Match(contestant, schedule, records, directory, say, stack)
            verdict = match_.play()
            result = outcome(verdict=verdict, blows=match_.blows(), starts=match_.starts)
    except Exception as error:
        say(f"    logs: {directory}")
        return outcome(failure=f"{type(error).__name__}: {error}")
    if verdict.is_exact:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        say(f"    logs: {directory}")
    return result


class _Match:
    """The servers, the records and the strikes of one run."""

    def __init__(
        self,
        contestant: Contestant,
        schedule: Schedule,
        records: int,
        directory: Path,
        say: Say,
        stack: ExitStack,
    ) -> None:
        self._contestant = contestant
        self._schedule = schedule
        self._say = say
        self._stack = stack
        self._payments = describe_payments(records, schedule.seed)
        self._kafka = stack.enter_context(EmbeddedKafka(progress=say))
        self._postgres = stack.enter_context(EmbeddedPostgres(proxied=True))
        self._kafka.create_topic(_TOPIC, PARTITIONS)
        create_database(self._postgres.url, _DATABASE)
        host, port = self._postgres.client_address
        self._direct_url = Place(
            "", "", self._postgres.host, self._postgres.port, _DATABASE, directory
        ).url
        self._create_tables()
        self._deployment = contestant.deploy(
            Place(self._kafka.bootstrap_servers, _TOPIC, host, port, _DATABASE, directory)
        )
        stack.callback(self._deployment.end)
        self._heals: list[tuple[float, Callable[[], None]]] = []
        self._struck: list[tuple[Strike, float | None]] = []
        self._flow = Flow(self._direct_url)

    @property
    def starts(self) -> int:
        return self._deployment.starts

    def blows(self) -> tuple[Blow, ...]:
        """Return the strikes with their times to recover."""
        return tuple(
            Blow(
                strike.kind,
                at is not None,
                None if at is None else self._flow.find_recovery_s(at),
            )
            for strike, at in self._struck
        )

    def play(self) -> Verdict:
        """Run the schedule and return the verdict.

        Raises:
            HarnessFailure: The contestant has not written its first or its last row in time.
        """
        model = compute_model(self._payments)
        self._deployment.start()
        with (
            self._flow,
            Producing(
                self._payments,
                self._schedule.producing_s,
                self._kafka.bootstrap_servers,
                _TOPIC,
                self._contestant.record_format,
            ) as producing,
        ):
            self._await_first_row()
            began = time.monotonic()
            producing.begin()
            pending = list(self._schedule.strikes)
            while pending or self._heals or not producing.is_done:
                self._deployment.supervise()
                now = time.monotonic()
                self._heal(now)
                if pending and now >= began + pending[0].at_s:
                    self._strike_or_wait(pending, now - began)
                time.sleep(_LOOK_S)
            self._await_rows(model)
            if not has_caught_up(self._direct_url, model):
                raise HarnessFailure(
                    f"the last record was not in the table {_CATCH_UP_DEADLINE_S:g} s after the"
                    f" end:\n{self._deployment.log_tail()}"
                )
        return judge(self._direct_url, model, has_totals=not self._contestant.no_totals)

    def _create_tables(self) -> None:
        id_ = "bigint PRIMARY KEY" if self._contestant.way == "upsert" else "bigint"
        with psycopg.connect(self._direct_url, autocommit=True) as connection:
            connection.execute(
                f"CREATE TABLE payments (id {id_}, account text, amount bigint, ts bigint)"
            )
            if self._contestant.way == "append":
                # Not unique. The watch on the highest id needs it.
                connection.execute("CREATE INDEX ON payments (id)")
            connection.execute(_TOTALS)

    def _await_first_row(self) -> None:
        deadline = time.monotonic() + _START_DEADLINE_S
        while not self._flow.has_rows:
            self._deployment.supervise()
            if time.monotonic() > deadline:
                raise HarnessFailure(
                    f"no row in {_START_DEADLINE_S:g} s:\n{self._deployment.log_tail()}"
                )
            time.sleep(_LOOK_S)

    def _await_rows(self, model: Model) -> None:
        """Wait until no row is missing or the deadline has passed, and then for late rows."""
        has_totals = not self._contestant.no_totals
        deadline = time.monotonic() + _CATCH_UP_DEADLINE_S
        while time.monotonic() < deadline:
            if is_complete(self._direct_url, model, has_totals=has_totals):
                break
            self._supervise_for(_CATCH_UP_LOOK_S)
        self._supervise_for(_QUIET_S)

    def _supervise_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._deployment.supervise()
            time.sleep(_LOOK_S)

    def _strike_or_wait(self, pending: list[Strike], now_s: float) -> None:
        """Strike with the first one, which waits for its victim for a bounded time."""
        strike = pending[0]
        if self._strike(strike.kind):
            self._struck.append((strike, time.monotonic()))
            self._say(f"    {now_s:5.1f} s  {strike.kind.value}")
        elif now_s < strike.at_s + _STRIKE_TRIES_S:
            return
        else:
            self._struck.append((strike, None))
            self._say(f"    {now_s:5.1f} s  {strike.kind.value}: no victim")
        pending.pop(0)

    def _strike(self, kind: StrikeKind) -> bool:
        match kind:
            case StrikeKind.WORKER:
                return self._deployment.kill_worker()
            case StrikeKind.COORDINATOR:
                return self._deployment.kill_coordinator()
            case StrikeKind.FREEZE:
                thaw = self._deployment.freeze()
                if thaw is not None:
                    self._heals.append((time.monotonic() + FROZEN_S, thaw))
                return thaw is not None
            case StrikeKind.DATABASE:
                self._postgres.kill()
                self._heals.append(
                    (time.monotonic() + DATABASE_DOWN_S, lambda: _start(self._postgres))
                )
                return True
            case StrikeKind.CONNECTIONS:
                self._postgres.network.cut()
                return True
            case _:
                assert_never(kind)

    def _heal(self, now: float) -> None:
        for due in [heal for heal in self._heals if heal[0] <= now]:
            self._heals.remove(due)
            due[1]()


def _start(server: EmbeddedPostgres) -> None:
    server.start()
