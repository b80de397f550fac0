"""The faults that tests inject: killed and paused processes, a slow, cut or silent network."""

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
