"""The conditions under which a run of chaos ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.report import count_delivered
from tests.chaos.run import Outcome
from tests.chaos.schedule import FaultKind


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that end a run. A schedule that has begun always runs to its verdict."""

    minutes: float | None
    schedules: int | None
    ends_once_all_struck: bool
    """True if the run ends as soon as each kind of fault has struck once."""

    def are_reached(
        self, outcomes: Sequence[Outcome], kinds: Sequence[FaultKind], elapsed_s: float
    ) -> bool:
        """Return True if no further schedule may begin."""
        if self.schedules is not None and len(outcomes) >= self.schedules:
            return True
        if self.minutes is not None and elapsed_s > 60 * self.minutes:
            return True
        return self.ends_once_all_struck and not _list_missed(outcomes, kinds)

    def choose_kinds(
        self, outcomes: Sequence[Outcome], kinds: Sequence[FaultKind]
    ) -> tuple[FaultKind, ...]:
        """Return the kinds of the next schedule.

        If the run ends once all kinds have struck, these are the kinds that have not struck yet.
        """
        missed = _list_missed(outcomes, kinds)
        return missed if self.ends_once_all_struck and missed else tuple(kinds)


def _list_missed(outcomes: Sequence[Outcome], kinds: Sequence[FaultKind]) -> tuple[FaultKind, ...]:
    delivered = count_delivered(outcomes)
    return tuple(kind for kind in kinds if not delivered[kind])
