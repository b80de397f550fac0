"""The measurements of each database: inserts and upserts, in both commit modes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import ClassVar, Literal

from typing_extensions import override

from benchmarks.job_spec import Database
from benchmarks.sinks.place import Effect, Place, Way
from benchmarks.sinks.rows import Rows
from benchmarks.stage import BenchmarkError, Stage
from onceflow.core.spi import Sink
from onceflow.integration.judge import verify
from onceflow.sinks import MySQLSink, PostgresSink

_Commits = Literal["two_phase", "ledger"]


class DatabasePlace(Place):
    """Databases of one of the stage's servers; the table is called `ledger`."""

    sink: ClassVar[type[PostgresSink] | type[MySQLSink]]

    def __init__(self, stage: Stage, kind: Database) -> None:
        self._stage = stage
        self._kind: Database = kind

    @property
    @override
    def ways(self) -> Mapping[str, Way]:
        last = Effect.LAST_OF_EACH_ACCOUNT
        return {
            "insert, two_phase": Way(self._insert("two_phase"), ratio_min=0.7, commit_ms_max=50),
            "insert, ledger": Way(self._insert("ledger")),
            "upsert, two_phase": Way(self._upsert("two_phase"), last),
            "upsert, ledger": Way(self._upsert("ledger"), last),
        }

    @override
    def empty(self) -> AbstractContextManager[str]:
        return self._stage.database(self._kind)

    @override
    def verify(self, address: str, rows: Rows, effect: Effect) -> None:
        match effect:
            case Effect.EVERY_ROW:
                verdict = verify(address, "ledger", rows.payments)
                if not verdict.ok:
                    raise BenchmarkError(f"the table in {self.name} is wrong: {verdict}")
            case Effect.LAST_OF_EACH_ACCOUNT:
                found = self._totals(address)
                if found != rows.latest:
                    raise BenchmarkError(
                        f"the table in {self.name} has (rows, n, balance) {found}, "
                        f"not {rows.latest}"
                    )

    @abstractmethod
    def _totals(self, address: str) -> tuple[int, ...]:
        """Return how many rows the table has, and the sums of `n` and of `balance`."""

    def _insert(self, commits: _Commits) -> Callable[[str], Sink]:
        return lambda url: self.sink(url, table="ledger", create=True, commit_mode=commits)

    def _upsert(self, commits: _Commits) -> Callable[[str], Sink]:
        return lambda url: self.sink(
            url,
            table="ledger",
            create=True,
            commit_mode=commits,
            write_mode="upsert",
            primary_key=("account",),
        )
