"""The input of a job, written while the job runs: the records of topics, or changes of a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from demo.targets import observe_committed_records
from tests.chaos.changes import INITIAL_ROWS, Changing, draw_changes
from tests.chaos.input_writer import Pace
from tests.chaos.job import JobSpec, group_of
from tests.chaos.producer import Producing
from tests.chaos.readers import read_rows
from tests.chaos.schedule import Schedule

_COPY_DEADLINE_S = 120.0
_LOOK_S = 0.2


class InputError(Exception):
    """Raised when a job does not begin with its input."""


def write_input(
    schedule: Schedule, spec: JobSpec, pace: Pace
) -> AbstractContextManager[Callable[[], bool]]:
    """Write the input in a context, which is a function that tells if the job committed all."""
    if schedule.graph == "changes":
        return _change_table(schedule, spec, pace)
    return _produce(schedule, spec, pace)


@contextmanager
def _produce(
    schedule: Schedule, spec: JobSpec, pace: Pace
) -> Generator[Callable[[], bool], None, None]:
    total = schedule.records * len(spec.topics)
    with ExitStack() as stack:
        committed = [
            stack.enter_context(
                observe_committed_records(
                    spec.bootstrap_servers, group_of(topic), topic, schedule.partitions
                )
            )
            for topic in spec.topics
        ]
        writer = stack.enter_context(Producing(schedule, spec.bootstrap_servers, spec.topics, pace))
        yield lambda: writer.is_done and sum(o.value for o in committed) >= total


@contextmanager
def _change_table(
    schedule: Schedule, spec: JobSpec, pace: Pace
) -> Generator[Callable[[], bool], None, None]:
    """Change the table once the job has copied its first rows."""
    changes = draw_changes(schedule)
    last, copy = changes[-1].record.id, spec.sinks[0]
    deadline = time.monotonic() + _COPY_DEADLINE_S
    while read_rows(copy, ("id",)).total() < INITIAL_ROWS:
        if time.monotonic() > deadline:
            raise InputError(f"the first rows were not copied in {_COPY_DEADLINE_S:g} s")
        time.sleep(_LOOK_S)
    with Changing(spec.source_url, changes, pace) as writer:
        yield lambda: writer.is_done and (last,) in read_rows(copy, ("id",))
