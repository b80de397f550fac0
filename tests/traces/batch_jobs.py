"""The small batches whose traces are recorded. Each runs in a directory, without Spark."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.spark_formats.batches import Driver, driver_of, killed_at
from tests.support.directory_sink import DirectorySink

from onceflow.core.errors import Fenced
from onceflow.sinks import SQLiteSink


def run_batches(directory: Path) -> None:
    """Write two batches. A task of the first is tried again, and Spark repeats that batch."""
    driver = driver_of(DirectorySink(str(directory / "out")), directory)
    plan = driver.plan(0)
    driver.task(plan, 0, [0])
    tried_again = driver.task(plan, 0, [0], task_attempt=1)
    driver.commit([tried_again, driver.task(plan, 1, [1])])
    driver.batch(0, [1], [0])
    driver.batch(1, [2], [3])


def run_killed_batches(directory: Path) -> None:
    """Die after the decision of a batch, and before that of the next batch, which is repeated."""
    driver = driver_of(DirectorySink(str(directory / "out")), directory)
    killed_at("logged", directory, partial(_write, driver, 0, [0]))
    killed_at("prepared", directory, partial(_write, driver, 1, [1]))
    driver.batch(1, [1])


def run_two_drivers_of_batches(directory: Path) -> None:
    """Plan a batch in two drivers. The first one is fenced."""
    sink = SQLiteSink(str(directory / "target.db"), table="rows", create=True)
    first = driver_of(sink, directory)
    second = replace(first, run="run-2")
    # Without a fingerprint a batch without rows is decided, too. No transaction refuses it.
    older, newer = first.plan(0, ""), second.plan(0, "")
    with suppress(Fenced):
        first.commit([first.task(older, 0, [])])
    second.commit([second.task(newer, 0, [0])])
    plan = second.plan(1, "")
    second.commit([second.task(plan, part, [part]) for part in (1, 2)])


def _write(driver: Driver, number: int, part: Iterable[int]) -> None:
    driver.batch(number, part)
