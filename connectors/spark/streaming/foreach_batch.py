"""`foreachBatch`, exactly once: the DataFrames that a user's function makes, under one decision.

It covers what a format cannot do: update mode, upserts (the rows of a key must be in one task, so
they are repartitioned), several tables, and a separate table for bad rows.
"""

from __future__ import annotations

import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import pyarrow as pa

from onceflow.connectors.spark.arrow_rows import arrow_schema
from onceflow.connectors.spark.batch.commits import (
    BatchCommits,
    BatchPlan,
    BatchTarget,
    TaskReport,
)
from onceflow.connectors.spark.batch.decision_keepers import resolve_keeper
from onceflow.connectors.spark.batch.identity import staging_area, stream_target
from onceflow.connectors.spark.batch.sink_group import SinkGroup, group_schema
from onceflow.connectors.spark.batch.task_writer import write_task
from onceflow.connectors.spark.packages import Shipped
from onceflow.connectors.spark.streaming.checkpoint_location import CheckpointLocation
from onceflow.connectors.spark.streaming.noted_sinks import FirstSink, NotedSinks
from onceflow.connectors.spark.streaming.writer import this_task
from onceflow.core.errors import ConfigError
from onceflow.core.imports import require_package
from onceflow.core.runtime.cluster.spark import use_own_interpreter
from onceflow.core.spi import CommittedBy, OnBadRow, Sink
from onceflow.core.spi.dead_letters import DEAD_LETTERS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Rows: TypeAlias = "Callable[[DataFrame, int], DataFrame | Mapping[str, DataFrame]]"

_QUERY_ID = "sql.streaming.queryId"
_ROWS = "rows"
_LETTERS = "dead_letters"
_FUNCTION = "the function that was passed to foreach_batch"


def foreach_batch(
    sink: Sink | Mapping[str, Sink],
    rows: Rows | None = None,
    *,
    checkpoint_location: str,
    dead_letters: Sink | None = None,
    sink_id: str = "",
) -> Callable[[DataFrame, int], None]:
    """Return a function for `writeStream.foreachBatch` that writes each batch exactly once.

    Args:
        sink: The sink, or a mapping from names to several sinks. One decision makes all rows of a
            batch visible in all sinks. If the first sink is a database, it keeps these decisions.
            So the same sink must be the first one in every later run of the query; another first
            sink raises ConfigError.
        rows: A function of the batch and its number that returns the DataFrame to write. With
            several sinks, it returns a mapping from their names to DataFrames. None: write the
            batch itself, to a single sink.
        checkpoint_location: The value of the query's option checkpointLocation.
        dead_letters: A sink for rows that cannot be written, with the schema `DEAD_LETTERS`. Each
            row arrives exactly once, together with the batch. None: such a row stops the query.
        sink_id: The name under which rows are prepared. "": a name made from the location.

    If a sink upserts or deletes rows, the rows are repartitioned by its key, so that one task
    writes all rows of a key. Their order within a batch is not kept, so a batch should have at
    most one row for each key. With several sinks, the batch is persisted while it is written.

    The function runs on the driver, and its tasks on the executors. If a process is killed, either
    no row of the batch is visible, or all rows are visible after the query runs again.

    Raises:
        ConfigError: No sink is given, or several sinks are given without `rows`.
        MissingExtra: pandas is not installed on the driver.
    """
    require_package("pandas")  # which Spark asks for before it passes a task its rows
    sinks = dict(sink) if isinstance(sink, Mapping) else {_ROWS: sink}
    if not sinks or _LETTERS in sinks:
        raise ConfigError(
            f"foreach_batch needs at least one sink. No sink may be named {_LETTERS!r}: this"
            " name stands for dead_letters="
        )
    for name, named_sink in sinks.items():
        if named_sink.committed_by is CommittedBy.DRIVER:
            raise ConfigError(
                f"{type(named_sink).__name__} ({name}) commits on the driver, once for each"
                " checkpoint, which foreach_batch does not support. Make it a format instead:"
                " register connectors.data_source(format, function), and write by"
                " writeStream.format(format)"
            )
    named = rows if isinstance(sink, Mapping) else _under_one_name(rows)
    if named is None:
        raise ConfigError(
            "foreach_batch with several sinks needs rows=, a function that returns a DataFrame for"
            f" each of {', '.join(sinks)}"
        )
    return _ForeachBatch(
        sinks, named, CheckpointLocation(checkpoint_location), dead_letters, sink_id
    )


def _query_id(batch: DataFrame) -> str | None:
    """Return the id of the query that runs `batch`; None if unknown, as with Spark Connect."""
    session: Any = batch.sparkSession
    if not hasattr(session, "_jsparkSession"):
        return None
    query_id: str | None = session.sparkContext.getLocalProperty(_QUERY_ID)
    return query_id or None


def _frame(made: object, batch_id: int, where: str) -> DataFrame:
    """Return `made`, the result of `rows`, if it is a DataFrame.

    Raises:
        ConfigError: It is not; for example None, if the function writes by itself as in Spark's own
            `foreachBatch`.
    """
    from pyspark.sql import DataFrame

    if isinstance(made, DataFrame):
        return made
    raise ConfigError(
        f"batch {batch_id}: {_FUNCTION} returned {_describe(made)}{where}, but must return the"
        " DataFrame to write: `return batch.select(…)`, without `.write`. Rows that the"
        " function writes itself are not part of the batch's decision"
    )


def _describe(made: object) -> str:
    """Describe the result of a function that did not return a DataFrame."""
    if isinstance(made, Mapping):
        names = cast("Mapping[object, object]", made)
        return f"DataFrames for {', '.join(map(str, names)) or 'nothing'}"
    return "None" if made is None else f"a {type(made).__name__}"


def _under_one_name(rows: Rows | None) -> Rows:
    def name_sink(batch: DataFrame, batch_id: int) -> Mapping[str, DataFrame]:
        made = batch if rows is None else rows(batch, batch_id)
        if isinstance(made, Mapping):
            raise ConfigError(
                f"{_FUNCTION} returned {_describe(made)}, but foreach_batch has one sink without"
                " a name: pass it a mapping of sinks with these names"
            )
        return {_ROWS: made}

    return name_sink


@dataclass
class _ForeachBatch:
    """The function for Spark, with connections that are kept from batch to batch.

    One thread uses it.

    It pickles without connections: with Spark Connect it runs in a process of the server.
    """

    sinks: Mapping[str, Sink]
    rows: Rows
    location: CheckpointLocation
    dead_letters: Sink | None
    sink_id: str
    _commits: BatchCommits | None = field(default=None, repr=False)
    _noted_sinks: NotedSinks | None = field(default=None, repr=False)
    _noted: bool = field(default=False, repr=False)
    """True if the checkpoint has the name of the first sink."""

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_commits": None, "_noted_sinks": None}

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        planned = self.location.read_planned_batch()
        # The checkpoint must belong to the calling query, because its offsets are the fingerprint.
        if planned.number != batch_id:
            raise ConfigError(
                f"batch {batch_id} is being written, but {self.location} is planning batch"
                f" {planned.number}: checkpoint_location= belongs to another query"
            )
        if hasattr(batch.sparkSession, "_jsparkSession"):
            use_own_interpreter(batch.sparkSession.sparkContext)
        query_id = _query_id(batch)
        if query_id is not None and query_id != planned.query_id:
            raise ConfigError(
                f"batch {batch_id} belongs to query {query_id}, but {self.location} is the"
                f" checkpoint of query {planned.query_id}. Give checkpoint_location= the running"
                " query's option checkpointLocation. Nothing was written"
            )
        several = len(self.sinks) > 1
        if several:
            # Otherwise Spark would read the sources once for each sink, and might get different
            # rows.
            batch.persist()
        try:
            frames = self._frames(batch, batch_id)
            self._write(frames, batch_id, planned.fingerprint)
        finally:
            if several:
                batch.unpersist()

    def _frames(self, batch: DataFrame, batch_id: int) -> Mapping[str, DataFrame]:
        made = self.rows(batch, batch_id)
        if not isinstance(made, Mapping) or made.keys() != self.sinks.keys():
            raise ConfigError(
                f"batch {batch_id}: {_FUNCTION} returned {_describe(made)}, but must return a"
                f" mapping with a DataFrame for each of {', '.join(self.sinks)}; an empty one"
                " adds no rows"
            )
        several = len(self.sinks) > 1
        return {
            name: _frame(frame, batch_id, f" for {name}" if several else "")
            for name, frame in made.items()
        }

    def _write(self, frames: Mapping[str, DataFrame], batch_id: int, fingerprint: str) -> None:
        schemas = {name: arrow_schema(frame.schema) for name, frame in frames.items()}
        if self.dead_letters is not None:
            schemas[_LETTERS] = DEAD_LETTERS
        schema = group_schema(schemas)
        commits, plan = self._plan(schema, batch_id, fingerprint)
        try:
            reports = [
                report
                for index, (name, frame) in enumerate(frames.items())
                for report in _write(frame, _Task(self._part(plan, name, index)))
            ]
            self._commit(commits, reports)
        except Exception:
            # Abort now rather than with the next batch: prepared transactions of tasks hold locks
            # until then.
            commits.abort(schema, plan.attempt)
            raise

    def _plan(
        self, schema: pa.Schema, batch_id: int, fingerprint: str
    ) -> tuple[BatchCommits, BatchPlan]:
        """Return the object that commits or aborts the batch, and the plan for its tasks."""
        if self._commits is None:
            self._commits = self._connect()
            # A function is not notified when its query ends.
            weakref.finalize(self, self._commits.close)
        plan = self._commits.plan(schema, batch_id, fingerprint)
        if not self._noted:
            # Do this after the claim, which confirms this sink, and before anything is decided.
            self._first.note()
            self._noted = True
        return self._commits, plan

    def _commit(self, commits: BatchCommits, reports: Sequence[TaskReport]) -> None:
        assert self._noted_sinks is not None, (
            "only a plan connects to the target and tells tasks what to write"
        )
        self._noted_sinks.note(reports)
        commits.commit(reports)

    def _connect(self) -> BatchCommits:
        parts = dict(self.sinks)
        if self.dead_letters is not None:
            parts[_LETTERS] = self.dead_letters
        group = SinkGroup(parts, partial(staging_area, f"{self.location.url}/onceflow"))
        options = {"sinkid": self.sink_id} if self.sink_id else {}
        named = stream_target(lambda _: group, options, self.location)
        target, decisions = resolve_keeper(named)
        noted_sinks = NotedSinks(self.location.url, target)
        try:
            # Check this before the first claim: another first sink would keep its decisions
            # elsewhere, and would not know the earlier ones.
            self._first.require(decisions)
            noted_sinks.require()
        except BaseException:
            decisions.close()
            raise
        self._noted_sinks = noted_sinks
        return BatchCommits(target, decisions)

    @property
    def _first(self) -> FirstSink:
        return FirstSink(f"{self.location.url}/onceflow", next(iter(self.sinks)))

    def _part(self, plan: BatchPlan, name: str, index: int) -> BatchPlan:
        """Return the plan for the tasks of the sink `name`, whose index is `index`."""
        group = plan.target.sink
        assert isinstance(group, SinkGroup)
        return replace(
            plan,
            target=self._target(plan, group, name),
            dead_letters=self._target(plan, group, _LETTERS) if self.dead_letters else None,
            write=index,
            writes=len(self.sinks),
        )

    def _target(self, plan: BatchPlan, group: SinkGroup, name: str) -> BatchTarget:
        sink_id = group.part_id(plan.target.sink_id, name)
        return replace(
            plan.target,
            sink=group.parts[name],
            sink_id=sink_id,
            staging=group.staging(sink_id),
            on_bad_row=OnBadRow.DEAD_LETTER if self.dead_letters else OnBadRow.FAIL,
        )


class _Task(Shipped):
    """The function that runs in each task of one write of a batch."""

    def __init__(self, plan: BatchPlan) -> None:
        self.plan = plan

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the rows of one partition. Yield the report as the only row."""
        task = this_task()
        # With Spark Connect, tasks do not know their batch. The function has checked it.
        batch = self.plan.batch.number if task.batch is None else task.batch
        report = write_task(self.plan, replace(task, batch=batch), batches)
        # mapInArrow is the only way back from a task: the report travels as its only row.
        yield pa.record_batch([pa.array([pickle.dumps(report)], pa.binary())], names=["report"])


def _write(frame: DataFrame, task: _Task) -> list[TaskReport]:
    """Run the tasks, which pre-commit their rows, and return their reports."""
    key = task.plan.target.sink.routing_key()
    if key:
        frame = frame.repartition(*key)

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return task.run(batches)

    with warnings.catch_warnings():
        # These warnings concern a pandas that is newer than Spark's. It is not used here.
        warnings.simplefilter("ignore", FutureWarning)
        written = frame.mapInArrow(write, "report binary")
    rows = written.collect()
    return [pickle.loads(row["report"]) for row in rows]  # noqa: S301 - pickled by our tasks
