"""The rules of the protocol, checked over the trace of one decision log.

The rules are those of docs/guarantee.md. They check the steps of processes and do not read targets:
a judge counts the rows there. A trace may begin after the job's first start. In this case the rules
do not check transactions of older attempts.

A process knows a decision only if it appended the decision, read it from the log, or received it
from the driver. A commit by a process that does not know the decision is a violation, even if the
log contains the decision by then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onceflow.core.protocol.ids import TransactionId
from onceflow.integration.traces.events import Trace, TracedStep, split_by_log
from onceflow.integration.traces.order import order_events

SHOWN_MAX = 80
"""The maximum number of events before a violation in its text."""
_SUCCESSES = ("Committed", "AlreadyCommitted")

_Checkpoint = tuple[int, int]
"""The attempt and the number of a checkpoint. Attempts may use a number again."""


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """A step that the protocol forbids."""

    rule: str
    log: str
    event: TracedStep
    before: Sequence[TracedStep]
    """The events before it, in an order of their causes."""

    def __str__(self) -> str:
        left_out = len(self.before) - SHOWN_MAX
        head = [f"… {left_out} events before"] if left_out > 0 else []
        shown = [f"  {event}" for event in self.before[-SHOWN_MAX:]]
        return "\n".join([f"{self.rule} ({self.log})", *head, *shown, f"> {self.event}"])


def check_trace(trace: Trace, *, are_targets_put_back: bool = False) -> Sequence[BrokenRule]:
    """Return the rules that `trace` breaks: the first one of each decision log.

    Pass `are_targets_put_back=True` if targets were restored from a backup. A transaction may then
    be committed a second time.
    """
    return [
        broken
        for log, of_log in split_by_log(trace).items()
        if (broken := _find_broken(log, of_log, Rules(are_targets_put_back)))
    ]


def _find_broken(log: str, trace: Trace, rules: Rules) -> BrokenRule | None:
    ordered = order_events(trace)
    for position, event in enumerate(ordered.events):
        for rule in rules.take(event):
            return BrokenRule(rule, log, event, ordered.events[:position])
    for event, cause in ordered.without_cause:
        rule = f"this step needs {' '.join(map(str, cause))}, which is in no trace"
        return BrokenRule(rule, log, event, ordered.events)
    for rule in rules.end():
        return BrokenRule(rule, log, ordered.events[-1], ordered.events[:-1])
    return None


@dataclass(slots=True)
class _Decision:
    listed: frozenset[TransactionId]
    is_standing: bool = False
    """True if the record is known to be in the log: its driver knows, or a later claim reads it."""
    is_revoked: bool = False
    """True if the user has let the job start from a savepoint before it."""
    batch: str = ""
    """The batch of Spark that it decides; empty for a checkpoint of a job."""


@dataclass(slots=True)
class _Attempt:
    """The steps of one attempt's driver."""

    restored: int | None
    """The checkpoint of the last decision that the attempt's claim read.

    The attempt restores this checkpoint unless it appends a first decision of its own.
    """
    by: int | None
    sinks: frozenset[str]
    subtasks: frozenset[str] = frozenset()
    in_doubt: set[TransactionId] = field(default_factory=set[TransactionId])
    """The transactions of older attempts that were listed since the last recovery or sweep."""
    deployed: int | None = None
    decided: int | None = None
    has_rewound: bool = False
    """True if the attempt begins from a savepoint, and not from the end of the log."""
    has_triggered: bool = False
    has_recovered: bool = False
    has_listed_last: bool = False
    """True if the transactions in doubt were listed after the targets' commits were queried."""
    has_swept: bool = False
    is_ending: bool = False
    has_swept_at_end: bool = False
    """True if a sweep has begun after the last checkpoint, even if the target has refused it."""
    has_ended_well: bool = False


@dataclass(slots=True)
class _Process:
    """The knowledge of one process."""

    listed: set[TransactionId] = field(default_factory=set[TransactionId])
    """The transactions of the decisions that the process knows."""
    heard: dict[int, int] = field(default_factory=dict[int, int])
    """The last decision that the driver has reported to the process, by attempt."""


@dataclass(slots=True)
class Rules:
    """The state of the rules after some events. `take` yields the rules that an event breaks."""

    are_targets_put_back: bool = False
    """True if targets were restored from a backup, or if a start from a savepoint went back."""
    attempts: dict[int, _Attempt] = field(default_factory=dict[int, _Attempt])
    decisions: dict[_Checkpoint, _Decision] = field(default_factory=dict[_Checkpoint, _Decision])
    processes: dict[str, _Process] = field(default_factory=dict[str, _Process])
    prepared: dict[TransactionId, _Checkpoint] = field(
        default_factory=dict[TransactionId, _Checkpoint]
    )
    rolled_back: set[TransactionId] = field(default_factory=set[TransactionId])
    outcomes: dict[TransactionId, list[str]] = field(default_factory=dict[TransactionId, list[str]])
    returned: set[TransactionId] = field(default_factory=set[TransactionId])
    aborted: set[_Checkpoint] = field(default_factory=set[_Checkpoint])
    saved: set[_Checkpoint] = field(default_factory=set[_Checkpoint])
    positions: dict[tuple[int, int, str], dict[str, Any]] = field(
        default_factory=dict[tuple[int, int, str], dict[str, Any]]
    )
    """The positions of splits, by attempt, checkpoint and source."""
    barriers: dict[tuple[object, ...], int] = field(default_factory=dict[tuple[object, ...], int])
    _checks: Mapping[str, Callable[[TracedStep], Iterator[str]]] = field(init=False)

    def __post_init__(self) -> None:
        """Create the rules before the first event."""
        self._checks = {
            "claimed": self._take_claim,
            "deciding": self._take_deciding,
            "decided": self._take_decided,
            "rewound": self._take_rewind,
            "listed": self._take_listing,
            "asked": self._take_listing,
            "returned": self._take_returned,
            "recovered": self._take_recovered,
            "sweeping": self._take_sweep_begin,
            "swept": self._take_sweep,
            "deployed": self._take_deployment,
            "triggered": self._take_trigger,
            "completed": self._take_completion,
            "aborted": self._take_abort,
            "saving": self._take_saving,
            "ending": self._take_ending,
            "ended": self._take_end,
            "heard": self._take_heard,
            "barrier": self._take_barrier,
            "prepared": self._take_prepared,
            "read": self._take_read,
            "acknowledged": self._take_acknowledgement,
            "restored_positions": self._take_restored_positions,
            "committing": self._take_commit,
            "committed": self._take_outcome,
            "rolling_back": self._take_rollback,
            "settled": self._take_settled,
        }

    def take(self, event: TracedStep) -> Iterator[str]:
        """Yield the rules that `event` breaks, and remember the event."""
        check = self._checks.get(event.step)
        return iter(()) if check is None else check(event)

    def end(self) -> Iterator[str]:
        """Yield the rules that the trace as a whole breaks."""
        for transaction, outcomes in self.outcomes.items():
            is_put_back = self.are_targets_put_back or transaction in self.returned
            if outcomes.count("Committed") > 1 and not is_put_back:
                yield f"two commits of {transaction} have made its rows visible"
        last = self.attempts[max(self.attempts)] if self.attempts else None
        if last is None or not last.has_ended_well:
            return
        for (_, checkpoint), decision in self.decisions.items():
            if decision.is_standing and not decision.is_revoked:
                for transaction in decision.listed:
                    if self._is_traced(transaction) and not self._is_committed(transaction):
                        yield (
                            f"checkpoint {checkpoint} decided {transaction}, the job is finished,"
                            " and no commit of the transaction has succeeded"
                        )

    # --- the decision log -------------------------------------------------------------------------

    def _take_claim(self, event: TracedStep) -> Iterator[str]:
        checkpoint, by = event.facts["checkpoint"], event.facts["by"]
        self.attempts[event.attempt] = _Attempt(checkpoint, by, frozenset(event.facts["sinks"]))
        process = self._process(event)
        process.listed.update(event.transactions("listed"))
        if checkpoint is None:
            return
        listed = frozenset(event.transactions("listed"))
        last = self.decisions.setdefault((by, checkpoint), _Decision(listed))
        yield from self._stand((by, checkpoint), last)
        for (_, number), decision in self.decisions.items():
            if decision.is_standing and number <= checkpoint:
                process.listed.update(decision.listed)

    def _take_deciding(self, event: TracedStep) -> Iterator[str]:
        number, listed = event.checkpoint, frozenset(event.transactions("listed"))
        yield from self._check_restored(event)
        attempt, key = self.attempts.get(event.attempt), (event.attempt, number)
        if attempt is not None:
            sinks = frozenset(event.facts["sinks"])
            if not attempt.has_swept and (gone := attempt.sinks - sinks):
                yield f"the log forgets sink {min(gone)}, and no sweep has looked there"
            attempt.sinks = attempt.sinks | sinks
            subtasks = set(event.facts["subtasks"])
            if attempt.has_triggered and (left_out := attempt.subtasks - subtasks):
                yield f"checkpoint {number} is decided without an ack of {min(left_out)}"
        if key in self.aborted:
            yield f"checkpoint {number} is decided after it was aborted"
        if key in self.saved:
            yield f"savepoint {number} is decided"
        batch: str = event.facts.get("batch", "")
        # A batch lists the transaction of one try of each task.
        if not batch:
            yield from self._find_unlisted(event, listed)
        self.decisions.setdefault(key, _Decision(listed, batch=batch))

    def _find_unlisted(self, event: TracedStep, listed: Collection[TransactionId]) -> Iterator[str]:
        """Yield the transactions that a decision should list and does not."""
        for transaction, (by, prepared) in self.prepared.items():
            is_before = by == event.attempt and prepared <= event.checkpoint
            if is_before and transaction not in listed and not self._is_committed(transaction):
                yield (
                    f"{transaction} was prepared before barrier {event.checkpoint}, is not"
                    " committed, and the decision does not list it"
                )

    def _take_decided(self, event: TracedStep) -> Iterator[str]:
        number, key = event.checkpoint, (event.attempt, event.checkpoint)
        if (decision := self.decisions.get(key)) is None:
            yield f"checkpoint {number} is decided without its content"
            return
        yield from self._stand(key, decision)
        self._process(event).listed.update(decision.listed)
        if (attempt := self.attempts.get(event.attempt)) is not None:
            attempt.decided = number
        for newer, claim in self.attempts.items():
            lacks = claim.restored is None or claim.restored < number
            if newer > event.attempt and lacks and not claim.has_rewound:
                yield (
                    f"attempt {event.attempt} decides checkpoint {number}, and attempt {newer} has"
                    f" claimed the log, which ended at checkpoint {claim.restored}"
                )

    def _take_rewind(self, event: TracedStep) -> Iterator[str]:
        for (by, number), decision in self.decisions.items():
            if by < event.attempt and number > event.checkpoint:
                decision.is_revoked = True
        self.are_targets_put_back = True
        if (attempt := self.attempts.get(event.attempt)) is not None:
            attempt.has_rewound = True
        yield from ()

    def _stand(self, key: _Checkpoint, decision: _Decision) -> Iterator[str]:
        decision.is_standing = True
        for transaction in sorted(decision.listed & self.rolled_back):
            yield f"checkpoint {key[1]} decides {transaction}, which was rolled back"
        for (by, _), other in self.decisions.items():
            is_twin = by != key[0] and other.batch == decision.batch != ""
            if is_twin and other.is_standing:
                yield f"attempts {by} and {key[0]} have both decided {decision.batch}"

    def _check_restored(self, event: TracedStep) -> Iterator[str]:
        """Yield a violation if the attempt acts on a log that lacks an older decision."""
        attempt = self.attempts.get(event.attempt)
        if attempt is None or attempt.has_rewound:
            return
        for (by, number), decision in self.decisions.items():
            counts = decision.is_standing and not decision.is_revoked and by < event.attempt
            if counts and (attempt.restored is None or attempt.restored < number):
                yield (
                    f"attempt {event.attempt} goes on from checkpoint {attempt.restored}, and"
                    f" attempt {by} has decided checkpoint {number}"
                )

    # --- the driver -------------------------------------------------------------------------------

    def _take_listing(self, event: TracedStep) -> Iterator[str]:
        if (attempt := self.attempts.get(event.attempt)) is not None:
            attempt.has_listed_last = event.step == "listed"
            older = (t for t in event.transactions() if t.attempt < event.attempt)
            attempt.in_doubt.update(older)
        yield from ()

    def _take_returned(self, event: TracedStep) -> Iterator[str]:
        self.returned.update(event.transactions())
        yield from ()

    def _take_recovered(self, event: TracedStep) -> Iterator[str]:
        if (attempt := self.attempts.get(event.attempt)) is None:
            return
        attempt.has_recovered = True
        yield from self._check_in_doubt(attempt)
        if attempt.has_listed_last:
            yield (
                "recovery listed transactions in doubt after it had asked targets for their"
                " commits: a commit in between is in neither answer"
            )

    def _take_sweep_begin(self, event: TracedStep) -> Iterator[str]:
        if (attempt := self.attempts.get(event.attempt)) is not None:
            attempt.has_swept_at_end = attempt.is_ending
        yield from ()

    def _take_sweep(self, event: TracedStep) -> Iterator[str]:
        if (attempt := self.attempts.get(event.attempt)) is not None:
            attempt.has_swept = True
            yield from self._check_in_doubt(attempt)

    def _check_in_doubt(self, attempt: _Attempt) -> Iterator[str]:
        """Yield the transactions of older attempts that stay in doubt."""
        for transaction in sorted(attempt.in_doubt - self.rolled_back - self.outcomes.keys()):
            if self._is_traced(transaction):
                yield f"{transaction} of an older attempt is in doubt, and stays so"
        attempt.in_doubt.clear()

    def _take_deployment(self, event: TracedStep) -> Iterator[str]:
        yield from self._check_restored(event)
        if (attempt := self.attempts.get(event.attempt)) is None:
            return
        attempt.deployed = event.checkpoint
        attempt.subtasks = frozenset(event.facts["subtasks"])
        if not attempt.has_recovered:
            yield "slots are deployed before the sinks have recovered"
        last = attempt.restored if attempt.decided is None else attempt.decided
        if event.checkpoint != last:
            yield f"slots restore checkpoint {event.checkpoint}, and the last decision is {last}"

    def _take_trigger(self, event: TracedStep) -> Iterator[str]:
        if (attempt := self.attempts.get(event.attempt)) is not None:
            attempt.has_triggered = True
        yield from ()

    def _take_completion(self, event: TracedStep) -> Iterator[str]:
        decision = self.decisions.get((event.attempt, event.checkpoint))
        if decision is None or not decision.is_standing:
            yield f"slots are told to commit checkpoint {event.checkpoint}, which is not decided"

    def _take_abort(self, event: TracedStep) -> Iterator[str]:
        key = event.attempt, event.checkpoint
        self.aborted.add(key)
        if key in self.decisions and self.decisions[key].is_standing:
            yield f"checkpoint {event.checkpoint} is aborted after its decision"

    def _take_saving(self, event: TracedStep) -> Iterator[str]:
        self.saved.add((event.attempt, event.checkpoint))
        yield from ()

    def _take_ending(self, event: TracedStep) -> Iterator[str]:
        if (attempt := self.attempts.get(event.attempt)) is not None:
            attempt.is_ending = True
        yield from ()

    def _take_end(self, event: TracedStep) -> Iterator[str]:
        if (attempt := self.attempts.get(event.attempt)) is None or not event.facts["is_finished"]:
            return
        attempt.has_ended_well = True
        # A target may refuse the sweep at the end, too, or not answer in time: no other follows.
        has_tried = attempt.has_swept_at_end or not event.facts.get("is_tidy", True)
        if attempt.has_triggered and not attempt.has_swept and not has_tried:
            yield "the job is finished, and no sweep has looked for what older attempts prepared"

    # --- slots ------------------------------------------------------------------------------------

    def _take_heard(self, event: TracedStep) -> Iterator[str]:
        process = self._process(event)
        process.heard[event.attempt] = max(
            event.checkpoint, process.heard.get(event.attempt, event.checkpoint)
        )
        for (by, number), decision in self.decisions.items():
            if by == event.attempt and number <= event.checkpoint:
                process.listed.update(decision.listed)
        yield from ()

    def _take_barrier(self, event: TracedStep) -> Iterator[str]:
        facts = event.facts
        channel = event.process, event.attempt, event.slot, facts["subtask"], facts["channel"]
        before = self.barriers.get(channel, -1)
        self.barriers[channel] = event.checkpoint
        if event.checkpoint <= before:
            yield f"barrier {event.checkpoint} comes after barrier {before} in one channel"

    def _take_prepared(self, event: TracedStep) -> Iterator[str]:
        for transaction in event.transactions():
            self.prepared[transaction] = event.attempt, event.checkpoint
            if transaction.attempt != event.attempt:
                yield f"attempt {event.attempt} has prepared {transaction} of another attempt"

    def _take_read(self, event: TracedStep) -> Iterator[str]:
        key = event.attempt, event.checkpoint, event.facts["source"]
        self.positions.setdefault(key, {}).update(dict(event.facts["positions"]))
        yield from ()

    def _take_acknowledgement(self, event: TracedStep) -> Iterator[str]:
        number, source = event.checkpoint, event.facts["source"]
        if self._process(event).heard.get(event.attempt, -1) < number:
            yield f"{source} acknowledges the positions of checkpoint {number}, which it has not"
            " heard to be decided"
        read = self.positions.get((event.attempt, number, source), {})
        for split, position in event.facts["positions"]:
            if read.get(split) != position:
                yield (
                    f"{source} acknowledges {position} of split {split}, and checkpoint {number}"
                    f" has {read.get(split)}"
                )

    def _take_restored_positions(self, event: TracedStep) -> Iterator[str]:
        if (attempt := self.attempts.get(event.attempt)) is None or attempt.restored is None:
            return
        source = event.facts["source"]
        read = self.positions.get((attempt.by or 0, attempt.restored, source), {})
        if attempt.decided is not None and attempt.decided == attempt.deployed:
            # Its own first decision may begin from a savepoint.
            read = {}
        for split, position in event.facts["positions"]:
            if split in read and read[split] != position:
                yield (
                    f"{source} goes on from {position} of split {split}, and checkpoint"
                    f" {attempt.restored} has {read[split]}"
                )

    # --- commits ----------------------------------------------------------------------------------

    def _take_commit(self, event: TracedStep) -> Iterator[str]:
        known = self._process(event).listed
        for transaction in event.transactions():
            if self._is_traced(transaction) and transaction not in known:
                yield f"{transaction} is committed, and its committer knows no decision of it"

    def _take_outcome(self, event: TracedStep) -> Iterator[str]:
        for transaction in event.transactions():
            outcomes = self.outcomes.setdefault(transaction, [])
            outcomes.append(event.facts["outcome"])
        yield from ()

    def _take_rollback(self, event: TracedStep) -> Iterator[str]:
        for transaction in event.transactions():
            self.rolled_back.add(transaction)
            for (_, number), decision in self.decisions.items():
                counts = decision.is_standing and not decision.is_revoked
                if counts and transaction in decision.listed:
                    yield f"{transaction} is rolled back, and checkpoint {number} has decided it"

    def _take_settled(self, event: TracedStep) -> Iterator[str]:
        for transaction in event.transactions():
            if self._is_traced(transaction) and not self._is_committed(transaction):
                yield f"a batch is marked as committed, and {transaction} is not committed"

    # --- state ------------------------------------------------------------------------------------

    def _process(self, event: TracedStep) -> _Process:
        return self.processes.setdefault(event.process, _Process())

    def _is_traced(self, transaction: TransactionId) -> bool:
        """Return True if the trace begins before the attempt of `transaction`."""
        return bool(self.attempts) and transaction.attempt >= min(self.attempts)

    def _is_committed(self, transaction: TransactionId) -> bool:
        return any(outcome in _SUCCESSES for outcome in self.outcomes.get(transaction, ()))
