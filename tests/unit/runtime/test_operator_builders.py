"""Each kind of work describes itself, and has a builder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest

from onceflow.core.plan.work import (
    Work,
)
from onceflow.core.runtime.slot.operator_builders import BUILDERS


def _walk(kind: type[Work]) -> Iterator[type[Work]]:
    for below in kind.__subclasses__():
        yield below
        yield from _walk(below)


# A base class that several kinds share is private. Kinds of tests are not those of the product.
# A dataclass with slots is made twice, and the first class stays known until it is collected.
KINDS = sorted(
    {
        kind.__name__
        for kind in _walk(Work)
        if kind.__module__ == Work.__module__ and not kind.__name__.startswith("_")
    }
)


def test_every_kind_of_work_has_a_builder() -> None:
    built = {kind.__name__ for kind in BUILDERS}
    assert set(KINDS) - built == set(), "these kinds of work have no line in BUILDERS"
    assert built - set(KINDS) == set()


@pytest.mark.parametrize("kind", BUILDERS, ids=lambda kind: kind.__name__)
def test_no_field_of_a_work_hides_what_the_work_says_of_itself(
    kind: type[Work],
) -> None:
    assert is_dataclass(kind)
    # A property of the base class must not be the default of a field with its name.
    described = {name for name in dir(Work) if not name.startswith("_")}
    assert described.isdisjoint(field.name for field in fields(kind))


def test_default_uids_which_name_state_in_checkpoints_stay_as_they_are() -> None:
    assert {kind.__name__: kind.uid_prefix for kind in BUILDERS} == {
        "ReadFrom": "read",
        "MapAsync": "async_map",
        "GatherRows": "gather",
        "MergeWindows": "keyed",
        "PreAggregateWindows": "preaggregate",
        "MapBatches": "map_batches",
        "MapInArrow": "map_batches",
        "MapInPandas": "map_pandas",
        "JoinTable": "join",
        "JoinLookup": "lookup_join",
        "SelectSql": "sql",
        "MapRecords": "map",
        "FlatMapRecords": "flat_map",
        "FilterRecords": "filter",
        "ProcessKeyed": "keyed",
        "ProcessConnected": "connect",
        "JoinConnected": "connect",
        "ProcessBroadcast": "connect",
        "ProcessRecords": "process",
        "ProcessBatches": "keyed",
        "Deduplicate": "keyed",
        "KeepTop": "keyed",
        "AggregateLastRows": "keyed",
        "RunAggregates": "keyed",
        "AggregateWindows": "keyed",
        "AggregateCounts": "keyed",
        "WriteTo": "write",
    }


def test_side_outputs_are_those_of_functions_and_of_late_records() -> None:
    assert {kind.__name__ for kind in BUILDERS if kind.has_side_outputs} == {
        *("ProcessKeyed", "ProcessConnected", "JoinConnected", "ProcessBroadcast"),
        *("ProcessRecords", "ProcessBatches", "AggregateWindows"),
    }
