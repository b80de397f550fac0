"""Mistakes of the user's program end the job soon, by an error that says what and where."""

from __future__ import annotations

import os
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.clusters import ON_BOTH, AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS, ledger
from tests.support.scripted_sink import ScriptedSink

from onceflow import (
    Checkpointing,
    JobState,
    KeyedFunction,
    LocalProcesses,
    NoRestart,
    Pipeline,
    StateAccess,
    TlsFiles,
    sum_,
)
from onceflow.core.api.stream import Stream
from onceflow.core.errors import ConfigError, TargetRefused, UserFunctionError
from onceflow.core.plan.functions import Record


def begin(
    cluster: AnyCluster, directory: Path, records: int = 500, **settings: Any
) -> tuple[Pipeline, Stream]:
    """A pipeline, with the default restart strategy unless `settings` name one, and its source."""
    pipeline = Pipeline(
        cluster,
        name="mistakes",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        settings=SETTINGS,
        **settings,
    )
    return pipeline, pipeline.read(CountingSource(records), uid="records")


def fail_at_77(record: Record) -> Record:
    if record["id"] == 77:
        raise ZeroDivisionError("no such amount")
    return record


class FailingKeyed(KeyedFunction):
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema

    def process(self, record: Record) -> Record:
        return fail_at_77(record)


def fail_batch_of_77(batch: pa.RecordBatch) -> pa.RecordBatch:
    for record in batch.to_pylist():
        fail_at_77(record)
    return batch


def with_step(stream: Stream, kind: str) -> Stream:
    match kind:
        case "map":
            return stream.map(fail_at_77, uid="step")
        case "flat_map":
            return stream.flat_map(lambda record: [fail_at_77(record)], uid="step")
        case "filter":
            return stream.filter(lambda record: bool(fail_at_77(record)), uid="step")
        case _:
            return stream.key_by("account").process(FailingKeyed(), uid="step")


class FailsInEverySlot(KeyedFunction):
    """Cannot be opened; says so once every slot has connected its channels and tries to."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema

    def open(self, state: StateAccess) -> None:
        here = Path(self.directory)
        (here / str(os.getpid())).touch()
        deadline = time.monotonic() + 30
        while len(list(here.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        raise ValueError("no such rate")

    def process(self, record: Record) -> Record:
        return record


def test_slots_that_all_fail_to_restore_leave_without_waiting_for_one_another(
    tmp_path: Path,
) -> None:
    opened, logs = tmp_path / "opened", tmp_path / "logs"
    opened.mkdir()
    pipeline, stream = begin(LocalProcesses(log_directory=logs), tmp_path, restart=NoRestart())
    failing = stream.key_by("account").process(FailsInEverySlot(str(opened)), uid="step")
    failing.write(DirectorySink(str(tmp_path / "out")), uid="out")
    with pytest.raises(UserFunctionError, match="no such rate"):
        pipeline.run(60)
    said = "".join(path.read_text() for path in logs.iterdir())
    assert said.count("only a part of the slot's state was restored") == 2, said
    assert "the slot did not finish closing" not in said


@pytest.mark.parametrize("kind", ["map", "flat_map", "filter", "process"])
def test_a_record_that_fails_three_times_ends_the_job_by_its_name(
    cluster: AnyCluster, tmp_path: Path, kind: str
) -> None:
    pipeline, stream = begin(cluster, tmp_path)
    sink = DirectorySink(str(tmp_path / "out"))
    with_step(stream, kind).write(sink, uid="out")
    job = pipeline.start()
    with pytest.raises(UserFunctionError) as raised:
        job.wait(60)
    text = str(raised.value)
    assert "operator 'step' failed: ZeroDivisionError: no such amount" in text
    assert "record {'id': 77, 'account': '77', 'amount': 39}" in text
    assert "in fail_at_77" in text
    assert "call_user" not in text
    assert "failed in the same way 3 times" in text
    assert job.status().restores == 2


@ON_BOTH
def test_a_function_of_batches_that_fails_three_times_ends_the_job_by_its_line(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    pipeline, stream = begin(cluster, tmp_path)
    stream.map_batches(fail_batch_of_77, uid="step").write(
        DirectorySink(str(tmp_path / "out")), uid="out"
    )
    job = pipeline.start()
    with pytest.raises(UserFunctionError, match=r"'step' failed: ZeroDivisionError.*test_program"):
        job.wait(60)
    assert job.status().restores == 2


def test_a_running_sum_that_overflows_ends_the_job_by_its_record(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    pipeline, stream = begin(cluster, tmp_path)
    large = stream.map(lambda record: record | {"amount": 2**62}, uid="large")
    large.key_by("account").running(total=sum_("amount"), uid="totals").write(
        DirectorySink(str(tmp_path / "out")), uid="out"
    )
    with pytest.raises(UserFunctionError, match=r"'totals' failed: .*64 bits.*record \{'id': "):
        pipeline.run(60)


def write_wrongly(batch: Any) -> None:
    batch.no_such_method()


def test_a_sink_with_a_mistake_ends_the_job_by_the_error_that_it_raised(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    pipeline, stream = begin(cluster, tmp_path)
    stream.write(ScriptedSink(str(tmp_path / "out"), {"write": write_wrongly}), uid="out")
    job = pipeline.start()
    with pytest.raises(TargetRefused, match="AttributeError: .*no_such_method"):
        job.wait(60)
    assert job.status().restores == 2


def test_a_failure_of_the_network_is_tried_again_for_as_long_as_it_lasts(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    mark = tmp_path / "tries"

    def ask(record: Record) -> Record:
        if record["id"] == 77:
            with mark.open("a") as file:
                file.write("x")
            if len(mark.read_text()) < 6:
                raise ConnectionRefusedError("nobody listens")
        return record

    pipeline, stream = begin(cluster, tmp_path)
    sink = DirectorySink(str(tmp_path / "out"))
    stream.map(ask, uid="step").write(sink, uid="out")
    assert pipeline.run(60).state is JobState.FINISHED
    assert sorted(row["id"] for row in sink.rows()) == list(range(500))


def test_a_function_that_cannot_be_pickled_is_refused_at_the_start_by_operator_and_variable(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    lock = threading.Lock()

    def guarded(record: Record) -> Record:
        with lock:
            return record

    pipeline, stream = begin(cluster, tmp_path)
    stream.map(guarded, uid="guarded").write(DirectorySink(str(tmp_path)), uid="out")
    with pytest.raises(ConfigError, match=r"guarded of operator 'guarded', which holds 'lock'"):
        pipeline.start()
    assert not (tmp_path / "checkpoints").exists()


def test_a_certificate_that_is_not_there_is_refused_at_the_start(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    missing = TlsFiles(*(str(tmp_path / name) for name in ("tls.crt", "tls.key", "ca.crt")))
    pipeline, _ = ledger(
        cluster, tmp_path, CountingSource(10), settings=replace(SETTINGS, tls=missing)
    )
    with pytest.raises(ConfigError, match=r"TlsFiles\(certificate='.*tls.crt'\) cannot be read"):
        pipeline.start()


def test_a_mistake_is_shown_without_frames_of_the_engine(tmp_path: Path) -> None:
    pipeline, records = begin(LocalProcesses(), tmp_path, restart=NoRestart())
    records.map(fail_at_77, uid="step").write(DirectorySink(str(tmp_path / "out")), uid="out")
    with pytest.raises(UserFunctionError, match="no such amount") as failed:
        pipeline.run(60)
    shown = "".join(traceback.format_exception(failed.value))
    assert "in fail_at_77" in shown
    # The call of the program, and the one method of ours that it called.
    assert shown.count("\n  File ") <= 4, shown
    for file in ("driver.py", "restart_loop.py", "attempt_start.py"):
        assert file not in shown


def test_a_setting_that_cannot_be_is_shown_without_frames_of_the_engine(tmp_path: Path) -> None:
    pipeline, records = begin(LocalProcesses(), tmp_path)
    records.map(fail_at_77, uid="step")
    with pytest.raises(ConfigError) as refused:
        pipeline.run(60)
    shown = "".join(traceback.format_exception(refused.value))
    assert shown.count("\n  File ") <= 3, shown
