"""Which tests wait for `script/test --servers`: what they hold, the default run holds elsewhere.

The default run takes ten minutes on two quiet cores, so it holds each guarantee once: with one
server of each technology, the whole kit for a sink that prepares, RocksDB for each operator and the
heap for one test of it, and short jobs on Spark. It has no test of the folders `ONLY_LEFT_OUT`.
A test is left out by its mark, or by a line here: other databases, storages, clusters and examples,
and what takes long where something shorter shows it. What takes minutes, and what kills once more
at another step, is marked `slow`.
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

ON_SPARK = re.compile(r"\[(.*-)?spark\]$")
"""Twins of whole jobs on local processes; tests/spark has what Spark adds."""

ON_MYSQL = (
    "tests/integration/test_mysql_durability.py::",
    "tests/integration/test_mysql_encryption.py::",
    "tests/integration/test_mysql_sink.py::",
    "tests/integration/test_mysql_sink_modes.py::",
    "tests/integration/test_mysql_sink_replicas.py::",
    "tests/integration/sql/test_sql_sink_crashes.py::",
    "tests/integration/sql/test_sql_moved_jobs.py::",
    # Their transactions have a name from the beginning, and Postgres's only at the end.
    "tests/integration/sql/test_sql_sink_bad_rows.py::test_rows_all_refused_before_a_barrier_",
)
"""Of these, MySQL's and MariaDB's stay: what is their own, and whole jobs."""

LEFT_OUT = (
    # The demo, and what only it needs.
    "tests/integration/test_demo.py::",
    "tests/integration/test_judge_topics.py::",
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
    "tests/runtime/test_key_types.py::test_both_hours_of_a_repeated_one_and_decimals_of_any_scale_find_their_state_again[heap",
    "tests/runtime/test_recovery.py::test_a_stopped_job_goes_on_at_another_parallelism_with_every_record_once[2-2",
    "tests/runtime/test_recovery.py::test_slots_killed_again_and_again_neither_lose_nor_double_a_row[rocksdb-spark",
    "tests/runtime/test_settings_change.py::test_a_key_of_another_type_is_refused_at_the_start_and_begins_anew_where_allowed[heap",
    "tests/runtime/test_state_changes.py::test_renamed_state_is_refused_by_name_and_dropped_alone_where_allowed[heap",
    "tests/runtime/test_windows.py::test_windows_come_out_once_through_kills_and_rescaling[tumbling",
    # MariaDB's twins of what is shown on MySQL.
    "tests/integration/sql/test_sql_sink_crashes.py::test_job_killed_at_a_step_writes_each_row_once[mariadb",
    "tests/integration/test_mysql_durability.py::test_server_that_forgets_commits_when_killed_is_refused_with_what_fixes_it[EmbeddedMariaDB",
    "tests/integration/test_mysql_durability.py::test_doctor_says_which_crash_is_not_covered[EmbeddedMariaDB",
    "tests/integration/test_mysql_durability.py::test_every_setting_that_a_crash_gets_through_is_known[EmbeddedMariaDB",
    "tests/integration/test_mysql_sink_replicas.py::test_rows_reach_the_replica_once_and_at_their_commit[EmbeddedMariaDB",
    "tests/integration/test_mysql_sink_replicas.py::test_rows_reach_the_replica_once_and_at_their_commit[EmbeddedMySQL-ledger",
    "tests/runtime/test_event_time_restored.py::test_records_within_the_allowed_lateness_come_out_after_a_restart[aggregate_by",
    "tests/runtime/test_event_time_restored.py::test_records_within_the_allowed_lateness_come_out_after_a_restart[co_group",
    "tests/runtime/test_event_time_restored.py::test_records_within_the_allowed_lateness_come_out_after_a_restart[process-stop",
    "tests/runtime/test_recovery.py::test_a_stopped_job_goes_on_at_another_parallelism_with_every_record_once[3-2",
    "tests/runtime/test_state_types_change.py::test_a_function_goes_on_with_a_wider_dataclass_and_not_with_another[heap",
    # The same mistake in another function of the program.
    "tests/runtime/test_program_mistakes.py::test_a_record_that_fails_three_times_ends_the_job_by_its_name[flat_map",
    "tests/runtime/test_program_mistakes.py::test_a_record_that_fails_three_times_ends_the_job_by_its_name[filter",
    # The same kill at another step, or in the other way to commit.
    "tests/integration/sql/test_sql_target_set_back.py::test_commits_that_an_older_copy_has_lost_are_named_though_the_last_checkpoint_lists_none[postgres-ledger",
    "tests/integration/sql/test_sql_target_set_back.py::test_running_committer_notices_that_its_server_came_back_as_an_older_copy[postgres-ledger",
    "tests/integration/test_file_sink_crashes.py::test_job_killed_before_a_request_to_s3_writes_each_row_once[copy_object",
    "tests/integration/test_file_sink_crashes.py::test_job_killed_before_a_request_to_s3_writes_each_row_once[/staged/",
    "tests/integration/test_kafka_sink_crashes.py::test_job_killed_at_a_step_writes_each_record_once[logged@2",
    "tests/integration/test_kafka_sink_crashes.py::test_job_killed_at_a_step_writes_each_record_once[producing@3",
    "tests/integration/test_kafka_sink_crashes.py::test_job_killed_at_a_step_writes_each_record_once[offset@2",
    "tests/integration/test_kafka_sink_crashes.py::test_job_killed_at_a_step_writes_each_record_once[record@2",
    "tests/integration/test_kafka_sink_faults.py::test_stale_rows_are_there_once_when_the_error_is_followed_for_each_transaction[after",
    "tests/spark_formats/test_replaced_tables.py::test_a_killed_batch_that_replaces_a_table_leaves_the_old_rows_or_the_new[flushed-postgres",
    "tests/spark_formats/test_replaced_tables.py::test_a_killed_batch_that_replaces_a_table_leaves_the_old_rows_or_the_new[write-postgres",
    "tests/spark_formats/test_replaced_tables.py::test_a_killed_batch_that_replaces_a_table_leaves_the_old_rows_or_the_new[settled-postgres",
    "tests/spark_formats/test_stream_sink.py::test_a_query_whose_process_is_killed_writes_every_row_once[prepared",
    "tests/integration/sql/test_sql_sink_altered_tables.py::test_a_key_that_is_altered_between_checkpoints_changes_no_other_row[added-MariaDB",
    "tests/integration/sql/test_sql_sink_altered_tables.py::test_a_key_that_is_altered_between_checkpoints_changes_no_other_row[caseless-MariaDB",
    "tests/integration/sql/test_sql_sink_altered_tables.py::test_a_key_that_is_altered_between_checkpoints_changes_no_other_row[dropped-MariaDB",
    "tests/integration/sql/test_sql_sink_altered_tables.py::test_a_key_that_is_altered_between_checkpoints_changes_no_other_row[widened-MariaDB",
    "tests/integration/sql/test_sql_sink_altered_tables.py::test_staged_rows_wait_while_their_key_is_altered[added-MariaDB",
    "tests/integration/sql/test_sql_sink_altered_tables.py::test_staged_rows_wait_while_their_key_is_altered[caseless-MariaDB",
    "tests/integration/sql/test_sql_sink_altered_tables.py::test_staged_rows_wait_while_their_key_is_altered[dropped-MariaDB",
    "tests/integration/sql/test_sql_sink_altered_tables.py::test_staged_rows_wait_while_their_key_is_altered[widened-MariaDB",
    "tests/integration/test_kafka_round_trips.py::test_committed_keys_and_values_are_what_other_clients_read[json-schema",
    "tests/integration/test_lake_dropped_partitions.py::test_rows_that_wait_when_their_partition_column_is_dropped_are_committed_without_it[bytes",
    "tests/integration/test_lake_dropped_partitions.py::test_rows_that_wait_when_their_partition_column_is_dropped_are_committed_without_it[date",
    "tests/integration/test_lake_dropped_partitions.py::test_rows_that_wait_when_their_partition_column_is_dropped_are_committed_without_it[decimal",
    "tests/integration/test_lake_dropped_partitions.py::test_rows_that_wait_when_their_partition_column_is_dropped_are_committed_without_it[year",
    "tests/integration/test_postgres_sink_changes.py::test_one_key_in_two_forms_never_leaves_the_older_change[jsonb-forms3",
    "tests/integration/test_postgres_sink_changes.py::test_one_key_in_two_forms_never_leaves_the_older_change[uuid-forms1",
    "tests/integration/test_postgres_sink_refusals.py::test_what_a_trigger_or_a_deferred_constraint_refuses_ends_the_job_by_name[notify",
    "tests/runtime/test_end_of_input.py::test_what_functions_make_at_the_end_is_there_once_through_a_kill_at_the_end[of_batches-",
    "tests/runtime/test_event_time_restored.py::test_records_within_the_allowed_lateness_come_out_after_a_restart[aggregate-rescale",
    "tests/runtime/test_program_mistakes.py::test_a_record_that_fails_three_times_ends_the_job_by_its_name[process",
    "tests/runtime/test_state_lookup.py::test_a_key_of_every_kind_of_state_is_looked_up_and_the_answer_says_as_of_when[heap",
    "tests/runtime/test_state_lookup.py::test_what_cannot_be_looked_up_is_told_with_what_comes_nearest[heap",
    "tests/unit/cli/test_closed_pipe.py::test_output_that_nobody_reads_does_not_change_the_exit_status[arguments0-",
    "tests/unit/cli/test_txn_command.py::test_a_person_at_a_terminal_is_asked_first[y",
    "tests/unit/runtime/test_http_server.py::test_clients_without_a_token_that_linger_shut_out_neither_the_owner_nor_probes[refused",
    "tests/unit/sinks/test_kafka_record_keys.py::test_keys_that_the_sink_registers_and_writes_the_source_discovers_and_reads[avro-id",
    "tests/unit/sinks/test_kafka_record_keys.py::test_keys_that_the_sink_registers_and_writes_the_source_discovers_and_reads[avro-name",
    "tests/unit/sinks/test_kafka_record_keys.py::test_keys_that_the_sink_registers_and_writes_the_source_discovers_and_reads[json-schema-key6",
    "tests/unit/sinks/test_kafka_record_keys.py::test_keys_that_the_sink_registers_and_writes_the_source_discovers_and_reads[json-schema-whole",
    "tests/spark_formats/test_another_staging.py::test_a_killed_write_goes_on_with_another_staging_location_or_is_refused_there[prepared-",
    "tests/spark_formats/test_another_staging.py::test_a_killed_write_goes_on_with_another_staging_location_or_is_refused_there[replied-",
    "tests/spark_formats/test_character_columns.py::test_padded_and_short_text_is_read_back_as_spark_has_it[json",
    "tests/spark_formats/test_character_columns.py::test_void_column_is_read_back_as_nulls[json",
    "tests/spark_formats/test_replaced_tables.py::test_a_killed_batch_that_replaces_a_table_leaves_the_old_rows_or_the_new[logged-",
    "tests/spark_formats/test_replaced_tables.py::test_a_killed_batch_that_replaces_a_table_leaves_the_old_rows_or_the_new[prepared-",
    "tests/spark_formats/test_replaced_tables.py::test_a_killed_batch_that_replaces_a_table_leaves_the_old_rows_or_the_new[replied-",
    # Each group of types in one way to write, and rows in bulk on MySQL alone.
    "tests/integration/sql/test_sql_round_trips.py::test_a_value_in_a_database_is_what_was_written_or_its_row_was_refused[postgres-numbers-insert",
    "tests/integration/sql/test_sql_round_trips.py::test_a_value_in_a_database_is_what_was_written_or_its_row_was_refused[postgres-text-upsert",
    "tests/integration/sql/test_sql_round_trips.py::test_a_value_in_a_database_is_what_was_written_or_its_row_was_refused[postgres-times-insert",
    "tests/integration/sql/test_sql_round_trips.py::test_a_value_in_a_database_is_what_was_written_or_its_row_was_refused[postgres-lists-upsert",
    "tests/integration/test_mysql_sink_modes.py::test_rows_arrive_the_same_by_load_data_and_where_it_is_off_by_inserts_of_many_rows[mariadb",
    "tests/integration/test_mysql_sink_modes.py::test_refused_row_is_named_where_rows_go_by_insert[mariadb",
    # Clauses of the conformance kit kill a job of Postgres at each of these steps.
    "tests/integration/sql/test_sql_sink_crashes.py::test_job_killed_at_a_step_writes_each_row_once[postgres-exactly_once-write",
    "tests/integration/sql/test_sql_sink_crashes.py::test_job_killed_at_a_step_writes_each_row_once[postgres-exactly_once-flushed",
    "tests/integration/sql/test_sql_sink_crashes.py::test_job_killed_at_a_step_writes_each_row_once[postgres-exactly_once-prepared-3",
    "tests/integration/sql/test_sql_sink_crashes.py::test_job_killed_at_a_step_writes_each_row_once[postgres-exactly_once-logged",
    "tests/integration/sql/test_sql_sink_crashes.py::test_job_killed_at_a_step_writes_each_row_once[postgres-exactly_once-commit-",
    "tests/integration/sql/test_sql_sink_crashes.py::test_job_killed_at_a_step_writes_each_row_once[postgres-exactly_once-committed",
    # The same guarantee in another mode, on another backend, in another window or at another step.
    "tests/formats/test_kept_formats.py::test_a_job_that_an_older_version_was_killed_in_goes_on_and_writes_every_row_once[0.1.0-heap",
    "tests/formats/test_kept_formats.py::test_a_savepoint_of_an_older_version_is_gone_on_from_in_new_storage[0.1.0-rocksdb",
    "tests/integration/test_kafka_sink_crashes.py::test_a_zombie_that_wakes_after_its_successor_committed_changes_nothing[producing-False",
    "tests/integration/test_postgres_round_trip.py::test_a_copy_equals_the_original[texts-upsert",
    "tests/integration/test_postgres_text_keys.py::test_an_index_has_the_order_of_text_keys_only_where_their_bytes_have_that_of_python[UTF8-True",
    "tests/integration/sql/test_sql_round_trips.py::test_a_value_in_sqlite_is_what_was_written_or_its_row_was_refused[-upsert",
    "tests/runtime/test_end_of_input.py::test_a_job_that_is_started_again_at_its_end_makes_nothing_twice[False",
    "tests/runtime/test_end_of_input.py::test_what_functions_make_at_the_end_is_there_once_through_a_kill_at_the_end[of_records-",
    "tests/runtime/test_end_of_input.py::test_what_functions_make_at_the_end_is_there_once_through_a_kill_at_the_end[of_broadcast-",
    "tests/runtime/test_event_time_restored.py::test_records_within_the_allowed_lateness_come_out_after_a_restart[sessions-stop",
    "tests/runtime/test_faults.py::test_a_damaged_state_file_is_refused_by_name[_flip_a_bit-own-file",
    "tests/runtime/test_idle_splits.py::test_a_source_that_ends_while_another_is_idle_does_not_end_event_time[2",
    "tests/runtime/test_more_input_after_the_end.py::test_windows_that_came_out_at_the_end_come_out_once_though_the_job_goes_on[aggregate",
    "tests/runtime/test_more_input_after_the_end.py::test_windows_that_came_out_at_the_end_come_out_once_though_the_job_goes_on[process",
    "tests/runtime/test_more_input_after_the_end.py::test_windows_that_came_out_at_the_end_are_whole_again_within_the_allowed_lateness[aggregate",
    "tests/runtime/test_more_input_after_the_end.py::test_windows_that_came_out_at_the_end_are_whole_again_within_the_allowed_lateness[sessions",
    "tests/runtime/test_more_input_after_the_end.py::test_windows_that_came_out_at_the_end_come_out_once_though_fewer_subtasks_go_on[aggregate",
    "tests/runtime/test_more_input_after_the_end.py::test_windows_that_came_out_at_the_end_come_out_once_though_fewer_subtasks_go_on[sessions",
    "tests/runtime/test_more_input_after_the_end.py::test_records_that_a_join_keeps_find_partners_that_come_after_the_end[inner",
    "tests/runtime/test_moved_jobs.py::test_a_job_that_stopped_with_a_savepoint_goes_on_in_new_storage_without_the_old_one[own",
    "tests/runtime/test_moved_jobs.py::test_a_killed_job_goes_on_from_a_savepoint_in_new_storage_with_the_rows_it_had_not_committed[own",
    "tests/runtime/test_moved_jobs.py::test_a_killed_job_goes_on_from_a_savepoint_in_new_storage_with_the_rows_it_had_not_committed[files",
    "tests/runtime/test_refusals.py::test_a_decided_commit_that_is_refused_is_stuck_over_attempts_and_never_dropped[outcome",
    "tests/runtime/test_refusals.py::test_a_failure_that_may_pass_is_tried_again_as_long_as_it_lasts[ConnectionResetError",
    "tests/runtime/test_refusals.py::test_a_pre_commit_that_is_refused_in_the_same_way_ends_the_job_by_name[exponential",
    "tests/runtime/test_refusals.py::test_a_pre_commit_that_is_refused_in_the_same_way_ends_the_job_by_name[rate",
    "tests/runtime/test_savepoint_restore_kills.py::test_a_driver_that_dies_at_a_step_of_a_restore_starts_again_with_each_row_once[restored-False",
    "tests/runtime/test_savepoint_slots.py::test_slots_write_the_state_of_a_savepoint_and_nothing_of_it_into_checkpoint_storage[rocksdb]",
    "tests/runtime/test_savepoint_slots.py::test_the_driver_copies_the_state_of_slots_whose_own_disk_has_the_savepoints_path[heap",
    "tests/runtime/test_savepoint_slots.py::test_the_driver_copies_the_state_of_slots_whose_own_disk_has_the_savepoints_path[rocksdb]",
    "tests/runtime/test_source_outputs.py::test_rows_and_dead_letters_of_each_output_are_there_once_though_slots_are_killed[False",
    "tests/runtime/test_windows.py::test_a_function_of_windows_sees_times_in_the_zone_of_their_column[tumbling",
    "tests/runtime/test_windows.py::test_every_record_is_in_a_window_or_comes_late_and_never_both[tumbling",
    "tests/simulation_runtime/test_simulation_runtime.py::test_a_mistake_of_the_runtime_is_caught[barriers",
    "tests/simulation_runtime/test_simulation_runtime.py::test_a_mistake_of_the_runtime_is_caught[requests",
    "tests/spark_formats/test_two_runs.py::test_of_two_runs_under_one_token_one_writes_and_the_other_names_it[own",
    "tests/spark_formats/test_two_runs.py::test_of_two_runs_under_one_token_one_writes_and_the_other_names_it[kafka",
    "tests/unit/sinks/test_sql_momentary_failures.py::test_each_staged_row_is_there_once_whichever_call_fails_for_a_moment[server-False",
    "tests/unit/storage/log/test_log_races.py::test_whatever_the_interleaving_an_appended_decision_is_seen_by_every_later_claim[1-0.15",
    "tests/unit/storage/log/test_log_races.py::test_whatever_the_interleaving_an_appended_decision_is_seen_by_every_later_claim[3-0.0",
    # The same model, kill or value beside others of its kind.
    "tests/conformance/test_all_windows.py::test_merged_totals_equal_those_of_all_records_through_snapshots_and_rescaling[heap-tumbling",
    "tests/conformance/test_all_windows.py::test_merged_totals_equal_those_of_all_records_through_snapshots_and_rescaling[rocksdb-small-cache-tumbling",
    "tests/conformance/test_column_joins.py::test_joins_with_a_column_as_limit_equal_the_model_through_snapshots_and_rescaling[heap-400-inner",
    "tests/conformance/test_count_windows.py::test_windows_of_a_number_equal_lists_of_records_through_snapshots_and_rescaling[rocksdb-small-cache-2]",
    "tests/conformance/test_count_windows.py::test_windows_of_a_number_equal_lists_of_records_through_snapshots_and_rescaling[rocksdb-small-cache-40]",
    "tests/conformance/test_interval_joins.py::test_interval_joins_equal_the_model_through_snapshots_and_rescaling[rocksdb-small-cache--700-400-inner",
    "tests/conformance/test_state_windows.py::test_sessions_equal_those_of_one_record_after_the_other_through_snapshots_and_rescaling[heap-3-9",
    "tests/conformance/test_state_windows.py::test_sessions_equal_those_of_one_record_after_the_other_through_snapshots_and_rescaling[rocksdb-small-cache-4-0",
    "tests/conformance/test_state_windows.py::test_windows_equal_those_that_keep_every_record_through_snapshots_and_rescaling[heap-SlidingEventTimeWindows(size=0.012",
    "tests/conformance/test_state_windows.py::test_windows_equal_those_that_keep_every_record_through_snapshots_and_rescaling[heap-TumblingEventTimeWindows(size=0.01,",
    "tests/conformance/test_state_windows.py::test_windows_equal_those_that_keep_every_record_through_snapshots_and_rescaling[rocksdb-small-cache-SlidingEventTimeWindows(size=0.012",
    "tests/integration/sql/test_sql_sink_crashes.py::test_job_killed_at_a_step_writes_each_row_once[postgres-ledger-commit-3",
    "tests/integration/sql/test_sql_sink_crashes.py::test_job_killed_at_a_step_writes_each_row_once[postgres-ledger-prepared-3",
    "tests/integration/sql/test_sql_sink_tables.py::test_new_table_is_created_at_once_whatever_is_prepared_or_open[postgres-two_phase-upsert",
    "tests/integration/test_kafka_registry.py::test_records_that_wait_for_their_schema_are_behind_no_snapshot[False",
    "tests/integration/test_kafka_sink_crashes.py::test_job_killed_after_it_began_a_commit_early_writes_each_record_once[begun@2-1",
    "tests/integration/test_mysql_sink_modes.py::test_rows_arrive_the_same_by_load_data_and_where_it_is_off_by_inserts_of_many_rows[mysql-insert-ledger",
    "tests/integration/test_mysql_sink_modes.py::test_rows_arrive_the_same_by_load_data_and_where_it_is_off_by_inserts_of_many_rows[mysql-load-data-two_phase",
    "tests/integration/test_postgres_sink_changes.py::test_a_delete_of_a_row_that_is_prepared_and_not_yet_committed_is_not_lost[ignore",
    "tests/runtime/test_configured_job.py::test_a_job_runs_as_its_file_says_under_flinks_names_and_keeps_what_its_program_says[flink-conf.yaml",
    "tests/runtime/test_page.py::test_long_names_are_not_broken_in_the_middle_of_a_word[1024",
    "tests/runtime/test_retained_checkpoints.py::test_an_older_retained_checkpoint_is_begun_from_when_a_rewind_is_allowed[number",
    "tests/spark_formats/test_batch_faults.py::test_a_reply_that_is_lost_on_the_way_from_the_database_does_no_harm[onceflow_batches",
    "tests/spark_formats/test_batch_kills.py::test_a_batch_that_is_killed_is_there_once_after_the_next[postgres-claimed",
    "tests/spark_formats/test_batch_kills.py::test_a_batch_that_is_killed_is_there_once_after_the_next[postgres-replied",
    "tests/spark_formats/test_batch_kills.py::test_a_batch_that_is_killed_is_there_once_after_the_next[postgres-write",
    "tests/spark_formats/test_decided_rows.py::test_a_killed_batch_of_staged_rows_is_visible_whole_or_not_at_all[commit-postgres",
    "tests/spark_formats/test_decided_rows.py::test_a_killed_batch_of_staged_rows_is_visible_whole_or_not_at_all[flushed-postgres",
    "tests/spark_formats/test_decided_rows.py::test_a_killed_batch_of_staged_rows_is_visible_whole_or_not_at_all[prepared-postgres",
    "tests/spark_formats/test_replaced_tables.py::test_a_killed_batch_that_replaces_a_table_leaves_the_old_rows_or_the_new[claimed-postgres",
)
"""Parameters of tests that have others in the default run."""

COSTLY = (
    # What takes long, where docs/internals/proofs.md names something shorter for the same line.
    "tests/crash/test_kills.py::test_a_killed_driver_is_replaced_by_one_that_goes_on",
    "tests/integration/sql/test_sql_blocked_checkpoints.py::test_checkpoint_that_times_out_names_the_sink",
    "tests/integration/sql/test_sql_sink_faults.py::test_frozen_server_hangs_nobody",
    "tests/integration/sql/test_sql_storage_behind.py::test_an_older_copy_of_the_storage_is_refused",
    "tests/integration/test_kafka_registry.py::test_registry_that_stays_away_fails_the_reader",
    "tests/integration/test_kafka_storage_behind.py::test_a_savepoint_that_is_older_than_the_topic",
    "tests/integration/test_kafka_storage_behind.py::test_an_older_copy_of_the_storage_is_refused",
    "tests/integration/test_kafka_storage_behind.py::test_another_storage_of_a_job_that_writes_to_kafka",
    "tests/runtime/test_job_commands.py::test_a_driver_that_was_killed_is_not_taken_for_a_running_one",
    "tests/runtime/test_job_commands.py::test_a_job_whose_files_cannot_be_read",
    "tests/runtime/test_job_events.py::test_listeners_that_raise_or_hang_stop_nothing",
    "tests/runtime/test_page.py::test_a_frozen_driver_is_told_and_the_page_goes_on",
    "tests/runtime/test_requests.py::test_stop_whose_checkpoint_times_out_is_repeated",
    "tests/runtime/test_requests_while_slots_are_lost.py::test_a_savepoint_that_is_asked_for_while",
    "tests/runtime/test_slow_storage.py::test_a_job_is_cancelled_while_its_state_is_restored",
    "tests/runtime/test_slow_storage.py::test_a_restore_that_takes_longer",
    "tests/runtime/test_storage_behind.py::test_a_job_begins_again_from_a_savepoint_in_its_own_storage",
    "tests/runtime/test_ui.py::test_jobs_are_there_whether_they_run_have_ended_or_were_killed",
    "tests/runtime/test_unaligned.py::test_rows_behind_a_barrier_that_timed_out_on_its_way",
    "tests/runtime/test_unaligned.py::test_the_last_rows_of_the_input_are_checkpointed",
    "tests/spark/test_partitions.py::test_slots_that_are_cut_off_from_each_other",
    "tests/spark/test_stuck_commit.py::test_commit_that_is_stuck_while_its_job_fails_over",
    "tests/spark_formats/test_refused_rows.py::test_save_names_a_row_that_breaks_a_constraint",
    "tests/spark_formats/test_register.py::test_threads_of_a_pool_that_register_first",
    "tests/spark_formats/test_restarted_server.py::test_a_write_whose_database_is_killed_after_its_last_commit",
    "tests/spark_formats/test_stream_sink.py::test_an_older_copy_of_a_checkpoint_is_refused",
    "tests/integration/test_kafka_discovery_on_spark.py::test_partitions_added_under_a_running_job",
    "tests/integration/test_kafka_storage_behind.py::test_the_last_commits_of_all_subtasks",
    "tests/integration/test_moved_jobs.py::test_records_in_kafka_are_there_once",
    "tests/integration/test_s3_storage.py::test_a_server_killed_in_mid_upload",
    "tests/runtime/test_batch_iterators.py::test_functions_that_hold_rows_back",
    "tests/runtime/test_batch_states.py::test_states_of_batches_are_exactly_once",
    "tests/runtime/test_connect.py::test_broadcast_state_is_the_same_on_every_subtask",
    "tests/runtime/test_connect.py::test_lists_without_a_key_are_dealt_out",
    "tests/runtime/test_joins.py::test_each_pair_comes_once_through_kills_and_rescaling",
    "tests/runtime/test_key_types.py::test_instants_far_from_today",
    "tests/runtime/test_money.py::test_money_is_added_exactly_though_slots_are_killed",
    "tests/runtime/test_rescaling.py::test_a_job_walks_through_parallelisms",
    "tests/runtime/test_requests.py::test_stop_whose_checkpoint_fails_the_attempt",
    "tests/runtime/test_savepoints.py::test_a_savepoint_older_than_the_last_decision",
    "tests/runtime/test_state_changes.py::test_an_aggregate_is_added_and_another_removed",
    "tests/runtime/test_stop_savepoints.py::test_a_savepoint_after_which_timers_have_fired",
    "tests/runtime/test_stop_savepoints.py::test_what_the_clock_makes_after_a_stop_savepoint",
    "tests/runtime/test_storage_behind.py::test_what_a_target_has_lost_that_was_committed",
    "tests/runtime/test_table_join.py::test_records_are_joined_once_while_slots_are_killed",
    "tests/runtime/test_timers.py::test_event_timers_fire_once_in_event_time",
    "tests/runtime/test_worked_cases.py::test_three_operators_in_parallel",
    "tests/spark/test_moves.py::test_a_stopped_job_goes_on_in_another_directory",
    "tests/spark_formats/test_prepared_room.py::test_save_with_a_staging_location",
    "tests/spark_formats/test_query_txn.py::test_what_a_query_decided_is_committed",
    "tests/spark_formats/test_restarted_server.py::test_a_query_whose_database_restarts",
    "tests/spark_formats/test_restarted_server.py::test_a_write_whose_database_is_killed_before",
    # What no guarantee names, and other tests of the default run show on another target or in
    # another way: faults of Kafka that the kit makes on databases, readers, servers that stay away.
    "tests/crash/test_crash_points.py::test_a_driver_that_dies_right_after_deciding_has_decided",
    "tests/crash/test_crash_points.py::test_at_least_once_the_same_death_shows_duplicates",
    "tests/integration/sql/test_sql_txn.py::test_a_paused_server_is_given_up_after_the_timeout",
    "tests/crash/test_kills.py::test_slots_killed_one_after_the_other_neither_lose_nor_double",
    "tests/integration/test_doctor.py::test_a_paused_database_does_not_keep_the_other_checks",
    "tests/integration/test_doctor.py::test_a_closed_port_and_wrong_credentials_are_told",
    "tests/integration/test_file_sink_s3.py::test_server_that_is_away_is_asked_again",
    "tests/integration/test_kafka_ranges.py::test_a_range_that_is_not_there_any_more",
    "tests/integration/test_kafka_sink.py::test_recovery_at_another_parallelism_commits",
    "tests/integration/test_kafka_sink_crashes.py::test_job_killed_and_started_at_another_parallelism",
    "tests/integration/test_kafka_sink_crashes.py::test_job_killed_while_it_makes_good_an_earlier_kill",
    "tests/integration/test_kafka_sink_faults.py::test_at_least_once_says_that_the_broker_is_gone",
    "tests/integration/test_kafka_sink_faults.py::test_commit_that_never_landed_is_produced_again",
    "tests/integration/test_kafka_sink_faults.py::test_damaged_rows_are_named_and_may_be_aborted",
    "tests/integration/test_kafka_sink_faults.py::test_outage_after_the_commit_was_sent_is_unknown",
    "tests/integration/test_kafka_sink_faults.py::test_storage_that_fails_after_the_commit",
    "tests/integration/test_kafka_sink_faults.py::test_unreachable_broker_is_retry_later",
    "tests/runtime/test_dead_letters.py::test_dead_letters_are_there_exactly_once_with_the_rest",
    "tests/runtime/test_local_processes.py::test_a_frozen_process_is_lost_and_killed",
    "tests/runtime/test_page.py::test_all_is_done_by_keyboard",
    "tests/runtime/test_page.py::test_on_a_phone_nothing_leads_out_of_the_screen",
    "tests/runtime/test_unaligned.py::test_a_barrier_that_waits_its_turn_overtakes",
    "tests/runtime/test_unaligned.py::test_a_stop_leaves_no_rows_in_flight",
    "tests/spark/test_file_sink_job.py::test_job_whose_slots_are_killed_writes_each_row_once",
    "tests/spark_formats/test_another_staging.py::test_of_two_runs_to_kafka_with_two_staging_locations",
    "tests/spark_formats/test_sql_readers.py::test_spark_reads_and_filters_a_table",
    "tests/crash/test_kills.py::test_a_killed_postgres_comes_back",
    "tests/integration/test_kafka_sink_faults.py::test_a_loss_that_was_made_good_by_hand",
    "tests/integration/test_kafka_sink_faults.py::test_commit_offset_behind_a_transaction",
    "tests/integration/test_kafka_sink_faults.py::test_network_cut_at_the_commit",
    "tests/runtime/test_bucket_jobs.py::test_rows_are_staged_in_the_bucket",
    # Tests that no line of the guarantees names, of parts that shorter ones show, too.
    "tests/conformance/test_conformance_plugin.py::test_mistake_of_a_beginner_is_told_with_what_to_do",
    "tests/conformance/test_random_programs.py::test_a_fix_that_is_undone_is_found_by_its_program",
    "tests/integration/test_kafka_native.py::test_odd_records_are_the_same_to_both_readers",
    "tests/integration/test_kafka_sink_faults.py::test_staged_rows_older_than_the_broker_keeps_proofs",
    "tests/integration/test_kafka_source_faults.py::test_broker_silent_for_the_deadline_is_unavailable",
    "tests/integration/test_txn_staged.py::test_staged_rows_are_applied_or_dropped_as_the_log_says",
    "tests/integration/test_workload.py::test_every_payment_is_in_the_partition_of_its_id_in_order",
    "tests/runtime/test_batch_timers.py::test_timers_of_batches_fire_once_through_kills_and_rescaling",
    "tests/runtime/test_logs_of_a_job.py::test_each_line_says_whose_it_is",
    "tests/runtime/test_program_mistakes.py::test_a_running_sum_that_overflows_ends_the_job_by_its_record",
    "tests/runtime/test_run_command.py::test_a_job_is_stopped_by_a_signal_and_goes_on_in_the_next_run",
    "tests/spark/test_python_daemon.py::test_slot_begins_with_all_that_the_daemon_has_imported",
    "tests/spark_formats/test_state_formats.py::test_spark_reads_the_checkpoints_and_the_state_in_them_as_dataframes",
    "tests/conformance/test_conformance_plugin.py::test_class_of_ones_own_needs_make_target_alone",
    "tests/unit/state/rocksdb/test_full_disk.py::test_database_on_a_full_disk_fails_and_never_waits",
    "tests/unit/runtime/test_data_plane.py::test_many_channels_are_opened_and_closed_without_an_abort",
    "tests/unit/test_monitoring_files.py::test_prometheus_takes_the_rules_and_they_fire_when_they_should",
    # test_slot_commits withdraws begun commits whose decision is late.
    "tests/integration/test_kafka_early_jobs.py::test_a_decision_that_is_late",
    # The same job by other means, or a deadline that another test waits for.
    "tests/conformance/test_conformance_plugin.py::test_option_that_names_no_target",
    "tests/integration/test_kafka_event_time.py::test_job_runs_through_discoveries",
    "tests/integration/test_kafka_ranges.py::test_ranges_are_read_natively",
    "tests/integration/test_kafka_sink_faults.py::test_commit_that_landed_but_was_reported_failed",
    "tests/integration/test_kafka_source_faults.py::test_reader_whose_broker_was_never_there",
    "tests/integration/test_kafka_source_faults.py::test_sink_of_a_refused_user",
    "tests/integration/test_kafka_source_faults.py::test_hung_broker_does_not_hold_poll",
    "tests/integration/test_kafka_storage_behind.py::test_a_commit_is_remembered_with_the_claim",
    "tests/integration/test_moved_jobs.py::test_a_stopped_job_moves_though_the_brokers",
    "tests/integration/test_readme.py::test_the_ten_line_pipeline",
    "tests/runtime/test_bucket_jobs.py::test_a_checkpoint_says_how_many_bytes",
    "tests/runtime/test_end_of_input.py::test_rows_of_the_end_are_there_once_though_their_checkpoint_times_out",
    "tests/runtime/test_faults.py::test_a_scratch_disk_without_room_for_a_restore",
    "tests/runtime/test_recovery.py::test_a_function_that_fails_in_every_attempt",
    "tests/runtime/test_sink_identity.py::test_renamed_uid_of_a_sink",
    "tests/runtime/test_sink_identity.py::test_sink_that_was_settled_by_hand",
    "tests/runtime/test_storage_behind.py::test_a_target_put_back_to_between_two_subtasks_commits_goes_on",
    "tests/spark_formats/test_kafka_stream.py::test_a_batch_read_goes_from_one_place",
    "tests/spark_formats/test_kafka_stream.py::test_raw_records_have_the_columns",
    "tests/spark_formats/test_moved_targets.py::test_a_query_that_comes_with_another_table_or_topic",
    "tests/unit/test_house.py::test_table_has_a_line_for_each_room",
    # Tests of the tests: they break rules of the engine on purpose, or count the kills that hit.
    "tests/conformance/test_kills_are_reached.py::",
    "tests/conformance/test_state_programs.py::test_a_broken_rule_of_timers_or_expiry_is_caught",
    "tests/unit/test_mutation.py::test_each_room_has_mutants_and_tests",
    "tests/unit/test_test_command.py::test_an_option_runs_the_default_selection",
    # Programs and servers for one test each.
    "tests/integration/test_mysql_sink_replicas.py::test_replica_is_refused_as_a_target",
    "tests/runtime/test_bucket_jobs.py::test_a_job_with_its_state_in_the_drivers_memory",
    "tests/runtime/test_settings_change.py::test_windows_of_another_size",
    "tests/unit/test_packaging.py::test_source_archive",
    "tests/unit/test_packaging.py::test_wheel",
    "tests/conformance/test_documented_source_conforms.py::",
    "tests/crash/test_crash_points.py::test_a_slot_that_dies_at_a_crash_point",
    "tests/integration/test_kafka_cleaned_topics.py::test_a_job_reads_each_record_that_compaction_leaves",
    "tests/integration/test_kafka_cleaned_topics.py::test_a_job_behind_retention",
    "tests/integration/test_kafka_cleaned_topics.py::test_a_bounded_job_ends_among_markers",
    "tests/integration/test_kafka_cleaned_topics.py::test_null_keys_and_empty_values",
    "tests/integration/test_mysql_durability.py::test_mariadb_that_flushes_once_a_second",
    "tests/integration/test_postgres_changes_job.py::test_both_tables_are_equal",
    "tests/integration/test_postgres_changes_job.py::test_each_inserted_row",
)
"""Tests of which what they show is shown by a shorter one in the default run."""

ONLY_LEFT_OUT = ("containers", "crash", "documents")
"""Folders of which the default run has no test, or is run without."""

KEPT = (
    "tests/integration/test_cloud_storage.py::test_of_drivers_that_create_one_record_at_once_one_wins[google]",
)
"""Of what is left out, the one proof of a guarantee."""


def is_left_out(node_id: str) -> bool:
    """Return whether the test is for `--servers`, though it carries no mark."""
    if node_id.startswith((*SIBLINGS, *COSTLY)):
        return True
    if node_id.startswith(LEFT_OUT):
        return not node_id.startswith(KEPT)
    if node_id.startswith("tests/runtime/") and ON_SPARK.search(node_id):
        return True
    parameters = node_id.partition("[")[2]
    is_twin = node_id.startswith(TWINS_IN) and OTHER_DATABASES.search(parameters)
    return bool(is_twin) and not node_id.startswith(ON_MYSQL)


def has_all_folders(node_ids: Iterable[str]) -> bool:
    """Return whether a run of these tests was asked for all: it has some of each folder."""
    tests = Path(__file__).parent
    folders = {path.parent.name for path in tests.glob("*/test_*.py")}.difference(ONLY_LEFT_OUT)
    return folders <= {node_id.split("/")[1] for node_id in node_ids}


def mark_left_out(items: Iterable[pytest.Item]) -> None:
    """Add the mark `servers` to tests that the rules above leave out."""
    for item in items:
        if is_left_out(item.nodeid):
            item.add_marker(pytest.mark.servers)
