"""Something is in doubt that the log has forgotten: the remedy leaves each row there once."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS
from typer.testing import CliRunner

from onceflow import Checkpointing, JobState, LocalProcesses, NoRestart, Pipeline
from onceflow.cli.main import app
from onceflow.core.crash_points import VARIABLE
from onceflow.core.errors import DecisionForgotten, OnceflowError
from onceflow.core.protocol.log import memory as log_memory
from onceflow.core.storage import FileSystemStorage

_RECORDS = 2_000


def _pipeline(directory: Path, *, pause_s: float = 0.0) -> Pipeline:
    pipeline = Pipeline(
        LocalProcesses(),
        name="old",
        parallelism=1,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval="50 ms"),
        restart=NoRestart(),
        settings=SETTINGS,
    )
    source = CountingSource(_RECORDS, batch_rows=20, pause_s=pause_s)
    pipeline.read(source, uid="records").write(DirectorySink(str(directory / "out")), uid="out")
    return pipeline


def _forget_attempts(directory: Path) -> None:
    """Decide in so many attempts that the log remembers nothing of those before."""
    log = FileSystemStorage(str(directory / "checkpoints")).open("old").log
    for _ in range(log_memory.ATTEMPTS_MAX):
        claimed = log.claim("another host:1")
        last, number = claimed.view.completed[-1], claimed.view.next_checkpoint
        claimed.append(replace(last, checkpoint=number, attempt=claimed.attempt))


@pytest.mark.parametrize("decided", [True, False])
def test_what_nobody_remembers_is_settled_by_looking_at_the_table_and_each_row_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decided: bool
) -> None:
    """The target holds in doubt what it held long ago: it was committed since, or sent again."""
    points, out = tmp_path / "crash points", tmp_path / "out"
    points.mkdir()
    monkeypatch.setenv(VARIABLE, str(points))
    monkeypatch.setattr(log_memory, "ATTEMPTS_MAX", 5)
    job = _pipeline(tmp_path, pause_s=0.01).start()
    job.wait_for(checkpoints=3)
    (points / ("commit" if decided else "prepared")).touch()
    with pytest.raises(OnceflowError):
        job.wait(60)
    # A slow machine may not have committed the transaction of the checkpoint before.
    log = FileSystemStorage(str(tmp_path / "checkpoints")).open("old").log.read()
    last = log.completed[-1].checkpoint
    prepared = DirectorySink(str(out)).prepared()
    (name,) = (file for file in prepared if (int(file.split("~")[2]) <= last) == decided)
    shutil.copy(out / "prepared" / name, tmp_path / name)
    job = _pipeline(tmp_path, pause_s=0.01).start()
    job.wait_for(checkpoints=3)
    job.stop(60)
    assert (out / "committed" / name).exists() == decided
    _forget_attempts(tmp_path)
    (out / "committed" / name).unlink(missing_ok=True)
    shutil.copy(tmp_path / name, out / "prepared" / name)
    with pytest.raises(DecisionForgotten) as refused:
        _pipeline(tmp_path).run(60)
    transaction = name.replace("~", "/")
    assert transaction in str(refused.value)
    with pa.ipc.open_file(out / "prepared" / name) as reader:
        ids = set(reader.read_all().column("id").to_pylist())
    there = ids <= {row["id"] for row in DirectorySink(str(out)).rows()}
    assert there != decided
    _force("abort" if there else "commit", transaction, tmp_path, monkeypatch)
    assert _pipeline(tmp_path).run(90).state is JobState.FINISHED
    rows = [row["id"] for row in DirectorySink(str(out)).rows()]
    assert sorted(rows) == list(range(_RECORDS))


def _force(verb: str, transaction: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "my_sink.py").write_text(
        "from tests.support.directory_sink import DirectorySink\n\n"
        f"out = DirectorySink({str(directory / 'out')!r})\n"
    )
    monkeypatch.setattr(sys, "path", [str(directory), *sys.path])
    monkeypatch.delitem(sys.modules, "my_sink", raising=False)
    done = CliRunner().invoke(
        app,
        [
            *("txn", verb, transaction, "--force", "--fence", "--yes", "--sink", "my_sink:out"),
            *("--sink-id", "old.out", "--storage", str(directory / "checkpoints")),
        ],
    )
    assert done.exit_code == 0, done.output
