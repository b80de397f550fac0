"""Tests requests that arrive while the driver examines the loss of a slot."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.counting_source import CountingSource
from tests.support.ledger import SETTINGS, assert_exactly_once, ledger
from tests.support.leftovers import find_savepoint_leftovers

from onceflow import FileSystemStorage, JobEvent, JobState, JobStatus, LocalProcesses
from onceflow.core.api.pipeline import Job
from onceflow.core.errors import SavepointFailed
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind, StateForm
from onceflow.core.protocol.checkpoints.snapshots import StateHandle
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.loops import attempt
from onceflow.core.protocol.loops.attempt_facts import SlotMessageReceived
from onceflow.core.protocol.messages import Failed
from onceflow.core.protocol.savepoints.savepoint import Savepoint
from onceflow.core.runtime.driver import savepoints
from onceflow.core.runtime.driver.savepoints import Savepoints
from onceflow.core.runtime.events.job_events import SlotLeft
from onceflow.core.storage.snapshots.savepoints import SavepointDirectory
from onceflow.core.storage.snapshots.state_files import FileStateReader
from onceflow.integration.conformance.processes import eventually

FAILED = Failed(1, "SlotLost", "channel broke", "", "job")


class _AsksAtALoss:
    """Asks for a savepoint, or to stop with one, as soon as a slot has reported its failure."""

    def __init__(self, job: Job, answer: Future[str], *, stops: bool) -> None:
        self._job, self._answer, self._stops = job, answer, stops
        self._asks: threading.Thread | None = None

    def __call__(self, event: JobEvent, status: JobStatus) -> None:
        if isinstance(event, SlotLeft) and event.error and self._asks is None:
            self._asks = threading.Thread(target=self._ask)
            self._asks.start()

    def _ask(self) -> None:
        try:
            if self._stops:
                place = self._job.stop(60, savepoint=True).savepoints[-1].place
            else:
                place = self._job.savepoint(timeout_s=60)
            self._answer.set_result(place)
        except BaseException as error:
            self._answer.set_exception(error)


@pytest.mark.parametrize("stops", [False, True])
def test_a_savepoint_that_is_asked_for_while_a_loss_is_looked_into_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    monkeypatch.setattr(attempt, "INVESTIGATION_S", 1.0)
    source = CountingSource(2_000, pause_s=0.002, ends_with=str(tmp_path / "read all"))
    pipeline, sink = ledger(LocalProcesses(), tmp_path, source)
    job = pipeline.start()
    answer: Future[str] = Future()
    job.add_listener(_AsksAtALoss(job, answer, stops=stops))
    _await_completed(job, 1)
    # A slot says that a channel has broken, and nothing is heard of the slot at its other side.
    driver = job._driver  # pyright: ignore[reportPrivateUsage]
    driver._context.events.put(SlotMessageReceived(AttemptId(1), 1, FAILED))  # pyright: ignore[reportPrivateUsage]
    assert Path(answer.result(60)).is_dir()
    assert job.status().restores == 1
    (tmp_path / "read all").touch()
    if stops:
        assert job.wait(60).state is JobState.STOPPED
        job = pipeline.start()
    assert job.wait(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)


def test_a_savepoint_that_no_attempt_takes_up_is_answered_within_its_time(tmp_path: Path) -> None:
    storage = FileSystemStorage(str(tmp_path / "checkpoints"))
    waiting = Savepoints("job", storage, storage.open("job"), None, "", wait_s=0.05)
    directory = str(tmp_path / "kept")
    asked = waiting.ask(CheckpointKind.SAVEPOINT, directory, StateForm.CANONICAL)
    with pytest.raises(
        SavepointFailed, match=r"no attempt started it within 0\.05 s; request it again"
    ):
        asked.done.result(60)
    assert not waiting.begin(asked.request), "an attempt that comes later does not take it"


def test_a_savepoint_that_failed_while_it_was_copied_leaves_nothing_when_the_copy_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy outlasts its attempt: the savepoint has failed, and its files are deleted before."""
    begun, goes_on, ended = threading.Event(), threading.Event(), threading.Event()
    read, collect = FileStateReader.read_verified_chunks, SavepointDirectory.collect

    def read_later(reader: FileStateReader, handle: StateHandle) -> Iterator[bytes]:
        begun.set()
        goes_on.wait(60)
        return read(reader, handle)

    def collect_and_tell(*arguments: Any) -> Savepoint:
        try:
            return collect(*arguments)
        finally:
            ended.set()

    monkeypatch.setattr(FileStateReader, "read_verified_chunks", read_later)
    monkeypatch.setattr(SavepointDirectory, "collect", collect_and_tell)
    # The driver copies what slots have uploaded to the job's storage.
    monkeypatch.setattr(savepoints, "may_slots_write", _may_not_write)
    pipeline, _ = ledger(
        LocalProcesses(),
        tmp_path,
        CountingSource(0, endless=True, pause_s=0.005),
        inline_threshold_bytes=0,
        settings=replace(SETTINGS, cancel_timeout_s=0.5),
    )
    job = pipeline.start()
    _await_completed(job, 1)
    kept = tmp_path / "kept"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(job.savepoint, str(kept))
        assert begun.wait(60)
        os.kill(job.status().slots[0].pid, signal.SIGKILL)
        with pytest.raises(SavepointFailed, match="attempt 1 has ended; ask again"):
            asked.result(60)
    goes_on.set()
    assert ended.wait(60)
    assert eventually(lambda: not list(kept.iterdir()), 10), find_savepoint_leftovers(kept)
    assert Path(job.savepoint(str(kept))).is_dir()
    assert job.stop(60).state is JobState.STOPPED
    assert find_savepoint_leftovers(kept) == []


def _may_not_write(*_: object) -> bool:
    return False


def _await_completed(job: Job, checkpoints: int) -> None:
    deadline = time.monotonic() + 90
    while job.status().checkpoints_completed < checkpoints:
        assert time.monotonic() < deadline, job.status()
        time.sleep(0.01)
