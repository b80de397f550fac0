"""The kit catches each sink of the gallery, on the one clause that it breaks and on no other."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.conformance import broken_committers, broken_latecomers, reference_sink
from tests.conformance.broken_sink import BrokenSink
from tests.conformance.broken_sinks import GALLERY

from onceflow.core.errors import BadRow
from onceflow.core.protocol.committables import CommitOutcome
from onceflow.integration.conformance import ClauseOutcome, run_clauses
from onceflow.integration.conformance.clause import Clause
from onceflow.integration.conformance.clause_catalog import CLAUSES
from onceflow.integration.conformance.harness import Effort
from onceflow.integration.conformance.processes import Processes


@pytest.mark.parametrize(
    "broken",
    # That one is tried below, and takes a clause's whole patience.
    [one for one in GALLERY if one is not broken_latecomers.IsNeverReady],
    ids=lambda sink: sink.__name__,
)
def test_broken_sink_fails_on_the_clause_that_it_breaks(
    broken: type[BrokenSink], tmp_path: Path, onceflow_processes: Processes
) -> None:
    failed = _failed_in_the_end(broken, tmp_path, onceflow_processes)
    assert set(failed) == {broken.breaks}, failed


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (broken_committers.ProvesInAnotherTransaction, "commit was killed right before"),
        (broken_latecomers.RemembersPrunedProofsInMemory, "after a commit that was held up"),
    ],
)
def test_a_sink_that_fails_at_a_line_is_told_the_file_the_line_and_the_rule(
    broken: type[BrokenSink], what: str, tmp_path: Path, onceflow_processes: Processes
) -> None:
    (reason,) = _failed_in_the_end(broken, tmp_path, onceflow_processes).values()
    assert reason.startswith(what), reason
    assert " Rule: " in reason
    match = re.search(r"right before (\S+\.py):(\d+) in (\w+) `(.+?)`[;.]", reason)
    assert match, reason
    text = Path(match[1]).read_text().splitlines()[int(match[2]) - 1]
    assert text.strip() == match[4]


class _ClientError(Exception):
    """An error class of a client's own."""


class _RefusingWriter(reference_sink.ReferenceWriter):
    def require_good(self) -> None:
        try:
            super().require_good()
        except BadRow:
            raise _ClientError("400: the id is there already") from None


class _RefusingCommitter(reference_sink.ReferenceCommitter):
    def refused(self, why: str) -> CommitOutcome:
        raise _ClientError(f"400: {why}")


class _SinkWithErrorsOfItsOwn(reference_sink.ReferenceSink):
    writer_class = _RefusingWriter
    committer_class = _RefusingCommitter


def test_sink_that_refuses_by_an_error_class_of_its_own_passes(
    tmp_path: Path, onceflow_processes: Processes
) -> None:
    about = ("bad", "refused")
    clauses = [one for one in CLAUSES if any(word in one.id for word in about)]
    assert len(clauses) >= 5
    targets = _targets(tmp_path, _SinkWithErrorsOfItsOwn)
    results = list(run_clauses(targets, clauses, onceflow_processes, Effort(rounds=2)))
    outcomes = {result.clause.id: (result.outcome, result.reason) for result in results}
    assert outcomes == {clause.id: (ClauseOutcome.PASSED, "") for clause in clauses}


@pytest.mark.slow
@pytest.mark.parametrize("broken", GALLERY, ids=lambda sink: sink.__name__)
def test_broken_sink_fails_on_no_other_clause(
    broken: type[BrokenSink], tmp_path: Path, onceflow_processes: Processes
) -> None:
    failed = _failed(broken, CLAUSES, tmp_path, onceflow_processes)
    assert set(failed) == {broken.breaks}, failed


@pytest.mark.servers
def test_sink_that_always_answers_later_costs_seconds_and_is_quoted(
    tmp_path: Path, onceflow_processes: Processes
) -> None:
    began = time.monotonic()
    failed = _failed(broken_latecomers.IsNeverReady, CLAUSES, tmp_path, onceflow_processes)
    (reason,) = failed.values()
    assert "the sink kept answering RetryLater(reason='the target is busy'" in reason
    assert time.monotonic() - began < 120


def test_gallery_is_large_and_breaks_many_clauses() -> None:
    assert len(GALLERY) >= 12
    assert {sink.breaks for sink in GALLERY} <= {clause.id for clause in CLAUSES}
    assert len({sink.breaks for sink in GALLERY}) >= 12


def _failed_in_the_end(
    broken: type[BrokenSink], directory: Path, processes: Processes
) -> dict[str, str]:
    """Return what `_failed` does for the clause that is broken, tried up to five times.

    On a loaded machine a commit that is to overtake another may come too late.
    """
    tried = [one for one in CLAUSES if one.id == broken.breaks]
    for number in map(str, range(5)):
        (directory / number).mkdir()
        if failed := _failed(broken, tried, directory / number, processes):
            return failed
    return {}


def _failed(
    broken: type[BrokenSink], clauses: Sequence[Clause], directory: Path, processes: Processes
) -> dict[str, str]:
    effort = Effort(rounds=broken.rounds)
    results = run_clauses(_targets(directory, broken), clauses, processes, effort)
    return {
        result.clause.id: result.reason
        for result in results
        if result.outcome is ClauseOutcome.FAILED
    }


def _targets(
    directory: Path, broken: type[reference_sink.ReferenceSink]
) -> Callable[[], reference_sink.ReferenceTarget]:
    numbers = itertools.count()

    def make() -> reference_sink.ReferenceTarget:
        own = directory / str(next(numbers))
        own.mkdir()
        return reference_sink.ReferenceTarget(own, broken)

    return make
