"""Tests the start of an attempt: the restored checkpoint, and further splits of its sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from tests.support.counting_source import CountingSource

from onceflow.core.plan.graph import Graph, Operator
from onceflow.core.plan.work import ReadFrom
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.splits import SplitState, with_lists
from onceflow.core.runtime.dataflow.source_operator import SPLITS, decode_split, encode_split
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
        anew = [Split(split.id, split.position) for split in known]
        return [*anew, *(Split(split.id, b"0") for split in self.splits()[len(known) :])]


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


def test_each_of_several_new_sources_is_in_the_decision() -> None:
    old = _LatestSource(9, ends=[5])
    restored = genesis_of(_graph(old=old), AttemptId(1), 2, 128, 0)
    graph = _graph(first=_LatestSource(9, ends=[7]), second=_LatestSource(9, ends=[8]), old=old)
    old.ends.append(6)
    decision = with_discovered_splits(graph, restored, AttemptId(2), 0)
    assert decision is not None
    assert _positions(splits_of(decision, "first")) == {"0": b"7"}
    assert _positions(splits_of(decision, "second")) == {"0": b"8"}
    assert _positions(splits_of(decision, "old")) == {"0": b"5", "1": b"0"}


def test_splits_added_since_the_checkpoint_are_dealt_to_the_slots_at_their_first_record() -> None:
    source = _LatestSource(9, ends=[5])
    restored = genesis_of(_graph(records=source), AttemptId(1), 1, 128, 0)
    source.ends.append(8)
    grown = with_discovered_splits(_graph(records=source), restored, AttemptId(2), 0)
    assert grown is not None
    dealt = [
        [decode_split(element).split for element in operator.lists[SPLITS]]
        for slot in assign_state(_graph(records=source), grown, 2)
        for operator in slot.operators
    ]
    assert dealt == [[Split("0", b"5")], [Split("1", b"0")]]


def test_source_whose_splits_are_all_known_needs_no_decision() -> None:
    graph = _graph(records=CountingSource(10))
    restored = genesis_of(graph, AttemptId(1), 1, 128, 0)
    assert with_discovered_splits(graph, restored, AttemptId(2), 0) is None


def _with_event_times(restored: CompletedCheckpoint, **event_times_ms: int) -> CompletedCheckpoint:
    """Return a checkpoint after `restored` in which splits of "records" have event times."""
    elements = tuple(
        encode_split(SplitState(split, event_times_ms.get(f"s{split.id}")))
        for split in splits_of(restored, "records") or ()
    )
    lists = {"records": elements}
    return with_lists(restored, SPLITS, lists, attempt=AttemptId(1), now_ms=0)


def _states(completed: CompletedCheckpoint) -> list[SplitState]:
    return [
        decode_split(element)
        for _, operator in completed.operator("records")
        for element in operator.lists.get(SPLITS, ())
    ]


def test_splits_that_a_source_makes_anew_need_no_decision_and_keep_their_event_times() -> None:
    source = _LatestSource(9, ends=[5, 6])
    graph = _graph(records=source)
    restored = _with_event_times(genesis_of(graph, AttemptId(1), 2, 128, 0), s0=100, s1=70)
    assert with_discovered_splits(graph, restored, AttemptId(2), 0) is None
    source.ends.append(8)
    grown = with_discovered_splits(graph, restored, AttemptId(2), 0)
    assert grown is not None
    assert _states(grown) == [
        SplitState(Split("0", b"5"), 100),
        SplitState(Split("1", b"6"), 70),
        SplitState(Split("2", b"0")),
    ]


def test_source_has_no_field_of_the_engine_in_its_hands() -> None:
    """Sources do not see the other fields that a checkpoint keeps for a split."""
    assert [field.name for field in fields(Split)] == ["id", "position"]


def test_element_of_a_checkpoint_has_the_layout_that_older_versions_wrote() -> None:
    element = b"\x83\xa2id\xa3p-0\xa8position\xc4\x015\xadevent_time_ms\xcdd\x00"
    state = SplitState(Split("p-0", b"5"), 25_600)
    assert decode_split(element) == state
    assert encode_split(state) == element
