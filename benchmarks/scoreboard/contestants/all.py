"""All contestants, in the order of the table."""

from __future__ import annotations

from benchmarks.scoreboard.contestant import Contestant
from benchmarks.scoreboard.contestants.bytewax import Bytewax
from benchmarks.scoreboard.contestants.connect import Connect
from benchmarks.scoreboard.contestants.flink import Flink
from benchmarks.scoreboard.contestants.onceflow import Onceflow
from benchmarks.scoreboard.contestants.quix import Quix
from benchmarks.scoreboard.contestants.spark import StructuredStreaming

OURS = "onceflow"


def list_contestants() -> tuple[Contestant, ...]:
    """Return a fresh object for each row of the table."""
    return (
        Onceflow(),
        StructuredStreaming("append"),
        StructuredStreaming("upsert"),
        StructuredStreaming("batch-id"),
        Flink("flink1", "append"),
        Flink("flink1", "upsert"),
        Flink("flink1", "xa"),
        Flink("flink1", "new-xa"),
        Flink("flink2", "append"),
        Flink("flink2", "upsert"),
        Flink("flink2", "xa"),
        Connect("append"),
        Connect("upsert"),
        Quix("append"),
        Quix("upsert"),
        Bytewax("append"),
        Bytewax("upsert"),
    )
