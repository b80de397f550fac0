"""A run of a query that another run has overtaken never takes the sink id back, and ends by name.

Each run keeps what it keeps between batches, as the processes beside a driver of Spark do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from tests.spark_formats.batches import SCHEMA, Driver, driver_of

from onceflow.connectors.spark.batch.commits import BatchCommits
from onceflow.connectors.spark.streaming.checkpoint_location import QueryRuns
from onceflow.core.errors import Fenced
from onceflow.core.spi import Sink
from onceflow.sinks import FileSink, SQLiteSink


class Run:
    """One driver of the query, which keeps its connections from batch to batch."""

    def __init__(self, driver: Driver, name: str, stack: ExitStack) -> None:
        self.driver = replace(driver, target=replace(driver.target, driver=name), run=name)
        self.planning: BatchCommits = self.driver.commits()
        self.committing: BatchCommits = self.driver.commits()
        stack.callback(self.planning.close)
        stack.callback(self.committing.close)

    def begin(self, number: int) -> Callable[[], object]:
        """Plan a batch of one row, and run its task; return what commits it."""
        plan = self.planning.plan(SCHEMA, number, f"offsets of {number}")
        report = self.driver.task(plan, 0, [number])
        return lambda: self.committing.commit([report])


def sqlite_sink(directory: Path) -> Sink:
    return SQLiteSink(f"sqlite:///{directory / 'rows.db'}", table="events", create=True)


def file_sink(directory: Path) -> Sink:
    return FileSink(str(directory / "rows"))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("make_sink", [sqlite_sink, file_sink])
def test_run_that_was_overtaken_ends_at_its_next_batch_and_the_newer_one_goes_on(
    tmp_path: Path, stack: ExitStack, make_sink: Callable[[Path], Sink]
) -> None:
    driver = driver_of(make_sink(tmp_path), tmp_path)
    old = Run(driver, "old application", stack)
    old.begin(0)()
    # The old one stands still here. Its successor begins with the batch that is planned next.
    new = Run(driver, "new application", stack)
    commit = new.begin(1)
    with pytest.raises(Fenced, match="new application.* That one goes on"):
        old.begin(1)
    commit()
    new.begin(2)()
    # Started once more, it is the newer one.
    old.begin(3)()
    with pytest.raises(Fenced, match="old application"):
        new.begin(4)


@pytest.mark.parametrize("make_sink", [sqlite_sink, file_sink])
def test_run_whose_own_commit_process_has_settled_a_failed_batch_goes_on(
    tmp_path: Path, stack: ExitStack, make_sink: Callable[[Path], Sink]
) -> None:
    run = Run(driver_of(make_sink(tmp_path), tmp_path), "application", stack)
    run.begin(0)()
    run.begin(1)
    run.committing.abort(SCHEMA)
    run.begin(1)()
    run.begin(2)()


def test_a_failed_batch_of_an_overtaken_run_rolls_nothing_of_the_newer_run_back(
    tmp_path: Path, stack: ExitStack
) -> None:
    driver = driver_of(sqlite_sink(tmp_path), tmp_path)
    old = Run(driver, "old application", stack)
    old.begin(0)
    commit = Run(driver, "new application", stack).begin(0)
    with pytest.raises(Fenced, match="new application"):
        old.committing.abort(SCHEMA)
    assert commit() is not None


def test_driver_that_another_one_has_overtaken_is_refused_by_its_note_whatever_process_asks(
    tmp_path: Path,
) -> None:
    checkpoint = str(tmp_path / "query")
    QueryRuns(checkpoint, "old application").require_newest()
    QueryRuns(checkpoint, "new application").require_newest()
    with pytest.raises(Fenced, match="another run has started since, in new application"):
        QueryRuns(checkpoint, "old application").require_newest()
    QueryRuns(checkpoint, "new application").require_newest()
    # Started again, the old application is the newest one.
    QueryRuns(checkpoint, "old application").require_newest()
    with pytest.raises(Fenced, match="in old application"):
        QueryRuns(checkpoint, "new application").require_newest()
