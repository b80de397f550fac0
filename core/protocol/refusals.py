"""The distinction between a target that will never take certain rows and a target that is away.

A target that is away answers later, so the job waits for it. If a target refuses rows, every
attempt meets the same refusal, and attempts would follow each other for ever. So a refusal has a
fingerprint, which is equal when the same sink refuses in the same way again. The restart strategy
counts equal fingerprints and ends the job (`same_mistakes` in `protocol.restart`).

A decided commit is never given up. If its target refuses it again and again for the same reason,
the commit is called stuck. The status shows that, and the job goes on trying.

Invariants:
    if the sink has made progress in an attempt, the attempt's fingerprint equals no other one's
    a failure that the network or a disk may have caused has no fingerprint: `spi.refusals` decides
    an error of another package that neither of them may have caused has a fingerprint
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

STUCK_TRIES: Final = 3
"""The number of tries with the same answer after which a commit is called stuck."""

_VARIES = re.compile(r"\b[0-9a-f]{8,}\b|\d+")
"""The numbers of attempts and transactions, addresses, times, and random parts of file names."""


def make_fingerprint(uid: str, error_class: str, text: str, *, only_in: int | None = None) -> str:
    """Return the fingerprint, which is equal when sink `uid` refuses in the same way again.

    `only_in` is the number of an attempt in which rows of the sink were decided before the failure.
    The current failure then differs from earlier ones, and the count starts again.
    """
    parts = (uid, error_class, describe_kind(text), "" if only_in is None else str(only_in))
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()[:16]


def describe_kind(text: str) -> str:
    """Return `text` without the parts that differ between two attempts with equal failures."""
    return _VARIES.sub("#", text)


@dataclass(frozen=True, slots=True)
class RefusalCount:
    """The number of refusals in a row of one commit for the same reason."""

    reason: str = ""
    tries: int = 0

    def add(self, reason: str) -> RefusalCount:
        """Return the count after another refusal for `reason`."""
        kind = describe_kind(reason)
        return RefusalCount(kind, self.tries + 1 if kind == self.reason else 1)

    @property
    def is_stuck(self) -> bool:
        """True after so many equal refusals that only a person can change the answer."""
        return self.tries >= STUCK_TRIES
