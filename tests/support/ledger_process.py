"""Runs the ledger in a driver process of its own, to be killed or to use another master.

    python -m tests.support.ledger_process DIRECTORY --records N [--pause-s S] [--master M]
        [--tls T] [--driver-host H] [--start-timeout-s S] …

Without a master its slots are processes of this machine. While it runs, DIRECTORY/status.json
holds the job's status as of a moment ago.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.ledger import SETTINGS, ledger

from onceflow import ExponentialDelay, JobStatus, LocalProcesses
from onceflow.core.runtime.cluster.local_processes import fork_own_host


def main() -> None:
    """Run until the input is at its end; exit status 1 when the job failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--records", type=int, required=True)
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--master", default="")
    parser.add_argument("--tls", default="auto")
    parser.add_argument("--ends-with", default="")
    parser.add_argument("--interval", type=float, default=0.1)
    parser.add_argument("--from-savepoint")
    parser.add_argument("--driver-host")
    parser.add_argument("--restart-delay-max-s", type=float)
    parser.add_argument("--start-timeout-s", type=float, default=SETTINGS.start_timeout_s)
    timeout_s = SETTINGS.heartbeat_timeout_s
    parser.add_argument("--heartbeat-timeout-s", type=float, default=timeout_s)
    arguments = parser.parse_args()
    source = CountingSource(
        arguments.records, pause_s=arguments.pause_s, ends_with=arguments.ends_with
    )
    settings = replace(
        SETTINGS,
        tls=arguments.tls,
        driver_host=arguments.driver_host,
        start_timeout_s=arguments.start_timeout_s,
        heartbeat_timeout_s=arguments.heartbeat_timeout_s,
    )
    cluster = _cluster(arguments.master)
    interval = arguments.interval or None
    delay_max_s = arguments.restart_delay_max_s
    pipeline, _ = ledger(
        cluster,
        arguments.directory,
        source,
        settings=settings,
        interval=interval,
        restart=ExponentialDelay(initial_delay_s=0.1, max_delay_s=delay_max_s)
        if delay_max_s
        else None,
    )
    job = pipeline.start(from_savepoint=arguments.from_savepoint)
    while not job.state.ended:
        _publish(job.status(), arguments.directory / "status.json")
        try:
            job.wait(0.05)
        except TimeoutError:
            continue
    _publish(job.status(), arguments.directory / "status.json")
    if not isinstance(cluster, LocalProcesses):
        cluster.stop()


def _cluster(master: str) -> AnyCluster:
    if not master:
        fork_own_host()
        return LocalProcesses()
    from pyspark.sql import SparkSession
    from tests.support.standalone import SPARK_JVM

    if master.startswith("sc://"):
        return SparkSession.Builder().remote(master).getOrCreate()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    return (
        SparkSession.Builder()
        .master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "OFF")
        .config("spark.python.daemon.module", "onceflow.connectors.python_daemon")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
        .config("spark.executor.extraJavaOptions", SPARK_JVM)
        .getOrCreate()
    )


def _publish(status: JobStatus, path: Path) -> None:
    text = json.dumps(
        {
            "state": status.state.value,
            "attempt": status.attempt,
            "restores": status.restores,
            "checkpoints": status.checkpoints_completed,
            "slots": [[slot.pid, slot.parent_pid] for slot in status.slots],
            "error": status.last_error,
        }
    )
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(path)


if __name__ == "__main__":
    main()
