"""The protocol of batches on a real database: every crash, every order, each row once.

A step that is left out is a process that was killed before it; `tests/spark_formats` has the kills
themselves, through Spark.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.postgres_sink_kit import ids_in, prepared, query
from tests.spark_formats.batches import Driver, driver_of, rows

from onceflow.connectors.spark.batch.task_writer import TaskIdentity, write_task
from onceflow.core.errors import ConfigError, Fenced, PreparedTransactionLost, SinkError
from onceflow.core.protocol.batches import decision_of
from onceflow.sinks import PostgresSink

pytestmark = pytest.mark.integration


@pytest.fixture
def driver(postgres_database: str, tmp_path: Path) -> Driver:
    query(postgres_database, "CREATE TABLE ledger (id bigint, account text, amount int)")
    return driver_of(PostgresSink(postgres_database, table="ledger"), tmp_path)


def url_of(driver: Driver) -> str:
    sink = driver.target.sink
    assert isinstance(sink, PostgresSink)
    return sink.url


def test_batches_are_written_whole_and_once(driver: Driver) -> None:
    driver.batch(0, range(5), range(5, 10))
    driver.batch(1, range(10, 15), [])
    assert ids_in(url_of(driver)) == list(range(15))
    assert prepared(url_of(driver)) == []


def test_what_was_prepared_and_not_decided_is_rolled_back_before_the_next_tasks(
    driver: Driver,
) -> None:
    plan = driver.plan(0)
    driver.task(plan, 0, range(5))
    driver.task(plan, 1, range(5, 10))
    assert len(prepared(url_of(driver))) == 2
    again = driver.plan(0)
    assert prepared(url_of(driver)) == []
    driver.commit([driver.task(again, 0, range(10))])
    assert ids_in(url_of(driver)) == list(range(10))


def test_a_decided_batch_is_committed_by_the_next_plan_and_its_replay_dropped(
    driver: Driver,
) -> None:
    plan = driver.plan(0)
    reports = [driver.task(plan, 0, range(5)), driver.task(plan, 1, range(5, 10))]
    commits = driver.commits()
    commits._carry_out = lambda *_: (_ for _ in ()).throw(SinkError("killed"))  # type: ignore[method-assign]
    with pytest.raises(SinkError, match="killed"):
        commits.commit(reports)
    commits.close()
    assert ids_in(url_of(driver)) == []
    again = driver.plan(0)
    assert ids_in(url_of(driver)) == list(range(10))
    assert again.decided
    # Other rows, in other partitions: the batch is there.
    assert driver.commit([driver.task(again, n, [100 + n]) for n in range(3)]) is None
    assert ids_in(url_of(driver)) == list(range(10))
    assert prepared(url_of(driver)) == []


def test_a_decided_transaction_that_is_lost_before_its_commit_is_reported(driver: Driver) -> None:
    report = driver.task(driver.plan(0), 0, range(5))
    commits = driver.commits()
    commits._carry_out = lambda *_: (_ for _ in ()).throw(SinkError("killed"))  # type: ignore[method-assign]
    with pytest.raises(SinkError, match="killed"):
        commits.commit([report])
    commits.close()
    (name,) = prepared(url_of(driver))
    query(url_of(driver), f"ROLLBACK PREPARED '{name}'")
    with pytest.raises(PreparedTransactionLost, match="is decided"):
        driver.plan(0)


def test_a_retried_task_and_a_twin_count_once(driver: Driver) -> None:
    plan = driver.plan(0)
    driver.task(plan, 0, range(5))  # its message was lost
    report = driver.task(plan, 0, range(5), task_attempt=1)
    assert len(driver.in_doubt()) == 2
    driver.commit([report])
    assert ids_in(url_of(driver)) == list(range(5))
    assert prepared(url_of(driver)) == []
    driver.task(plan, 0, range(5), task_attempt=2)  # a twin prepares after the decision
    assert len(prepared(url_of(driver))) == 1
    driver.batch(1, range(5, 10))
    assert ids_in(url_of(driver)) == list(range(10))
    assert prepared(url_of(driver)) == []


def test_a_task_that_runs_after_abort_prepares_nothing(driver: Driver) -> None:
    plan = driver.plan(0)
    driver.task(plan, 0, range(5))
    driver.abort(plan)
    assert prepared(url_of(driver)) == []
    with pytest.raises(Fenced):
        driver.task(plan, 1, range(5, 10))
    assert prepared(url_of(driver)) == []


def test_a_reply_to_the_decision_that_was_lost_does_no_harm(driver: Driver) -> None:
    plan = driver.plan(0)
    reports = [driver.task(plan, 0, range(5))]
    first = driver.commit(reports)
    assert driver.commit(reports) == first
    assert ids_in(url_of(driver)) == list(range(5))


def test_of_two_drivers_the_one_that_planned_last_decides(driver: Driver) -> None:
    other = replace(driver, run="run-2")
    old = driver.plan(0)
    reports = [driver.task(old, 0, range(5))]
    new = other.plan(0)
    with pytest.raises(Fenced, match="has claimed the sink id since"):
        driver.commit(reports)
    other.commit([other.task(new, 0, range(5))])
    assert ids_in(url_of(driver)) == list(range(5))
    assert prepared(url_of(driver)) == []


@pytest.mark.untraced("decides without the steps of a commit")
def test_a_decision_of_the_old_driver_is_honoured_by_the_new_one(driver: Driver) -> None:
    other = replace(driver, run="run-2")
    old = driver.plan(0)
    report = driver.task(old, 0, range(5))
    commits = driver.commits()
    commits.decisions.decide(
        decision_of(old.batch, old.attempt, [(0, report.committables)], fingerprint=old.fingerprint)
    )
    commits.close()
    new = other.plan(0)
    assert new.decided
    assert ids_in(url_of(driver)) == list(range(5))


def test_an_older_copy_of_the_checkpoint_is_refused(driver: Driver) -> None:
    for number in range(3):
        driver.batch(number, [number])
    with pytest.raises(ConfigError, match="other input"):
        driver.plan(2, "offsets of another batch 2")
    with pytest.raises(ConfigError, match="older copy"):
        driver.batch(1, [7], fingerprint="another")
    driver.batch(9, [9])
    with pytest.raises(ConfigError, match="older copy"):
        driver.plan(5)
    assert ids_in(url_of(driver)) == [0, 1, 2, 9]


def test_two_queries_cannot_share_a_sink_id(driver: Driver) -> None:
    driver.batch(0, range(3))
    other = driver.other(owner="Spark query r", source="r")
    with pytest.raises(ConfigError, match="belongs to Spark query q"):
        other.plan(0)


def test_a_checkpoint_that_was_moved_is_noticed(driver: Driver) -> None:
    driver.batch(0, range(3))
    moved = driver.other(sink_id="events-2")
    with pytest.raises(ConfigError, match="sinkId=events-1"):
        moved.plan(0)


def test_two_writes_of_one_named_batch_in_one_run_are_refused(driver: Driver) -> None:
    named = driver.other(owner="batch writes of j", source="j", sink_id="j-1")
    plan = named.plan(7, "")
    named.commit([named.task(plan, 0, range(3))])
    again = named.plan(7, "")
    with pytest.raises(ConfigError, match="need different names"):
        named.task(again, 0, range(3, 6))
    later = replace(named, run="run-3")
    plan = later.plan(7, "")
    assert later.commit([later.task(plan, 0, range(3))]) is None
    assert ids_in(url_of(driver)) == [0, 1, 2]


def test_a_task_of_no_micro_batch_is_refused_with_the_triggers_to_use(driver: Driver) -> None:
    """Spark's continuous trigger goes on in the checkpoint of micro-batches."""
    plan = driver.plan(0)
    task = TaskIdentity(0, 0, 1, None, driver.run)
    with pytest.raises(ConfigError, match=r"trigger\(processingTime=…\)"):
        write_task(plan, task, iter([rows(range(3))]))
    assert prepared(url_of(driver)) == []
