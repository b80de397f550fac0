"""Slots as processes of this machine end with their driver, are killed and told like any other."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.counting_source import SCHEMA, CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import assert_exactly_once, ledger

from onceflow import Checkpointing, JobState, LocalProcesses, NoRestart, Pipeline, RuntimeSettings
from onceflow.core.api.pipeline import Job
from onceflow.core.errors import SlotLost
from onceflow.core.runtime.cluster.process_host import Link, ProcessHost, ProcessKilled, Returned
from onceflow.integration.conformance.processes import Processes, eventually
from onceflow.integration.faults.processes import is_alive, parent_of


def _slot_pids(job: Job) -> list[int]:
    """Return the slots' process ids once some checkpoint is completed."""
    assert eventually(lambda: job.status().checkpoints_completed > 1, 90)
    return [slot.pid for slot in job.status().slots]


def test_a_job_with_a_killed_process_goes_on(cluster: LocalProcesses, tmp_path: Path) -> None:
    source = CountingSource(4_000, pause_s=0.002, ends_with=str(tmp_path / "read all"))
    pipeline, sink = ledger(cluster, tmp_path, source)
    job = pipeline.start()
    os.kill(_slot_pids(job)[1], signal.SIGKILL)
    (tmp_path / "read all").touch()
    assert job.wait(60).state is JobState.FINISHED
    assert job.status().restores == 1
    assert_exactly_once(sink, source)


def _modules(link: Link) -> list[str]:
    del link
    return list(sys.modules)


def test_a_process_begins_with_what_every_slot_would_import(onceflow_processes: Processes) -> None:
    imported = onceflow_processes.run(_modules)
    assert {"pandas", "onceflow.core.state.heap.store", "onceflow.core.state.rocksdb.store"} <= set(
        imported
    )


def _parent(link: Link) -> int:
    del link
    return os.getppid()


def test_a_host_that_stands_still_is_given_up_after_the_time_of_a_start() -> None:
    host = ProcessHost()
    _, link = host.start(_parent)
    assert link.poll(60)
    returned = link.recv()
    assert isinstance(returned, Returned)
    os.kill(returned.value, signal.SIGSTOP)
    try:
        with pytest.raises(ProcessKilled, match="did not start within 1 s"):
            host.start(_parent, timeout_s=1)
    finally:
        os.kill(returned.value, signal.SIGKILL)
        link.close()
        host.close()


def _says_something_and_dies(record: Any) -> Any:
    print("about to die")  # noqa: T201
    os.kill(os.getpid(), signal.SIGSEGV)
    return record


def test_the_log_of_a_process_that_died_has_its_last_words(
    cluster: LocalProcesses, tmp_path: Path
) -> None:
    pipeline = Pipeline(
        cluster,
        name="dies",
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints")),
        restart=NoRestart(),
    )
    records = pipeline.read(CountingSource(10), uid="records")
    records.map(_says_something_and_dies, schema=SCHEMA).write(
        DirectorySink(str(tmp_path / "out")), uid="out"
    )
    with pytest.raises(SlotLost, match="slot 0"):
        pipeline.run(90)
    (log,) = (tmp_path / "logs").glob("dies-attempt-*-slot-0.log")
    assert "about to die" in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600, "what it quotes is the user's alone"


def test_a_frozen_process_is_lost_and_killed(cluster: LocalProcesses, tmp_path: Path) -> None:
    settings = RuntimeSettings(
        heartbeat_interval_s=0.2, heartbeat_timeout_s=2.0, cancel_timeout_s=1.0
    )
    source = CountingSource(4_000, pause_s=0.002, ends_with=str(tmp_path / "read all"))
    pipeline, sink = ledger(cluster, tmp_path, source, settings=settings)
    job = pipeline.start()
    frozen = _slot_pids(job)[0]
    os.kill(frozen, signal.SIGSTOP)
    (tmp_path / "read all").touch()
    assert job.wait(60).state is JobState.FINISHED
    assert not is_alive(frozen)
    assert_exactly_once(sink, source)


@pytest.mark.servers
def test_a_job_survives_the_program_that_forks_its_slots(
    cluster: LocalProcesses, tmp_path: Path
) -> None:
    source = CountingSource(4_000, pause_s=0.002, ends_with=str(tmp_path / "read all"))
    pipeline, sink = ledger(cluster, tmp_path, source)
    job = pipeline.start()
    slot = _slot_pids(job)[0]
    host = parent_of(slot)
    assert host is not None
    assert host != os.getpid()
    os.kill(host, signal.SIGKILL)
    os.kill(slot, signal.SIGKILL)
    (tmp_path / "read all").touch()
    assert job.wait(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)


_DRIVER = """
import json, os, sys, time
from pathlib import Path
from onceflow import Checkpointing, LocalProcesses, Pipeline
from tests.support.counting_source import SCHEMA, CountingSource
from tests.support.directory_sink import DirectorySink

directory = Path(sys.argv[1])
seen = directory / "seen"

def look(record):
    fresh = seen.with_suffix("." + str(os.getpid()))
    fresh.write_text(json.dumps([os.environ["COLOUR"], os.getcwd(), "pyspark" in sys.modules]))
    fresh.replace(seen)
    return record

checkpointing = Checkpointing(storage=str(directory / "checkpoints"), interval=0.1)
pipeline = Pipeline(LocalProcesses(), name="mine", checkpointing=checkpointing)
records = pipeline.read(CountingSource(100000, pause_s=0.01), uid="records")
records.map(look, schema=SCHEMA).write(DirectorySink(str(directory / "out")), uid="out")
job = pipeline.start()
while job.status().checkpoints_completed < 2:
    time.sleep(0.01)
assert "pyspark" not in sys.modules
print(json.dumps([slot.pid for slot in job.status().slots]), flush=True)
job.wait()
"""


@pytest.mark.servers
def test_slots_are_where_their_driver_is_without_spark_and_end_when_it_is_killed(
    tmp_path: Path,
) -> None:
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLOUR": "green"}
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
    )
    assert driver.stdout is not None
    try:
        pids = json.loads(driver.stdout.readline())
        assert json.loads((tmp_path / "seen").read_text()) == ["green", str(tmp_path), False]
        hosts = [host for pid in pids if (host := parent_of(pid)) is not None]
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
    assert eventually(lambda: not any(map(is_alive, [*pids, *hosts])), 90)


_TALKATIVE = """
import sys
from pathlib import Path
from onceflow import Checkpointing, LocalProcesses, Pipeline
from tests.support.counting_source import SCHEMA, CountingSource
from tests.support.directory_sink import DirectorySink

directory = Path(sys.argv[1])

def talk(record):
    print(record, flush=True)
    print(record, file=sys.stderr)
    return record

checkpointing = Checkpointing(storage=str(directory / "checkpoints"))
pipeline = Pipeline(LocalProcesses(), name="talkative", checkpointing=checkpointing)
records = pipeline.read(CountingSource(500), uid="records")
records.map(talk, schema=SCHEMA).write(DirectorySink(str(directory / "out")), uid="out")
status = pipeline.run(60)
(directory / "attempts").write_text(str(status.attempt))
"""


@pytest.mark.servers
def test_a_function_may_print_where_nobody_reads_the_output_any_more(tmp_path: Path) -> None:
    """As after a restart of the system's journal: every later write is a broken pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _TALKATIVE, str(tmp_path)]
    try:
        ended = subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | environment,
            stdout=writer,
            stderr=writer,
            timeout=90,
            check=False,
        )
    finally:
        os.close(writer)
    assert ended.returncode == 0
    assert (tmp_path / "attempts").read_text() == "1"
    rows = DirectorySink(str(tmp_path / "out")).rows()
    assert sorted(row["id"] for row in rows) == list(range(500))


def test_a_program_that_ends_leaves_nothing_unclosed() -> None:
    """Not the process that would have forked its slots, which is importing everything yet."""
    program = "from onceflow import LocalProcesses; LocalProcesses().check(1)"
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")
