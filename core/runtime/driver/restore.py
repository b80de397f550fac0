"""Checks that a pipeline can restore from its job's decision log, and assigns state to slots.

Invariant: every operator's state, every row in flight and every sink id of the restored checkpoint
belongs to a part of the new pipeline, unless the user has allowed to drop it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from onceflow.core.errors import ConfigError, StateIncompatible
from onceflow.core.plan.graph import Exchange, Graph
from onceflow.core.plan.work import OwnedState, Work
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    InFlight,
    OperatorSnapshot,
    StateHandle,
    committables_of,
)
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.protocol.messages import RestoredOperator
from onceflow.core.protocol.splits import assign_splits, broadcast_copy, owner_of, with_lists
from onceflow.core.runtime.dataflow.operator_descriptions import describe_operator, find_changes
from onceflow.core.runtime.dataflow.restored_event_time import EVENT_TIME
from onceflow.core.runtime.dataflow.source_operator import SPLITS, decode_split
from onceflow.core.state.states.operator_state import find_mode

_log = logging.getLogger("onceflow.runtime.driver")


def check_max_parallelism(restored: CompletedCheckpoint, max_parallelism: int) -> None:
    """Raise StateIncompatible if the number of key groups differs from that of `restored`.

    With another number, keys would change their owners.
    """
    if restored.max_parallelism != max_parallelism:
        raise StateIncompatible(
            f"checkpoint {restored.checkpoint} was taken with max_parallelism"
            f" {restored.max_parallelism}, but the pipeline sets {max_parallelism}. Keys would"
            f" change owners: set max_parallelism={restored.max_parallelism}"
        )


def operators_left(graph: Graph, restored: CompletedCheckpoint) -> tuple[str, ...]:
    """Return the uids that have state in `restored` and no operator in `graph` that takes it."""
    works = {operator.uid: operator.work for operator in graph.operators}
    return tuple(
        sorted(
            {
                operator.uid
                for snapshot in restored.snapshots
                for operator in snapshot.operators
                if not _takes(works.get(operator.uid), operator)
            }
        )
    )


def _takes(work: Work | None, snapshot: OperatorSnapshot) -> bool:
    owned = OwnedState.NOTHING if work is None else work.owned_state
    return _find_parts(snapshot) in owned


def _find_parts(snapshot: OperatorSnapshot) -> OwnedState:
    """Return the parts of an operator's state that are in `snapshot`."""
    parts = OwnedState.NOTHING
    if snapshot.keyed:
        parts |= OwnedState.OF_KEYS
    if snapshot.raw:
        parts |= OwnedState.OF_SUBTASK
    if EVENT_TIME in snapshot.lists:
        parts |= OwnedState.EVENT_TIME
    if snapshot.lists.keys() - {EVENT_TIME}:
        parts |= OwnedState.SPLITS
    return parts


def check_in_flight(graph: Graph, restored: CompletedCheckpoint) -> None:
    """Raise StateIncompatible unless `graph` has an operator for every row that was in flight."""
    inputs = {(part.chain, part.input) for s in restored.snapshots for part in s.in_flight}
    lost = sorted({chain for chain, _ in inputs - _find_inputs_in_flight(graph)})
    if lost:
        raise StateIncompatible(
            f"checkpoint {restored.checkpoint} holds rows in flight to {', '.join(lost)}, but the"
            " pipeline no longer sends rows there. Start the unchanged pipeline, stop it (which"
            " leaves no rows in flight), and then change it. Or, if these rows may be lost, set"
            f" Checkpointing(ignore_in_flight_of={restored.checkpoint})"
        )


def _find_inputs_in_flight(graph: Graph) -> set[tuple[str, int]]:
    """Return the inputs, by chain and number, for which a checkpoint may contain batches.

    Rows of an input without a key have no owner, so a checkpoint never contains them. But an
    operator that absorbs rows marks outstanding results by a batch without rows.
    """
    return {
        (chain.id, edge.input)
        for chain in graph.chains()
        for edge in chain.edges
        if edge.exchange is Exchange.BY_KEY or chain.head.work.absorbs_rows
    }


def without_in_flight(
    restored: CompletedCheckpoint, attempt: AttemptId, now_ms: int
) -> CompletedCheckpoint:
    """Return a copy of `restored` as a new decision without rows in flight, which are lost then."""
    again = with_lists(restored, SPLITS, {}, attempt=attempt, now_ms=now_ms)
    snapshots = tuple(replace(snapshot, in_flight=()) for snapshot in again.snapshots)
    return replace(again, snapshots=snapshots)


def check_operators(graph: Graph, restored: CompletedCheckpoint) -> None:
    """Raise StateIncompatible unless `graph` has every operator whose state is in `restored`."""
    left = operators_left(graph, restored)
    if left:
        known = ", ".join(sorted(operator.uid for operator in graph.operators))
        raise StateIncompatible(
            f"checkpoint {restored.checkpoint} holds state of {', '.join(left)}, but no operator"
            f" of the pipeline takes it (the pipeline has {known}). Give the operator its old"
            " uid. Or, if this state is no longer needed, start with Pipeline(…,"
            f" allow_non_restored_state=True), which deletes the state of {', '.join(left)} and"
            " keeps all other state"
        )


def find_changed_operators(graph: Graph, restored: CompletedCheckpoint) -> dict[str, list[str]]:
    """Return, by uid, the changes to operators whose state in `restored` would be misread.

    See `operator_descriptions`. An operator without state has nothing to misread.
    """
    changed: dict[str, list[str]] = {}
    for operator in graph.operators:
        now = describe_operator(operator)
        for _, snapshot in restored.operator(operator.uid) if now else ():
            if changes := find_changes(snapshot.described, now):
                changed[operator.uid] = changes
    return changed


def check_settings(graph: Graph, restored: CompletedCheckpoint) -> None:
    """Raise StateIncompatible if `graph` would misread an operator's state in `restored`."""
    changed = find_changed_operators(graph, restored)
    if changed:
        what = "; ".join(f"{uid!r}: {', '.join(changes)}" for uid, changes in changed.items())
        raise StateIncompatible(
            f"checkpoint {restored.checkpoint} holds state that the pipeline would misread:"
            f" operator {what}. Start the pipeline with the old settings. Or, if this state is no"
            " longer needed, start with Pipeline(…, allow_non_restored_state=True), which"
            " deletes it and keeps all other state"
        )


def check_sinks(graph: Graph, view: LogView, retired: Collection[str]) -> None:
    """Raise ConfigError unless every sink id of the log is in `graph` or in `retired`.

    Otherwise transactions in doubt under that id would never be committed or aborted.
    """
    mine = {work.sink_id for _, work in graph.sinks()}
    left = sorted(view.sinks - mine - set(retired))
    if left:
        raise ConfigError(_describe_left_sinks(left, sorted(mine), view))


def _describe_left_sinks(left: Sequence[str], mine: Sequence[str], view: LogView) -> str:
    names = ", ".join(map(repr, left))
    listed = committables_of(view.completed[-1]) if view.decided else ()
    lost = [committable for committable in listed if committable.transaction.sink_id in left]
    if lost:
        what = (
            f"checkpoint {view.completed[-1].checkpoint} decided {len(lost)} transactions"
            f" ({sum(committable.rows for committable in lost)} rows) under sink id {names}, the"
            f" first {lost[0].transaction}"
        )
    else:
        what = f"the job has written under sink id {names}, where transactions may be in doubt"
    return (
        f"{what}, but no sink of the pipeline has this id (the pipeline has"
        f" {', '.join(map(repr, mine)) or 'none'}). Its decided transactions would never be"
        " committed, and the others would stay prepared. If the sink was renamed, give it its"
        f" old id: write(…, sink_id={left[0]!r}). If the sink is no longer needed, let the start"
        f" commit or abort its transactions: Pipeline(…, retired_sinks={{{left[0]!r}: <the sink as"
        " it was>})"
    )


def check_others(job: str, graph: Graph, others: Mapping[str, LogView]) -> None:
    """Raise ConfigError if a sink id of a new job belongs to another job in the same storage.

    `others` are the logs of those jobs, by name. Another job may be this job under an older name.
    """
    mine = {work.sink_id for _, work in graph.sinks()}
    uids = {operator.uid for operator in graph.operators}
    for name, view in others.items():
        shared = sorted(mine & view.sinks)
        if shared:
            raise ConfigError(
                f"job {job!r} is new, but job {name!r} in the same checkpoint storage already"
                f" uses sink id {shared[0]!r}. Two jobs with one sink id would commit and abort"
                " each other's rows. If this is the same job under a new name, start it as"
                f" Pipeline(name={name!r}), or first rename its directory {name!r} in the storage"
                f" to {job!r}. Otherwise give this job its own sink id: write(…, sink_id=…)"
            )
        last = view.completed[-1] if view.decided else None
        stateful = {o.uid for s in last.snapshots for o in s.operators} if last else set[str]()
        # Only a warning: two pipelines built by one function have the same uids and are two jobs.
        if stateful and stateful <= uids:
            _log.warning(
                "job %r is new, and job %r in the same checkpoint storage has the same"
                " operators. A job is identified by its name: a renamed job starts as a new job,"
                " and transactions that the old job left in doubt stay in doubt until the old"
                " job is started again",
                job,
                name,
            )


@dataclass(frozen=True, slots=True)
class RestoredSlot:
    """The state with which one slot begins."""

    operators: tuple[RestoredOperator, ...]
    in_flight: tuple[InFlight, ...]
    """The rows that the slot replays; they include rows of other slots."""


def assign_state(
    graph: Graph, restored: CompletedCheckpoint, parallelism: int
) -> list[RestoredSlot]:
    """Return the state with which each of `parallelism` slots begins.

    One pass serves all slots: a search of all handles for each slot would be quadratic.
    """
    operators: list[list[RestoredOperator]] = [[] for _ in range(parallelism)]
    groups = restored.max_parallelism
    # If state must not be dropped, the start was refused before this call.
    dropped = find_changed_operators(graph, restored)
    for operator in graph.operators:
        old = () if operator.uid in dropped else restored.operator(operator.uid)
        owned = operator.work.owned_state
        if OwnedState.SPLITS in owned:
            elements = [e for _, o in old for e in o.lists.get(SPLITS, ())]
            for slot, mine in enumerate(_divide_splits(elements, parallelism)):
                operators[slot].append(RestoredOperator(operator.uid, lists={SPLITS: mine}))
        elif owned and old:
            by_slot = _divide_state(operator.uid, old, groups, parallelism)
            for of_slot, restored_operator in zip(operators, by_slot, strict=True):
                of_slot.append(restored_operator)
    flying = [part for chain in graph.chains() for part in restored.in_flight(chain.id)]
    in_flight = _by_owner(flying, lambda part: part.handle, groups, parallelism)
    pairs = zip(operators, in_flight, strict=True)
    return [RestoredSlot(tuple(of_slot), replayed) for of_slot, replayed in pairs]


def _divide_state(
    uid: str, old: Sequence[tuple[int, OperatorSnapshot]], groups: int, parallelism: int
) -> list[RestoredOperator]:
    """Return, by slot, the state that is not of splits."""
    snapshots = [snapshot for _, snapshot in old]
    by_owner = _by_owner([h for o in snapshots for h in o.keyed], _itself, groups, parallelism)
    unkeyed = _without_key(snapshots, parallelism)
    bytes_of_groups = _by_owner(_raw_keyed(old), _itself, groups, parallelism)
    event_times = tuple(e for o in snapshots for e in o.lists.get(EVENT_TIME, ()))
    lists = {EVENT_TIME: event_times} if event_times else {}
    return [
        RestoredOperator(uid, keyed=keyed, lists=lists, raw=(*others, *owned))
        for keyed, others, owned in zip(by_owner, unkeyed, bytes_of_groups, strict=True)
    ]


def _divide_splits(elements: Sequence[bytes], parallelism: int) -> list[tuple[bytes, ...]]:
    # Keyed by id, so that a split that several snapshots hold is assigned once.
    by_id = {decode_split(element).split.id: element for element in elements}
    assigned = assign_splits(sorted(by_id), parallelism)
    return [tuple(by_id[split] for split in mine) for mine in assigned]


def _raw_keyed(old: Sequence[tuple[int, OperatorSnapshot]]) -> list[StateHandle]:
    return [h for _, o in old for h in o.raw if find_mode(h) == "raw-keyed"]


def _without_key(
    old: Sequence[OperatorSnapshot], parallelism: int
) -> list[tuple[StateHandle, ...]]:
    """Return, by slot, the handles of state without a key.

    Each slot gets one copy of broadcast state. It gets all handles of other state, and reads its
    share of that.
    """
    if not any(operator.raw for operator in old):
        return [()] * parallelism
    # Every slot gets these handles: the owner of an element of a split list is known only when all
    # elements are, and only slots read the files that contain them.
    everybody = [h for o in old for h in o.raw if find_mode(h) in {"split", "union"}]
    # A savepoint of DataFrames has one copy; its other parts have keyed state only.
    parts = [[h for h in o.raw if find_mode(h) == "broadcast"] for o in old]
    copies = list(filter(None, parts)) or [[]]
    return [(*everybody, *copies[broadcast_copy(slot, len(copies))]) for slot in range(parallelism)]


_Item = TypeVar("_Item")


def _itself(handle: StateHandle) -> StateHandle:
    return handle


def _by_owner(
    items: Sequence[_Item],
    handle_of: Callable[[_Item], StateHandle],
    max_parallelism: int,
    parallelism: int,
) -> list[tuple[_Item, ...]]:
    """Return, by slot and in order, the items whose handle may hold keys of that slot."""
    items_by_slot: list[list[_Item]] = [[] for _ in range(parallelism)]
    for item in items:
        handle = handle_of(item)
        # An empty interval means that the handle holds no keys.
        if handle.key_group_last < handle.key_group_first:
            continue
        first = owner_of(handle.key_group_first, max_parallelism, parallelism)
        last = owner_of(handle.key_group_last, max_parallelism, parallelism)
        # An interval of key groups belongs to an interval of slots. Each of these slots reads the
        # file and takes its own keys.
        for slot in range(first, last + 1):
            items_by_slot[slot].append(item)
    return [tuple(of_slot) for of_slot in items_by_slot]
