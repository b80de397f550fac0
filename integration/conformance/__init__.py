"""The conformance kit, which tests a sink against its real target and a state backend."""

from onceflow.integration.conformance.clause import Clause, ClauseOutcome, ClauseResult, run_clauses
from onceflow.integration.conformance.state_suite import StateBackendConformance
from onceflow.integration.conformance.suite import SinkConformance
from onceflow.integration.conformance.target import NotTestable, SinkTarget, Violation

__all__ = [
    "Clause",
    "ClauseOutcome",
    "ClauseResult",
    "NotTestable",
    "SinkConformance",
    "SinkTarget",
    "StateBackendConformance",
    "Violation",
    "run_clauses",
]
