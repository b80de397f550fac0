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
from pathlib import Path

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

SIBLINGS = (
    # Of jobs whose slots are killed: the same on another state backend, or at another parallelism.
    "tests/runtime/test_bucket_jobs.py::test_a_job_with_its_state_in_a_bucket_survives_kills_and_leaves_no_object_behind[heap",
    "tests/runtime/test_bucket_jobs.py::test_a_job_with_its_state_in_the_drivers_memory_survives_a_killed_slot[heap",
    "tests/runtime/test_key_types.py::test_both_hours_of_a_repeated_one_and_decimals_of_any_scale_find_their_state_again[heap",
    "tests/runtime/test_key_types.py::test_instants_far_from_today_come_out_of_an_outer_join_as_they_went_in[heap",
    "tests/runtime/test_money.py::test_money_is_added_exactly_though_slots_are_killed[heap",
    "tests/runtime/test_recovery.py::test_a_stopped_job_goes_on_at_another_parallelism_with_every_record_once[2-2",
    "tests/runtime/test_recovery.py::test_slots_killed_again_and_again_neither_lose_nor_double_a_row[rocksdb-spark",
    "tests/runtime/test_rescaling.py::test_a_job_walks_through_parallelisms_with_every_record_once[HeapBackend",
    "tests/runtime/test_settings_change.py::test_a_key_of_another_type_is_refused_at_the_start_and_begins_anew_where_allowed[heap",
    "tests/runtime/test_state_changes.py::test_renamed_state_is_refused_by_name_and_dropped_alone_where_allowed[heap",
    "tests/runtime/test_windows.py::test_windows_come_out_once_through_kills_and_rescaling[tumbling",
    # MariaDB's twins of what is shown on MySQL.
    "tests/integration/test_mysql_durability.py::test_server_that_forgets_commits_when_killed_is_refused_with_what_mends_it[EmbeddedMariaDB",
    "tests/integration/test_mysql_durability.py::test_doctor_says_which_crash_is_not_covered[EmbeddedMariaDB",
    "tests/integration/test_mysql_durability.py::test_every_setting_that_a_crash_gets_through_is_known[EmbeddedMariaDB",
    "tests/integration/test_mysql_sink_replicas.py::test_rows_reach_the_replica_once_and_at_their_commit[EmbeddedMariaDB",
    "tests/integration/test_mysql_sink_replicas.py::test_replica_is_refused_as_a_target[EmbeddedMariaDB",
    # The same mistake in another function of the program.
    "tests/runtime/test_program_mistakes.py::test_a_record_that_fails_three_times_ends_the_job_by_its_name[flat_map",
    "tests/runtime/test_program_mistakes.py::test_a_record_that_fails_three_times_ends_the_job_by_its_name[filter",
    # The same kill at another step, or in the other way to commit.
    "tests/integration/test_kafka_sink_faults.py::test_network_cut_at_the_commit_loses_and_doubles_nothing[request",
    "tests/crash/test_crash_points.py::test_a_slot_that_dies_at_a_crash_point_neither_loses_nor_doubles_a_row[local-prepared-heap-two_phase",
    "tests/integration/sql/test_sql_storage_behind.py::test_an_older_copy_of_the_storage_is_refused_at_every_try_by_what_a_database_has[postgres-ledger",
    "tests/integration/sql/test_sql_target_set_back.py::test_commits_that_an_older_copy_has_lost_are_named_though_the_last_checkpoint_lists_none[postgres-ledger",
    "tests/integration/sql/test_sql_target_set_back.py::test_running_committer_notices_that_its_server_came_back_as_an_older_copy[postgres-ledger",
    "tests/integration/test_file_sink_crashes.py::test_job_killed_before_a_request_to_s3_writes_each_row_once[copy_object",
    "tests/integration/test_file_sink_crashes.py::test_job_killed_before_a_request_to_s3_writes_each_row_once[/staged/",
    "tests/integration/test_kafka_sink_crashes.py::test_job_killed_at_a_step_writes_each_record_once[producing@3",
    "tests/integration/test_mysql_sink_replicas.py::test_rows_reach_the_replica_once_and_at_their_commit[EmbeddedMySQL-ledger",
    "tests/integration/test_kafka_sink_crashes.py::test_job_killed_at_a_step_writes_each_record_once[offset@2",
    "tests/integration/test_kafka_sink_crashes.py::test_job_killed_at_a_step_writes_each_record_once[record@2",
    "tests/spark_formats/test_replaced_tables.py::test_a_killed_batch_that_replaces_a_table_leaves_the_old_rows_or_the_new[flushed-postgres",
    "tests/spark_formats/test_replaced_tables.py::test_a_killed_batch_that_replaces_a_table_leaves_the_old_rows_or_the_new[write-postgres",
    "tests/spark_formats/test_replaced_tables.py::test_a_killed_batch_that_replaces_a_table_leaves_the_old_rows_or_the_new[settled-postgres",
    "tests/spark_formats/test_stream_sink.py::test_a_query_whose_process_is_killed_writes_every_row_once[prepared",
)
"""Parameters of tests that have others in the default run."""

ONLY_LEFT_OUT = ("containers", "documents")
"""Folders of which the default run has no test, or is run without."""

KEPT = (
    "tests/integration/test_cloud_storage.py::test_of_drivers_that_create_one_record_at_once_one_wins[google]",
)
"""Of what is left out, the one proof of a guarantee."""


def is_left_out(node_id: str) -> bool:
    """Return whether the test is for `--servers`, though it carries no mark."""
    if node_id.startswith(SIBLINGS):
        return True
    if node_id.startswith(LEFT_OUT):
        return not node_id.startswith(KEPT)
    parameters = node_id.partition("[")[2]
    is_twin = node_id.startswith(TWINS_IN) and OTHER_DATABASES.search(parameters)
    return bool(is_twin) and not node_id.startswith(ON_MYSQL)


def has_all_folders(items: Iterable[pytest.Item]) -> bool:
    """Return whether the run was asked for all tests: it has some of each folder."""
    tests = Path(__file__).parent
    folders = {path.parent.name for path in tests.glob("*/test_*.py")}.difference(ONLY_LEFT_OUT)
    return folders <= {item.path.relative_to(tests).parts[0] for item in items}


def mark_left_out(items: Iterable[pytest.Item]) -> None:
    """Give the mark `servers` to tests that the rules above leave out."""
    for item in items:
        if is_left_out(item.nodeid):
            item.add_marker(pytest.mark.servers)
