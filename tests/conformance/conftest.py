"""Of the examples' sinks the default run tries the clauses that take no time, and one soak."""

from __future__ import annotations

import pytest

from onceflow.integration.conformance.clause import Clause
from onceflow.integration.conformance.clauses import batching, killing, overtaking, running

EXAMPLES = {"TestDeltaSink", "TestHttpSink", "TestOwnSink", "TestRedisSink"}
LONG = {
    clause.id
    for clause in (*killing.CLAUSES, *overtaking.CLAUSES, *running.CLAUSES, *batching.CLAUSES)
    if clause not in (running.job_killed_again_and_again, batching.batch_is_visible_whole)
}
"""They kill or hold up a process at every line, or a job at every step."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        callspec, test = getattr(item, "callspec", None), item.getparent(pytest.Class)
        if callspec is None or test is None or test.name not in EXAMPLES:
            continue
        clause = callspec.params.get("clause")
        if isinstance(clause, Clause) and clause.id in LONG:
            item.add_marker(pytest.mark.slow)
