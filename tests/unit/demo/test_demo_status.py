"""The demo tells what the job says of itself: its transactions, and once each why it restarts."""

from __future__ import annotations

from dataclasses import replace

from demo.driver import DriverStatus, SinkTransactions
from demo.report import StatusWatcher

SINK = SinkTransactions(
    uid="ledger", open=2, prepared=1, committed=7, aborted=3, oldest_prepared_s=0.42
)
STATUS = DriverStatus(state="running", attempt=2, records_in=10, checkpoints=1, sinks=(SINK,))


def test_transactions_are_shown_with_the_age_of_the_oldest() -> None:
    said, shown = list[str](), list[str]()
    watcher = StatusWatcher(said.append, shown.append)
    watcher.look(None)
    watcher.look(STATUS)
    settled = replace(SINK, prepared=0, committed=8, oldest_prepared_s=0.0)
    watcher.look(replace(STATUS, sinks=(settled,)))
    assert shown == [
        "transactions: 2 open, 1 prepared, oldest for 0.4 s, 7 committed, 3 rolled back",
        "transactions: 2 open, 0 prepared, 8 committed, 3 rolled back",
    ]
    assert said == []


def test_each_reason_of_a_restart_is_told_once_and_on_one_line() -> None:
    said, shown = list[str](), list[str]()
    watcher = StatusWatcher(said.append, shown.append)
    lost = replace(STATUS, last_error="SlotLost: slot 1 is gone\nat once " + "x" * 900)
    for status in (lost, lost, replace(lost, last_error=""), lost):
        watcher.look(status)
    watcher.look(replace(lost, attempt=3, last_error="PreCommitFailed: later"))
    first, second = said
    assert first.startswith("        the job, attempt 2: SlotLost: slot 1 is gone at once xxx")
    assert "\n" not in first
    assert len(first) < 300
    assert second.endswith("attempt 3: PreCommitFailed: later")
