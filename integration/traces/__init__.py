"""Replays the traces of jobs (`onceflow.core.traces`) against the rules of the protocol."""
