"""The input of a job: topics or a table, which are written while the job runs."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from types import TracebackType

from demo.targets import observe_committed_records
from tests.chaos.changes import INITIAL_ROWS, Changing, draw_changes
from tests.chaos.job import JobSpec, group_of
from tests.chaos.producer import Pace, Producing
from tests.chaos.readers import count_rows, holds_id
from tests.chaos.schedule import Schedule
from typing_extensions import Self, override

_COPY_DEADLINE_S = 120.0
_LOOK_S = 0.2


class InputError(Exception):
    """Raised when a job does not begin with its input."""


class Input(ABC):
    """An input that is being written. A context manager; entering begins."""

    def __init__(self, schedule: Schedule) -> None:
        self.pace = Pace(schedule.producing_s)
        self._stack = ExitStack()

    @abstractmethod
    def begin(self, stack: ExitStack) -> None:
        """Begin to write. `stack` ends what is begun."""

    @abstractmethod
    def is_committed(self) -> bool:
        """Return whether all of it is written, and the job has committed it."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.begin(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()


class Topics(Input):
    """The records of topics."""

    def __init__(self, schedule: Schedule, spec: JobSpec) -> None:
        """Describe it."""
        super().__init__(schedule)
        self._spec = spec
        self._partitions = schedule.partitions
        self._total = schedule.records * len(spec.topics)
        self._producing = Producing(schedule, spec.bootstrap_servers, spec.topics, self.pace)

    @override
    def begin(self, stack: ExitStack) -> None:
        servers, partitions = self._spec.bootstrap_servers, self._partitions
        self._committed = [
            stack.enter_context(
                observe_committed_records(servers, group_of(topic), topic, partitions)
            )
            for topic in self._spec.topics
        ]
        stack.enter_context(self._producing)

    @override
    def is_committed(self) -> bool:
        return self._producing.is_done and sum(o.value for o in self._committed) >= self._total


class Table(Input):
    """The changes of a table. The job has copied its first rows when the changes begin."""

    def __init__(self, schedule: Schedule, spec: JobSpec) -> None:
        """Describe it."""
        super().__init__(schedule)
        self._copy = spec.sinks[0]
        self._changes = draw_changes(schedule)
        self._changing = Changing(spec.source_url, self._changes, self.pace)
        self._look_at = 0.0

    @override
    def begin(self, stack: ExitStack) -> None:
        deadline = time.monotonic() + _COPY_DEADLINE_S
        while count_rows(self._copy) < INITIAL_ROWS:
            if time.monotonic() > deadline:
                raise InputError(f"the first rows were not copied in {_COPY_DEADLINE_S:g} s")
            time.sleep(_LOOK_S)
        stack.enter_context(self._changing)

    @override
    def is_committed(self) -> bool:
        if not self._changing.is_done or time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + _LOOK_S
        return holds_id(self._copy, self._changes[-1].record.id)


def open_input(schedule: Schedule, spec: JobSpec) -> Input:
    """Return the input of the job."""
    return Table(schedule, spec) if schedule.graph == "changes" else Topics(schedule, spec)
