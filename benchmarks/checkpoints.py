"""How long a checkpoint of an idle small job takes, from its trigger to its decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.job_spec import Backend, CheckpointTimes, JobSpec
from benchmarks.spread import percentile
from benchmarks.stage import Stage

_ROWS_PER_SECOND = 100.0
_INTERVAL_S = 0.2
_COUNT = 100
# The first ones open connections and files and import modules.
_WARM_UP = 10
_PARTS = ("duration_ms", "sync_ms", "async_ms", "append_ms", "committed_ms")


@dataclass(frozen=True, slots=True)
class IdleCheckpoints:
    """Percentiles of the parts of a run's checkpoints, in milliseconds."""

    backend: Backend
    count: int
    p50: dict[str, float]
    p99: dict[str, float]


def idle_checkpoints(stage: Stage, backend: Backend) -> IdleCheckpoints:
    """Run a job of 100 rows a second into Postgres, five checkpoints a second, and return them."""
    spec = JobSpec(
        records=None,
        source="generated",
        rows_per_second=_ROWS_PER_SECOND,
        backend=backend,
        interval_s=_INTERVAL_S,
        accounts=1_000,
        task="idle_checkpoints",
        checkpoints=_COUNT,
    )
    times = stage.run(spec).checkpoints[_WARM_UP:]
    return IdleCheckpoints(
        backend,
        len(times),
        {part: percentile(_of(times, part), 50) for part in _PARTS},
        {part: percentile(_of(times, part), 99) for part in _PARTS},
    )


def _of(times: Sequence[CheckpointTimes], part: str) -> list[float]:
    values = (getattr(one, part) for one in times)
    return [float(value) for value in values if value is not None]
