"""Schedules by which broken variants that are rarely caught were caught.

Tests try them first: the search takes a minute for some. After a change that draws other schedules
they are as good as any others; `script/simulate --mutants` tells how far the search goes now.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

CAUGHT_BY: Mapping[str, int] = MappingProxyType(
    {
        "tells by numbers what came after a savepoint": 2612,
        "waits for a barrier that was skipped": 1432,
        "deletes shared files unconfirmed": 1341,
        "forgets retired sinks before the sweep": 1322,
        "reads no barrier before it has replayed": 1063,
        "the last barrier waits for all rows": 785,
        "takes a late word for the newest decision": 725,
        "tells nobody that a checkpoint failed": 643,
        "deletes shared files under pending": 273,
        "deletes shared files that are named again": 254,
        "ends the job with rows in flight": 221,
        "takes acks of older attempts": 219,
        "prunes proofs without a floor": 218,
        "recovery takes a failed listing for an empty one": 154,
        "begins from any savepoint": 146,
        "lets an older checkpoint be decided after a newer": 125,
        "confirms what its state has not heard of": 122,
        "recovery sees no older copy of a table": 112,
        "aligns aborted checkpoints anew": 110,
        "aligns aborted checkpoints": 110,
        "never forgets aborted checkpoints": 106,
        "recovery makes one version of several decisions": 95,
        "recovery knows the last checkpoint alone": 95,
        "recovery commits the newest first": 95,
        "makes one version of several decisions": 95,
        "forgets files that are decided and not committed": 95,
        "finishes before the last whole commit": 95,
        "commits the newest decision first": 95,
        "accepts its own orphan record": 83,
        "takes late acks for the next checkpoint's": 82,
        "waits for who has declined": 78,
        "takes a refused decision for one that stands": 76,
        "starts without a sink that nobody settles": 61,
        "takes a lost transaction for committed": 58,
        "recovery commits nothing": 58,
        "recovery asks only for what is listed": 58,
        "recovery aborts decided transactions": 58,
        "tells sinks to commit at a savepoint": 56,
        "deletes a savepoint's files before it is written": 56,
        "never deletes what was uploaded for a savepoint": 56,
        "takes an unknown outcome for success": 55,
        "takes its own record for another driver's": 54,
        "takes a lost reply of an append for a refusal": 54,
        "takes what exists for its own record": 50,
        "commits a whole checkpoint before the decision": 40,
        "sweeps nothing after the first checkpoint": 35,
        "recovery takes a failed abort for done": 35,
        "records rows behind an aligned barrier": 33,
        "confirms what is not committed": 32,
        "never unblocks a channel": 29,
        "omits what is decided and not committed": 28,
        "forgets what it has not replayed": 27,
        "replays in another order": 27,
        "replays all rows in every subtask": 27,
        "gives credits before it has replayed": 27,
        "the target keeps no ordered proof": 23,
        "forgets files of aborted checkpoints": 21,
        "recovery commits no whole checkpoint": 19,
        "waits again for barriers that were read": 17,
        "overtakes what is broadcast": 17,
        "commits again what a decision lists again": 16,
        "recovery does not ask for the ordered proof": 16,
        "appends without create-if-absent": 14,
        "forgets retired sinks without asking them": 14,
    }
)
"""By the variant's name."""
