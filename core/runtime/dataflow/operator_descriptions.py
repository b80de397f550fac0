"""Settings of stateful operators that determine the meaning of their state.

Each checkpoint records these settings for each such operator, by name and as text
(`OperatorSnapshot.described`). A start compares them with the pipeline before any slot begins:

    key                 the kinds of the key's values: with another kind, no key would be found
    windows, time, size, slide, offset, gap     another value cuts kept rows into other windows
    lower, upper        of joins by time: rows were kept for these limits
    how                 of joins by time: an outer side may become inner. The opposite is refused:
                        rows kept by an inner side do not record whether they had a partner.
    allowed lateness    may become shorter: a window that has expired with the longer lateness has
                        also expired with the shorter one. A longer lateness would start expired
                        windows anew.

A setting that one of the two lacks is not compared: the states themselves differ in that case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from onceflow.core.plan.graph import Operator
from onceflow.core.plan.join_functions import OUTER_SIDES
from onceflow.core.plan.windows import LATENESS
from onceflow.core.plan.work import OwnedState
from onceflow.core.state.aggregates.accumulator_shape import key_kind

_WITH_ZONE, _WITHOUT_ZONE = " with a zone", " without a zone"


def describe_operator(operator: Operator) -> dict[str, str]:
    """Return the settings of `operator` by name; empty if its state depends on none."""
    work = operator.work
    if OwnedState.OF_KEYS not in work.owned_state:
        return {}
    schema = operator.input_schema
    key = _key_text([schema.field(name).type for name in work.input_key(0)])
    return {"key": key} | work.time_settings()


def find_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the changes, with both values, with which `now` would misread state of `before`."""
    return [
        f"{name} was {before[name]} and is now {now[name]}"
        for name in now
        if name in before and not _is_kept(name, before[name], now[name])
    ]


def _is_kept(name: str, before: str, now: str) -> bool:
    if name == LATENESS:
        return int(now.removesuffix(" ms")) <= int(before.removesuffix(" ms"))
    if name == "how":
        return OUTER_SIDES[now] <= OUTER_SIDES[before]
    return before == now


def _key_text(types: Sequence[pa.DataType]) -> str:
    kinds: list[str] = []
    for key_type in types:
        kind = key_kind(key_type)
        plain = key_type.value_type if pa.types.is_dictionary(key_type) else key_type
        # In memory and in snapshots, a key with a time zone differs from a key without.
        if pa.types.is_timestamp(plain):
            kind += _WITHOUT_ZONE if plain.tz is None else _WITH_ZONE
        kinds.append(kind)
    return ", ".join(kinds)
