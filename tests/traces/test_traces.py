"""The rules reject the traces of mistakes, and accept those of the same jobs without them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.traces.mistakes import JOBS, MISTAKES, Mistake
from tests.traces.recording import RECORDED, record

from onceflow.core.protocol.ids import TransactionId
from onceflow.core.traces import VARIABLE, Trace
from onceflow.integration.traces.events import load_trace, read_trace
from onceflow.integration.traces.rules import check_trace


@pytest.mark.parametrize("job", JOBS)
def test_recorded_trace_of_a_job_is_accepted(job: str) -> None:
    trace = load_trace(RECORDED / f"{job.replace(' ', '-')}.jsonl")
    assert sum(map(len, trace.values())) > 20
    assert check_trace(trace) == []


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_recorded_trace_of_a_mistake_is_rejected(mistake: Mistake) -> None:
    (broken,) = check_trace(load_trace(RECORDED / mistake.file))
    assert mistake.rule in broken.rule
    assert str(broken.event) in str(broken)


def test_each_recorded_trace_has_its_job_or_mistake() -> None:
    jobs = {f"{job.replace(' ', '-')}.jsonl" for job in JOBS}
    assert {path.name for path in RECORDED.iterdir()} == jobs | {m.file for m in MISTAKES}


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_trace_of_a_job_of_today_is_accepted(job: str) -> None:
    assert check_trace(record(job)) == []


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_trace_of_a_mistake_of_today_is_rejected(mistake: Mistake) -> None:
    (broken,) = check_trace(record(mistake.job, mistake))
    assert mistake.rule in broken.rule


def test_step_without_its_cause_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written by hand: a slot hears of a decision that no driver has told it."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    Trace("log", 1).record("claimed", checkpoint=None, by=None, listed=[], sinks=[])
    Trace("log", 1, slot=0).record("heard", checkpoint=4)
    (broken,) = check_trace(read_trace(tmp_path))
    assert broken.rule == "this step needs completed 1 4, which is in no trace"


def test_steps_are_lines_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    transaction = TransactionId("sink", 2, 3, 0)
    outcome = Trace("log", 2, slot=1).record_commit([transaction], lambda: 7, by="slot")
    assert outcome == 7
    (events,) = read_trace(tmp_path).values()
    assert [(event.step, event.slot, event.transactions()) for event in events] == [
        ("committing", 1, (transaction,)),
        ("committed", 1, (transaction,)),
    ]
    assert events[1].facts["outcome"] == "int"


def test_nothing_is_read_or_written_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    unread = iter([1, 2])
    Trace("log", 1).record("listed", transactions=unread)
    assert list(unread) == [1, 2]
