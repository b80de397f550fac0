"""A job whose operator, and not its program, says where and how it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import assert_exactly_once

from onceflow import Checkpointing, JobState, Pipeline, RuntimeSettings, count, sum_


@pytest.mark.parametrize(
    ("name", "separator"), [("flow.toml", " = "), ("config.yaml", ": "), ("flink-conf.yaml", ": ")]
)
def test_a_job_runs_as_its_file_says_under_flinks_names_and_keeps_what_its_program_says(
    cluster: AnyCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    separator: str,
) -> None:
    """Storage, backend, parallelism and the place of savepoints come from the file alone."""
    file = tmp_path / name
    quote = '"' if separator == " = " else ""
    file.write_text(
        f"""
parallelism.default = 2
state.backend.type = {quote}EmbeddedRocksDB{quote}
state.checkpoints.dir = {quote}{tmp_path / "checkpoints"}{quote}
state.savepoints.dir = {quote}{tmp_path / "kept"}{quote}
execution.checkpointing.interval = {quote}1 h{quote}
execution.checkpointing.num-retained = 2
""".replace(" = ", separator)
    )
    monkeypatch.setenv("ONCEFLOW_CONFIG", str(file))
    source = CountingSource(6_000, pause_s=0.002, ends_with=str(tmp_path / "read all"))
    sink = DirectorySink(str(tmp_path / "out"))

    def pipeline() -> Pipeline:
        built = Pipeline(
            cluster,
            name="ledger",
            checkpointing=Checkpointing(interval="100 ms"),
            settings=RuntimeSettings(start_timeout_s=30, heartbeat_timeout_s=60),
        )
        records = built.read(source, uid="records")
        balances = records.key_by("account").running(
            balance=sum_("amount"), n=count(), uid="balance"
        )
        balances.write(sink, uid="ledger")
        return built

    job = pipeline().start()
    status = job.stop(60, savepoint=True)
    assert len(status.slots) == 2
    place = Path(status.savepoints[-1].place)
    assert place.parent == tmp_path / "kept"
    assert (tmp_path / "checkpoints" / "ledger" / "log").is_dir()
    (tmp_path / "read all").touch()
    # What a start begins from may be said there, too.
    monkeypatch.setenv("ONCEFLOW_EXECUTION_STATE_RECOVERY_PATH", str(place))
    status = pipeline().run(60)
    assert (status.state, status.restored_savepoint) == (JobState.FINISHED, str(place))
    assert_exactly_once(sink, source)
