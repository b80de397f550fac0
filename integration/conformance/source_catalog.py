"""The catalog of the clauses of sources, in run order: prerequisites come first."""

from __future__ import annotations

from onceflow.integration.conformance.clause import Clause
from onceflow.integration.conformance.clauses import ending, growing, reading, source_jobs

SOURCE_CLAUSES: tuple[Clause, ...] = (
    *reading.CLAUSES,
    *ending.CLAUSES,
    *growing.CLAUSES,
    *source_jobs.CLAUSES,
)
