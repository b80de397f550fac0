"""The policy for retrying a commit or an abort that did not succeed, and for giving it up.

`CommitRetryPolicy` holds the numbers. The queues of `queue`, `steps` and `whole_checkpoints` apply
them. While a job runs, slots and the driver use the defaults with the deadline of the settings.
Recovery and batches of Spark use `recovery_retries`. `onceflow txn` tries once: its user repeats
the command.

    initial_delay_s <= pause <= max_delay_s;  last try <= first try + deadline_s
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CommitRetryPolicy:
    """The time for which an unsuccessful commit is retried, and the pauses in between."""

    initial_delay_s: float = 0.05
    multiplier: float = 2.0
    max_delay_s: float = 5.0
    deadline_s: float = 120.0
    """The time from the first try of one transaction to the last. The attempt fails after it."""
    waits_for_people: bool = True
    """True if a commit is also retried when a person must first fix a row or a constraint."""

    def __post_init__(self) -> None:
        if self.initial_delay_s <= 0 or self.max_delay_s < self.initial_delay_s:
            raise ValueError(
                f"initial_delay_s={self.initial_delay_s} must be over 0 and at most "
                f"max_delay_s={self.max_delay_s}"
            )
        if self.multiplier < 1:
            raise ValueError(f"multiplier={self.multiplier} must be 1 or more")
        if self.deadline_s < 0:
            raise ValueError(f"deadline_s={self.deadline_s} must be 0 or more")

    def delay_s(self, tries: int) -> float:
        """Return the pause after `tries` failed tries, 1 or more."""
        # Bound the exponent so that the power cannot overflow. The maximum is reached long before.
        return min(self.initial_delay_s * self.multiplier ** min(tries - 1, 64), self.max_delay_s)


def recovery_retries(deadline_s: float, *, waits_for_people: bool = True) -> CommitRetryPolicy:
    """Return the policy of recovery and batches: short pauses, up to `deadline_s`."""
    return CommitRetryPolicy(
        # Use shorter pauses than in a running job: nothing is written before recovery ends, so each
        # pause delays the job.
        initial_delay_s=0.02,
        max_delay_s=1.0,
        deadline_s=deadline_s,
        waits_for_people=waits_for_people,
    )
