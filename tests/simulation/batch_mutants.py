"""Deliberately broken rules of batches. Each must be caught."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from tests.simulation.batch_world import Rules

from onceflow.core.commit.planner import CommitPlan, plan_claimed, plan_sweep
from onceflow.core.protocol import batches
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId


def _writes_again(claim: batches.BatchClaim, batch: batches.BatchId, fingerprint: str) -> object:
    verdict = batches.judge_batch(claim, batch, fingerprint)
    return batches.WriteBatch() if isinstance(verdict, batches.SkipBatch) else verdict


def _numbers_alone(claim: batches.BatchClaim, batch: batches.BatchId, fingerprint: str) -> object:
    del fingerprint
    decision = claim.decision(batch)
    return batches.judge_batch(claim, batch, decision.fingerprint if decision else "")


def _no_gaps_seen(claim: batches.BatchClaim, batch: batches.BatchId, fingerprint: str) -> object:
    verdict = batches.judge_batch(claim, batch, fingerprint)
    unknown = isinstance(verdict, batches.RefuseBatch) and claim.decision(batch) is None
    return batches.WriteBatch() if unknown else verdict


def _writes_lower(claim: batches.BatchClaim, batch: batches.BatchId, fingerprint: str) -> object:
    verdict = batches.judge_batch(claim, batch, fingerprint)
    return batches.WriteBatch() if isinstance(verdict, batches.RefuseLower) else verdict


def _any_owner(
    proposed: batches.BatchDecision, *, owner: object, existing: batches.BatchDecision | None
) -> object:
    del owner
    return batches.check_decision(proposed, owner=proposed.attempt, existing=existing)


def _decides_anew(proposed: batches.BatchDecision, **given: Any) -> object:
    verdict = batches.check_decision(proposed, **given)
    return verdict if isinstance(verdict, batches.Overtaken) else batches.Decide()


def _rolls_back_all(
    claim: batches.BatchClaim, in_doubt: Sequence[Committable], *, sink_ids: Collection[str]
) -> CommitPlan:
    del sink_ids
    return CommitPlan((), tuple(c for c in in_doubt if c.transaction.attempt < claim.attempt))


def _leaves_decided(
    claim: batches.BatchClaim, in_doubt: Sequence[Committable], *, sink_ids: Collection[str]
) -> CommitPlan:
    return replace(plan_claimed(claim, in_doubt, sink_ids=sink_ids), commit=())


def _leaves_undecided(
    claim: batches.BatchClaim, in_doubt: Sequence[Committable], *, sink_ids: Collection[str]
) -> CommitPlan:
    return replace(plan_claimed(claim, in_doubt, sink_ids=sink_ids), abort=())


def _knows_unsettled(
    claim: batches.BatchClaim, in_doubt: Sequence[Committable], *, sink_ids: Collection[str]
) -> CommitPlan:
    left = tuple(decision for decision in claim.decisions if not decision.is_committed)
    return plan_claimed(replace(claim, decisions=left), in_doubt, sink_ids=sink_ids)


def _sweeps_newer(
    decision: batches.BatchDecision, in_doubt: Sequence[Committable], *, sink_ids: Collection[str]
) -> Sequence[Committable]:
    forever = replace(decision, attempt=AttemptId(10**8 - 1))
    return plan_sweep(forever, in_doubt, sink_ids=sink_ids)


def _commits_what_is_listed(
    claim: batches.BatchClaim, in_doubt: Sequence[Committable], *, sink_ids: Collection[str]
) -> CommitPlan:
    """Counts a decided transaction that is not in doubt as committed, without a proof."""
    plan = plan_claimed(claim, in_doubt, sink_ids=sink_ids)
    listed = {one.transaction for one in in_doubt}
    return replace(plan, commit=tuple(c for c in plan.commit if c.transaction in listed))


def _sweeps_its_own(
    decision: batches.BatchDecision, in_doubt: Sequence[Committable], *, sink_ids: Collection[str]
) -> Sequence[Committable]:
    swept = plan_sweep(decision, in_doubt, sink_ids=sink_ids)
    return tuple(one for one in swept if one.transaction.attempt == decision.attempt)


def _proofs_of_its_own(decision: batches.BatchDecision) -> CheckpointId:
    return CheckpointId(decision.attempt * batches.TRIES)


def _forgets_its_own(decision: batches.BatchDecision) -> AttemptId:
    return AttemptId(decision.attempt + 1)


def _one_name_a_partition(attempt: AttemptId, task_attempt: int, task_id: int) -> CheckpointId:
    del task_attempt, task_id
    return CheckpointId(attempt * batches.TRIES)


def _version_of_committing(decided: AttemptId, committing: AttemptId) -> CheckpointId:
    del decided
    return batches.batch_checkpoint(committing)


def _asks_anew(proposed: batches.BatchDecision, **given: Any) -> object:
    """Whoever asks again what it has decided is judged as one that decides for the first time."""
    existing = given["existing"]
    own = existing is not None and existing.attempt == proposed.attempt
    return batches.check_decision(
        proposed, owner=given["owner"], existing=None if own else existing
    )


def _all_at_once(decided: Sequence[Committable], **_: object) -> Any:
    return sorted(decided, key=lambda one: not one.payload), ()


BATCH_MUTANTS: tuple[Rules, ...] = (
    Rules("a decided batch is written again", judge=_writes_again, check=_decides_anew),
    Rules("a batch is known by its number alone", judge=_numbers_alone),
    Rules("a batch below the last decision is written", judge=_no_gaps_seen),
    Rules("an attempt that was overtaken decides", check=_any_owner),
    Rules("planning rolls back what is decided", settle=_rolls_back_all),
    Rules("planning leaves what is decided", settle=_leaves_decided),
    Rules("planning leaves what is undecided", settle=_leaves_undecided),
    Rules("planning settles, then claims", claim_first=False),
    Rules("abort rolls back without a claim", abort_claims=False),
    Rules(
        "a decision counts as settled before its commits",
        settle=_knows_unsettled,
        settled_first=True,
    ),
    Rules("the sweep takes newer attempts' rows", sweep=_sweeps_newer),
    Rules("a task that is tried again rolls its twin back", takes_twin_away=True),
    Rules("planning commits only what the target lists", settle=_commits_what_is_listed),
    Rules("the sweep leaves what older attempts prepare", sweep=_sweeps_its_own),
    Rules("prunes the proofs of all older decisions", oldest_proof=_proofs_of_its_own),
    Rules("forgets a decision once it is committed", forgotten_before=_forgets_its_own),
    Rules("the tries of a task have one name", checkpoint=_one_name_a_partition),
    Rules("staged rows are applied before their twins are rolled back", around=_all_at_once),
    Rules("a batch below the last one that a user has numbered is written", judge=_writes_lower),
    Rules("a decision is made again where its reply was lost", check=_asks_anew),
    Rules("staged rows are applied before the decision", rows_first=True),
    Rules("old rows are deleted before the decision", deletes_first=True),
    Rules("rows that are applied with the decision leave no proof", proves_applied=False),
    Rules("a batch without rows replaces nothing", empty_replaces=False),
    Rules("a version has the number of who commits it", version=_version_of_committing),
    Rules("only the first sink of a group is settled", settles_group=False),
)
