"""The slots of an attempt as its driver knows them: who takes part, who is lost, why one failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onceflow.core.errors
from onceflow.core.errors import OnceflowError, SettingsRefused, SlotFailed, SlotLost
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.messages import Failed, Hello


@dataclass(frozen=True, slots=True)
class AttemptSettings:
    """What one attempt goes by. Times are in seconds."""

    job: str
    attempt: AttemptId
    parallelism: int
    versions: Mapping[str, str]
    """Of the driver: every slot must run the same."""
    storage: str
    """The checkpoint storage, for people."""
    storage_token: str
    """What a slot reads there when it sees the same storage."""
    start_timeout_s: float
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    commit_deadline_s: float
    cancel_timeout_s: float


@dataclass(slots=True)
class _Member:
    hello: Hello
    heard_at_s: float


class SlotRoster:
    """The slots that take part, in the order in which they came."""

    def __init__(self, settings: AttemptSettings) -> None:
        self._settings = settings
        self._members: dict[int, _Member] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, slot: int) -> bool:
        return slot in self._members

    def find_refusal(self, hello: Hello) -> SettingsRefused | None:
        """Return why the slot cannot take part, if so.

        Its versions, or what it sees of checkpoint storage, are not the driver's.
        """
        settings = self._settings
        if hello.versions != settings.versions:
            return SettingsRefused(
                f"slot {hello.slot} on {hello.host} runs {hello.versions} and the driver runs"
                f" {settings.versions}; install the same versions on every executor"
            )
        if hello.storage_probe != settings.storage_token:
            return SettingsRefused(
                f"slot {hello.slot} on {hello.host} does not see the checkpoint storage of the"
                f" driver ({settings.storage}): use a directory that every executor shares"
            )
        return None

    def admit(self, hello: Hello, now_s: float) -> None:
        """Have the slot take part."""
        self._members[hello.slot] = _Member(hello, now_s)

    def hear(self, slot: int, now_s: float) -> None:
        """Record that `slot` lives."""
        if slot in self._members:
            self._members[slot].heard_at_s = now_s

    def release(self, slot: int) -> None:
        """Forget a slot that has left."""
        del self._members[slot]

    def find_lost(self, waiting_s: Mapping[int, float], now_s: float) -> SlotLost | None:
        """Return which slot has been silent, or has taken no message, for too long, if any."""
        timeout_s = self._settings.heartbeat_timeout_s
        for slot, member in self._members.items():
            silent_s = now_s - member.heard_at_s
            if silent_s > timeout_s:
                return SlotLost(
                    f"slot {slot} (process {member.hello.pid}) has been silent for"
                    f" {silent_s:.0f} s; heartbeat_timeout_s={timeout_s}"
                )
            # A process may send heartbeats from one thread while the one that reads hangs.
            unsent_s = waiting_s.get(slot, 0.0)
            if unsent_s > timeout_s:
                return SlotLost(
                    f"slot {slot} (process {member.hello.pid}) has taken no message for"
                    f" {unsent_s:.0f} s; heartbeat_timeout_s={timeout_s}"
                )
        return None


def slot_error(failed: Failed) -> OnceflowError:
    """Return the error that a slot reported, as its own class where there is one."""
    text = f"slot {failed.slot}: {failed.message}"
    known = getattr(onceflow.core.errors, failed.error_class, None)
    if isinstance(known, type) and issubclass(known, OnceflowError):
        return known(text, fingerprint=failed.fingerprint)
    text = f"slot {failed.slot}: {failed.error_class}: {failed.message}\n{failed.trace}"
    return SlotFailed(text, fingerprint=failed.fingerprint)
