"""The judges of a run: each asks the target alone whether every payment is there once."""

from onceflow.integration.oracle.databases import verify
from onceflow.integration.oracle.topics import verify_topic
from onceflow.integration.oracle.verdict import NoVerdict, Verdict

__all__ = ["NoVerdict", "Verdict", "verify", "verify_topic"]
