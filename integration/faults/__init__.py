"""Faults that tests inject: dead and frozen processes, a network that is slow, cut or silent."""

from onceflow.integration.faults.network import TcpProxy
from onceflow.integration.faults.processes import (
    is_alive,
    kill_process,
    kill_tree,
    pause_tree,
    process_tree,
    unpause_tree,
)

__all__ = [
    "TcpProxy",
    "is_alive",
    "kill_process",
    "kill_tree",
    "pause_tree",
    "process_tree",
    "unpause_tree",
]
