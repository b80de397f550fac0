"""A job that is started without a sink id that it has written under leaves nothing behind."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from tests.support.clusters import ON_BOTH, AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS
from tests.support.scripted_sink import ScriptedSink, When
from typer.testing import CliRunner

from onceflow import Checkpointing, FixedDelay, JobState, Pipeline
from onceflow.cli.main import app
from onceflow.core.errors import ConfigError, PreparedTransactionLost
from onceflow.core.protocol.committables import RetryLater
from onceflow.core.spi import Sink
from onceflow.core.storage import FileSystemStorage
from onceflow.sinks import FileSink

SOURCE = CountingSource(3_000, batch_rows=10)
SLOWLY = replace(SOURCE, pause_s=0.1)
"""The same records, at a pace at which the job is cancelled long before their end."""


def job_in(
    cluster: AnyCluster,
    directory: Path,
    sinks: Mapping[str, tuple[str | None, Sink]],
    *,
    name: str = "names",
    retired: Mapping[str, Sink | None] | None = None,
    source: CountingSource = SOURCE,
) -> Pipeline:
    """Build records -> every one of `sinks`, which are (sink id, sink) by uid."""
    pipeline = Pipeline(
        cluster,
        name=name,
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        restart=FixedDelay(attempts=3, delay_s=0.01),
        settings=SETTINGS,
        retired_sinks=retired,
    )
    records = pipeline.read(source, uid="records")
    for uid, (sink_id, sink) in sinks.items():
        records.write(sink, uid=uid, sink_id=sink_id)
    return pipeline


@pytest.fixture
def out(tmp_path: Path) -> ScriptedSink:
    refuse = When(_shut_file(tmp_path / "out"), RetryLater("the target takes no commit for now"))
    return ScriptedSink(str(tmp_path / "out"), {"commit": refuse})


def _shut_file(out: Path | str) -> Path:
    """Return the file that shuts the target."""
    return Path(out, "shut")


def leave_decided_and_uncommitted(pipeline: Pipeline, sink: ScriptedSink) -> None:
    """Run the job until its target has taken rows and then refused some that were decided."""
    job = pipeline.start()
    job.wait_for(checkpoints=2)
    _shut_file(sink.directory).touch()
    job.wait_for(checkpoints=job.status().checkpoints_completed + 2)
    assert job.cancel(60).state is JobState.CANCELLED
    assert sink.prepared()
    _shut_file(sink.directory).unlink()


def ids_of(sink: DirectorySink) -> list[int]:
    return sorted(row["id"] for row in sink.rows())


def test_changed_sink_id_is_refused_by_what_it_would_leave_behind(
    cluster: AnyCluster, tmp_path: Path, out: ScriptedSink
) -> None:
    leave_decided_and_uncommitted(
        job_in(cluster, tmp_path, {"out": ("old", out)}, source=SLOWLY), out
    )
    changed = job_in(cluster, tmp_path, {"out": ("new", out)})
    said = r"decided \d+ transactions \(\d+ rows\) under sink id 'old', the first old/1/"
    with pytest.raises(ConfigError, match=said) as refused:
        changed.run(60)
    assert "write(…, sink_id='old')" in str(refused.value)
    # A refused start leaves no trace: under its old id the job goes on.
    assert job_in(cluster, tmp_path, {"out": ("old", out)}).run(60).state is JobState.FINISHED
    assert ids_of(out) == list(range(SOURCE.records))
    assert out.prepared() == []


def test_renamed_uid_of_a_sink_is_refused_too_and_needs_no_more_than_the_old_id(
    cluster: AnyCluster, tmp_path: Path, out: ScriptedSink
) -> None:
    leave_decided_and_uncommitted(
        job_in(cluster, tmp_path, {"out": (None, out)}, source=SLOWLY), out
    )
    with pytest.raises(ConfigError, match=r"write\(…, sink_id='names\.out'\)"):
        job_in(cluster, tmp_path, {"renamed": (None, out)}).run(60)
    renamed = job_in(cluster, tmp_path, {"renamed": ("names.out", out)})
    assert renamed.run(60).state is JobState.FINISHED
    assert ids_of(out) == list(range(SOURCE.records))
    assert out.prepared() == []


@ON_BOTH
def test_retired_sink_is_settled_and_the_job_goes_on_without_it(
    cluster: AnyCluster, tmp_path: Path, out: ScriptedSink
) -> None:
    leave_decided_and_uncommitted(
        job_in(cluster, tmp_path, {"out": ("old", out)}, source=SLOWLY), out
    )
    sinks: dict[str, tuple[str | None, Sink]] = {"out": ("new", out)}
    changed = job_in(cluster, tmp_path, sinks, retired={"old": out}, source=SLOWLY).start()
    # The first has it looked for what was prepared late, and a later one forgets it.
    log = FileSystemStorage(str(tmp_path / "checkpoints")).open("names").log
    while "old" in log.read().sinks:
        changed.wait_for(checkpoints=changed.status().checkpoints_completed + 1)
    assert changed.stop(60).state is JobState.STOPPED
    assert out.prepared() == []
    # Once a checkpoint without it is decided, nothing asks for it any more.
    assert job_in(cluster, tmp_path, sinks).run(60).state is JobState.FINISHED
    assert ids_of(out) == list(range(SOURCE.records))


def test_removed_sink_is_refused_though_it_has_nothing_decided(
    cluster: AnyCluster, tmp_path: Path, out: ScriptedSink
) -> None:
    """Transactions of its older attempts that were never decided would stay prepared for ever."""
    second = DirectorySink(str(tmp_path / "second"))
    sinks: dict[str, tuple[str | None, Sink]] = {"out": (None, out), "second": (None, second)}
    leave_decided_and_uncommitted(job_in(cluster, tmp_path, sinks, source=SLOWLY), out)
    remaining: dict[str, tuple[str | None, Sink]] = {"out": (None, out)}
    with pytest.raises(ConfigError, match="sink id 'names.second'"):
        job_in(cluster, tmp_path, remaining).run(60)
    without = job_in(cluster, tmp_path, remaining, retired={"names.second": second})
    assert without.run(60).state is JobState.FINISHED
    assert ids_of(out) == list(range(SOURCE.records))
    assert (out.prepared(), second.prepared()) == ([], [])
    seen = ids_of(second)
    assert seen == sorted(set(seen)), "no row of the retired sink came twice"


def test_sink_that_was_settled_by_hand_is_retired_without_asking_its_target(
    cluster: AnyCluster, tmp_path: Path, out: ScriptedSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_decided_and_uncommitted(
        job_in(cluster, tmp_path, {"out": ("old", out)}, source=SLOWLY), out
    )
    (tmp_path / "my_job.py").write_text(
        "from tests.support.directory_sink import DirectorySink\n\n"
        f"old = DirectorySink({out.directory!r})\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "my_job", raising=False)
    for verb in ("commit", "abort"):
        done = CliRunner().invoke(
            app,
            [
                *("txn", verb, "--all", "--yes", "--fence", "--sink", "my_job:old"),
                *("--sink-id", "old", "--storage", str(tmp_path / "checkpoints")),
            ],
        )
        assert done.exit_code == 0, done.output
    assert out.prepared() == []
    retired: dict[str, Sink | None] = {"old": None}
    assert job_in(cluster, tmp_path, {"out": ("new", out)}, retired=retired).run(60)
    assert ids_of(out) == list(range(SOURCE.records))


def test_job_under_another_name_is_refused_where_its_sink_id_tells(
    cluster: AnyCluster, tmp_path: Path, out: ScriptedSink
) -> None:
    leave_decided_and_uncommitted(
        job_in(cluster, tmp_path, {"out": ("ledger", out)}, source=SLOWLY), out
    )
    renamed = job_in(cluster, tmp_path, {"out": ("ledger", out)}, name="renamed")
    with pytest.raises(
        ConfigError, match=r"job 'names' .* already uses sink id 'ledger'.*rename its direct"
    ):
        renamed.run(60)
    storage = tmp_path / "checkpoints"
    (storage / "names").rename(storage / "renamed")
    renamed = job_in(cluster, tmp_path, {"out": ("ledger", out)}, name="renamed")
    assert renamed.run(60).state is JobState.FINISHED
    assert ids_of(out) == list(range(SOURCE.records))
    assert out.prepared() == []


def test_job_that_may_be_an_older_one_under_another_name_is_told_so(
    cluster: AnyCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = DirectorySink(str(tmp_path / "out"))
    job_in(cluster, tmp_path, {"out": (None, sink)}).run(60)
    elsewhere = DirectorySink(str(tmp_path / "elsewhere"))
    with caplog.at_level(logging.WARNING, "onceflow.runtime.driver"):
        job_in(cluster, tmp_path, {"out": (None, elsewhere)}, name="other").run(60)
    assert "job 'names' in the same checkpoint storage has the same operators" in caplog.text
    assert ids_of(elsewhere) == list(range(SOURCE.records))


def test_a_job_that_writes_to_another_directory_is_told_how_and_goes_on_there(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    """As docs/operations.md says below "Another target"."""
    old, new = (FileSink(str(tmp_path / name)) for name in ("old", "new"))
    job = job_in(cluster, tmp_path, {"out": (None, old)}, source=SLOWLY).start()
    job.wait_for(checkpoints=2)
    assert job.stop(60).state is JobState.STOPPED
    with pytest.raises(PreparedTransactionLost, match="see 'Another target' there if the sink"):
        job_in(cluster, tmp_path, {"out": (None, new)}).run(60)
    retired = {"names.out": old}
    job_in(cluster, tmp_path, {"out": ("names.out-2", new)}, retired=retired).run(60)
    written = [ds.dataset(sink.url, format="parquet").to_table()["id"] for sink in (old, new)]
    assert all(map(len, written))
    ids = [one for column in written for one in column.to_pylist()]
    assert sorted(ids) == list(range(SOURCE.records))
