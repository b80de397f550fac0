"""Tests the settings on the page: their effective values and origins."""

from __future__ import annotations

from onceflow import Checkpointing, HeapBackend
from onceflow.core.settings.configuration import Configuration
from onceflow.core.settings.effective_settings import list_effective


def test_the_program_is_stronger_than_the_environment_field_by_field() -> None:
    environment = {
        "ONCEFLOW_CHECKPOINTING_INTERVAL": "5 s",
        "ONCEFLOW_CHECKPOINTING_TIMEOUT": "1 min",
        "ONCEFLOW_STATE_BACKEND_TYPE": "rocksdb",
    }
    shown = list_effective(
        Configuration.load(environment=environment),
        Checkpointing(storage="/kept", interval="200 ms"),
        None,
        {"state_backend": HeapBackend(), "restart": None, "pipeline.parallelism": 3},
    )
    found = {one.name: (one.value, one.origin) for one in shown}
    assert found["checkpointing.interval"] == ("200 ms", "program")
    assert found["checkpointing.storage"] == ("/kept", "program")
    assert found["checkpointing.timeout"] == (
        "1 min",
        "environment ONCEFLOW_CHECKPOINTING_TIMEOUT",
    )
    assert found["checkpointing.retained"] == ("1", "default")
    assert found["pipeline.parallelism"] == ("3", "program")
    assert found["state_backend"] == ("HeapBackend(incremental=True)", "program")
    assert "state_backend.type" not in found, "the backend is taken whole"
    assert found["restart.strategy"][1] == "default"
