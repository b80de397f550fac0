"""A sink id names one sink: no two writes of a pipeline share one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink

from onceflow import Checkpointing, LocalProcesses, Pipeline, Stream
from onceflow.core.errors import ConfigError


def records_of_a_pipeline(directory: Path) -> Stream:
    checkpointing = Checkpointing(storage=str(directory / "checkpoints"))
    pipeline = Pipeline(LocalProcesses(), name="letters", checkpointing=checkpointing)
    return pipeline.read(CountingSource(100), uid="records")


def test_two_writes_with_one_sink_id_are_refused_by_both_names(tmp_path: Path) -> None:
    records = records_of_a_pipeline(tmp_path)
    records.write(DirectorySink(str(tmp_path / "a")), uid="first", sink_id="ledger")
    with pytest.raises(ConfigError, match="'first' and 'second' write under one sink id, 'ledger'"):
        records.write(DirectorySink(str(tmp_path / "b")), uid="second", sink_id="ledger")


def test_the_sink_id_of_a_dead_letter_sink_is_taken_too(tmp_path: Path) -> None:
    records = records_of_a_pipeline(tmp_path)
    letters = DirectorySink(str(tmp_path / "letters"))
    records.write(DirectorySink(str(tmp_path / "a")), uid="first", dead_letters=letters)
    taken = "letters.first-dead-letters"
    with pytest.raises(ConfigError, match=f"'first-dead-letters' and 'second' .* '{taken}'"):
        records.write(DirectorySink(str(tmp_path / "b")), uid="second", sink_id=taken)
