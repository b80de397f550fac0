"""The rooms of the code that mutants are planted in, and the tests that look at each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

_ROOT = Path(__file__).parents[2]
_UNIT = "tests/unit"
_SCHEDULES = "tests/simulation/test_simulation.py::test_every_invariant_holds_in"


@dataclass(frozen=True, slots=True)
class Room:
    """A part of the code.

    `stages` are the arguments of pytest, the cheapest first. A mutant that a stage kills is not run
    in the next one.
    """

    files: Sequence[str]
    """Patterns of paths below the root of the project."""
    stages: Sequence[Sequence[str]]


_SIMULATION = (
    f"{_SCHEDULES}_the_schedules_that_catch_broken_variants",
    f"{_SCHEDULES}_random_schedules",
)

_RUNTIME_SCHEDULES = (
    "tests/simulation_runtime/test_simulation_runtime.py::test_each_row_is_in_each_sink_once_in"
)
_RUNTIME_SIMULATION = (
    f"{_RUNTIME_SCHEDULES}_the_schedules_that_have_caught_mistakes",
    f"{_RUNTIME_SCHEDULES}_random_schedules",
)


def _name_units(*names: str) -> tuple[str, ...]:
    """Return the unit tests of the runtime with these names. None of them opens a connection."""
    return tuple(f"{_UNIT}/runtime/test_{name}.py" for name in names)


def _name_sink_units(*begin: str) -> tuple[str, ...]:
    """Return the unit tests of sinks whose names begin so."""
    found = (path for name in begin for path in _ROOT.glob(f"{_UNIT}/sinks/test_{name}*.py"))
    return tuple(sorted(str(path.relative_to(_ROOT)) for path in found))


_DATAFLOW_UNITS = _name_units(
    *("batch_iterators", "channels", "function_metrics", "outside_calls", "result_rows"),
    "user_functions",
)
_SLOT_UNITS = _name_units("slot_commits", "snapshot_uploads", "source_splits")

ROOMS: Mapping[str, Room] = MappingProxyType(
    {
        "protocol": Room(
            ("core/protocol/**/*.py",),
            (
                (f"{_UNIT}/protocol", f"{_UNIT}/commit"),
                _name_units("channels", "subtask"),
                (f"{_UNIT}/runtime/test_status.py", f"{_UNIT}/runtime/test_slot_control.py"),
                (*_SIMULATION, "tests/simulation/test_batches.py"),
                _RUNTIME_SIMULATION,
                ("tests/runtime/test_recovery.py", "tests/runtime/test_refusals.py"),
            ),
        ),
        "commit": Room(
            ("core/commit/*.py",),
            (
                (
                    f"{_UNIT}/commit",
                    f"{_UNIT}/protocol/test_refusals.py",
                    f"{_UNIT}/runtime/test_slot_commits.py",
                ),
                _SIMULATION,
                ("tests/conformance/test_begun_commits_conform.py",),
                ("tests/runtime/test_recovery.py",),
            ),
        ),
        "log": Room(
            ("core/storage/log/*.py", "core/storage/snapshots/*.py"),
            (
                (f"{_UNIT}/storage",),
                (
                    "tests/runtime/test_savepoints.py",
                    "tests/runtime/test_retained_checkpoints.py",
                    "tests/runtime/test_savepoint_restore_kills.py",
                ),
            ),
        ),
        "dataflow": Room(
            ("core/runtime/dataflow/*.py",),
            (
                _DATAFLOW_UNITS,
                _RUNTIME_SIMULATION,
                (
                    "tests/conformance/test_state_windows.py",
                    "tests/conformance/test_early_windows.py",
                    "tests/conformance/test_last_rows.py",
                ),
                (f"{_UNIT}/runtime",),
                ("tests/runtime/test_windows.py", "tests/runtime/test_unaligned.py"),
                ("tests/runtime/test_joins.py", "tests/runtime/test_discovery.py"),
                ("tests/runtime/test_end_of_input.py", "tests/runtime/test_connect.py"),
            ),
        ),
        "driver": Room(
            ("core/runtime/driver/*.py",),
            (
                (*_SLOT_UNITS, *_name_units("restart_loop", "source_splits_discovery")),
                _RUNTIME_SIMULATION,
                (f"{_UNIT}/runtime",),
                ("tests/runtime/test_recovery.py", "tests/runtime/test_savepoints.py"),
                ("tests/runtime/test_requests.py", "tests/runtime/test_discovery.py"),
            ),
        ),
        "slot": Room(
            ("core/runtime/slot/*.py",),
            (
                _SLOT_UNITS,
                _RUNTIME_SIMULATION,
                (f"{_UNIT}/runtime",),
                ("tests/runtime/test_recovery.py", "tests/runtime/test_unaligned.py"),
                ("tests/runtime/test_faults.py",),
            ),
        ),
        "state": Room(
            ("core/state/**/*.py",),
            (
                (f"{_UNIT}/state/heap", f"{_UNIT}/state/test_expiring_states.py"),
                (f"{_UNIT}/state",),
                ("tests/conformance/test_state_backends_conform.py",),
                ("tests/conformance/test_state_batches.py",),
                (
                    "tests/conformance/test_state_aggregates.py",
                    "tests/conformance/test_state_decimals.py",
                    "tests/conformance/test_distinct_counts.py",
                ),
                ("tests/conformance/test_state_snapshots.py",),
                (
                    "tests/conformance/test_state_evolution.py",
                    "tests/conformance/test_state_types.py",
                ),
                (
                    "tests/conformance/test_state_ttl.py",
                    "tests/conformance/test_state_running_ttl.py",
                    "tests/conformance/test_state_timers.py",
                ),
                ("tests/conformance/test_random_programs.py",),
            ),
        ),
        "sinks": Room(
            ("sinks/base/*.py", "sinks/sql/*.py", "sinks/sqlite/*.py"),
            (
                _name_sink_units("sql_writer", "sql_commits", "staged"),
                _name_sink_units("sql", "fence", "refused_commits"),
                ("tests/conformance/test_sqlite_sink_conforms.py",),
                ("tests/integration/test_sqlite_sink.py",),
                _name_sink_units("silence", "refused_settings"),
                (
                    "tests/integration/sql/test_sql_sink.py",
                    "tests/integration/sql/test_sql_sink_ledger.py",
                    "tests/integration/sql/test_sql_sink_races.py",
                    "tests/integration/sql/test_sql_sink_changes.py",
                    "tests/integration/sql/test_sql_target_set_back.py",
                ),
            ),
        ),
        "server-sinks": Room(
            ("sinks/postgres/*.py", "sinks/mysql/*.py"),
            (
                _name_sink_units("postgres_two_phase", "mysql_two_phase"),
                _name_sink_units("postgres", "mysql", "sql_values"),
                (
                    "tests/integration/sql/test_sql_sink.py",
                    "tests/integration/sql/test_sql_sink_races.py",
                ),
                ("tests/integration/sql/test_sql_sink_changes.py",),
            ),
        ),
        "file-sink": Room(
            ("sinks/files/*.py",),
            (
                _name_sink_units("file_publication"),
                _name_sink_units("file_sink", "refused_commits"),
                ("tests/integration/test_file_sink.py",),
                ("tests/integration/test_file_sink_crashes.py",),
            ),
        ),
        "kafka-sink": Room(
            ("sinks/kafka/*.py",),
            (
                _name_sink_units("kafka_momentary", "kafka_commit", "kafka_sink", "kafka_fence"),
                _name_sink_units("kafka"),
                (
                    "tests/integration/test_kafka_early_commits.py",
                    "tests/integration/test_kafka_sink.py",
                    "tests/integration/test_kafka_sink_check.py",
                ),
                ("tests/integration/test_kafka_sink_faults.py",),
            ),
        ),
        "lake-sinks": Room(
            ("sinks/lake/*.py", "sinks/iceberg/*.py", "sinks/delta/*.py"),
            (
                _name_sink_units("lake_commits", "delta_table", "iceberg_table"),
                _name_sink_units("lake"),
                (
                    "tests/integration/test_lake_sinks.py",
                    "tests/integration/test_lake_upserts.py",
                ),
            ),
        ),
        "kafka-source": Room(
            ("sources/kafka/*.py",),
            (
                (f"{_UNIT}/sources/test_kafka_reader.py", f"{_UNIT}/sources/test_kafka_gaps.py"),
                (f"{_UNIT}/sources",),
                ("tests/integration/test_kafka_source.py",),
            ),
        ),
    }
)
