"""Asks the server again after its reply was lost: it alone can tell what became of a statement."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.protocol.committables import RetryLater, Unknown

_T = TypeVar("_T")
_PAUSE_S = 0.05
_PAUSE_MAX_S = 1.0


class NoReply(Exception):
    """The connection broke after a statement was sent: it may have been carried out."""


def settled(
    ask: Callable[[], _T], statement: str, *, sent_to: object, timeout_s: float
) -> _T | RetryLater | Unknown:
    """Return what `ask` returns; after a lost reply, ask again for `timeout_s`.

    Until a statement is sent nothing can have changed, so that is "retry later"; once a reply was
    lost, only the server can tell. `statement` and `sent_to` say what was sent where.
    """
    lost_reply = ""
    deadline = time.monotonic() + timeout_s
    pause_s = _PAUSE_S
    while True:
        try:
            return ask()
        except NoReply as error:
            lost_reply = str(error)
        except (SinkError, ConfigError) as error:
            if not lost_reply:
                return RetryLater(str(error))
        if time.monotonic() + pause_s > deadline:
            return Unknown(
                f"{statement} was sent to {sent_to} and not answered ({lost_reply}), and the "
                f"server could not be asked within {timeout_s:g} s what became of it"
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, _PAUSE_MAX_S)
