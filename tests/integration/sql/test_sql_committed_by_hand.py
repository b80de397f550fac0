"""Somebody has committed what was not decided: the remedy, word for word, leaves each row once.

The rows are sent again by the next start, so they have to go first, and their proof with them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.integration.sql.databases import Postgres
from tests.support.counting_source import CountingSource
from tests.support.ledger import SETTINGS

from onceflow import Checkpointing, JobState, LocalProcesses, NoRestart, Pipeline
from onceflow.core.crash_points import VARIABLE
from onceflow.core.errors import OnceflowError, StorageBehind

_OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"
_RECORDS = 2_000


def _pipeline(directory: Path, database: Postgres) -> Pipeline:
    pipeline = Pipeline(
        LocalProcesses(),
        name="payments",
        parallelism=1,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval="50 ms"),
        restart=NoRestart(),
        settings=SETTINGS,
    )
    source = CountingSource(_RECORDS, batch_rows=20, pause_s=0.01)
    sink = database.sink(table="ledger", create=True, commit_mode="two_phase")
    pipeline.read(source, uid="records").write(sink, uid="out")
    return pipeline


def test_rows_committed_by_hand_are_taken_out_with_their_proof_and_come_again_once(
    tmp_path: Path, postgres_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Postgres(postgres_database)
    points = tmp_path / "crash points"
    points.mkdir()
    monkeypatch.setenv(VARIABLE, str(points))
    job = _pipeline(tmp_path, database).start()
    job.wait_for(checkpoints=3)
    (points / "prepared").touch()
    with pytest.raises(OnceflowError):
        job.wait(60)
    (transaction,) = database.prepared()
    database.settle(database.words.commit, transaction)
    before = database.ids_in()
    with pytest.raises(StorageBehind) as refused:
        _pipeline(tmp_path, database).start().wait(60)
    assert database.ids_in() == before
    told = re.search(
        r"has committed checkpoint \d+ of attempt (\d+) .* ends at checkpoint (\d+) of",
        str(refused.value),
    )
    assert told is not None
    (section,) = re.findall(r"```sql\n( *BEGIN;.*?)```", _OPERATIONS.read_text(), flags=re.DOTALL)
    shown = "attempt = 7 AND checkpoint > 41"
    assert section.count(shown) == 2
    database.query(section.replace(shown, f"attempt = {told[1]} AND checkpoint > {told[2]}"))
    assert 0 < len(database.ids_in()) < len(before)
    assert _pipeline(tmp_path, database).start().wait(90).state is JobState.FINISHED
    assert database.ids_in() == list(range(_RECORDS))
