"""Structured Streaming: foreachBatch with JDBC, with upserts, and with batch ids in Postgres."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec
import pyspark
from tests.support.program import python

from benchmarks.scoreboard.contestant import Contestant, Deployment, NotRun, Place, Role, Say
from benchmarks.scoreboard.jobs.spark_job import JobSpec, SparkWay
from benchmarks.spark_jars import spark_jars
from onceflow.integration.faults import processes
from onceflow.integration.servers.server import ServerError

_JOB = "benchmarks.scoreboard.jobs.spark_job"
_GUIDE = "https://spark.apache.org/docs/latest/streaming/"
_SETTINGS = (
    "local-cluster[1,2,1024], trigger 1 second, a checkpoint location for each query",
    "RocksDB state store, startingOffsets earliest",
    "the application is started again with the same checkpoint locations",
)


class StructuredStreaming(Contestant):
    """Structured Streaming with an executor process of its own."""

    engine = f"Spark {metadata.version('pyspark')}, Structured Streaming"
    links = (
        f"{_GUIDE}apis-on-dataframes-and-datasets.html#foreachbatch",
        "https://spark.apache.org/docs/latest/sql-data-sources-jdbc.html",
    )

    def __init__(self, spark_way: SparkWay) -> None:
        self._spark_way: SparkWay = spark_way
        self.name = f"spark-{spark_way}"
        match spark_way:
            case "append":
                self.sink = "foreachBatch, JDBC writer, mode append"
                self.way = "append"
                self.claim = "at least once"
                self.settings = _SETTINGS
            case "upsert":
                self.sink = "foreachBatch, INSERT … ON CONFLICT (id) by psycopg"
                self.way = "upsert"
                self.claim = "at least once, effectively once by key"
                self.settings = (*_SETTINGS, "foreachPartition: one transaction a partition")
            case "batch-id":
                self.sink = "foreachBatch, rows and batchId in one transaction by psycopg"
                self.way = "append"
                self.claim = "exactly once"
                self.settings = (
                    *_SETTINGS,
                    "the driver collects each batch, and skips a batchId that is committed",
                )

    def install(self, say: Say) -> None:
        """Fetch the jars of Kafka's source and of JDBC."""
        try:
            spark_jars(progress=say)
        except ServerError as error:
            raise NotRun(str(error)) from error

    def deploy(self, place: Place) -> Deployment:
        """Return the driver, whose JVM starts a master, workers and executors."""
        spec = JobSpec(
            way=self._spark_way,
            bootstrap_servers=place.bootstrap_servers,
            topic=place.topic,
            url=place.url,
            jdbc_url=place.jdbc_url,
            jars=tuple(map(str, spark_jars(progress=lambda _: None))),
            directory=str(place.directory),
        )
        path = place.directory / "job.json"
        path.write_bytes(msgspec.json.encode(spec))
        environment = {
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_HOME": str(_link_spark(place.directory / "spark")),
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        return _Application(
            [Role("driver", lambda: python("-m", _JOB, path), environment)], place.directory
        )


class _Application(Deployment):
    # Two applications must not share a checkpoint location.
    replaces_frozen = False

    def __init__(self, roles: Sequence[Role], directory: Path) -> None:
        super().__init__(roles, directory, coordinator="driver", worker="driver")

    def find_worker(self) -> int | None:
        """Return an executor: a JVM below the JVM of the driver."""
        for jvm in self._find_jvms(self._programs["driver"].pid):
            for pid in reversed(processes.process_tree(jvm)):
                if "CoarseGrainedExecutorBackend" in _read_command(pid):
                    return pid
        return None

    def _find_jvms(self, pid: int) -> tuple[int, ...]:
        return processes.children_of(pid)


def _link_spark(directory: Path) -> Path:
    """Return a home of Spark below which executors keep their logs, and not in the package."""
    directory.mkdir()
    for part in ("bin", "jars", "python"):
        (directory / part).symlink_to(Path(pyspark.__file__).parent / part)
    return directory


def _read_command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""
