"""Two runs write one batch at once: one of them wins, the other one says who, and its repeat ends.

A run is what one `save` does. Steps of two runs take turns as two drivers' do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.spark_formats import write_cases
from tests.spark_formats.writes import Write

from onceflow.core.errors import Fenced, OnceflowError

WHO = r"attempt 2 of .*process \d+ on .*, since 20\d\d-\d\d-\d\d"


@write_cases.on(
    write_cases.sqlite_case,
    write_cases.files_case,
    write_cases.own_case,
    write_cases.postgres_case,
    write_cases.kafka_case,
)
def test_of_two_runs_under_one_token_one_writes_and_the_other_names_it(
    make: write_cases.MakeCase, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    case = make(request, tmp_path, "events")
    early = Write(case.make_sink, case.options)
    late = Write(case.make_sink, case.options)
    with pytest.raises(Fenced, match=WHO):
        early.write(range(5), range(5, 9))
        early.commit()
    late.write(range(5), range(5, 9))
    late.commit()
    assert case.ids() == list(range(9))
    # What an orchestrator does with the run that has failed.
    again = Write(case.make_sink, case.options)
    again.write(range(5), range(5, 9))
    again.commit()
    assert case.ids() == list(range(9))


@write_cases.on(write_cases.sqlite_case, write_cases.files_case)
def test_of_two_runs_that_are_repeated_until_they_end_every_one_ends(
    make: write_cases.MakeCase, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    case = make(request, tmp_path, "events")
    waiting = ["a", "b"]
    planned: dict[str, Write] = {}
    failures = 0
    for _ in range(4):
        # Each plans before the other one has written: the one that plans last goes on.
        for name in waiting:
            planned[name] = Write(case.make_sink, case.options)
        for name in list(waiting):
            try:
                planned[name].write(range(5))
                planned[name].commit()
                waiting.remove(name)
            except OnceflowError:
                failures += 1
    assert (waiting, failures) == ([], 1)
    assert case.ids() == list(range(5))


def test_two_writes_without_a_token_at_once_are_told_to_take_names(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    case = write_cases.sqlite_case(request, tmp_path, "events").without_token()
    early = Write(case.make_sink, case.options)
    late = Write(case.make_sink, case.options)
    with pytest.raises(Fenced, match=f"(?s){WHO}.*No row of this write is in the target.*txnAppId"):
        early.write(range(5))
        early.commit()
    late.write(range(5, 9))
    late.commit()
    assert case.ids() == [5, 6, 7, 8]
    again = Write(case.make_sink, case.options)
    again.write(range(5))
    again.commit()
    assert case.ids() == list(range(9))
