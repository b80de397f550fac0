"""Who owns what after a start or a rescale: key groups, splits and operator list state.

    key group in 0 .. max_parallelism - 1;  owner_of(g) == i  <=>  g in key_group_range(i)
    1 <= parallelism <= max_parallelism <= 32768

Every assignment is a function of its arguments alone, so all processes agree without talking.
Source: Flink's `KeyGroupRangeAssignment` and `RoundRobinOperatorStateRepartitioner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from onceflow.core.protocol.ids import PARALLELISM_MAX

KEY_GROUPS_DEFAULT_MIN = 128

_Item = TypeVar("_Item")


def key_group_range(max_parallelism: int, parallelism: int, index: int) -> range:
    """Return the contiguous key groups of subtask `index`; never empty."""
    _check(max_parallelism, parallelism)
    if not 0 <= index < parallelism:
        raise ValueError(f"subtask index {index} is not in 0..{parallelism - 1}")
    first = -(-index * max_parallelism // parallelism)
    end = -(-(index + 1) * max_parallelism // parallelism)
    return range(first, end)


def owner_of(key_group: int, max_parallelism: int, parallelism: int) -> int:
    """Return the index of the subtask that owns `key_group`."""
    _check(max_parallelism, parallelism)
    if not 0 <= key_group < max_parallelism:
        raise ValueError(f"key group {key_group} is not in 0..{max_parallelism - 1}")
    return key_group * parallelism // max_parallelism


def default_max_parallelism(parallelism: int) -> int:
    """Return the power of two at or above 1.5 x `parallelism`, within 128 and 32768."""
    if not 1 <= parallelism <= PARALLELISM_MAX:
        raise ValueError(f"parallelism={parallelism} must be 1..{PARALLELISM_MAX}")
    wanted = parallelism + (parallelism + 1) // 2
    return min(max(1 << (wanted - 1).bit_length(), KEY_GROUPS_DEFAULT_MIN), PARALLELISM_MAX)


def assign_splits(split_ids: Sequence[str], parallelism: int) -> tuple[tuple[str, ...], ...]:
    """Return each subtask's split ids: sorted, dealt out in turn, loads differing by one at most.

    Raises:
        ValueError: An id comes twice; two readers of one split would double its records.
    """
    if len(set(split_ids)) != len(split_ids):
        twice = sorted({split for split in split_ids if split_ids.count(split) > 1})
        raise ValueError(f"splits {', '.join(twice)} come twice")
    return redistribute_list([sorted(split_ids)], parallelism)


def redistribute_list(
    parts: Sequence[Sequence[_Item]], parallelism: int
) -> tuple[tuple[_Item, ...], ...]:
    """Return list state dealt out anew: every item once, loads differing by one at most.

    `parts` are the items of each old subtask, by index.
    """
    if parallelism < 1:
        raise ValueError(f"parallelism={parallelism} must be 1 or more")
    items = [item for part in parts for item in part]
    return tuple(tuple(items[index::parallelism]) for index in range(parallelism))


def _check(max_parallelism: int, parallelism: int) -> None:
    if not 1 <= parallelism <= max_parallelism <= PARALLELISM_MAX:
        raise ValueError(
            f"parallelism={parallelism} and max parallelism={max_parallelism} must be"
            f" 1 <= parallelism <= max parallelism <= {PARALLELISM_MAX}"
        )
