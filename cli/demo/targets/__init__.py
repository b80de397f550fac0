"""Where the demo can write: a server each, how far it is, and who judges it."""

from onceflow.cli.demo.targets.starting import started_target
from onceflow.cli.demo.targets.target import Target

__all__ = ["Target", "started_target"]
