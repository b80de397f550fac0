"""Queries of Spark over streams whose reader is a Python process of its own."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

STARVED = "Python worker failed to connect back"
"""The error of a query whose reader was not there after ten seconds."""
_STARTS_MAX = 6
_TIMEOUT_S = 300


def run_to_end(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Return the query that `start` starts, once it has ended.

    Spark gives the process of the reader ten seconds, which a machine under load may not keep. Such
    a query has read nothing, and the documents say to start it again.

    Raises:
        StreamingQueryException: The query failed for another reason.
    """
    for number in range(1, _STARTS_MAX + 1):
        query = start()
        try:
            assert query.awaitTermination(_TIMEOUT_S)
        except StreamingQueryException as error:
            if STARVED not in str(error) or number == _STARTS_MAX:
                raise
        else:
            return query
        finally:
            query.stop()
    raise AssertionError("the last start returns or raises")
