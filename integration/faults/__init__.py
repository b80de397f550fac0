"""Faults that tests inject: dead and frozen processes, a network that is slow, cut or silent."""

from onceflow.integration.faults.network import TcpProxy
from onceflow.integration.faults.processes import (
    children_of,
    is_alive,
    is_paused,
    kill_process,
    kill_session,
    kill_tree,
    parent_of,
    pause_tree,
    process_tree,
    session_members,
    unpause_tree,
)

__all__ = [
    "TcpProxy",
    "children_of",
    "is_alive",
    "is_paused",
    "kill_process",
    "kill_session",
    "kill_tree",
    "parent_of",
    "pause_tree",
    "process_tree",
    "session_members",
    "unpause_tree",
]
