"""A job begins only from state that its pipeline can read, and each slot gets its share of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, cast

import pyarrow as pa
import pytest
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink

from onceflow.core.errors import ConfigError, StateIncompatible
from onceflow.core.plan.graph import Feed, Graph, Operator
from onceflow.core.plan.windows import TumblingEventTimeWindows
from onceflow.core.plan.work import (
    AggregateWindows,
    Deduplicate,
    Keep,
    MapAsync,
    MapRecords,
    ProcessBroadcast,
    ProcessKeyed,
    ProcessRecords,
    ReadFrom,
    RunAggregates,
    WriteTo,
)
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    InFlight,
    OperatorSnapshot,
    StateHandle,
    SubtaskSnapshot,
)
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef, TransactionId
from onceflow.core.protocol.log.memory import NOTHING_REMEMBERED, LogMemory
from onceflow.core.protocol.log.rules import CheckpointDecided, LogView
from onceflow.core.runtime.dataflow.restored_event_time import EVENT_TIME
from onceflow.core.runtime.dataflow.source_operator import SPLITS
from onceflow.core.runtime.driver import restore

_SCHEMA = pa.schema([("key", pa.int64())])
_GROUPS = 8
_ANY = cast("Any", None)
_SOURCE = CountingSource(1)


def _operator(uid: str, work: Any, *above: str) -> Operator:
    return Operator(uid, work, tuple((Feed(one, _SCHEMA),) for one in above), _SCHEMA)


def _graph(work: Any, *more: Operator) -> Graph:
    return Graph((_operator("in", ReadFrom(_SOURCE)), _operator("op", work, "in"), *more))


_KEYED = ProcessKeyed(("key",), _ANY)


def _handle(name: str, first: int = 0, last: int = -1) -> StateHandle:
    return StateHandle(name, f"{name}-{first}", 1, "sum", first, last)


def _restored(
    *snapshots: OperatorSnapshot, in_flight: tuple[InFlight, ...] = ()
) -> CompletedCheckpoint:
    parts = [
        SubtaskSnapshot(SubtaskRef("chain", index), (snapshot,))
        for index, snapshot in enumerate(snapshots)
    ]
    flying = SubtaskSnapshot(SubtaskRef("flying", 0), (), in_flight=in_flight)
    return CompletedCheckpoint(
        CheckpointId(7), AttemptId(3), 2, _GROUPS, (*parts, flying), 1, 2
    )  # fmt: skip


_OF_KEYS = OperatorSnapshot("op", keyed=(_handle("k", 0, 7),))
_OF_SUBTASK = OperatorSnapshot("op", raw=(_handle("operator-split"),))
_OF_LISTS = OperatorSnapshot("op", lists={"list": (b"",)})
_OF_TIME = OperatorSnapshot("op", lists={EVENT_TIME: (b"",)})


@pytest.mark.parametrize(
    ("work", "taken"),
    [
        (_KEYED, (_OF_KEYS, _OF_SUBTASK, _OF_TIME)),
        (ProcessBroadcast(("key",), _ANY, ()), (_OF_KEYS, _OF_SUBTASK, _OF_TIME)),
        (ProcessBroadcast((), _ANY, ()), (_OF_SUBTASK,)),
        (ProcessRecords(_ANY), (_OF_SUBTASK,)),
        (RunAggregates(("key",), {}), (_OF_KEYS,)),
        (Deduplicate(("key",), Keep.FIRST, None), (_OF_KEYS,)),
        (
            AggregateWindows(("key",), TumblingEventTimeWindows(1.0), "key", 0, {}),
            (_OF_KEYS, _OF_TIME),
        ),
        (ReadFrom(_SOURCE), (_OF_LISTS,)),
        (MapRecords(_ANY), ()),
    ],
)
def test_state_that_no_operator_takes_is_refused_by_its_uid(
    work: Any, taken: tuple[OperatorSnapshot, ...]
) -> None:
    graph = _graph(work)
    for snapshot in (_OF_KEYS, _OF_SUBTASK, _OF_LISTS, _OF_TIME):
        left = () if snapshot in taken else ("op",)
        assert restore.operators_left(graph, _restored(snapshot)) == left
        if left:
            with pytest.raises(StateIncompatible, match="holds state of op, but"):
                restore.check_operators(graph, _restored(snapshot))
        else:
            restore.check_operators(graph, _restored(snapshot))
    assert restore.operators_left(graph, _restored(OperatorSnapshot("op"))) == ()
    assert restore.operators_left(graph, _restored(replace(_OF_KEYS, uid="gone"))) == ("gone",)


def test_another_number_of_key_groups_is_refused() -> None:
    restore.check_max_parallelism(_restored(), _GROUPS)
    with pytest.raises(StateIncompatible, match="set max_parallelism=8"):
        restore.check_max_parallelism(_restored(), _GROUPS + 1)


def test_rows_in_flight_to_an_input_that_is_gone_are_refused() -> None:
    def fly(chain: str, number: int) -> CompletedCheckpoint:
        return _restored(in_flight=(InFlight(chain, True, _handle("f", 0, 7), number),))

    graph = _graph(_KEYED)
    restore.check_in_flight(graph, fly("op", 0))
    # async_map marks outstanding results in a FINAL checkpoint.
    restore.check_in_flight(_graph(MapAsync(_ANY, _ANY)), fly("op", 0))
    for restored in (fly("op", 1), fly("gone", 0)):
        with pytest.raises(StateIncompatible, match="rows in flight to"):
            restore.check_in_flight(graph, restored)
    # The rows of a stream without a key have no owner.
    with pytest.raises(StateIncompatible, match="in flight to op,"):
        restore.check_in_flight(_graph(ProcessRecords(_ANY)), fly("op", 0))
    without = restore.without_in_flight(fly("gone", 0), AttemptId(4), 9)
    assert without.in_flight("gone") == ()
    assert (without.attempt, without.checkpoint) == (4, 8)


def test_state_of_another_key_type_is_refused_and_given_to_no_slot() -> None:
    graph = _graph(_KEYED)
    same, other = (replace(_OF_KEYS, described={"key": kind}) for kind in ("integer", "text"))
    restore.check_settings(graph, _restored(same))
    with pytest.raises(StateIncompatible, match="'op': key was text and is now integer"):
        restore.check_settings(graph, _restored(other))
    assert [
        operator.uid for operator in restore.assign_state(graph, _restored(same), 1)[0].operators
    ] == [
        "in",
        "op",
    ]
    assert [
        operator.uid for operator in restore.assign_state(graph, _restored(other), 1)[0].operators
    ] == ["in"]


def _view(*committables: Committable, sinks: tuple[str, ...] = ()) -> LogView:
    snapshot = OperatorSnapshot("op", keyed=_OF_KEYS.keyed, committables=committables)
    return _log(_restored(snapshot), LogMemory(sinks=sinks))


def _log(restored: CompletedCheckpoint, memory: LogMemory = NOTHING_REMEMBERED) -> LogView:
    decided = CheckpointDecided(1, AttemptId(3), restored, "")
    return LogView(decided=(decided,), memory=memory)


def _with_sink(sink_id: str) -> Graph:
    return _graph(_KEYED, _operator("out", WriteTo(DirectorySink("d"), sink_id), "op"))


def test_a_sink_id_that_the_pipeline_lacks_is_refused_unless_it_is_retired() -> None:
    decided = Committable(TransactionId("old", 3, 7, 0), 5)
    other = Committable(TransactionId("new", 3, 7, 0), 9)
    view = _view(decided, other)
    restore.check_sinks(_with_sink("new"), view, ("old",))
    restore.check_sinks(_with_sink("old"), _view(decided), ())
    with pytest.raises(ConfigError, match=r"decided 1 transactions \(5 rows\) under sink id 'old'"):
        restore.check_sinks(_with_sink("new"), view, ())
    with pytest.raises(ConfigError, match="where transactions may be in doubt"):
        restore.check_sinks(_with_sink("new"), _view(other, sinks=("old",)), ())
    with pytest.raises(ConfigError, match="where transactions may be in doubt"):
        restore.check_sinks(_with_sink("new"), LogView(memory=LogMemory(sinks=("old",))), ())


def test_a_new_job_that_takes_the_sink_id_of_another_one_is_refused() -> None:
    other = _view(sinks=("taken",))
    restore.check_others("job", _with_sink("free"), {"other": LogView()})
    with pytest.raises(
        ConfigError, match="job 'other' in the same checkpoint storage already uses sink id 'taken'"
    ):
        restore.check_others("job", _with_sink("taken"), {"first": LogView(), "other": other})


@pytest.mark.parametrize(
    ("view", "warns"),
    [
        (_view(), True),
        (_log(_restored(*(replace(_OF_KEYS, uid=uid) for uid in ("in", "op", "out")))), True),
        (LogView(), False),
        (_log(_restored()), False),
        (_log(_restored(replace(_OF_KEYS, uid="elsewhere"))), False),
    ],
)
def test_a_new_job_with_the_operators_of_another_one_is_warned(
    caplog: pytest.LogCaptureFixture, view: LogView, warns: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        restore.check_others("job", _with_sink("free"), {"other": view})
    assert (
        "job 'other' in the same checkpoint storage has the same operators" in caplog.text
    ) == warns


def test_each_slot_gets_the_state_and_the_rows_in_flight_of_its_keys() -> None:
    left, right = _handle("k", 0, 3), _handle("k", 4, 7)
    middle, empty = _handle("m", 3, 4), _handle("e", 5, 4)
    snapshots = (
        OperatorSnapshot("op", keyed=(left, empty), lists={EVENT_TIME: (b"1",)}),
        OperatorSnapshot("op", keyed=(right, middle), lists={EVENT_TIME: (b"2",)}),
    )
    flying = tuple(InFlight("op", sent, middle) for sent in (False, True))
    restored = _restored(*snapshots, in_flight=(*flying, InFlight("op", True, right)))
    two = restore.assign_state(_graph(_KEYED), restored, 2)
    assert [slot.operators[1].keyed for slot in two] == [(left, middle), (right, middle)]
    assert [slot.operators[1].lists for slot in two] == [{EVENT_TIME: (b"1", b"2")}] * 2
    at = InFlight("op", True, middle), InFlight("op", True, right), InFlight("op", False, middle)
    assert [slot.in_flight for slot in two] == [(at[0], at[2]), at]
    (one,) = restore.assign_state(_graph(_KEYED), restored, 1)
    assert one.operators[1].keyed == (left, right, middle)
    four = restore.assign_state(_graph(_KEYED), restored, 4)
    keyed = [slot.operators[1].keyed for slot in four]
    assert keyed == [(left,), (left, middle), (right, middle), (right,)]


def test_an_operator_without_state_is_restored_nowhere() -> None:
    for slot in restore.assign_state(_graph(_KEYED), _restored(), 2):
        assert [(operator.uid, operator.lists) for operator in slot.operators] == [
            ("in", {SPLITS: ()})
        ]


def test_state_without_a_key_is_given_to_every_slot_and_broadcast_state_once() -> None:
    def hold(mode: str, of: str, first: int = 0, last: int = -1) -> StateHandle:
        return StateHandle(f"operator-state-{mode}", of, 1, "sum", first, last)

    split, union = hold("split", "s"), hold("union", "u")
    copies = hold("broadcast", "b0"), hold("broadcast", "b1")
    owned = hold("raw-keyed", "k", 0, 3)
    restored = _restored(
        OperatorSnapshot("op", raw=(split, copies[0], owned)),
        OperatorSnapshot("op", raw=(union,)),
        OperatorSnapshot("op", raw=(copies[1],)),
        OperatorSnapshot("op"),
    )
    slots = restore.assign_state(_graph(_KEYED), restored, 3)
    assert [slot.operators[1].raw for slot in slots] == [
        (split, union, copies[0], owned),
        (split, union, copies[1], owned),
        (split, union, copies[0]),
    ]
    without = _restored(OperatorSnapshot("op", raw=(split,)), OperatorSnapshot("op", raw=(union,)))
    for slot in restore.assign_state(_graph(_KEYED), without, 2):
        assert slot.operators[1].raw == (split, union)


def test_state_of_a_single_key_group_is_restored() -> None:
    single = _handle("k", 5, 5)
    slots = restore.assign_state(
        _graph(_KEYED), _restored(OperatorSnapshot("op", keyed=(single,))), 2
    )
    assert [slot.operators[1].keyed for slot in slots] == [(), (single,)]
