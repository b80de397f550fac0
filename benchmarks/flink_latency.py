"""Flink's jobs in `python -m benchmarks.latency`: the same work, in a JVM with a local cluster.

The JVM runs one job after the other, each with an interval of its own, and is as good as idle
between them. benchmarks/flink has the job: Latency.java says what Flink is given.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.beside_flink.engines import Engine, build_flink, flink
from benchmarks.beside_flink.jdbc import to_jdbc_url
from benchmarks.stage import BenchmarkError

FLINK_WARM_UP_S = 20.0
"""Of each job, besides a first one that a fresh JVM runs: see `benchmarks.latency`."""
_LOOK_INTERVAL_S = 0.1
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class FlinkSink:
    """The target of a job of Flink: a topic, or a table and its database."""

    words: tuple[str, ...]
    """As Latency.java reads them."""

    @classmethod
    def of_topic(cls, topic: str) -> FlinkSink:
        """Return a sink into a topic that exists, of the brokers that are read from."""
        return cls(("kafka", topic))

    @classmethod
    def of_table(cls, url: str, table: str) -> FlinkSink:
        """Return a sink into a table of Postgres that exists; `url` is libpq's."""
        return cls(("table", to_jdbc_url(url, "postgresql"), table))


class FlinkJob:
    """A job that runs in the JVM; the JVM has one at a time."""

    def __init__(self, jvm: Engine) -> None:
        self._jvm = jvm

    def count_checkpoints(self) -> int:
        """Return how many checkpoints are completed.

        Raises:
            BenchmarkError: The job has failed.
        """
        return self._jvm.ask_number("checkpoints")

    def wait_for(self, checkpoints: int) -> None:
        """Return once so many checkpoints are completed.

        Raises:
            BenchmarkError: The job has failed, or they are not completed in two minutes.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while (completed := self.count_checkpoints()) < checkpoints:
            if time.monotonic() > deadline:
                raise BenchmarkError(
                    f"Flink completed {completed} of {checkpoints} checkpoints in {_TIMEOUT_S:g} s"
                )
            time.sleep(_LOOK_INTERVAL_S)

    def stop(self) -> None:
        """Return when the job has ended, and has committed every row.

        Raises:
            BenchmarkError: It failed.
        """
        self._jvm.stop()

    def steps_ms(self) -> dict[str, float]:
        """Return nothing: Flink's checkpoints are not taken apart."""
        return {}


class FlinkJvm:
    """A JVM in which jobs are started."""

    def __init__(self, engine: Engine, scratch: Path) -> None:
        self._engine = engine
        self._scratch = scratch

    def start(self, servers: str, topic: str, sink: FlinkSink, interval_ms: int) -> FlinkJob:
        """Start the job that reads `topic`; it runs until it is stopped."""
        directory = tempfile.mkdtemp(dir=self._scratch)
        self._engine.begin(directory, interval_ms, servers, topic, *sink.words)
        return FlinkJob(self._engine)


@contextmanager
def run_flink(scratch: Path) -> Generator[FlinkJvm]:
    """Yield a JVM, ready, built if it is not yet; after the block it is gone.

    Raises:
        BenchmarkError: There is no Java 17, or no Maven; or the build failed.
    """
    build_flink()
    with flink(scratch, "Latency") as engine:
        yield FlinkJvm(engine, scratch)
