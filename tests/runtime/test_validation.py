"""A sink that will be refused is refused before any other has been changed for the job."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.ledger import SETTINGS

from onceflow import Checkpointing, NoRestart, Pipeline
from onceflow.connectors import ConfigError
from onceflow.sinks import SQLiteSink


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ("absent", "absent"),
        ("narrow", "'account'"),
    ],
)
def test_a_sink_that_cannot_take_the_rows_keeps_the_others_from_being_opened(
    cluster: AnyCluster, tmp_path: Path, table: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(sqlite3.connect(tmp_path / "there.db")) as db:
        db.execute("CREATE TABLE narrow (id INTEGER PRIMARY KEY)")
        db.commit()
    pipeline = Pipeline(
        cluster,
        name="two",
        parallelism=1,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints")),
        restart=NoRestart(),
        settings=SETTINGS,
    )
    records = pipeline.read(CountingSource(10), uid="records")
    fresh = SQLiteSink(str(tmp_path / "fresh.db"), table="rows", create=True)
    records.write(fresh, uid="fresh")
    records.write(SQLiteSink(str(tmp_path / "there.db"), table=table), uid="there")
    with pytest.raises(ConfigError, match=why):
        pipeline.run(60)
    assert "killed" not in caplog.text, "a slot that dials in late is told to leave"
    assert not (tmp_path / "fresh.db").exists()
    with closing(sqlite3.connect(tmp_path / "there.db")) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("narrow",)]
