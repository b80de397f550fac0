"""The checks of `onceflow run --check`: those of the pipeline, and those of the doctor."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from onceflow.cli.doctor.command import MARGIN_S, Check, examine
from onceflow.cli.doctor.machine import check_java, check_python
from onceflow.cli.doctor.spark import SparkQuestion, check_spark
from onceflow.cli.doctor.storage import check_storage, missing_directories
from onceflow.cli.run.cluster import OpenedCluster
from onceflow.connectors.catalog import SINKS, SOURCES
from onceflow.core.api.pipeline import Pipeline
from onceflow.core.errors import ConfigError
from onceflow.core.runtime.cluster.local_processes import LocalProcesses
from onceflow.core.spi import Sink, Source
from onceflow.core.spi.connector import Finding, Questions
from onceflow.core.storage import (
    CheckpointStorage,
    FileSystemStorage,
    HdfsStorage,
    ObjectStorage,
)


def check_pipeline(
    pipeline: Pipeline, cluster: OpenedCluster, timeout_s: float
) -> tuple[Finding, ...]:
    """Return all findings. Ends the Spark session, because the last check starts its own.

    Raises:
        ConfigError: The graph is incomplete, or a sink is both written and retired.
    """
    plan = pipeline.describe()
    parallelism = plan.graph.parallelism
    checks = [Check("python", check_python), Check("pipeline", pipeline.validate)]
    location = _locate(plan.storage)
    missing = missing_directories(location) if location is not None else ()
    if location is not None:
        checks.append(Check("storage", partial(check_storage, location, missing)))
    for uid, source in plan.sources.items():
        if (questions := _examine_source(source, parallelism)) is not None:
            checks.append(Check(f"server of {uid}", questions))
    for uid, sink in plan.sinks.items():
        if (questions := _examine_sink(sink, parallelism)) is not None:
            checks.append(Check(f"server of {uid}", questions))
    findings = examine(checks, timeout_s)
    on_spark = not isinstance(pipeline.cluster, LocalProcesses)
    is_remote = type(pipeline.cluster).__module__.startswith("pyspark.sql.connect.")
    if not on_spark or is_remote:
        return findings
    # Close the session first: it may occupy all slots of the cluster.
    master = cluster.master or _read_master(pipeline)
    cluster.close()
    question = SparkQuestion(master, parallelism, location, timeout_s, missing)
    spark = [
        Check("java", partial(check_java, timeout_s)),
        Check("spark", partial(check_spark, question)),
    ]
    return (*findings, *examine(spark, timeout_s + MARGIN_S))


def _read_master(pipeline: Pipeline) -> str | None:
    context = getattr(pipeline.cluster, "sparkContext", None)
    return None if context is None else str(context.master)


def _locate(storage: CheckpointStorage) -> str | None:
    """Return `storage` as a path or URL for the doctor, or None if there is nothing to check."""
    match storage:
        case FileSystemStorage():
            return storage.root
        case ObjectStorage() | HdfsStorage():
            return storage.url
        case _:  # in memory, or a storage of another package
            return None


def _examine_source(source: Source, parallelism: int) -> Questions | None:
    for name in SOURCES.names():
        # A connector that cannot be loaded is not the connector of `source`, which exists.
        with suppress(ConfigError):
            connector = SOURCES.find(name)
            if connector.source is type(source) and connector.examine is not None:
                return connector.examine(source, parallelism)
    return None


def _examine_sink(sink: Sink, parallelism: int) -> Questions | None:
    for name in SINKS.names():
        with suppress(ConfigError):
            connector = SINKS.find(name)
            if connector.sink is type(sink) and connector.examine is not None:
                return connector.examine(sink, parallelism)
    return None
