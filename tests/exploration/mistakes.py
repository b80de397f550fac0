"""Broken variants of the protocol, each with a world in which it breaks a law.

Some variants break no law in any world. They have the reason instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

from tests.simulation.mutants import MUTANTS
from tests.simulation.variant import Variant

from onceflow.core.protocol.loops import attempt_facts
from onceflow.core.protocol.loops.attempt import AttemptLoop
from onceflow.core.storage.log.decision_log import DecisionUnknown


class _NoticesNoLostSlot(AttemptLoop):
    """Waits for a dead slot."""

    def _hear(self, fact: attempt_facts.AttemptFact, now_s: float) -> None:
        if not isinstance(fact, attempt_facts.SlotGone):
            super()._hear(fact, now_s)


class _TakesUnknownForDecided(AttemptLoop):
    """Takes a lost reply of the log for a decision."""

    def _on_appended(self, end: attempt_facts.AppendEnded, now_s: float) -> None:
        if isinstance(end.error, DecisionUnknown):
            end = replace(end, error=None)
        super()._on_appended(end, now_s)


OWN: Final = (
    Variant("waits for a dead slot", attempt_loop=_NoticesNoLostSlot),
    Variant("takes a lost reply of the log for a decision", attempt_loop=_TakesUnknownForDecided),
)
"""Mistakes of the specification that the simulator does not have."""

VARIANTS: Final[Mapping[str, Variant]] = {v.name: v for v in (*MUTANTS, *OWN)}


@dataclass(frozen=True, slots=True)
class Mistake:
    """A broken variant, and the world in which it is tried."""

    name: str
    world: str

    def find_variant(self) -> Variant:
        return VARIANTS[self.name]


CAUGHT_IN: Final[Mapping[str, tuple[str, ...]]] = {
    "one slot": (
        "commits at pre-commit, before the decision",
        "tells sinks to commit before the decision",
        "acks before the prepare",
        "appends without create-if-absent",
        "takes a lost reply of an append for a refusal",
        "takes its own record for another driver's",
        "takes acks of older attempts",
        "takes late acks for the next checkpoint's",
        "takes a refused decision for one that stands",
        "takes an unknown append for a refused one",
        "counts confirmations when the decision is logged",
        "finishes before the last commits",
        "goes by the wall clock",
        "abort rolls back what a later decision lists",
        "names transactions without the attempt",
        "records the position one too early",
        "records the position one too late",
        "forgets what aborted checkpoints prepared",
        "omits what is decided and not committed",
        "confirms what is not committed",
        "skips a transaction that is not committed",
        "takes an unknown outcome for success",
        "recovery commits everything in doubt",
        "recovery aborts nothing",
        "recovery commits nothing",
        "recovery aborts decided transactions",
        "sweep aborts the live attempt's transactions",
        "sweeps nothing after the first checkpoint",
        "waits for a dead slot",
        "takes a lost reply of the log for a decision",
    ),
    "two slots": ("completes with an ack missing",),
    "two faults": (
        "recovery takes a failed listing for an empty one",
        "recovery takes a failed abort for done",
    ),
    "exchange": ("alignment lets a channel through", "never unblocks a channel"),
    "overtaking": (
        "overtakes rows in channels and persists none",
        "records nothing after the snapshot",
        "records rows after the barrier",
        "acks before all barriers have come",
    ),
    "savepoint": (
        "tells sinks to commit at a savepoint",
        "begins from any savepoint",
        "tells by numbers what came after a savepoint",
    ),
    "stop with a savepoint": (
        "a restored decision forgets what a savepoint has prepared",
        "counts on what a later attempt has rolled back",
    ),
    "two drivers": ("takes what exists for its own record",),
    "versions": (
        "forgets files of aborted checkpoints",
        "finishes before the last whole commit",
        "recovery commits no whole checkpoint",
        "commits again what a decision lists again",
        "commits a whole checkpoint before the decision",
        "recovery does not ask for the ordered proof",
    ),
}

MISTAKES: Final = tuple(
    Mistake(name, world) for world, names in CAUGHT_IN.items() for name in names
)

_NO_REWINDS = "no start from a savepoint goes back, and no target is put back"
_SAME_STORAGE = "a job starts from a savepoint only in its own storage"
_NO_TIMERS = "no function makes rows while no source reads, and no source skips any"
_NO_FILES = "no world has state files"
_NO_PRUNING = "no world prunes proofs or records"
_NO_COPIES = "no target and no log is an older copy"
_SAME_PIPELINE = "sinks and splits stay as they are"
_ONE_TRANSACTION = "a pre-commit makes one transaction for each sink"
_CREDITS = "senders have credits for all rows, and one sink replays all rows"
_ONE_AT_A_TIME = "one checkpoint is pending at a time"
_NO_DECLINES = "no slot declines a checkpoint, and no message between live processes is lost"
_NO_ORDER = "no law says in which order the transactions of a subtask become visible"
_NO_REQUESTS = "no law says that a request for a checkpoint is fulfilled"
_NO_ANSWERS = "no law says that a request for a savepoint is answered, and answered once"
_NO_INTERVAL = "no sink gathers decisions, and two decisions never wait"
_NO_LAST_ROWS = "no function makes rows at the end of the input"
_FEW_CHECKPOINTS = "the worlds with an exchange have one fault and two checkpoints at the most"

NOT_EXPRESSED_BY_FIELD: Final[Mapping[str, str]] = {
    "check_savepoint": _NO_TIMERS,
    "check_targets": _SAME_STORAGE,
    "restored_from": _SAME_STORAGE,
    "is_put_back": _NO_REWINDS,
    "lacks_own_commits": _NO_REWINDS,
    "sinks_to_import": _NO_REWINDS,
    "view_before": _NO_REWINDS,
    "memory_at": _SAME_STORAGE,
    "attempt_loop": _NO_ANSWERS,
    "trusts_locations": _NO_FILES,
    "looks_for_mark_once": _NO_FILES,
    "reuse_undecided_files": _NO_FILES,
    "confirms_unheard": _NO_FILES,
    "retain_ledger_from": _NO_PRUNING,
    "judged": _NO_PRUNING,
    "prepare": _NO_PRUNING,
    "require_not_behind": _NO_COPIES,
    "lost_is_committed": _NO_COPIES,
    "next_decision": _NO_COPIES,
    "checks_sinks": _SAME_PIPELINE,
    "asks_retired": _SAME_PIPELINE,
    "settles_early": _SAME_PIPELINE,
    "retired_plan": _SAME_PIPELINE,
    "with_lists": _SAME_PIPELINE,
    "reads_undecided_splits": _SAME_PIPELINE,
    "lists_first_only": _ONE_TRANSACTION,
    "names_tables_alike": _ONE_TRANSACTION,
    "output_queue": _CREDITS,
    "barrier_waits_its_turn": _CREDITS,
    "replayed": _CREDITS,
    "broadcast_copy": _CREDITS,
    "snapshot_late": "a source that emits a barrier late is not modelled",
    "global_queue": _NO_INTERVAL,
    "drops_decided": _NO_INTERVAL,
    "source_barriers": _ONE_AT_A_TIME,
    "inputs": _FEW_CHECKPOINTS,
    "alignment": _FEW_CHECKPOINTS,
    "mode": _FEW_CHECKPOINTS,
    "acks_before_in_flight": _FEW_CHECKPOINTS,
}
"""Why no world catches variants that differ in this field, unless `CAUGHT_IN` names them."""

NOT_EXPRESSED: Final[Mapping[str, str]] = {
    "waits for a lost ack for ever": _NO_DECLINES,
    "waits for who has declined": _NO_DECLINES,
    "tells nobody that a checkpoint failed": _NO_DECLINES,
    "lets an older checkpoint be decided after a newer": _ONE_AT_A_TIME,
    "commits what is not decided yet": _ONE_AT_A_TIME,
    "takes a late word for the newest decision": _ONE_AT_A_TIME,
    "commits the newest first": _NO_ORDER,
    "recovery commits the newest first": _NO_ORDER,
    "never ends": "the search would not end: each state leads to a new checkpoint",
    "forgets what was asked for when it is triggered": _NO_REQUESTS,
    "forgets what was asked for with the attempt": _NO_REQUESTS,
    "deletes shared files of subsumed checkpoints": _NO_FILES,
    "deletes files of a retained checkpoint": _NO_FILES,
    "never deletes files of subsumed checkpoints": _NO_FILES,
    "never deletes files of failed checkpoints": _NO_FILES,
    "never deletes files of late acks": _NO_FILES,
    "never deletes shared files": _NO_FILES,
    "counts once what two subtasks name": _NO_FILES,
    "deletes shared files unconfirmed": _NO_FILES,
    "deletes shared files under pending": _NO_FILES,
    "deletes shared files that are named again": _NO_FILES,
    "recovery asks only for what is listed": _NO_COPIES,
    "recovery knows the last checkpoint alone": _NO_COPIES,
    "asks for the last proof if nothing is listed": _NO_COPIES,
    "leaves what is in doubt again": _NO_COPIES,
    "recovery sees no older copy of a table": _NO_COPIES,
    "recovery makes one version of several decisions": _NO_INTERVAL,
    "a decision names none undelivered": _NO_INTERVAL,
    "takes the furthest committer for all": "no world has two sinks that commit whole checkpoints",
    "a savepoint names what is decided after it": _NO_INTERVAL,
    "deletes a savepoint's files before it is written": _NO_FILES,
    "never deletes what was uploaded for a savepoint": _NO_FILES,
    "takes files of a savepoint for files of the job": _NO_FILES,
    "ends without last rows": _NO_LAST_ROWS,
    "forgets that last rows were made by a drain": _NO_LAST_ROWS,
    "makes last rows at every start": _NO_LAST_ROWS,
    "makes last rows behind a savepoint": _NO_LAST_ROWS,
    "the end overtakes last rows": _NO_LAST_ROWS,
    "ends the job with rows in flight": _FEW_CHECKPOINTS,
    "the last barrier waits for all rows": _FEW_CHECKPOINTS,
}
"""Why no world catches a variant of the simulator, by its name."""


def find_reason(variant: Variant) -> str | None:
    """Return why no world catches `variant`; None if no reason is known."""
    if variant.name in NOT_EXPRESSED:
        return NOT_EXPRESSED[variant.name]
    return next((NOT_EXPRESSED_BY_FIELD.get(name) for name in _list_changes(variant)), None)


def _list_changes(variant: Variant) -> Iterator[str]:
    plain = Variant()
    for field in fields(Variant):
        if field.name != "name" and getattr(variant, field.name) != getattr(plain, field.name):
            yield field.name
