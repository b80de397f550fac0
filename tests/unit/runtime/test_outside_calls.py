"""A call to a target that takes long is told as under way; one that has failed, as a wait."""

from __future__ import annotations

import pytest

from onceflow.core.protocol.messages import Wait
from onceflow.core.runtime.dataflow import sink_operator
from onceflow.core.runtime.dataflow.sink_operator import OutsideCalls
from onceflow.core.runtime.events.status_parts import sum_up_waits


@pytest.fixture(autouse=True)
def _show_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_operator, "SHOWN_AFTER_S", -1.0)


def describe(calls: OutsideCalls) -> list[str]:
    waits = sum_up_waits((wait, 1_000.0) for wait in calls.list_waits())
    return [wait.describe().partition(", since")[0] for wait in waits]


def test_a_call_that_has_not_failed_is_under_way_and_one_that_has_waits() -> None:
    calls = OutsideCalls("ledger", "database 'shop'")
    calls.begin("pre-commit")
    calls.begin("commit")
    assert describe(calls) == [
        "ledger is in a commit at database 'shop'",
        "ledger is in a pre-commit at database 'shop'",
    ]
    calls.fail("commit")
    calls.end("pre-commit")
    assert describe(calls) == ["ledger is waiting for database 'shop' (to commit)"]


def test_a_call_that_follows_a_failed_one_is_under_way_again() -> None:
    calls = OutsideCalls("ledger", "database 'shop'")
    calls.begin("commit")
    calls.fail("commit")
    calls.end("commit")
    assert calls.list_waits() == ()
    with calls.during("commit"):
        assert [wait.call for wait in calls.list_waits()] == ["commit"]
    assert calls.list_waits() == ()


def test_a_wait_and_a_call_of_two_subtasks_are_two_lines() -> None:
    waits = (
        Wait("ledger", "database 'shop'", 5.0),
        Wait("ledger", "database 'shop'", 9.0, "commit"),
    )
    assert len(sum_up_waits((wait, 1_000.0) for wait in waits)) == 2
