"""A compiled function in a whole job, through kills and rescaling."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from benchmarks.keyed_balance import KeyedBalance
from tests.runtime.test_recovery import BACKENDS
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS, assert_exactly_once

from onceflow import Checkpointing, FixedDelay, JobState, Pipeline, StateBackend
from onceflow.core.errors import StateIncompatible

pytest.importorskip("numba")
pytestmark = pytest.mark.servers


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_function_is_exactly_once_through_kills_and_rescaling(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend
) -> None:
    source = CountingSource(20_000, pause_s=0.002, ends_with=str(tmp_path / "ends"))
    sink = DirectorySink(str(tmp_path / "out"))
    for parallelism in (2, 3):
        pipeline = Pipeline(
            cluster,
            name="compiled",
            parallelism=parallelism,
            checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.1),
            state_backend=backend,
            restart=FixedDelay(attempts=20, delay_s=0.01),
            settings=SETTINGS,
        )
        records = pipeline.read(source, uid="records").key_by("account")
        records.process(KeyedBalance(), uid="balance", compiled=True).write(sink, uid="out")
        job = pipeline.start()
        job.wait_for(checkpoints=job.status().checkpoints_completed + 2)
        os.kill(job.status().slots[0].pid, signal.SIGKILL)
        job.wait_for(checkpoints=job.status().checkpoints_completed + 2)
        if parallelism == 2:
            assert job.stop(60).state is JobState.STOPPED
        else:
            (tmp_path / "ends").touch()
            assert job.wait(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)


@pytest.mark.parametrize("first", [True, False], ids=["compiled first", "python first"])
def test_state_of_a_compiled_function_is_refused_by_name_as_python_and_the_reverse(
    cluster: AnyCluster, tmp_path: Path, first: bool
) -> None:
    """Whoever leaves compiled=True out, as errors advise, loses no state by it."""
    source = CountingSource(20_000, pause_s=0.002, ends_with=str(tmp_path / "ends"))
    sink = DirectorySink(str(tmp_path / "out"))

    def build(*, compiled: bool) -> Pipeline:
        pipeline = Pipeline(
            cluster,
            name="compiled",
            checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.1),
            settings=SETTINGS,
        )
        records = pipeline.read(source, uid="records").key_by("account")
        records.process(KeyedBalance(), uid="balance", compiled=compiled).write(sink, uid="out")
        return pipeline

    job = build(compiled=first).start()
    job.wait_for(checkpoints=2)
    assert job.stop(60).state is JobState.STOPPED
    with pytest.raises(StateIncompatible, match="balance"):
        build(compiled=not first).run(60)
    (tmp_path / "ends").touch()
    assert build(compiled=first).run(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)
