"""Broken variants of what is asked of targets before a start; each must be caught."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tests.simulation.variant import Variant

from onceflow.core.errors import SavepointRefused, StorageBehind
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.protocol.log.target_records import TargetRecord, newest_attempt
from onceflow.core.protocol.savepoints.savepoint import Savepoint, check_targets


def _never_behind(view: LogView, records: Iterable[TargetRecord], storage: str) -> None:
    """Goes on from its log whatever the targets have committed."""


def _behind_by_attempt(view: LogView, records: Iterable[TargetRecord], storage: str) -> None:
    """Takes a log for the newest as soon as its attempt is: at one of the next tries."""
    if newest_attempt(records) >= view.attempt:
        raise StorageBehind(f"{storage} is out of date")


def _savepoint_by_attempt(
    savepoint: Savepoint, view: LogView, records: Iterable[TargetRecord], **told: Any
) -> None:
    """Takes a savepoint for the newest as soon as the attempt is."""
    if newest_attempt(records) >= view.attempt:
        raise SavepointRefused("out of date")


def _savepoint_without_claims(
    savepoint: Savepoint, view: LogView, records: Iterable[TargetRecord], **told: Any
) -> None:
    """Judges whole checkpoints by their number alone."""
    check_targets(savepoint, view, [replace(record, claims=()) for record in records], **told)


OLDER_COPY_MUTANTS: tuple[Variant, ...] = (
    Variant("goes on from an older copy of its log", require_not_behind=_never_behind),
    Variant("tells an older copy by its attempt", require_not_behind=_behind_by_attempt),
    Variant("tells an older savepoint by the attempt", check_targets=_savepoint_by_attempt),
    Variant("tells an older savepoint by number alone", check_targets=_savepoint_without_claims),
)
