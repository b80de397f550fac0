"""The jars of Spark's own Kafka connector and of JDBC, which are measured beside onceflow."""

from __future__ import annotations

from pathlib import Path

from onceflow.integration.servers.kafka_jars import Progress, jars_of

# Spark's connector, which works on 4.3, too, and the driver that its JDBC uses.
_SPARK_JARS = (
    ("org.apache.spark", "spark-sql-kafka-0-10_2.13", "4.2.0"),
    ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.2.0"),
    ("org.apache.kafka", "kafka-clients", "3.9.1"),
    ("org.apache.commons", "commons-pool2", "2.12.0"),
    ("org.postgresql", "postgresql", "42.7.7"),
)


def spark_jars(*, progress: Progress) -> tuple[Path, ...]:
    """Return the jars by which Spark reads Kafka and speaks JDBC to Postgres, fetched once.

    Raises:
        ServerError: Neither client could fetch them; says what each answered.
    """
    target = jars_of(
        "spark-jars-4.2.0",
        _SPARK_JARS,
        "Spark's jars (11 MB, once)",
        progress=progress,
    )
    return tuple(target / f"{name}-{version}.jar" for _, name, version in _SPARK_JARS)
