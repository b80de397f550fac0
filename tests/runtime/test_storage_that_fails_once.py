"""Calls to checkpoint storage that fail once cost no row, and leave no file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.failing_once import FailingOnceStorage
from tests.support.ledger import SETTINGS, assert_exactly_once, ledger
from tests.support.staged_sink import StagedSink

from onceflow import Checkpointing, FixedDelay, JobState, LocalProcesses, Pipeline, RocksDBBackend
from onceflow.core.api.pipeline import Job
from onceflow.core.runtime.driver import attempt_start
from onceflow.core.runtime.transport.control_plane import ControlEvent, ControlServer
from onceflow.core.runtime.transport.credentials import Credentials
from onceflow.integration.conformance.processes import eventually

SOURCE = CountingSource(0, splits_count=1, batch_rows=5, pause_s=0.002, endless=True)


def _fail_and_stop(
    pipeline: Pipeline, storage: FailingOnceStorage, waves: Iterable[Iterable[tuple[str, str]]]
) -> None:
    """Run the job until each call of each wave has failed once before and once after its effect."""
    job: Job = pipeline.start()
    for wave in waves:
        _complete_more(job)
        for call, path in wave:
            for after in (False, True):
                storage.fail(call, path, after=after)
        assert eventually(lambda: not storage.list_due(), 90), storage.list_due()
    # What could not be deleted is deleted after the next checkpoint.
    _complete_more(job)
    assert job.stop(90).state is JobState.STOPPED


def _complete_more(job: Job) -> None:
    """Wait for three checkpoints: the first of an attempt sweeps what others have left."""
    job.wait_for(checkpoints=job.status().checkpoints_completed + 3)


def _assert_each_once(ids: Sequence[int]) -> None:
    assert len(ids) > 0
    assert sorted(ids) == list(range(len(ids)))


@pytest.fixture
def storage(tmp_path: Path) -> FailingOnceStorage:
    root, faults = str(tmp_path / "checkpoints"), str(tmp_path / "faults")
    return FailingOnceStorage(root, inline_threshold_bytes=0, faults=faults)


def test_each_row_is_there_once_though_each_call_for_a_decision_and_for_state_fails_once(
    cluster: AnyCluster, tmp_path: Path, storage: FailingOnceStorage
) -> None:
    pipeline, sink = ledger(
        cluster,
        tmp_path,
        SOURCE,
        storage=storage,
        parallelism=1,
        interval=0.02,
        tolerable_failures=1_000,
        backend=RocksDBBackend(),
    )
    log, state = r"/log/", r"/chk-|/shared/"
    attempt_fails = [("create", log), ("write", state)]
    _fail_and_stop(pipeline, storage, [attempt_fails, [("delete", log), ("delete", state)]])
    _assert_each_once([row["id"] for row in sink.rows()])
    assert sink.prepared() == []
    records = sorted((tmp_path / "checkpoints" / "ledger" / "log").glob("*.json"))
    numbers = [int(record.stem) for record in records]
    assert numbers == list(range(numbers[0], numbers[-1] + 1)), "a record is left before the first"


def test_staged_rows_are_there_once_though_each_call_for_their_commit_fails_once(
    cluster: AnyCluster, tmp_path: Path, storage: FailingOnceStorage
) -> None:
    sink = StagedSink(str(tmp_path / "rows.db"))
    pipeline = Pipeline(
        cluster,
        name="staged",
        parallelism=1,
        checkpointing=Checkpointing(storage=storage, interval=0.02, tolerable_failures=1_000),
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
    )
    pipeline.read(SOURCE, uid="records").write(sink, uid="out")
    calls = ("write", "read", "delete")
    _fail_and_stop(pipeline, storage, [[(call, r"\.arrow$") for call in calls]])
    _assert_each_once(sink.ids())


def test_an_attempt_that_cannot_write_its_probe_leaves_no_server_open(
    tmp_path: Path, storage: FailingOnceStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[ControlServer] = []
    closed: list[ControlServer] = []

    class CountedServer(ControlServer):
        def __init__(
            self, host: str, credentials: Credentials, post: Callable[[ControlEvent], None]
        ) -> None:
            super().__init__(host, credentials, post)
            opened.append(self)

        def close(self, timeout_s: float) -> bool:
            closed.append(self)
            return super().close(timeout_s)

    monkeypatch.setattr(attempt_start, "ControlServer", CountedServer)
    storage.fail("write", "/probe/")
    source = CountingSource(100)
    pipeline, sink = ledger(LocalProcesses(), tmp_path, source, storage=storage, parallelism=1)
    assert pipeline.run(60).attempt == 2
    assert storage.list_due() == []
    assert_exactly_once(sink, source)
    assert len(opened) > 0
    assert closed == opened
