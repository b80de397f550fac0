"""Schedules by which broken variants that are rarely caught were caught.

Tests try them first: the search takes a minute for some. After a change that draws other schedules
they are as good as any others; `script/simulate --mutants` tells how far the search goes now.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

CAUGHT_BY: Mapping[str, int] = MappingProxyType(
    {
        "deletes shared files unconfirmed": 1011,
        "recovery takes a failed listing for an empty one": 992,
        "waits for a barrier that was skipped": 970,
        "tells nobody that a checkpoint failed": 915,
        "takes a late word for the newest decision": 725,
        "forgets what it has not replayed": 537,
        "forgets retired sinks before the sweep": 505,
        "aligns aborted checkpoints anew": 341,
        "takes acks of older attempts": 219,
        "takes an unknown outcome for success": 154,
        "aligns aborted checkpoints": 129,
        "lets an older checkpoint be decided after a newer": 125,
        "recovery sees no older copy of a table": 112,
        "never forgets aborted checkpoints": 106,
        "recovery makes one version of several decisions": 95,
        "recovery knows the last checkpoint alone": 95,
        "recovery commits the newest first": 95,
        "makes one version of several decisions": 95,
        "forgets files that are decided and not committed": 95,
        "finishes before the last whole commit": 95,
        "commits the newest decision first": 95,
        "recovery takes a failed abort for done": 76,
        "takes late acks for the next checkpoint's": 70,
        "takes a lost transaction for committed": 58,
        "recovery commits nothing": 58,
        "recovery asks only for what is listed": 58,
        "recovery aborts decided transactions": 58,
        "takes its own record for another driver's": 54,
        "replays after what is new": 54,
        "waits for who has declined": 51,
        "takes a lost reply of an append for a refusal": 51,
        "takes what exists for its own record": 50,
        "takes a refused decision for one that stands": 49,
    }
)
"""By the variant's name."""
