"""A `write` or a query comes again with another stagingLocation, or with one that was cleaned."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from tests.spark_formats import write_cases
from tests.spark_formats.batches import SCHEMA, Driver, killed_at, rows
from tests.spark_formats.writes import Write, save, save_alone

from onceflow.connectors.spark.batch.identity import stream_target
from onceflow.connectors.spark.formats import FilesFormat
from onceflow.connectors.spark.streaming.checkpoint_location import CheckpointLocation
from onceflow.connectors.spark.streaming.query_transactions import write_transactions
from onceflow.core.commit.by_hand import SinkResourceManager
from onceflow.core.crash_points import CrashPoint
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.log.target_records import LoggedDecision
from onceflow.sinks import FileSink

pytestmark = pytest.mark.timeout(600)
"""Above all that a test may wait for: a process that is killed (150 s) and twice the records of a
topic (100 s each), or these five times. So it fails at the wait that took too long, which says what
is missing."""
TRIES = 4
"""More than attempts of the first run, whose number the next tries must not pass."""


def save_case(case: write_cases.WriteCase) -> None:
    save(case.make_sink, case.options, range(5), range(5, 9))


@write_cases.on(write_cases.sqlite_case, write_cases.files_case, but=write_cases.own_case)
def test_a_write_repeated_with_another_staging_location_finds_its_batch_written(
    make: write_cases.MakeCase, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    case = make(request, tmp_path, "events")
    for name in ("a", "b", "b", "a", "c"):
        save_case(case.with_staging(tmp_path / name))
        assert case.ids() == list(range(9))


@write_cases.on(write_cases.files_case, but=write_cases.own_case)
@pytest.mark.parametrize("point", ["prepared", "logged", "commit", "replied"])
def test_a_killed_write_goes_on_with_another_staging_location_or_is_refused_there(
    make: write_cases.MakeCase, request: pytest.FixtureRequest, tmp_path: Path, point: CrashPoint
) -> None:
    case = make(request, tmp_path, "events")
    first = case.with_staging(tmp_path / "a")
    killed_at(
        point, tmp_path, lambda: save_alone(first.make_sink, first.options, range(5), range(5, 9))
    )
    other = case.with_staging(tmp_path / "b")
    if make is write_cases.kafka_case and point in ("logged", "commit"):
        # Decided, and its rows wait where the first run has staged them.
        for _ in range(TRIES):
            with pytest.raises(ConfigError, match="with its former stagingLocation"):
                save_case(other)
        save_case(first)
    save_case(other)
    assert case.ids() == list(range(9))
    save_case(first)
    assert case.ids() == list(range(9))


def test_a_sink_that_does_not_tell_its_claims_refuses_another_staging_location_at_every_try(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    case = write_cases.own_case(request, tmp_path, "events")
    save_case(case.with_staging(tmp_path / "a"))
    for _ in range(TRIES):
        with pytest.raises(ConfigError, match="Give the stagingLocation of the earlier writes"):
            save_case(case.with_staging(tmp_path / "b"))
    save_case(case.with_staging(tmp_path / "a"))
    assert case.ids() == list(range(9))


def test_files_are_written_once_by_a_token_without_any_staging_location(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    case = write_cases.files_case(request, tmp_path, "events")
    options = {name: one for name, one in case.options.items() if name != "staginglocation"}
    for _ in range(2):
        save(case.make_sink, options, range(9))
    assert case.ids() == list(range(9))


def test_a_query_that_comes_with_another_staging_location_is_refused_at_every_try(
    tmp_path: Path,
) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "metadata").write_text('{"id": "query"}')

    def driver(staging: str) -> Driver:
        options = {"path": str(tmp_path / "out"), "staginglocation": str(tmp_path / staging)}
        named = stream_target(FilesFormat.make_sink, options, CheckpointLocation(str(checkpoint)))
        return Driver(named.target, SCHEMA, rows, named.directory)

    driver("a").batch(0, range(5))
    for _ in range(TRIES):
        with pytest.raises(ConfigError, match="Give the stagingLocation of the earlier writes"):
            driver("b").batch(0, range(5))
    assert driver("a").plan(0).decided
    assert write_cases.file_ids(tmp_path / "out") == list(range(5))


def test_of_two_runs_with_two_staging_locations_the_one_that_planned_last_decides(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    case = write_cases.files_case(request, tmp_path, "events")
    early = Write(case.make_sink, case.with_staging(tmp_path / "a").options)
    late = Write(case.make_sink, case.with_staging(tmp_path / "b").options)
    check_last_decides(early, late, case)


@pytest.mark.integration
def test_of_two_runs_to_kafka_with_two_staging_locations_the_one_that_planned_last_decides(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    case = write_cases.kafka_case(request, tmp_path, "events")
    early = Write(case.make_sink, case.with_staging(tmp_path / "a").options)
    late = Write(case.make_sink, case.with_staging(tmp_path / "b").options)
    check_last_decides(early, late, case)


def check_last_decides(early: Write, late: Write, case: write_cases.WriteCase) -> None:
    with pytest.raises(Exception, match="attempt 2"):
        early.write(range(9))
        early.commit()
    late.write(range(9))
    late.commit()
    assert case.ids() == list(range(9))


def test_what_a_killed_write_to_files_has_decided_is_told_whatever_the_staging_location(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    case = write_cases.files_case(request, tmp_path, "events").with_staging(tmp_path / "a")
    save = partial(save_alone, case.make_sink, case.options, range(5), range(5, 9))
    killed_at("logged", tmp_path, save)
    sink = FileSink(case.options["path"])
    for staging in ("", str(tmp_path / "a"), str(tmp_path / "b")):
        settler = write_transactions("nightly", SinkResourceManager(sink, ""), staging=staging)
        decisions = [one.status.decision for one in settler.in_doubt()]
        settler.close()
        assert decisions == [LoggedDecision.DECIDED] * 2
