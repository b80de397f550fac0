"""Reads lake tables by Spark with the formats' jars, on the newest Spark that both have jars for.

    python lake_reader.py JARS SETTINGS SQL

prints the rows as JSON, one a line; JARS are paths with commas, SETTINGS a JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

SPARK = "4.1"
_JARS = (
    ("org.apache.iceberg", f"iceberg-spark-runtime-{SPARK}_2.13", "1.12.0"),
    ("io.delta", f"delta-spark_{SPARK}_2.13", "4.4.0"),
    ("org.xerial", "sqlite-jdbc", "3.54.1.0"),
)
_NOT_SPARKS_OWN = ("delta-", "iceberg-", "sqlite-", "unitycatalog-")
_TIMEOUT_S = 600

DELTA: Mapping[str, str] = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


def iceberg_settings(properties: Mapping[str, str]) -> dict[str, str]:
    """Return what makes a SQLite catalog of pyiceberg the catalog `default` of Spark."""
    catalog = "spark.sql.catalog.default"
    return {
        catalog: "org.apache.iceberg.spark.SparkCatalog",
        f"{catalog}.type": "jdbc",
        f"{catalog}.uri": properties["uri"].replace("sqlite:///", "jdbc:sqlite:"),
        f"{catalog}.warehouse": properties["warehouse"],
        f"{catalog}.jdbc.schema-version": "V1",
    }


def query_by_spark(settings: Mapping[str, str], sql: str) -> list[dict[str, Any]]:
    """Return the rows that Spark has for `sql`; instants are texts in UTC."""
    from tests.support.spark_versions import environment_of

    from onceflow.integration.servers.kafka_jars import jars_of

    jars = jars_of(f"lake-jars-{SPARK}", _JARS, "jars of Iceberg and Delta (90 MB, once)")
    names = [str(one) for one in sorted(jars.glob("*.jar")) if one.name.startswith(_NOT_SPARKS_OWN)]
    python = environment_of(SPARK)
    done = subprocess.run(
        [str(python), __file__, ",".join(names), json.dumps(dict(settings)), sql],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        env={"PATH": os.environ["PATH"], "SPARK_LOCAL_IP": "127.0.0.1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def main(jars: str, settings: str, sql: str) -> None:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[1]").config("spark.jars", jars)
    fixed = {
        "spark.ui.enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        # Tables of a few rows: a task for each of Delta's 50 partitions takes minutes.
        "spark.sql.shuffle.partitions": "1",
        "spark.databricks.delta.snapshotPartitions": "1",
    }
    for name, value in {**fixed, **json.loads(settings)}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    assert spark.version.startswith(f"{SPARK}."), spark.version
    for line in spark.sql(sql).toJSON().collect():
        sys.stdout.write(f"{line}\n")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
