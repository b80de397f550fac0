"""What an attempt begins with: the restored checkpoint, and what its sources have besides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.counting_source import CountingSource

from onceflow.core.api.graph import Graph, Operator, ReadFrom
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.runtime.dataflow.operators import SPLITS, decode_split
from onceflow.core.runtime.driver.restore import assign_state
from onceflow.core.runtime.driver.source_splits import genesis_of, splits_of, with_discovered_splits
from onceflow.core.spi import Source, Split


@dataclass(frozen=True)
class _LatestSource(CountingSource):
    """Starts where `ends` stands when it is asked for the first time."""

    ends: list[int] = field(default_factory=list[int])

    def splits(self) -> Sequence[Split]:
        return [Split(str(number), b"%d" % end) for number, end in enumerate(self.ends)]

    def discover(self, known: Sequence[Split]) -> Sequence[Split]:
        return [*known, *(Split(split.id, b"0") for split in self.splits()[len(known) :])]


def _graph(**sources: Source) -> Graph:
    return Graph(
        tuple(Operator(uid, ReadFrom(one), (), one.schema) for uid, one in sources.items())
    )


def _positions(splits: Sequence[Split] | None) -> dict[str, bytes]:
    assert splits is not None
    return {split.id: split.position for split in splits}


def test_where_a_new_source_starts_is_resolved_once_and_the_others_stay_where_they_are() -> None:
    old, new = _LatestSource(9, ends=[5, 6]), _LatestSource(9, ends=[7])
    restored = genesis_of(_graph(old=old), AttemptId(1), 2, 128, 0)
    graph = _graph(old=old, new=new)
    first = with_discovered_splits(graph, restored, AttemptId(2), 0)
    assert first is not None
    # A crash, and more records, before the first checkpoint: the next attempt restores this one.
    old.ends[:], new.ends[:] = [50, 60], [70]
    assert with_discovered_splits(graph, first, AttemptId(3), 0) is None
    assert _positions(splits_of(first, "old")) == {"0": b"5", "1": b"6"}
    assert _positions(splits_of(first, "new")) == {"0": b"7"}


def test_splits_added_since_the_checkpoint_are_dealt_to_the_slots_at_their_first_record() -> None:
    source = _LatestSource(9, ends=[5])
    restored = genesis_of(_graph(records=source), AttemptId(1), 1, 128, 0)
    source.ends.append(8)
    grown = with_discovered_splits(_graph(records=source), restored, AttemptId(2), 0)
    assert grown is not None
    dealt = [
        [decode_split(element) for element in operator.lists[SPLITS]]
        for slot in assign_state(_graph(records=source), grown, 2)
        for operator in slot.operators
    ]
    assert dealt == [[Split("0", b"5")], [Split("1", b"0")]]


def test_source_whose_splits_are_all_known_needs_no_decision() -> None:
    graph = _graph(records=CountingSource(10))
    restored = genesis_of(graph, AttemptId(1), 1, 128, 0)
    assert with_discovered_splits(graph, restored, AttemptId(2), 0) is None
