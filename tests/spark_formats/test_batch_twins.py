"""A task is tried again while an older try of it is prepared, whose report was lost.

The table has a unique key, so the same rows written again would wait for the older try's locks.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.integration.postgres_sink_kit import ids_in, prepared, query
from tests.spark_formats.batches import driver_of, killed_at

from onceflow.core.errors import PreCommitFailed, SinkError
from onceflow.sinks import PostgresSink

pytestmark = pytest.mark.integration


def ledger(url: str, **settings: Any) -> PostgresSink:
    """Return a sink for a new table."""
    query(
        url, "CREATE TABLE IF NOT EXISTS ledger (id bigint PRIMARY KEY, account text, amount int)"
    )
    return PostgresSink(url, table="ledger", **settings)


def test_a_task_tried_again_beside_its_prepared_twin_waits_for_no_lock(
    postgres_database: str, tmp_path: Path
) -> None:
    """Its twin's report was lost; its rows come again, by a unique key."""
    driver = driver_of(ledger(postgres_database), tmp_path)
    plan = driver.plan(0)
    driver.task(plan, 0, range(5))
    began = time.monotonic()
    again = driver.task(plan, 0, range(5), task_attempt=1)
    assert time.monotonic() - began < 30, "it waited for its twin's locks"
    other = driver.task(plan, 1, range(5, 10))
    assert len(prepared(postgres_database)) == 2
    driver.commit([again, other])
    assert ids_in(postgres_database) == list(range(10))
    assert prepared(postgres_database) == []
    assert not driver.in_doubt()


@pytest.mark.parametrize("decided", [False, True])
def test_a_batch_with_a_task_beside_its_twin_is_settled_by_the_next_run(
    postgres_database: str, tmp_path: Path, decided: bool
) -> None:
    sink = ledger(postgres_database, write_mode="upsert", primary_key=("id",))
    driver = driver_of(sink, tmp_path)
    plan = driver.plan(0)
    driver.task(plan, 0, range(5))
    again = driver.task(plan, 0, range(5), task_attempt=1)
    assert again.beside
    if decided:
        killed_at("logged", tmp_path, lambda: driver.commit([again]))
    assert driver.plan(0).decided == decided
    assert ids_in(postgres_database) == (list(range(5)) if decided else [])
    assert not driver.in_doubt()


def test_rows_that_are_staged_where_the_driver_does_not_look_are_not_decided(
    postgres_database: str, tmp_path: Path
) -> None:
    driver = driver_of(ledger(postgres_database), tmp_path / "shared")
    plan = driver.plan(0)
    twin = driver.task(plan, 0, range(5))
    elsewhere = driver_of(ledger(postgres_database), tmp_path / "elsewhere")
    away = replace(plan, target=replace(plan.target, staging=elsewhere.target.staging))
    again = driver.task(away, 0, range(5), task_attempt=1)
    with pytest.raises(SinkError, match="does not see them"):
        driver.commit([again])
    # Nothing is decided: the twin's report may count still.
    driver.commit([twin])
    assert ids_in(postgres_database) == list(range(5))


def test_a_task_that_must_wait_for_its_twin_names_it(
    postgres_database: str, tmp_path: Path
) -> None:
    driver = driver_of(ledger(postgres_database, lock_timeout_s=0.2), tmp_path)
    plan = driver.plan(0)
    (twin,) = driver.task(plan, 0, range(5)).committables
    alone = replace(plan, target=replace(plan.target, staging=None))
    with pytest.raises(PreCommitFailed, match=f"{twin.transaction}.*stagingLocation"):
        driver.task(alone, 0, range(5), task_attempt=1)
