"""An archive of the classes that Spark's JVMs load: half of the work of each start.

    python -m tests.support.spark_classes           prints what leads a JVM to the archive
    python -m tests.support.spark_classes --write   writes it, unless it is there

A run of all tests starts some thirty of them. An archive is that of one Java and of one
environment's jars; a JVM that finds none, or another's, starts as it would without.
"""

from __future__ import annotations

import hashlib
import os
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from onceflow.integration.servers.cache import exclusive
from onceflow.integration.servers.kafka_jars import java_command

_TIMEOUT_S = 600.0
_OPTIONS = "SPARK_SUBMIT_OPTS"
_SILENT = "-Xlog:cds=off -Xlog:cds+dynamic=off"


def archive() -> Path:
    """Return where it is, or would be: a JVM takes none of other jars, not even of copies."""
    java = Path(java_command()).resolve()
    found = find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    jars = Path(found.origin).parent / "jars"
    parts = (java, java.stat().st_mtime_ns, jars, jars.stat().st_mtime_ns)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
    return Path(sys.prefix) / f".spark-{version('pyspark')}-classes-{key}.jsa"


def write(path: Path) -> None:
    """Run a session of Spark for a moment; `path` then appears whole.

    Half an archive, of a JVM that did not end well, would let others crash: it gets no such name.
    """
    from pyspark.sql import SparkSession

    written = path.with_suffix(f".{os.getpid()}")
    given = os.environ.get(_OPTIONS, "")
    os.environ[_OPTIONS] = f"{given} -XX:ArchiveClassesAtExit={written} {_SILENT}"
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.Builder().master("local[2]").config("spark.ui.enabled", "false")
    session = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
    rows = session.createDataFrame([(1, "a"), (2, "b")], "id BIGINT, account STRING")
    rows.groupBy("account").count().collect()
    session.sparkContext.parallelize([1, 2], 2).map(str).collect()
    jvm = cast("Any", session.sparkContext)._gateway.proc
    session.stop()
    # It archives when it exits, which it does when nobody can speak to it any more.
    jvm.stdin.close()
    if jvm.wait(_TIMEOUT_S) == 0:
        written.rename(path)


def main() -> None:
    """Do what the arguments say."""
    path = archive()
    if sys.argv[1:] != ["--write"]:
        print(f"-XX:SharedArchiveFile={path} {_SILENT}")  # noqa: T201
        return
    with exclusive(path.with_suffix(".lock"), 2 * _TIMEOUT_S):
        if not path.exists():
            write(path)


if __name__ == "__main__":
    main()
