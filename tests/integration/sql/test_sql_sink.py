"""Tests the databases' sinks on real servers: rows are visible once or not at all."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial

import pytest
from tests.integration.sink_kit import committables, eventually, rows
from tests.integration.sql.databases import Database, SqlJob

from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    Lost,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import CheckpointId, TransactionId

_KEPT = {"postgres": 1, "mysql": 1, "mariadb": 0}
"""How many connections a writer keeps beside what it has prepared."""

_WITHOUT_LEDGER = {
    "postgres": "belongs to another database",
    "mysql": "onceflow_ledger",
    "mariadb": "onceflow_ledger",
}
"""What a database that has no ledger says of another's transaction; Postgres knows it."""

_NOW = {
    "postgres": "SELECT extract(epoch FROM now())",
    "mysql": "SELECT UNIX_TIMESTAMP()",
    "mariadb": "SELECT UNIX_TIMESTAMP()",
}


def test_rows_are_seen_at_the_commit_and_not_before(job: SqlJob, database: Database) -> None:
    writer, committer = job.writer(), job.committer()
    writer.write(rows([1, 2]))
    assert database.ids_in() == []
    committable = Committable(TransactionId("job.ledger", 1, 1, 0), rows=2)
    assert writer.pre_commit(CheckpointId(1)) == (committable,)
    assert database.ids_in() == []
    assert database.prepared() == ["job.ledger/1/1/0/0"]
    assert committer.commit(committable) == Committed()
    assert database.ids_in() == [1, 2]
    assert database.prepared() == []
    assert database.ledger_rows() == ["job.ledger/1/1/0/0"]


def test_closing_rolls_back_what_is_open_and_leaves_what_is_prepared(
    job: SqlJob, database: Database
) -> None:
    writer = job.writer()
    writer.write(rows([1]))
    (committable,) = writer.pre_commit(CheckpointId(1))
    writer.write(rows([2]))
    writer.close()
    writer.close()
    assert database.ids_in() == []
    assert database.prepared() == ["job.ledger/1/1/0/0"]
    assert job.committer().commit(committable) == Committed()
    assert database.ids_in() == [1]


def test_rows_of_the_next_checkpoint_flow_while_the_last_one_is_undecided(
    job: SqlJob, database: Database
) -> None:
    writer, committer = job.writer(), job.committer()
    writer.write(rows([1]))
    (first,) = writer.pre_commit(CheckpointId(1))
    writer.write(rows([2]))
    assert committer.commit(first) == Committed()
    assert database.ids_in() == [1]
    writer.write(rows([3]))
    (second,) = writer.pre_commit(CheckpointId(2))
    assert committer.commit(second) == Committed()
    assert database.ids_in() == [1, 2, 3]


@pytest.mark.parametrize(
    "order",
    [[0], [1], [0, 1], [1, 0], [0, 0, 1], [1, 0, 1, 0]],
    ids=lambda order: "-".join(map(str, order)),
)
def test_commits_in_any_order_and_number_show_each_row_once(
    job: SqlJob, database: Database, order: list[int]
) -> None:
    both = [job.prepare(1, [1, 2]), job.prepare(2, [3, 4])]
    committer = job.committer()
    seen: set[int] = set()
    for index in order:
        expected: CommitOutcome = AlreadyCommitted() if index in seen else Committed()
        assert committer.commit(both[index]) == expected
        seen.add(index)
    wanted = [*([1, 2] if 0 in seen else []), *([3, 4] if 1 in seen else [])]
    assert database.ids_in() == wanted
    assert committables(committer.in_doubt()) == committables(
        [one for index, one in enumerate(both) if index not in seen]
    )


def test_checkpoints_without_rows_prepare_nothing(job: SqlJob, database: Database) -> None:
    writer = job.writer()
    assert writer.pre_commit(CheckpointId(1)) == ()
    writer.write(rows([]))
    assert writer.pre_commit(CheckpointId(2)) == ()
    assert database.prepared() == []
    writer.write(rows([1]))
    (third,) = writer.pre_commit(CheckpointId(3))
    assert third.transaction.checkpoint == 3
    assert writer.pre_commit(CheckpointId(4)) == ()
    assert job.committer().commit(third) == Committed()
    assert database.ids_in() == [1]


def test_replay_after_a_crash_leaves_one_copy(job: SqlJob, database: Database) -> None:
    committer = job.committer()
    assert committer.commit(job.prepare(1, [1, 2])) == Committed()
    lost = job.prepare(2, [3, 4])
    job.check(attempt=2)
    committer = job.committer(attempt=2)
    assert list(committer.in_doubt()) == [Committable(lost.transaction)]
    assert committer.abort(lost) == Aborted()
    again = job.prepare(2, [3, 4], attempt=2)
    assert committer.commit(again) == Committed()
    assert database.ids_in() == [1, 2, 3, 4]
    assert database.prepared() == []


def test_decided_transaction_is_committed_by_an_attempt_that_never_saw_it(
    job: SqlJob, database: Database
) -> None:
    decided = job.prepare(1, [1])
    job.check(attempt=2)
    # All that a new process has is what the decision log wrote down.
    text = str(decided.transaction)
    transaction = TransactionId.parse(text)
    assert transaction is not None
    assert job.committer(attempt=2).commit(Committable(transaction)) == Committed()
    assert job.committer(attempt=2).commit(job.prepare(2, [2], attempt=2)) == Committed()
    assert database.ids_in() == [1, 2]


def test_orphan_of_a_lost_decision_log_is_listed_and_rolled_back(
    job: SqlJob, database: Database
) -> None:
    job.prepare(1, [1, 2])
    committer = job.committer(attempt=2)
    (orphan,) = committer.in_doubt()
    assert committer.abort(orphan) == Aborted()
    assert committer.abort(orphan) == Aborted()
    assert database.prepared() == []
    assert database.ids_in() == []
    assert list(committer.in_doubt()) == []


def test_transaction_of_a_cut_connection_is_listed_by_another_and_can_be_rolled_back(
    job: SqlJob, database: Database
) -> None:
    writer = job.writer()
    writer.write(rows([1]))
    (committable,) = writer.pre_commit(CheckpointId(1))
    database.end_sessions()
    committer = job.committer()
    assert list(committer.in_doubt()) == [Committable(committable.transaction)]
    assert committer.abort(committable) == Aborted()
    assert database.prepared() == []


def test_undecided_checkpoints_hold_one_connection_however_many_they_are(
    job: SqlJob, database: Database
) -> None:
    """Systems with a connection for each prepared transaction run into the server's limit."""
    writer, committer = job.writer(), job.committer()
    found: list[Committable] = []
    for checkpoint in range(1, 11):
        writer.write(rows([checkpoint]))
        (committable,) = writer.pre_commit(CheckpointId(checkpoint))
        found.append(committable)
    assert len(database.prepared()) == 10
    kept = _KEPT[database.name]
    eventually(lambda: len(database.sessions()) == kept)
    assert [committer.commit(one) for one in found] == [Committed()] * 10
    assert len(database.sessions()) == kept + 1
    assert database.ids_in() == list(range(1, 11))


def test_in_doubt_lists_exactly_this_sink_id(job: SqlJob, database: Database) -> None:
    own = job.prepare(1, [1])
    with SqlJob(database.sink(table="ledger"), sink_id="job.ledger.x") as other:
        foreign = other.check().prepare(1, [2])
        strangers = ("job.ledge/1/1/0/0", "not ours", "job.ledger/1/1/0", "job_ledger/1/1/0/0")
        for number, name in enumerate(strangers):
            database.prepare(name, f"INSERT INTO ledger (id) VALUES ({number})")
        assert list(job.committer().in_doubt()) == [Committable(own.transaction)]
        assert list(other.committer().in_doubt()) == [Committable(foreign.transaction)]


def test_rolled_back_by_an_operator_is_lost_and_never_called_committed(
    job: SqlJob, database: Database
) -> None:
    committable = job.prepare(7, [1, 2])
    database.settle(database.words.rollback, committable.transaction)
    outcome = job.committer().commit(committable)
    assert isinstance(outcome, Lost)
    assert "job.ledger/1/7/0/0" in outcome.reason
    assert "checkpoint 7" in outcome.reason
    assert "ledger" in outcome.reason


def test_committed_by_an_operator_is_already_committed(job: SqlJob, database: Database) -> None:
    committable = job.prepare(1, [1, 2])
    database.settle(database.words.commit, committable.transaction)
    assert job.committer().commit(committable) == AlreadyCommitted()
    assert job.committer().abort(committable) == AlreadyCommitted()
    assert database.ids_in() == [1, 2]


def test_committers_that_race_for_one_transaction_never_call_it_lost(
    job: SqlJob, database: Database
) -> None:
    """Eight connections commit the same transactions at once, a hundred times over."""
    writer = job.writer()
    committers = [job.committer() for _ in range(8)]
    for committer in committers:
        committer.in_doubt()
    for checkpoint in range(1, 41):
        writer.write(rows([checkpoint]))
        (committable,) = writer.pre_commit(CheckpointId(checkpoint))
        outcomes = _all_at_once(
            [partial(committer.commit, committable) for committer in committers]
        )
        assert outcomes.count(Committed()) == 1, outcomes
        assert all(
            isinstance(outcome, (Committed, AlreadyCommitted, RetryLater)) for outcome in outcomes
        ), outcomes
    assert database.ids_in() == list(range(1, 41))


def test_ledger_is_pruned_below_a_checkpoint_of_this_sink_only(
    job: SqlJob, database: Database
) -> None:
    committer = job.committer()
    for checkpoint in (1, 2, 3):
        committer.commit(job.prepare(checkpoint, [checkpoint]))
    undecided = job.prepare(4, [4])
    with SqlJob(database.sink(table="ledger"), sink_id="job.ledger.x") as other:
        other.committer().commit(other.check().prepare(1, [9]))
    committer.prune(CheckpointId(3))
    committer.prune(CheckpointId(3))
    assert database.ledger_rows() == ["job.ledger.x/1/1/0/0", "job.ledger/1/3/0/0"]
    committer.prune(CheckpointId(10))
    assert database.ledger_rows() == ["job.ledger.x/1/1/0/0"]
    # What was prepared when the ledger was pruned is proven by its own row as ever.
    assert committer.commit(undecided) == Committed()
    assert committer.commit(undecided) == AlreadyCommitted()


def test_pruning_many_rows_ends_with_none_left(job: SqlJob, database: Database) -> None:
    columns = "transaction_id, sink_id, attempt, checkpoint, subtask, row_count"
    proofs = ", ".join(
        f"('job.ledger/1/{n}/0/0', 'job.ledger', 1, {n}, 0, 1)" for n in range(1, 3501)
    )
    database.query(f"INSERT INTO {database.ledger} ({columns}) VALUES {proofs}")
    job.committer().prune(CheckpointId(3400))
    assert len(database.ledger_rows()) == 101


def test_subtasks_prepare_and_commit_side_by_side(job: SqlJob, database: Database) -> None:
    writers = [job.writer(subtask=subtask, parallelism=4) for subtask in range(4)]
    found: list[Committable] = []
    for checkpoint in (1, 2):
        for subtask, writer in enumerate(writers):
            writer.write(rows([checkpoint * 10 + subtask]))
        for writer in writers:
            (committable,) = writer.pre_commit(CheckpointId(checkpoint))
            found.append(committable)
    assert len({one.transaction for one in found}) == 8
    committer = job.committer()
    assert {committer.commit(one) for one in found} == {Committed()}
    assert database.ids_in() == [10, 11, 12, 13, 20, 21, 22, 23]


def test_at_least_once_shows_rows_at_once_and_again_when_replayed(database: Database) -> None:
    settings = {"create": True, "delivery": "at_least_once", "flush_rows": 10}
    with database.job(table="ledger", **settings) as job:
        writer = job.check().writer()
        writer.write(rows(range(5)))
        assert database.ids_in() == []
        writer.write(rows(range(5, 12)))
        assert database.ids_in() == list(range(12))
        writer.write(rows([12]))
        assert writer.pre_commit(CheckpointId(1)) == ()
        assert database.ids_in() == list(range(13))
        writer.write(rows([13]))
        writer.pre_commit(CheckpointId(2))
        writer.close()
        # The driver died before it wrote checkpoint 2 down: its rows are sent again.
        again = job.check(attempt=2).writer(attempt=2)
        again.write(rows([13]))
        again.pre_commit(CheckpointId(2))
        assert list(job.committer(attempt=2).in_doubt()) == []
    assert database.ids_in() == [*range(14), 13]
    assert database.prepared() == []


def test_switching_to_at_least_once_finds_what_exactly_once_left_in_doubt(
    job: SqlJob, database: Database
) -> None:
    left = job.prepare(1, [1])
    with database.job(table="ledger", delivery="at_least_once") as other:
        committer = other.check(attempt=2).committer(attempt=2)
        assert list(committer.in_doubt()) == [Committable(left.transaction)]
        assert committer.commit(left) == Committed()
    assert database.ids_in() == [1]


def test_ids_are_unique_over_a_hundred_thousand_checkpoints() -> None:
    names = {
        str(TransactionId("job.ledger", attempt, checkpoint, subtask))
        for attempt, subtask in itertools.product((1, 11), (1, 11))
        for checkpoint in range(25_000)
    }
    assert len(names) == 100_000
    widest = TransactionId("s" * 32, 99_999_999, 9_999_999_999, 32_767, 9)
    assert len(str(widest)) <= 63
    assert TransactionId.parse(str(widest)) == widest


def test_a_committer_stops_quietly_when_the_ledger_cannot_be_pruned(
    job: SqlJob, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    database.query(f"DROP TABLE {database.ledger}")
    job.committer().prune(CheckpointId(5))
    assert "onceflow_ledger" in caplog.text


def test_missing_ledger_proves_nothing(job: SqlJob, database: Database) -> None:
    """Neither "already committed" nor "lost" can be told without it."""
    committable = job.prepare(1, [1])
    database.settle(database.words.commit, committable.transaction)
    database.query(f"DROP TABLE {database.ledger}")
    outcome = job.committer().commit(committable)
    assert isinstance(outcome, RetryLater)
    assert "onceflow_ledger" in outcome.reason


def test_transaction_of_another_database_is_neither_seen_nor_called_lost(
    job: SqlJob, database: Database
) -> None:
    committable = job.prepare(1, [1])
    database.query(f"CREATE DATABASE {database.database_name}_other")
    try:
        with type(database)(f"{database.url}_other").job(table="ledger") as other:
            committer = other.committer()
            assert list(committer.in_doubt()) == []
            outcome = committer.commit(committable)
        assert isinstance(outcome, RetryLater), "without a ledger nothing is proven"
        assert _WITHOUT_LEDGER[database.name] in outcome.reason
        assert job.committer().commit(committable) == Committed()
        assert database.ids_in() == [1]
    finally:
        database.query(f"DROP DATABASE {database.database_name}_other")


def test_age_of_what_is_prepared_is_told(job: SqlJob, database: Database) -> None:
    committable = job.prepare(1, [1])
    committer = job.committer()
    since = committer.find_prepare_time(committable)
    assert since is not None
    ((now,),) = database.query(_NOW[database.name])
    assert 0 <= float(now) - since.timestamp() < 60
    assert committer.commit(committable) == Committed()
    assert committer.find_prepare_time(committable) is None


def _all_at_once(calls: list[Callable[[], CommitOutcome]]) -> list[CommitOutcome]:
    barrier = threading.Barrier(len(calls))
    outcomes: list[CommitOutcome] = [Unknown("not asked")] * len(calls)

    def run(index: int) -> None:
        barrier.wait(60)
        outcomes[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return outcomes
