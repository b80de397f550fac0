"""The decision log's chain: who may append, what is read, what is pruned (I5)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.protocol.checkpoints.coordination import completed

from onceflow.core.errors import CheckpointCorrupt, Fenced
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.log import rules


def digest_of(record: rules.LogRecord) -> str:
    return hashlib.sha256(repr(record).encode()).hexdigest()[:16]


def chain(*steps: int | str) -> list[rules.LogEntry]:
    """A log: a text claims under that name, a number decides that checkpoint."""
    view, entries = rules.LogView(), list[rules.LogEntry]()
    for step in steps:
        record: rules.LogRecord
        if isinstance(step, str):
            record = rules.next_claim(view, step)
        else:
            record = rules.next_decision(view, completed(step, attempt=view.attempt))
        entries.append(rules.LogEntry(record, digest_of(record)))
        view = rules.apply(view, entries[-1])
    return entries


def test_empty_log_is_a_job_that_never_ran() -> None:
    view = rules.replay([])
    assert (view.last_sequence, view.attempt, view.completed) == (0, 0, ())
    assert view.next_checkpoint == 1
    assert rules.next_claim(view, "me") == rules.AttemptClaimed(1, AttemptId(1), "me", "")


def test_fold_says_who_owns_the_job_and_what_is_decided() -> None:
    entries = chain("a", 0, 1, 2, "b", 3)
    view = rules.replay(reversed(entries))
    assert (view.last_sequence, view.attempt) == (6, 2)
    assert [c.checkpoint for c in view.completed] == [0, 1, 2, 3]
    assert view.last_digest == entries[-1].digest
    assert view.next_checkpoint == 4
    assert view.orphans == ()


def test_older_attempt_cannot_decide() -> None:
    view = rules.replay(chain("a", 0, "b"))
    with pytest.raises(Fenced, match="attempt 2 owns"):
        rules.next_decision(view, completed(1, attempt=1))


def test_a_driver_claims_again_while_nobody_else_has() -> None:
    entries = chain("a", 0, "b", 1, 2)
    again = rules.claim_again(rules.replay(entries), owner="b", attempt=AttemptId(2))
    assert again == rules.next_claim(rules.replay(entries), "b")
    pruned = rules.replay(entries[4:])
    assert pruned.owner == ""
    assert rules.claim_again(pruned, owner="b", attempt=AttemptId(2)).attempt == 3


def test_a_driver_whose_job_was_taken_over_never_takes_it_back() -> None:
    view = rules.replay(chain("older", 0, "newer"))
    with pytest.raises(Fenced, match=r"attempt 1 is fenced: attempt 2 \(newer\) has claimed"):
        rules.claim_again(view, owner="older", attempt=AttemptId(1))
    assert rules.claim_again(view, owner="newer", attempt=AttemptId(2)).attempt == 3


def test_an_own_claim_that_nobody_confirmed_does_not_fence_its_driver() -> None:
    view = rules.replay(chain("a", 0, "a"))
    assert rules.claim_again(view, owner="a", attempt=AttemptId(1)).attempt == 3
    with pytest.raises(Fenced, match="attempt 3"):
        rules.claim_again(rules.replay(chain("a", 0, "a", "b")), owner="a", attempt=AttemptId(1))


@pytest.mark.parametrize("number", [0, 1])
def test_decisions_never_go_back(number: int) -> None:
    view = rules.replay(chain("a", 0, 1))
    with pytest.raises(CheckpointCorrupt):
        rules.next_decision(view, completed(number, attempt=1))


def test_append_stands_when_it_is_the_highest() -> None:
    record = chain("a", 0)[-1].record
    verdict = rules.check_append(record, "mine", standing_digest="mine", highest_sequence=2)
    assert verdict == rules.AppendStands()


def test_append_that_no_listing_shows_is_not_taken_for_a_lost_race() -> None:
    record = chain("a", 0)[-1].record
    verdict = rules.check_append(record, "mine", standing_digest="mine", highest_sequence=1)
    assert verdict == rules.AppendUnlisted()


@pytest.mark.parametrize(
    ("standing", "highest"),
    [("theirs", 2), (None, 2), ("mine", 3), ("mine", 40)],
    ids=["somebody was first", "pruned at once", "claimed since", "orphan in a pruned gap"],
)
def test_append_that_lost_the_race_fences(standing: str | None, highest: int) -> None:
    record = chain("a", 0)[-1].record
    verdict = rules.check_append(record, "mine", standing_digest=standing, highest_sequence=highest)
    assert isinstance(verdict, rules.AppendFenced)
    assert "attempt 1" in verdict.reason


def test_orphan_below_a_pruned_chain_is_not_read() -> None:
    """A late driver's record fits a number that was pruned, and even touches the chain."""
    entries = chain("a", 0, 1, "b", 2, 3)
    orphan_record = replace(entries[3].record, previous="of long ago")
    orphan = rules.LogEntry(orphan_record, "orphan")
    view = rules.replay([orphan, *entries[4:]])
    assert view.orphans == (4,)
    assert view.first_sequence == 5
    assert [c.checkpoint for c in view.completed] == [2, 3]
    far = rules.LogEntry(replace(entries[1].record, previous="of long ago"), "orphan")
    assert rules.replay([far, *entries[4:]]).orphans == (2,)


def test_chain_is_followed_from_its_highest_record_only() -> None:
    entries = chain("a", 0, 1)
    other = rules.LogEntry(rules.next_claim(rules.LogView(), "other"), "other digest")
    with pytest.raises(CheckpointCorrupt, match="two records"):
        rules.replay([*entries, other])


def test_log_cut_below_its_last_decision_is_refused() -> None:
    """Starting over from nothing would lose or double rows."""
    entries = chain("a", 0, 1, "b")
    with pytest.raises(CheckpointCorrupt, match="no remaining record is a decision"):
        rules.replay(entries[-1:])


def test_log_that_only_ever_saw_claims_is_no_cut_log() -> None:
    view = rules.replay(chain("a", "b", "c"))
    assert (view.attempt, view.completed) == (3, ())


@pytest.mark.parametrize(
    "broken",
    [
        {"previous": "another"},
        {"sequence": 9},
        {"attempt": AttemptId(1)},
    ],
)
def test_record_that_does_not_follow_is_refused(broken: dict[str, object]) -> None:
    view = rules.replay(chain("a", 0))
    record = replace(rules.next_claim(view, "b"), **broken)  # type: ignore[arg-type]
    with pytest.raises(CheckpointCorrupt):
        rules.apply(view, rules.LogEntry(record, "d"))


def test_claim_goes_above_an_attempt_that_a_target_has_seen() -> None:
    view = rules.replay(chain("a", 0))
    assert rules.next_claim(view, "b").attempt == 2
    record = rules.next_claim(view, "b", above=AttemptId(7))
    after = rules.apply(view, rules.LogEntry(record, "d"))
    assert (record.attempt, after.attempt, rules.next_claim(after, "c").attempt) == (8, 8, 9)


def test_decision_filed_under_another_attempt_is_refused() -> None:
    view = rules.replay(chain("a", 0))
    record = rules.CheckpointDecided(3, AttemptId(1), completed(1, attempt=7), view.last_digest)
    with pytest.raises(CheckpointCorrupt, match="attempt 7"):
        rules.apply(view, rules.LogEntry(record, "d"))


def test_pruning_keeps_the_retained_decisions_and_all_after_them() -> None:
    view = rules.replay(chain("a", 0, 1, "b", 2, "c"))
    assert rules.prunable(view, 1) == (1, 2, 3, 4)
    assert rules.prunable(view, 2) == (1, 2)
    assert rules.prunable(view, 3) == (1,)
    assert rules.prunable(view, 99) == (1,)
    with pytest.raises(ValueError, match="retained=0"):
        rules.prunable(view, 0)


def test_log_without_a_decision_is_not_pruned() -> None:
    assert rules.prunable(rules.replay(chain("a", "b")), 1) == ()


def test_crash_in_the_middle_of_pruning_leaves_a_readable_log() -> None:
    entries = chain("a", 0, 1, "b", 2, "c", 3)
    view = rules.replay(entries)
    doomed = rules.prunable(view, 1)
    for deleted in range(len(doomed) + 1):
        left = [e for e in entries if e.record.sequence not in doomed[:deleted]]
        shorter = rules.replay(left)
        assert (shorter.last_digest, shorter.attempt) == (view.last_digest, view.attempt)
        assert shorter.completed[-1] == view.completed[-1]


@dataclass
class _Driver:
    """A driver that claimed the log. It works on its view of that time, and may be long gone."""

    view: rules.LogView
    own: AttemptId


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_at_most_one_attempt_extends_the_log_whatever_the_interleaving(
    data: st.DataObject,
) -> None:
    """I5: drivers claim, append, prune and verify, each step on its own, in any order.

    Between a create and its verification anything may happen. Whoever is told that its append
    stands must be in the chain for good, and must have been the newest attempt.
    """
    store: dict[int, rules.LogEntry] = {}
    drivers: list[_Driver] = []
    unverified: list[tuple[_Driver, rules.LogEntry]] = []
    promised: list[rules.LogEntry] = []
    checkpoint = 0

    def create(driver: _Driver, record: rules.LogRecord) -> None:
        entry = rules.LogEntry(record, digest_of(record))
        store.setdefault(record.sequence, entry)
        unverified.append((driver, entry))

    for step in range(data.draw(st.integers(5, 60))):
        match data.draw(st.sampled_from(["claim", "decide", "verify", "verify", "prune"])):
            case "claim":
                view = rules.replay(store.values())
                driver = _Driver(view, AttemptId(view.attempt + 1))
                create(driver, rules.next_claim(view, f"driver {step}"))
            case "decide" if drivers:
                driver = data.draw(st.sampled_from(drivers))
                busy = any(waiting is driver for waiting, _ in unverified)
                if not busy and driver.view.attempt == driver.own:
                    checkpoint += 1
                    create(
                        driver,
                        rules.next_decision(driver.view, completed(checkpoint, attempt=driver.own)),
                    )
            case "verify" if unverified:
                index = data.draw(st.integers(0, len(unverified) - 1))
                driver, entry = unverified.pop(index)
                standing = store.get(entry.record.sequence)
                verdict = rules.check_append(
                    entry.record,
                    entry.digest,
                    standing_digest=standing.digest if standing else None,
                    highest_sequence=max(store),
                )
                if isinstance(verdict, rules.AppendStands):
                    now = rules.replay(store.values())
                    assert (now.last_digest, now.attempt) == (entry.digest, driver.own)
                    driver.view = rules.apply(driver.view, entry)
                    promised.append(entry)
                    if driver not in drivers:
                        drivers.append(driver)
                else:
                    drivers = [other for other in drivers if other is not driver]
            case "prune" if drivers:
                driver = data.draw(st.sampled_from(drivers))
                for sequence in rules.prunable(driver.view, data.draw(st.integers(1, 3))):
                    store.pop(sequence, None)
            case _:
                pass
        if store:
            view = rules.replay(store.values())
            held = {e.digest for e in store.values() if e.record.sequence >= view.first_sequence}
            for entry in promised:
                pruned = entry.record.sequence < view.first_sequence
                assert pruned or entry.digest in held, f"a promised record is gone: {entry}"
            decided = [
                entry.record.completed.checkpoint
                for entry in promised
                if isinstance(entry.record, rules.CheckpointDecided)
            ]
            if decided:
                assert view.completed[-1].checkpoint >= decided[-1]
    numbers = [entry.record.sequence for entry in promised]
    assert numbers == sorted(set(numbers))
