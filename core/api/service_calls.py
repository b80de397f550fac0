"""The operators of a stream that call services."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from onceflow.core.argument_types import check_arguments
from onceflow.core.arrow.schema_text import SchemaLike, schema_of
from onceflow.core.errors import ConfigError
from onceflow.core.plan.async_functions import (
    Call,
    CallRetries,
    check_idempotency_key,
    limit_calls,
    require_coroutine,
)
from onceflow.core.plan.graph import Feed, GraphBuilder
from onceflow.core.plan.work import MapAsync
from onceflow.core.spi import OnBadRow, Sink
from onceflow.core.spi.bad_rows import bad_row_policy

StreamT = TypeVar("StreamT")


class ServiceCalls(Generic[StreamT]):
    """The methods of a stream that call services. A part of `Stream`."""

    def __init__(self, graph: GraphBuilder, *feeds: Feed) -> None:
        """`feeds` must have the same schema."""
        self._graph = graph
        self._feeds = feeds

    @check_arguments
    def async_map(
        self,
        function: Call,
        *,
        uid: str,
        schema: SchemaLike | None = None,
        capacity: int = 100,
        timeout: float | str = 60.0,
        retry: CallRetries | None = None,
        ordered: bool = True,
        rate_limit: float | None = None,
        idempotency_key: str | Sequence[str] = (),
        on_bad_row: OnBadRow | str = OnBadRow.FAIL,
        dead_letters: Sink | None = None,
    ) -> StreamT:
        """Call a service for each record by the coroutine function `function`.

        `function` returns a record, several records, or None for no output. `schema` is the schema
        of the results (default: unchanged). In each subtask, up to `capacity` calls run at once,
        and at most `rate_limit` begin in a second. A try may take `timeout`. `retry` repeats failed
        tries. Results are emitted in the order of the records, or as they come if `ordered` is
        False. With `idempotency_key`, columns that identify a record, the function gets a text that
        is the same in each call for this record. If the service has refused a record in all tries,
        the job fails, or the record is dropped or written to `dead_letters`, as in `write`. A
        refusal is any error but a network error, a timeout, and an answer with the HTTP status 408,
        425, 429 or 500 to 599. These fail the attempt, as 401 and 407 do, and leave out no record.

        Records in flight are part of each checkpoint. The service may be called more than once for
        a record; its results are emitted exactly once.

        Raises:
            ConfigError: `function` is no coroutine function, or an argument is invalid.
        """
        require_coroutine(function, "async_map")
        key = (idempotency_key,) if isinstance(idempotency_key, str) else tuple(idempotency_key)
        check_idempotency_key(key, self._feeds[0].schema)
        work = MapAsync(
            function,
            limit_calls("async_map", capacity, timeout, retry, ordered, rate_limit),
            idempotency_key=key,
            on_bad_row=bad_row_policy(on_bad_row, dead_letters is not None),
        )
        return self._add_calls(work, uid, schema, dead_letters)

    @check_arguments
    def async_map_batches(
        self,
        function: Call,
        *,
        uid: str,
        schema: SchemaLike | None = None,
        rows_max: int = 100,
        capacity: int = 10,
        timeout: float | str = 60.0,
        retry: CallRetries | None = None,
        ordered: bool = True,
        rate_limit: float | None = None,
        on_bad_row: OnBadRow | str = OnBadRow.FAIL,
        dead_letters: Sink | None = None,
    ) -> StreamT:
        """Call a service for up to `rows_max` records at once, as Arrow batches.

        Works like `async_map`. The grouping of records into batches is arbitrary.

        Raises:
            ConfigError: `function` is no coroutine function, or an argument is invalid.
        """
        require_coroutine(function, "async_map_batches")
        if rows_max < 1:
            raise ConfigError(f"async_map_batches(rows_max={rows_max}): give 1 record or more")
        work = MapAsync(
            function,
            limit_calls("async_map_batches", capacity, timeout, retry, ordered, rate_limit),
            rows_max=rows_max,
            on_bad_row=bad_row_policy(on_bad_row, dead_letters is not None),
        )
        return self._add_calls(work, uid, schema, dead_letters)

    def _add_calls(
        self, work: MapAsync, uid: str, schema: SchemaLike | None, dead_letters: Sink | None
    ) -> StreamT:
        made = self._feeds[0].schema if schema is None else schema_of(schema)
        operator = self._graph.add(work, self._feeds, uid=uid, schema=made)
        if dead_letters is not None:
            self._graph.add_dead_letters(operator, dead_letters)
        return self._make_stream(Feed(operator.uid, made))

    def _make_stream(self, feed: Feed) -> StreamT:
        raise NotImplementedError
