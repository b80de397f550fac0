"""Schedules by which broken variants that are rarely caught were caught.

Tests try them first: the search takes a minute for some. After a change that draws other schedules
they are as good as any others; `script/simulate --mutants` tells how far the search goes now.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

CAUGHT_BY: Mapping[str, int] = MappingProxyType(
    {
        "lets an older checkpoint be decided after a newer": 543,
        "tells nobody that a checkpoint failed": 715,
        "deletes shared files that are named again": 254,
        "takes a lost reply of an append for a refusal": 184,
        "takes acks of older attempts": 151,
        "deletes shared files under pending": 104,
        "confirms what is not committed": 91,
        "takes its own record for another driver's": 78,
        "takes a refused decision for one that stands": 78,
        "waits for a barrier that was skipped": 78,
        "takes an unknown append for a refused one": 76,
        "goes by the wall clock": 55,
        "never forgets aborted checkpoints": 52,
        "aligns aborted checkpoints": 47,
        "aligns aborted checkpoints anew": 47,
        "confirms what its state has not heard of": 28,
        "omits what is decided and not committed": 28,
        "accepts its own orphan record": 27,
        "deletes shared files unconfirmed": 289,
        "never deletes what was uploaded for a savepoint": 21,
        "appends without create-if-absent": 18,
        "takes what exists for its own record": 18,
        "never deletes files of failed checkpoints": 18,
    }
)
"""By the variant's name."""
