"""The kit catches each source of the gallery, on the one clause that it breaks and on no other."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from tests.conformance.broken_outputs import OUTPUTS_GALLERY, BrokenOutputs
from tests.conformance.broken_sources import GALLERY, BrokenSource
from tests.conformance.reference_source import ReferenceInput, ReferenceReader
from tests.conformance.test_sources_conform import TwoOutputsInput

from onceflow.core.runtime.cluster.process_host import Link
from onceflow.core.spi import EndOfInput, Split
from onceflow.integration.conformance import (
    ClauseOutcome,
    SourceInput,
    run_clauses,
    source_harness,
    source_job,
)
from onceflow.integration.conformance.clause import Clause
from onceflow.integration.conformance.clauses import ending
from onceflow.integration.conformance.harness import Effort
from onceflow.integration.conformance.processes import ChildFailed, Processes
from onceflow.integration.conformance.source_catalog import SOURCE_CLAUSES
from onceflow.integration.conformance.source_job import SourceWork, count_files_rows
from onceflow.integration.conformance.whole_job import KillPlan


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait half a second for rows that never come."""
    monkeypatch.setattr(source_harness, "PATIENCE_S", 0.5)


@pytest.mark.parametrize("broken", GALLERY, ids=lambda source: source.__name__)
def test_broken_source_fails_on_the_clause_that_it_breaks(
    broken: type[BrokenSource],
    tmp_path: Path,
    onceflow_processes: Processes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ending, "PROMPT_S", 0.5)
    clauses = [clause for clause in SOURCE_CLAUSES if clause.id == broken.breaks]
    failed = _failed(broken, clauses, tmp_path, onceflow_processes)
    assert set(failed) == {broken.breaks}, failed


@pytest.mark.slow
@pytest.mark.parametrize("broken", GALLERY, ids=lambda source: source.__name__)
def test_broken_source_fails_on_no_other_clause(
    broken: type[BrokenSource], tmp_path: Path, onceflow_processes: Processes
) -> None:
    failed = _failed(broken, SOURCE_CLAUSES, tmp_path, onceflow_processes)
    assert set(failed) == {broken.breaks}, failed


@pytest.mark.parametrize("broken", OUTPUTS_GALLERY, ids=lambda source: source.__name__)
def test_broken_source_with_outputs_fails_on_the_clause_that_it_breaks(
    broken: type[BrokenOutputs], onceflow_processes: Processes
) -> None:
    clauses = [clause for clause in SOURCE_CLAUSES if clause.id == broken.breaks]
    failed = _list_failed(lambda: TwoOutputsInput(broken), clauses, onceflow_processes)
    assert set(failed) == {broken.breaks}, failed


@pytest.mark.slow
@pytest.mark.parametrize("broken", OUTPUTS_GALLERY, ids=lambda source: source.__name__)
def test_broken_source_with_outputs_fails_on_no_other_clause(
    broken: type[BrokenOutputs], onceflow_processes: Processes
) -> None:
    failed = _list_failed(lambda: TwoOutputsInput(broken), SOURCE_CLAUSES, onceflow_processes)
    assert set(failed) == {broken.breaks}, failed


def test_each_broken_source_breaks_another_clause() -> None:
    broken = [source.breaks for source in GALLERY]
    assert len(set(broken)) == len(broken) >= 6
    assert set(broken) <= {clause.id for clause in SOURCE_CLAUSES}


def test_a_reader_that_returns_no_rows_fails_where_snapshots_are_collected(
    tmp_path: Path, onceflow_processes: Processes
) -> None:
    """A clause that is skipped for that would hide the missing rows."""
    clauses = [clause for clause in SOURCE_CLAUSES if clause.id == "replay-from-each-position"]
    failed = _failed(_ReturnsNothing, clauses, tmp_path, onceflow_processes)
    assert "not returned" in failed["replay-from-each-position"]


class _ReadsNothing(ReferenceReader):
    def read_lines(self, split_id: str) -> list[int]:
        return []


class _ReturnsNothing(BrokenSource):
    breaks = "every-row-is-returned-once"
    reader_class = _ReadsNothing


def test_a_commit_that_does_not_return_fails_its_clause(
    tmp_path: Path, onceflow_processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_harness, "TIMEOUT_S", 0.2)
    name = "acknowledgement-keeps-later-rows"
    clauses = [clause for clause in SOURCE_CLAUSES if clause.id == name]
    failed = _failed(_CommitsForEver, clauses, tmp_path, onceflow_processes)
    assert "commit did not return" in failed[name]


class _WaitsInCommit(ReferenceReader):
    def commit(self, splits: Sequence[Split]) -> None:
        threading.Event().wait()


class _CommitsForEver(BrokenSource):
    breaks = "acknowledgement-keeps-later-rows"
    reader_class = _WaitsInCommit


def test_a_source_that_acknowledges_nothing_fails_where_the_input_counts_acknowledged_rows(
    tmp_path: Path, onceflow_processes: Processes
) -> None:
    name = "only-decided-rows-are-acknowledged"
    clauses = [clause for clause in SOURCE_CLAUSES if clause.id == name]
    failed = _failed(_AcknowledgesNothing, clauses, tmp_path, onceflow_processes)
    assert "count_acknowledged() returned 0" in failed[name]


class _IgnoresCommits(ReferenceReader):
    def commit(self, splits: Sequence[Split]) -> None:
        pass


class _AcknowledgesNothing(BrokenSource):
    breaks = "only-decided-rows-are-acknowledged"
    reader_class = _IgnoresCommits


def test_rows_after_the_last_one_fail_a_clause_of_a_waiting_poll(
    tmp_path: Path, onceflow_processes: Processes
) -> None:
    name = "wake-ends-a-waiting-poll"
    clauses = [clause for clause in SOURCE_CLAUSES if clause.id == name]
    failed = _failed(_ReturnsEmptyBatches, clauses, tmp_path, onceflow_processes)
    assert "after all rows returned" in failed[name]


class _ReturnsNoRowsAtOnce(ReferenceReader):
    def poll(self, timeout_s: float) -> pa.RecordBatch | EndOfInput | None:
        result = super().poll(min(timeout_s, 0.001))
        return pa.RecordBatch.from_pylist([], self.source.schema) if result is None else result


class _ReturnsEmptyBatches(BrokenSource):
    breaks = "poll-without-rows-returns-in-time"
    reader_class = _ReturnsNoRowsAtOnce


def test_a_job_of_a_bounded_source_that_does_not_end_fails_though_its_rows_are_visible(
    tmp_path: Path, onceflow_processes: Processes
) -> None:
    reference = ReferenceInput(tmp_path / "rows", _EndsNever)
    (tmp_path / "rows").mkdir()
    rows = sum(map(len, reference.fill(4).values()))
    storage, target = str(tmp_path / "storage"), str(tmp_path / "target")
    work = SourceWork(reference.source_with_end(), storage, target, rows, rows)
    attempt = onceflow_processes.start(_run_impatiently, work, KillPlan(1))
    with pytest.raises(ChildFailed, match="TimeoutError"):
        attempt.result()
    assert count_files_rows(work.source, target) == rows


def _run_impatiently(link: Link, work: SourceWork, plan: KillPlan) -> bool:
    source_job.TIMEOUT_S = 16.0  # type: ignore[attr-defined]
    return source_job.run_source_attempt(link, work, plan)


class _HasNoEnd(ReferenceReader):
    def end(self) -> EndOfInput | None:
        self.wait(0.01)
        return None


class _EndsNever(BrokenSource):
    breaks = "bounded-end"
    reader_class = _HasNoEnd


def _turn(keys: Sequence[object]) -> Sequence[object]:
    return keys[::-1]


def _replace_first(keys: Sequence[object]) -> Sequence[object]:
    return ["another", *keys[1:]]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (_turn, "came in the order"),
        (_replace_first, "('orders', 0), ('orders', 6)"),
    ],
    ids=["another order", "another row"],
)
def test_rows_are_compared_output_by_output(
    keys: Callable[[Sequence[object]], Sequence[object]],
    reason: str,
    onceflow_processes: Processes,
) -> None:
    class Changed(TwoOutputsInput):
        def keys(self, batch: pa.RecordBatch) -> Sequence[object]:
            return keys(super().keys(batch))

    clauses = [clause for clause in SOURCE_CLAUSES if clause.id == "every-row-is-returned-once"]
    (result,) = run_clauses(Changed, clauses, onceflow_processes, Effort(rounds=2))
    assert reason in result.reason


def _failed(
    broken: type[BrokenSource], clauses: Sequence[Clause], directory: Path, processes: Processes
) -> dict[str, str]:
    return _list_failed(_inputs(directory, broken), clauses, processes)


def _list_failed(
    make_input: Callable[[], SourceInput], clauses: Sequence[Clause], processes: Processes
) -> dict[str, str]:
    results = run_clauses(make_input, clauses, processes, Effort(rounds=2))
    return {
        result.clause.id: result.reason
        for result in results
        if result.outcome is ClauseOutcome.FAILED
    }


def _inputs(directory: Path, broken: type[BrokenSource]) -> Callable[[], ReferenceInput]:
    numbers = itertools.count()

    def make() -> ReferenceInput:
        own = directory / str(next(numbers))
        own.mkdir()
        return ReferenceInput(own, broken)

    return make
