"""The job whose checkpoints, logs, savepoints and targets are kept for each version.

It has each kind of state that a checkpoint stores. It is never changed: what older versions have
written is read by it. A new kind of state gets a job of its own.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
from tests.support.counting_source import CountingSource, amount_of
from tests.support.ledger import SETTINGS

from onceflow import (
    Checkpointing,
    FixedDelay,
    HeapBackend,
    KeyedFunction,
    ListStateDescriptor,
    LocalProcesses,
    MapStateDescriptor,
    Pipeline,
    Record,
    RocksDBBackend,
    StateAccess,
    Timer,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
    count,
    sum_,
)
from onceflow.core.state import StateBackend
from onceflow.sinks import FileSink, SQLiteSink

RECORDS = 2_000
ACCOUNTS = 8
SPLITS = 2
WINDOW_MS = 250
LIST_LENGTH = 5
BACKENDS: dict[str, StateBackend] = {"heap": HeapBackend(), "rocksdb": RocksDBBackend()}
VISITS = pa.schema(
    [
        ("id", pa.int64()),
        ("account", pa.string()),
        ("visits", pa.int64()),
        ("money", pa.decimal128(20, 2)),
        ("of_last_digit", pa.int64()),
        ("last_ids", pa.list_(pa.int64())),
        ("first_seen", pa.timestamp("us", "UTC")),
    ]
)
REMINDERS = pa.schema([("account", pa.string()), ("at_ms", pa.int64())])


@dataclass
class Account:
    """The state that a function keeps for an account."""

    visits: int
    money: Decimal
    first_seen: datetime
    nickname: str | None = None


class Remember(KeyedFunction):
    """Keeps a dataclass, a list and a map of each account."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return VISITS

    def open(self, state: StateAccess) -> None:
        self._account = state.value_state(ValueStateDescriptor("account", Account))
        self._last = state.list_state(ListStateDescriptor("last", int))
        self._digits = state.map_state(MapStateDescriptor("digits", Decimal, int))

    def process(self, record: Record) -> Record:
        seen = self._account.get() or Account(0, Decimal(0), instant_of(record["id"]))
        seen.visits += 1
        seen.money += Decimal(record["amount"]) / 100
        self._account.set(seen)
        self._last.add(record["id"])
        self._last.update(list(self._last.get())[-LIST_LENGTH:])
        digit = Decimal(record["id"] // ACCOUNTS % 10)
        self._digits.put(digit, (self._digits.get(digit) or 0) + 1)
        return {
            "id": record["id"],
            "account": record["account"],
            "visits": seen.visits,
            "money": seen.money,
            "of_last_digit": self._digits.get(digit),
            "last_ids": list(self._last.get()),
            "first_seen": seen.first_seen,
        }


class Remind(KeyedFunction):
    """Emits a row for an account at each whole second of event time that it has been seen in."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return REMINDERS

    def open(self, state: StateAccess) -> None:
        self._timers = state.timers()

    def process(self, record: Record) -> None:
        self._timers.register_event_time_timer((record["id"] // 1000 + 1) * 1000)

    def on_timer(self, timer: Timer) -> Record:
        return {"account": timer.key, "at_ms": timer.at_ms}


@dataclass(frozen=True)
class KeptJob:
    """The job below `directory`, with its targets beside its checkpoint storage."""

    directory: Path
    backend: str

    @property
    def savepoint(self) -> Path:
        return self.directory / "savepoint"

    @property
    def read_all(self) -> Path:
        """Input ends when this file is there."""
        return self.directory / "read all"

    def pipeline(self, *, storage: str = "checkpoints", pause_s: float = 0.0) -> Pipeline:
        """Return it; `pause_s` is waited for at each batch of ten records."""
        pipeline = Pipeline(
            LocalProcesses(self.directory / "logs"),
            name="kept",
            parallelism=2,
            checkpointing=Checkpointing(storage=str(self.directory / storage), interval=0.1),
            state_backend=BACKENDS[self.backend],
            restart=FixedDelay(attempts=3, delay_s=0.01),
            settings=SETTINGS,
        )
        source = CountingSource(
            RECORDS, SPLITS, ACCOUNTS, batch_rows=10, pause_s=pause_s, ends_with=str(self.read_all)
        )
        records = pipeline.read(
            source, uid="records", watermarks=WatermarkStrategy("id", max_out_of_orderness=60)
        )
        keyed = records.key_by("account")
        balances = keyed.running(balance=sum_("amount"), n=count(), uid="balances")
        balances.write(self._rows("balances"), uid="balances-out", sink_id="kept-balances")
        visits = keyed.process(Remember(), uid="visits")
        visits.write(
            FileSink(str(self.directory / "visits")), uid="visits-out", sink_id="kept-visits"
        )
        windows = keyed.window(TumblingEventTimeWindows(WINDOW_MS / 1000))
        totals = windows.aggregate(total=sum_("amount"), n=count(), uid="windows")
        totals.write(self._rows("windows"), uid="windows-out", sink_id="kept-windows")
        reminders = keyed.process(Remind(), uid="reminders")
        reminders.write(self._rows("reminders"), uid="reminders-out", sink_id="kept-reminders")
        return pipeline

    def _rows(self, table: str) -> SQLiteSink:
        return SQLiteSink(f"sqlite:///{self.directory / 'rows.db'}", table=table, create=True)

    def query(self, statement: str) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(self.directory / "rows.db")) as database:
            return database.execute(statement).fetchall()

    def assert_every_row_is_there_once(self) -> None:
        """Hold what is in the targets against what the input says."""
        members = ids_of_accounts()
        balances = self.query("SELECT account, id, n FROM balances ORDER BY account, n")
        assert sorted(int(str(row[1])) for row in balances) == list(range(RECORDS))
        assert Counter((row[0], row[2]) for row in balances) == Counter(
            (account, n) for account, ids in members.items() for n in range(1, len(ids) + 1)
        )
        last = self.query(
            "SELECT account, balance FROM balances b WHERE n = (SELECT max(n) FROM balances"
            " WHERE account = b.account)"
        )
        assert dict(last) == {  # type: ignore[arg-type]
            account: sum(map(amount_of, ids)) for account, ids in members.items()
        }
        self._assert_visits(members)
        found = self.query("SELECT account, count(*), sum(n), sum(total) FROM windows GROUP BY 1")
        assert {row[0]: row[1:] for row in found} == {
            account: (
                len({record // WINDOW_MS for record in ids}),
                len(ids),
                sum(map(amount_of, ids)),
            )
            for account, ids in members.items()
        }
        assert Counter(self.query("SELECT account, at_ms FROM reminders")) == Counter(
            {
                (account, (record // 1000 + 1) * 1000)
                for account, ids in members.items()
                for record in ids
            }
        )

    def _assert_visits(self, members: dict[str, list[int]]) -> None:
        files = pyarrow.dataset.dataset(self.directory / "visits", format="parquet")
        rows = files.to_table().sort_by([("account", "ascending"), ("visits", "ascending")])
        by_account: defaultdict[str, list[Record]] = defaultdict(list)
        for row in rows.to_pylist():
            by_account[row["account"]].append(row)
        assert set(by_account) == set(members)
        for account, visits in by_account.items():
            order = [row["id"] for row in visits]
            assert sorted(order) == members[account]
            digits: Counter[int] = Counter()
            for number, row in enumerate(visits, 1):
                digits[row["id"] // ACCOUNTS % 10] += 1
                assert row["visits"] == number
                assert row["money"] == Decimal(sum(map(amount_of, order[:number]))) / 100
                assert row["of_last_digit"] == digits[row["id"] // ACCOUNTS % 10]
                assert row["last_ids"] == order[:number][-LIST_LENGTH:]
                assert row["first_seen"] == instant_of(order[0])


def instant_of(record: int) -> datetime:
    return datetime.fromtimestamp(1_700_000_000 + record, timezone.utc)


def ids_of_accounts() -> dict[str, list[int]]:
    members: defaultdict[str, list[int]] = defaultdict(list)
    for record in range(RECORDS):
        members[str(record % ACCOUNTS)].append(record)
    return dict(members)
