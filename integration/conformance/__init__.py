"""The conformance kit, which tests sinks and sources on real servers, and state backends."""

from onceflow.integration.conformance.clause import Clause, ClauseOutcome, ClauseResult, run_clauses
from onceflow.integration.conformance.source_input import SourceInput
from onceflow.integration.conformance.state_suite import StateBackendConformance
from onceflow.integration.conformance.suite import SinkConformance, SourceConformance
from onceflow.integration.conformance.target import NotTestable, SinkTarget, Violation

__all__ = [
    "Clause",
    "ClauseOutcome",
    "ClauseResult",
    "NotTestable",
    "SinkConformance",
    "SinkTarget",
    "SourceConformance",
    "SourceInput",
    "StateBackendConformance",
    "Violation",
    "run_clauses",
]
