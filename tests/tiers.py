"""Which tests wait for `script/test --servers`: what they hold, the default run holds elsewhere.

The default run takes ten minutes on two quiet cores, so it holds each guarantee once: with one
server of each technology, the whole kit for a sink that prepares and one that stages, and short
jobs on Spark. A test is left out by its mark, or by a line here: other databases, storages,
clusters and examples. What takes minutes, and what kills once more at another step, is marked
`slow`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

OTHER_DATABASES = re.compile(r"\b(mysql|mariadb|EmbeddedMySQL|EmbeddedMariaDB)\b")
"""In the ids of parameters: twins of what runs on Postgres."""

TWINS_IN = ("tests/integration/", "tests/spark_formats/", "tests/runtime/")
"""Where tests take the database as a parameter."""

ON_MYSQL = (
    "tests/integration/test_mysql_durability.py::",
    "tests/integration/test_mysql_sink.py::",
    "tests/integration/test_mysql_sink_modes.py::",
    "tests/integration/test_mysql_sink_replicas.py::",
    "tests/integration/sql/test_sql_sink_crashes.py::",
    "tests/integration/sql/test_sql_moved_jobs.py::",
)
"""Of these, MySQL's and MariaDB's stay: what is their own, and whole jobs."""

LEFT_OUT = (
    # The demo, and what only it needs.
    "tests/integration/test_demo.py::",
    "tests/integration/test_oracle_topics.py::",
    "tests/integration/test_bench_sinks.py::",
    "tests/unit/benchmarks/test_bench_beside_flink.py::",
    "tests/unit/benchmarks/test_bench_figures.py::",
    "tests/unit/benchmarks/test_bench_sinks_figures.py::",
    "tests/unit/demo/test_demo_command.py::",
    # Storages beside a directory and S3.
    "tests/integration/test_cloud_storage.py::",
    "tests/integration/test_hdfs_storage.py::",
    # Servers that are set up in other ways, or of other versions.
    "tests/integration/test_doctor_kafka_versions.py::",
    "tests/integration/test_doctor_mysql.py::",
    "tests/spark_formats/test_registry_formats.py::",
    # What tests in containers find out about containers, and tests of the servers that tests start.
    "tests/containers/test_databases.py::",
    "tests/containers/test_fixtures.py::",
    "tests/containers/test_kafka.py::",
    "tests/integration/test_mysql_servers.py::",
    "tests/integration/test_servers.py::",
    # Spark on another cluster than the local one.
    "tests/spark/test_clusters.py::",
    "tests/spark/test_doctor_spark.py::",
    "tests/spark/test_signals.py::test_a_program_that_does_something_else_stops_as_well",
    # Programs of documents: what they call is shown by tests of its own.
    "tests/spark/test_documented_programs.py::",
    "tests/spark_formats/test_bootstrap_example.py::",
    "tests/spark_formats/test_documented_formats.py::",
    # Examples of sinks, whose clauses are the kit's, and installation into a new environment.
    "tests/conformance/test_documented_sink_conforms.py::",
    "tests/unit/test_packaging.py::test_every_public_name_imports_in_a_fresh_environment",
)

KEPT = (
    "tests/integration/test_cloud_storage.py::test_of_drivers_that_create_one_record_at_once_one_wins[google]",
)
"""Of what is left out, the one proof of a guarantee."""


def is_left_out(node_id: str) -> bool:
    """Return whether the test is for `--servers`, though it carries no mark."""
    if node_id.startswith(LEFT_OUT):
        return not node_id.startswith(KEPT)
    parameters = node_id.partition("[")[2]
    is_twin = node_id.startswith(TWINS_IN) and OTHER_DATABASES.search(parameters)
    return bool(is_twin) and not node_id.startswith(ON_MYSQL)


def mark_left_out(items: Iterable[pytest.Item]) -> None:
    """Give the mark `servers` to tests that the rules above leave out."""
    for item in items:
        if is_left_out(item.nodeid):
            item.add_marker(pytest.mark.servers)
