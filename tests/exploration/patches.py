"""Patches of production's code for an exploration: a simulated clock, and a chosen mistake."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from tests.exploration import ports
from tests.simulation.variant import Variant

from onceflow.core.commit import loop
from onceflow.core.errors import SinkError
from onceflow.core.protocol.committables import Aborted, AbortOutcome, Committable
from onceflow.core.protocol.log import rules
from onceflow.core.runtime.driver import savepoint_restore, sink_recovery
from onceflow.core.storage.log import decision_log
from onceflow.core.storage.log.decision_log import DecisionLog

_SAVEPOINT_RULES = (
    *("check_savepoint", "check_targets", "is_put_back", "lacks_own_commits"),
    "sinks_to_import",
)
_COMMITTERS = (ports.TwoPhaseCommitter, ports.StagedCommitter, ports.VersionCommitter)


class _Clock:
    """A clock that moves only while a thread sleeps: recovery waits between two tries."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += max(seconds, 1e-3)


@contextmanager
def running(variant: Variant) -> Generator[None]:
    """Replace the clock, and what `variant` breaks in functions of production."""
    plain = Variant()
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(patch.object(loop, "time", _Clock()))
        if variant.plan is not plain.plan:
            enter(patch.object(sink_recovery, "plan_commits", variant.plan))
        if variant.global_plan is not plain.global_plan:
            enter(patch.object(sink_recovery, "plan_global_recovery", variant.global_plan))
        if variant.next_decision is not plain.next_decision:
            enter(patch.object(rules, "next_decision", variant.next_decision))
        enter(patch.object(savepoint_restore, "restore_point", _take_directory))
        enter(patch.object(logging.getLogger("onceflow.runtime.driver"), "disabled", True))
        for name in _SAVEPOINT_RULES:
            enter(patch.object(savepoint_restore, name, getattr(variant, name)))
        enter(patch.object(savepoint_restore, "build_first_decision", variant.restored_from))
        if variant.view_before is not plain.view_before:
            enter(patch.object(decision_log, "view_before", variant.view_before))
        if not variant.judged:
            enter(patch.object(rules, "check_append", _check_nothing))
        if variant.takes_what_exists:
            enter(patch.object(DecisionLog, "_create", _take_what_exists()))
        if variant.exists_is_anothers:
            enter(patch.object(DecisionLog, "_create", _take_own_for_anothers()))
        for committer in _COMMITTERS:
            if variant.failed_listing_is_empty:
                enter(patch.object(committer, "in_doubt", _list_or_nothing(committer.in_doubt)))
            if variant.failed_abort_is_done:
                enter(patch.object(committer, "abort", _abort_at_any_rate(committer.abort)))
        yield


def _take_directory(directory: object, storage: object, location: str) -> object:
    del storage, location
    return directory


def _check_nothing(
    record: rules.LogRecord, digest: str, *, standing_digest: str | None, highest_sequence: int
) -> rules.AppendVerdict:
    del record, highest_sequence
    return rules.AppendStands() if standing_digest == digest else rules.AppendFenced("lost")


def _take_what_exists() -> Any:
    create = DecisionLog._create  # pyright: ignore[reportPrivateUsage]

    def broken(log: DecisionLog, record: Any, data: bytes, digest: str) -> str:
        create(log, record, data, digest)
        return digest

    return broken


def _take_own_for_anothers() -> Any:
    create = DecisionLog._create  # pyright: ignore[reportPrivateUsage]

    def broken(log: DecisionLog, record: Any, data: bytes, digest: str) -> str | None:
        files: Any = log._fs  # pyright: ignore[reportPrivateUsage]
        standing = create(log, record, data, digest)
        return None if files.exists else standing

    return broken


def _list_or_nothing(listing: Any) -> Any:
    def broken(committer: Any) -> Sequence[Committable]:
        try:
            listed: Sequence[Committable] = listing(committer)
        except SinkError:
            return ()
        return listed

    return broken


def _abort_at_any_rate(abort: Any) -> Any:
    def broken(committer: Any, committable: Committable) -> AbortOutcome:
        abort(committer, committable)
        return Aborted()

    return broken
