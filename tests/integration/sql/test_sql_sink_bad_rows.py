"""Rows that the table can never take are left out and handed back; all others arrive once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from tests.integration.sink_kit import SCHEMA, rows
from tests.integration.sql.databases import Database, SqlJob

from onceflow.core.commit.queue import CommitQueue, CommitRetryPolicy
from onceflow.core.errors import BadRow, PreCommitFailed, SinkError, TargetRefused
from onceflow.core.protocol.committables import Committed, RetryLater
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import OnBadRow, RejectedRows, SinkWriter
from onceflow.core.storage import FileStagingArea

LENIENT = [OnBadRow.DROP, OnBadRow.DEAD_LETTER]


@dataclass(frozen=True)
class Dialect:
    """The messages of one database about refused rows."""

    trigger: tuple[str, ...]
    """Refuses the row 7: it is not liked."""
    said_of_division: str
    correcting: tuple[str, ...]
    """Create a trigger that takes the sign away from an amount."""
    numbering: tuple[str, ...]
    """Add a column that the server numbers, with two numbers left, to the table."""
    said_of_numbers: str
    judging: tuple[str, ...]
    """Statements that give the table a column `account` whose texts only the server can check."""
    judged: tuple[tuple[str, str], ...]
    """Texts of `account`, each with the server's reason to refuse it, or "" if it accepts it."""
    never_text: tuple[tuple[str, str], ...] = ()
    """Values that every text column refuses, each with a part of the error."""


_TRIGGER = "CREATE TRIGGER stop BEFORE INSERT ON ledger FOR EACH ROW"
_MYSQL = Dialect(
    trigger=(
        (
            f"{_TRIGGER} BEGIN IF NEW.id = 7 THEN SIGNAL SQLSTATE '45000' "
            "SET MESSAGE_TEXT = 'seven is not liked'; END IF; END"
        ),
    ),
    said_of_division="Division by 0",
    correcting=(
        (
            "CREATE TRIGGER correct BEFORE INSERT ON ledger FOR EACH ROW"
            " SET NEW.amount = ABS(NEW.amount)"
        ),
    ),
    numbering=(
        "ALTER TABLE ledger ADD n tinyint NOT NULL AUTO_INCREMENT UNIQUE, AUTO_INCREMENT = 126",
    ),
    said_of_numbers="(error 1467)",
    judging=("ALTER TABLE ledger MODIFY account varchar(40) CHARACTER SET latin1",),
    judged=(("é", ""), ("ł", "charset latin1"), ("€", ""), ("a", "")),
)
_DEEP = "[" * 40 + "]" * 40
"""A document that is nested deeper than MariaDB accepts."""
DIALECTS = {
    "postgres": Dialect(
        trigger=(
            (
                "CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.id = 7 "
                "THEN RAISE EXCEPTION 'seven is not liked'; END IF; RETURN NEW; END $$"
            ),
            f"{_TRIGGER} EXECUTE FUNCTION stop()",
        ),
        said_of_division="division by zero",
        correcting=(
            (
                "CREATE FUNCTION correct() RETURNS trigger LANGUAGE plpgsql AS"
                " $$ BEGIN NEW.amount := ABS(NEW.amount); RETURN NEW; END $$"
            ),
            (
                "CREATE TRIGGER correct BEFORE INSERT ON ledger FOR EACH ROW"
                " EXECUTE FUNCTION correct()"
            ),
        ),
        numbering=(
            "CREATE SEQUENCE numbers MAXVALUE 2",
            "ALTER TABLE ledger ADD n bigint NOT NULL DEFAULT nextval('numbers')",
        ),
        said_of_numbers="reached maximum value",
        judging=(
            "ALTER TABLE ledger ALTER account TYPE inet USING NULL",
            "ALTER TABLE ledger ADD CONSTRAINT local CHECK (account << '10.0.0.0/8')",
        ),
        judged=(
            ("no", "type inet"),
            ("10.0.0.1", ""),
            ("11.0.0.1", "constraint local"),
            ("", "inet"),
        ),
        never_text=(("a\0", "NUL"),),
    ),
    "mysql": _MYSQL,
    "mariadb": dataclasses.replace(
        _MYSQL,
        judging=("ALTER TABLE ledger MODIFY account json",),
        said_of_numbers="(error 167)",
        judged=(("[1]", ""), (_DEEP, "CONSTRAINT `account`"), ("2", "")),
    ),
}
REFUSALS = (
    "ALTER TABLE ledger ADD CONSTRAINT no_three CHECK (id <> 3)",
    "ALTER TABLE ledger ADD CONSTRAINT once UNIQUE (amount)",
    "CREATE TABLE parent (id bigint PRIMARY KEY)",
    "INSERT INTO parent VALUES (0), (1), (2), (3), (4), (5), (7), (8), (9)",
    "ALTER TABLE ledger ADD CONSTRAINT known FOREIGN KEY (id) REFERENCES parent (id)",
    "ALTER TABLE ledger ADD CHECK (1 / (id - 8) < 5)",
)
"""Refuse the row 3, a second row of the same amount, and the rows 6 and 8."""


def _job(database: Database, policy: OnBadRow = OnBadRow.DEAD_LETTER, **settings: Any) -> SqlJob:
    sink = database.sink(table="ledger", create=True, commit_mode="two_phase", **settings)
    return SqlJob(sink, on_bad_row=policy).check()


def _row(number: int, account: str, amount: int = 0) -> pa.RecordBatch:
    columns = [pa.array([number], pa.int64()), pa.array([account]), pa.array([amount], pa.int64())]
    return pa.record_batch(columns, schema=SCHEMA)


def _reasons(writer: SinkWriter) -> dict[Any, str]:
    """Return why rows were rejected since the last call, by their ids."""
    return {
        number: reason
        for part in writer.take_rejected()
        for number, reason in zip(part.rows.column("id").to_pylist(), part.reasons, strict=True)
    }


def _written(
    database: Database, job: SqlJob, batches: Sequence[pa.RecordBatch]
) -> tuple[list[int], list[str]]:
    """Write and commit `batches`; return the ids rejected and why."""
    writer = job.writer()
    rejected: list[RejectedRows] = []
    for batch in batches:
        writer.write(batch)
        rejected += writer.take_rejected()
    committables = writer.pre_commit(CheckpointId(1))
    rejected += writer.take_rejected()
    for committable in committables:
        assert job.committer().commit(committable) == Committed()
        assert committable.rows == len(database.ids_in())
    assert list(writer.take_rejected()) == [], "each is handed back once"
    found: list[tuple[int, str]] = []
    for one in rejected:
        assert one.rows.schema.equals(job.schema)
        found += zip(one.rows.column("id").to_pylist(), one.reasons, strict=True)
    found.sort()
    return [number for number, _ in found], [reason for _, reason in found]


@pytest.mark.parametrize(
    "policy", [OnBadRow.DROP, pytest.param(OnBadRow.DEAD_LETTER, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("by_key", [False, True])
def test_rows_that_the_server_refuses_are_left_out_one_by_one(
    database: Database, policy: OnBadRow, by_key: bool
) -> None:
    settings: dict[str, Any] = {"primary_key": ("id",), "write_mode": "upsert"} if by_key else {}
    with _job(database, policy, **settings) as job:
        database.query("ALTER TABLE ledger ADD CONSTRAINT round CHECK (id % 100 <> 7)")
        given = [rows(range(start, start + 500)) for start in (0, 500, 1000)]
        ids, reasons = _written(database, job, given)
    expected = [number for number in range(1500) if number % 100 == 7]
    assert ids == expected
    assert all(database.said_of_violation("round") in reason for reason in reasons)
    assert database.ids_in() == sorted(set(range(1500)) - set(expected))
    assert database.prepared() == []


@pytest.mark.parametrize("policy", LENIENT)
def test_rows_that_are_refused_by_us_or_by_the_server_are_left_out_and_told(
    database: Database, policy: OnBadRow
) -> None:
    database.query(
        "CREATE TABLE ledger (id bigint PRIMARY KEY, account varchar(6), amount bigint, "
        "CONSTRAINT even CHECK (amount <> 130))",
        "INSERT INTO ledger VALUES (5, 'there', 0)",
    )
    with _job(database, policy) as job:
        writer = job.writer()
        accounts = ["far too long" if number == 20 else "fine" for number in range(1, 200)]
        writer.write(rows(range(1, 200)).set_column(1, "account", pa.array(accounts)))
        (committable,) = writer.pre_commit(CheckpointId(1))
        rejected = _reasons(writer)
        assert sorted(rejected) == [5, 13, 20]
        assert database.said_of_duplicate(5) in rejected[5]
        assert database.said_of_violation("even") in rejected[13]
        assert "column 'account'" in rejected[20]
        assert "far too long" in rejected[20]
        assert committable.rows == 196
        assert job.committer().commit(committable) == Committed()
        assert database.ids_in() == [one for one in range(1, 200) if one not in (13, 20)]
        writer.write(rows([5]))
        assert writer.pre_commit(CheckpointId(2)) == (), "of rejected rows nothing is prepared"
        assert [part.rows.num_rows for part in writer.take_rejected()] == [1]
    assert database.prepared() == []


def test_every_kind_of_refusal_is_a_rejected_row(database: Database) -> None:
    dialect = DIALECTS[database.name]
    amounts = pa.array([0, 10, 20, 30, 40, 10, 60, 70, 80, 90], pa.int64())
    with _job(database) as job:
        database.query(*REFUSALS, *dialect.trigger)
        batch = rows(range(10)).set_column(2, SCHEMA.field("amount"), amounts)
        ids, reasons = _written(database, job, [batch])
    assert ids == [3, 5, 6, 7, 8]
    expected = ("no_three", "once", "known", "seven is not liked", dialect.said_of_division)
    for reason, part in zip(reasons, expected, strict=True):
        assert part in reason
    assert database.ids_in() == [0, 1, 2, 4, 9]


def test_rows_that_do_not_fit_are_rejected_with_column_and_value(database: Database) -> None:
    never = DIALECTS[database.name].never_text
    batches = [rows([1, 4000, 2, 5000]), _row(9, "acct-12")]
    batches += [_row(-1, text) for text, _ in never]
    with _job(database) as job:
        database.retype("amount", "smallint")
        database.retype("account", "varchar(6)")
        ids, reasons = _written(database, job, batches)
    assert ids == [*(-1 for _ in never), 9, 4000, 5000]
    expected = (*(why for _, why in never), "over 6 letters", "40000", "50000")
    for reason, part in zip(reasons, expected, strict=True):
        assert part in reason
        assert "of its batch" not in reason
    assert database.ids_in() == [1, 2]


def test_checkpoint_of_bad_rows_alone_prepares_nothing(database: Database) -> None:
    with _job(database) as job:
        database.query("ALTER TABLE ledger ADD CHECK (id < 0)")
        ids, _ = _written(database, job, [rows([1, 2])])
        assert ids == [1, 2]
        assert database.prepared() == []
        writer = job.writer()
        writer.write(rows([-1]))
        (committable,) = writer.pre_commit(CheckpointId(2))
        assert committable.rows == 1


def test_rows_all_refused_before_a_barrier_leave_nothing_open_under_its_name(
    database: Database,
) -> None:
    """Many rows are sent before the barrier; what they opened must not outlive it."""
    with _job(database, OnBadRow.DROP) as job:
        database.query("ALTER TABLE ledger ADD CONSTRAINT never CHECK (id < 0)")
        writer, queue = job.writer(), CommitQueue(CommitRetryPolicy())
        for number in range(16):
            writer.write(_row(number, "x" * 2**20))
        assert len(_reasons(writer)) == 16, "they are sent before the barrier"
        queue.pre_committed(CheckpointId(1), writer.pre_commit(CheckpointId(1)))
        queue.note_decision(CheckpointId(1))
        database.query("ALTER TABLE ledger DROP CONSTRAINT never")
        writer.write(rows([1, 2]))
        (committable,) = writer.pre_commit(CheckpointId(2))
        queue.pre_committed(CheckpointId(2), [committable])
        assert job.committer().commit(committable) == Committed()
    assert database.ids_in() == [1, 2]
    assert database.prepared() == []


def test_rows_between_rejected_ones_survive_the_crash_that_follows(database: Database) -> None:
    with _job(database) as job:
        database.query("ALTER TABLE ledger ADD CHECK (id <> 2)")
        writer = job.writer()
        writer.write(rows([1, 2, 3]))
        (committable,) = writer.pre_commit(CheckpointId(1))
        writer.close()
        job.check(2)
        assert job.committer(2).commit(committable) == Committed()
    assert database.ids_in() == [1, 3]


def test_bad_rows_that_fail_the_job_still_do(database: Database) -> None:
    with _job(database, OnBadRow.FAIL, table_column="account") as job:
        database.query(
            f"CREATE TABLE {database.quoted('acct-1')} "
            "(id bigint, amount bigint, CONSTRAINT negative CHECK (id < 0))"
        )
        writer = job.writer()
        with pytest.raises(BadRow, match=re.escape(database.said_of_violation("negative"))):
            writer.write(rows([1]))
            writer.pre_commit(CheckpointId(1))
        with pytest.raises(SinkError, match="failed before"):
            writer.write(rows([2]))
    assert database.prepared() == []


def test_what_is_no_rows_fault_fails_the_writer_and_rejects_nothing(database: Database) -> None:
    with _job(database) as job:
        writer = job.writer()
        database.query("DROP TABLE ledger")
        writer.write(rows([1, 2]))
        with pytest.raises(PreCommitFailed, match=re.escape(database.said_of_missing("ledger"))):
            writer.pre_commit(CheckpointId(1))
        assert list(writer.take_rejected()) == []


def test_a_server_that_has_no_number_left_for_new_rows_rejects_none(
    database: Database, staging: FileStagingArea, mode: str
) -> None:
    dialect = DIALECTS[database.name]
    sink = database.sink(table="ledger", create=True, commit_mode=mode)
    with SqlJob(sink, staging=staging, on_bad_row=OnBadRow.DEAD_LETTER) as job:
        writer = job.check().writer()
        database.query(*dialect.numbering)
        writer.write(rows([1, 2, 3, 4]))
        if mode == "two_phase":
            with pytest.raises(TargetRefused, match=re.escape(dialect.said_of_numbers)):
                writer.pre_commit(CheckpointId(1))
        else:
            (committable,) = writer.pre_commit(CheckpointId(1))
            outcome = job.committer().commit(committable)
            assert isinstance(outcome, RetryLater)
            assert dialect.said_of_numbers in outcome.reason
            assert outcome.until_fixed
        assert not writer.take_rejected()
    assert database.ids_in() == []


@pytest.mark.parametrize("policy", list(OnBadRow))
def test_values_that_do_not_fit_become_null_where_the_user_says_so(
    database: Database, policy: OnBadRow
) -> None:
    with _job(database, policy, overflow="null") as job:
        database.retype("amount", "smallint")
        database.retype("account", "varchar(6)")
        writer = job.writer()
        writer.write(rows([1, 4000]))
        writer.write(_row(9, "acct-12", 5))
        assert list(writer.take_rejected()) == []
        (committable,) = writer.pre_commit(CheckpointId(1))
        job.committer().commit(committable)
    found = database.query("SELECT id, account, amount FROM ledger ORDER BY id")
    assert found == [(1, "acct-1", 10), (9, None, 5), (4000, "acct-3", None)]


def test_value_for_a_column_that_takes_no_null_is_a_bad_row_all_the_same(
    database: Database,
) -> None:
    with _job(database, overflow="null") as job:
        database.retype("id", "smallint")
        ids, reasons = _written(database, job, [rows([1, 40_000])])
    assert ids == [40_000]
    assert "column 'id'" in reasons[0]


def test_row_with_an_unknown_operation_or_table_is_rejected(database: Database) -> None:
    schema = pa.schema([("id", pa.int64()), ("op", pa.string()), ("t", pa.string())])
    sink = database.sink(
        table="ledger", create=False, write_mode="upsert", primary_key=("id",),
        operation_column="op", table_column="t",
    )  # fmt: skip
    database.query("CREATE TABLE ledger (id bigint PRIMARY KEY)")
    with SqlJob(sink, schema=schema, on_bad_row=OnBadRow.DROP) as job:
        writer = job.check().writer()
        batch = pa.record_batch(
            [
                pa.array([1, 2, 3, None, 5], pa.int64()),
                pa.array(["c", "boom", "c", "c", "c"]),
                pa.array([None, None, "absent", None, "a.b.c"]),
            ],
            schema=schema,
        )
        writer.write(batch)
        by_id = _reasons(writer)
        (committable,) = writer.pre_commit(CheckpointId(1))
        job.committer().commit(committable)
    assert set(by_id) == {2, 3, 5, None}
    assert "'boom'" in by_id[2]
    assert "table absent does not exist" in by_id[3]
    assert "'a.b.c'" in by_id[5]
    assert "'id' is null" in by_id[None]
    assert database.ids_in() == [1]


def test_ledger_mode_rejects_what_does_not_fit_and_says_what_it_cannot_reject(
    database: Database, staging: FileStagingArea, caplog: pytest.LogCaptureFixture
) -> None:
    sink = database.sink(table="ledger", create=True, commit_mode="ledger")
    with SqlJob(sink, staging=staging, on_bad_row=OnBadRow.DROP) as job:
        job.check()
        database.retype("amount", "smallint")
        ids, reasons = _written(database, job, [rows([1, 4000, 2])])
    assert ids == [4000]
    assert "40000" in reasons[0]
    assert "a unique index, a foreign key or a trigger" in caplog.text
    assert database.ids_in() == [1, 2]


@pytest.mark.parametrize("settings", [{}, {"primary_key": ("id",), "write_mode": "upsert"}])
def test_ledger_mode_rejects_before_the_decision_what_only_the_server_can_judge(
    database: Database, staging: FileStagingArea, settings: dict[str, Any]
) -> None:
    dialect = DIALECTS[database.name]
    texts = [text for text, _ in dialect.judged]
    sink = database.sink(table="ledger", create=True, commit_mode="ledger", **settings)
    with SqlJob(sink, staging=staging, on_bad_row=OnBadRow.DROP) as job:
        job.check()
        database.query(*dialect.judging)
        batches = [_row(number, text) for number, text in enumerate(texts)]
        ids, reasons = _written(database, job, [pa.concat_batches(batches)])
    refused = {number: why for number, (_, why) in enumerate(dialect.judged) if why}
    assert ids == list(refused)
    for reason, part in zip(reasons, refused.values(), strict=True):
        assert part in reason
    assert database.ids_in() == sorted(set(range(len(texts))) - set(refused))


_CHECKED = {
    "whole": (pa.int64(), "bigint", "whole > -5 AND whole % 2 = 0", (4, None), (3, -6)),
    "tiny": (pa.int64(), "smallint", "tiny * 10000 < 50000", (4,), (5,)),
    "price": (
        pa.decimal128(9, 2),
        "decimal(9, 2)",
        "price <> 0.10",
        (Decimal("0.11"),),
        (Decimal("0.10"),),
    ),
    "day": (pa.date32(), "date", "day < '2026-10-01'", (date(2026, 9, 30),), (date(2026, 10, 1),)),
    "text": (pa.string(), "varchar(20)", "text <> 'it''s'", ("its", "", "9"), ("it's",)),
}
"""Columns with Arrow type, type, CHECK constraint, values that it accepts, and ones it refuses."""


def test_ledger_mode_evaluates_check_constraints_as_the_table_does(
    database: Database, staging: FileStagingArea
) -> None:
    columns = ", ".join(f"{name} {spec[1]}" for name, spec in _CHECKED.items())
    checks = ", ".join(f"CONSTRAINT c_{n} CHECK ({spec[2]})" for n, spec in _CHECKED.items())
    database.query(f"CREATE TABLE ledger (id bigint, {columns}, {checks})")
    schema = pa.schema([("id", pa.int64()), *((name, spec[0]) for name, spec in _CHECKED.items())])
    given: list[tuple[str, Any]] = []
    given += [(name, value) for name, spec in _CHECKED.items() for value in spec[3]]
    accepted = len(given)
    given += [(name, value) for name, spec in _CHECKED.items() for value in spec[4]]
    rows = [{"id": number, name: value} for number, (name, value) in enumerate(given)]
    sink = database.sink(table="ledger", commit_mode="ledger")
    with SqlJob(sink, schema=schema, staging=staging, on_bad_row=OnBadRow.DROP) as job:
        batch = pa.RecordBatch.from_pylist(rows, schema=schema)
        ids, reasons = _written(database, job.check(), [batch])
    assert ids == list(range(accepted, len(given)))
    for (name, _), reason in zip(given[accepted:], reasons, strict=True):
        assert f"c_{name}" in reason
    assert database.ids_in() == list(range(accepted))


def test_ledger_mode_knows_no_constraint_of_a_row_that_a_trigger_changes(
    database: Database, staging: FileStagingArea
) -> None:
    database.query(
        "CREATE TABLE ledger (id bigint, account varchar(20), amount bigint,"
        " CONSTRAINT positive CHECK (amount >= 0))",
        *DIALECTS[database.name].correcting,
    )
    sink = database.sink(table="ledger", commit_mode="ledger")
    with SqlJob(sink, staging=staging, on_bad_row=OnBadRow.DROP) as job:
        assert _written(database, job.check(), [_row(1, "a", -5)]) == ([], [])
    assert database.query("SELECT amount FROM ledger") == [(5,)]


def test_ledger_mode_fails_before_the_decision_at_what_the_server_refuses(
    database: Database, staging: FileStagingArea
) -> None:
    dialect = DIALECTS[database.name]
    sink = database.sink(table="ledger", create=True, commit_mode="ledger")
    with SqlJob(sink, staging=staging, on_bad_row=OnBadRow.FAIL) as job:
        job.check()
        database.query(*dialect.judging)
        writer = job.writer()
        text, why = next(judged for judged in dialect.judged if judged[1])
        writer.write(_row(1, text))
        with pytest.raises(BadRow, match=re.escape(why)):
            writer.pre_commit(CheckpointId(1))
    assert list(staging.transactions()) == []
