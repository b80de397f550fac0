"""Broken variants of rewinds; each must be caught, as those of `mutants`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from tests.simulation.variant import Variant

from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.protocol.log.target_records import TargetRecord, is_set_back
from onceflow.core.protocol.savepoints.savepoint import (
    Savepoint,
    is_put_back,
    lacks_own_commits,
    sinks_to_import,
    view_before,
)

Records = Sequence[TargetRecord]


def _by_what_is_known(
    savepoint: Savepoint, view: LogView, records: Records, in_doubt: object
) -> bool:
    """Goes on where the last decision's commits alone are lacking."""
    return any(is_set_back(record, view.memory.committed) for record in records)


def _at_every_start(*facts: object) -> bool:
    """Begins from the savepoint whenever it is named."""
    return True


def _never_again(*facts: object) -> bool:
    """Begins from a savepoint once."""
    return False


def _imports_for_new_storage(
    savepoint: Savepoint, view: LogView, records: Iterable[TargetRecord], **named: Any
) -> frozenset[str]:
    """Counts on the job's own storage for what is staged."""
    return frozenset() if view.decided else sinks_to_import(savepoint, view, records, **named)


def _keeps_for_all(
    savepoint: Savepoint, view: LogView, records: Records = (), **named: Any
) -> LogView:
    """Keeps the decisions for all targets if they are kept for one target without a record."""
    before = view_before(savepoint, view, records, **named)
    return replace(before, memory=replace(before.memory, kept=()))


def _takes_nothing_back(
    savepoint: Savepoint, view: LogView, records: Records = (), **named: Any
) -> LogView:
    """Keeps decisions that were made after the savepoint."""
    before = view_before(savepoint, view, records, **named)
    if not before.starts_over or not view.decided:
        return before
    return replace(before, memory=replace(before.memory, decided=view.memory.decided))


def _asks_for_all(
    savepoint: Savepoint, view: LogView, records: Records = (), **named: Any
) -> LogView:
    """Asks targets for what was committed last, though it was taken back."""
    before = view_before(savepoint, view, records, **named)
    if not before.starts_over or not view.decided:
        return before
    return replace(before, memory=replace(before.memory, committed=view.memory.committed))


def _lacks_nothing(*facts: object) -> bool:
    """Counts on what the log knows to be committed where nothing more was decided."""
    return False


def _by_highest(records: Records) -> Records:
    return [replace(record, proofs=frozenset()) for record in records]


def _lacks_by_highest(
    savepoint: Savepoint, view: LogView, records: Records, in_doubt: frozenset[TransactionId]
) -> bool:
    """Takes a target that has some of a checkpoint for one that has all of it."""
    return lacks_own_commits(savepoint, view, _by_highest(records), in_doubt)


def _is_put_back_by_highest(
    savepoint: Savepoint, view: LogView, records: Records, in_doubt: frozenset[TransactionId]
) -> bool:
    """The same at a start that is repeated."""
    return is_put_back(savepoint, view, _by_highest(records), in_doubt)


REWIND_MUTANTS: tuple[Variant, ...] = (
    Variant("goes on where what was committed last is lacking", is_put_back=_by_what_is_known),
    Variant("begins from the savepoint at every start", is_put_back=_at_every_start),
    Variant("begins from a savepoint once", is_put_back=_never_again),
    Variant("a rewind takes nothing staged out of it", sinks_to_import=_imports_for_new_storage),
    Variant("a rewind keeps for all what it keeps for one", view_before=_keeps_for_all),
    Variant("a rewind takes nothing back", view_before=_takes_nothing_back),
    Variant("a rewind asks for what it takes back", view_before=_asks_for_all),
    Variant("a rewind counts on the same cut", lacks_own_commits=_lacks_nothing),
    Variant("takes a part of a checkpoint for all of it", lacks_own_commits=_lacks_by_highest),
    Variant("begins again only where all is lacking", is_put_back=_is_put_back_by_highest),
)
