"""The driver's view of an attempt's slots: which take part, which are lost, why one failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onceflow.core.errors
from onceflow.core.errors import OnceflowError, SettingsRefused, SlotFailed, SlotLost
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.messages import Failed, Hello

ADDRESS_ADVICE = (
    "Make each machine's host name resolve to its network address (/etc/hosts; Docker: --network"
    " host, or one network for all containers), or set RuntimeSettings(slot_host=…), for example"
    ' "${env:SLOT_HOST}" with a variable on each machine'
)
"""The advice for slots that do not reach each other at their addresses."""


@dataclass(frozen=True, slots=True)
class AttemptSettings:
    """The settings of one attempt. Times are in seconds."""

    job: str
    attempt: AttemptId
    parallelism: int
    versions: Mapping[str, str]
    """The versions of the driver. Every slot must run the same."""
    storage: str
    """The location of the checkpoint storage, for people."""
    storage_token: str
    """The text that a slot reads from storage if it sees the same storage as the driver."""
    one_machine: bool
    """True if all slots run on the driver's machine, where loopback addresses are enough."""
    start_timeout_s: float
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    commit_deadline_s: float
    cancel_timeout_s: float


@dataclass(slots=True)
class _Member:
    hello: Hello
    heard_at_s: float

    def describe(self) -> str:
        return f"process {self.hello.pid} on {self.hello.host}"


class SlotRoster:
    """The slots that take part, in the order in which they connected."""

    def __init__(self, settings: AttemptSettings) -> None:
        self._settings = settings
        self._members: dict[int, _Member] = {}
        self._excused_until_s = float("-inf")

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, slot: int) -> bool:
        return slot in self._members

    def find_refusal(self, hello: Hello) -> SettingsRefused | None:
        """Return the error for a slot that cannot take part, or None if it can.

        A slot is refused if its versions, or the text that it reads in checkpoint storage, differ
        from the driver's. It is also refused if other slots do not reach it at its address.
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
        return self._find_address_refusal(hello)

    def _find_address_refusal(self, hello: Hello) -> SettingsRefused | None:
        if hello.loopback and not self._settings.one_machine:
            return SettingsRefused(
                f"slot {hello.slot} on {hello.machine} listens at {hello.host}, a loopback"
                f" address that other machines cannot reach. {ADDRESS_ADVICE}"
            )
        for slot, member in self._members.items():
            other = member.hello
            is_elsewhere = hello.network_id and other.network_id not in {"", hello.network_id}
            if slot != hello.slot and other.host == hello.host and is_elsewhere:
                return SettingsRefused(
                    f"slot {slot} on {other.machine} and slot {hello.slot} on {hello.machine} are"
                    " on different machines or in different containers, but both give"
                    f" {hello.host} as their address. {ADDRESS_ADVICE}"
                )
        return None

    def admit(self, hello: Hello, now_s: float) -> None:
        """Add the slot to those that take part."""
        self._members[hello.slot] = _Member(hello, now_s)

    def hear(self, slot: int, now_s: float) -> None:
        """Record that `slot` is alive."""
        if slot in self._members:
            self._members[slot].heard_at_s = now_s

    def excuse(self, now_s: float) -> None:
        """Ignore silence before `now_s`: this process could not receive messages until then."""
        self._excused_until_s = now_s
        for member in self._members.values():
            member.heard_at_s = max(member.heard_at_s, now_s)

    def release(self, slot: int) -> None:
        """Remove a slot that has left."""
        del self._members[slot]

    def find_lost(self, waiting_s: Mapping[int, float], now_s: float) -> SlotLost | None:
        """Return the error for a slot that was silent, or took no message, for too long, if any."""
        timeout_s = self._settings.heartbeat_timeout_s
        for slot, member in self._members.items():
            silent_s = now_s - member.heard_at_s
            if silent_s > timeout_s:
                return SlotLost(
                    f"slot {slot} ({member.describe()}) has been silent for"
                    f" {silent_s:.0f} s; heartbeat_timeout_s={timeout_s}"
                )
            # A process may send heartbeats from one thread while the thread that reads hangs.
            unsent_s = min(waiting_s.get(slot, 0.0), now_s - self._excused_until_s)
            if unsent_s > timeout_s:
                return SlotLost(
                    f"slot {slot} ({member.describe()}) has taken no message for"
                    f" {unsent_s:.0f} s; heartbeat_timeout_s={timeout_s}"
                )
        return None


class DriverPauses:
    """The detector of pauses of the driver itself, by the time between two of its turns.

    A process that is stopped, swapped out or suspended receives no message meanwhile. After the
    pause, the silence is the driver's own and not the slots'.
    """

    def __init__(self, settings: AttemptSettings) -> None:
        self._settings = settings
        # The driver turns twice per interval, and a slot may have been silent for one before.
        self._gap_max_s = settings.heartbeat_timeout_s - 2 * settings.heartbeat_interval_s
        self._turned_at_s: float | None = None
        self._pause_s = 0.0
        self._ended_at_s = float("-inf")

    def turn(self, now_s: float) -> bool:
        """Record a turn; return True if the driver was paused before it."""
        gap_s = 0.0 if self._turned_at_s is None else now_s - self._turned_at_s
        self._turned_at_s = now_s
        if gap_s <= self._gap_max_s:
            return False
        self._pause_s, self._ended_at_s = gap_s, now_s
        return True

    def explain(self, error: BaseException) -> BaseException:
        """Return `error`.

        If it is the loss of a slot soon after a pause, name the pause as the cause.
        """
        now_s = self._turned_at_s or 0.0
        since_s = now_s - self._ended_at_s
        if not isinstance(error, SlotLost) or since_s > self._settings.heartbeat_timeout_s:
            return error
        return SlotLost(
            f"{error}. The cause may be this driver: its process did not run for"
            f" {self._pause_s:.0f} s until {since_s:.0f} s ago (stopped, suspended or without"
            " CPU), and a slot ends if the driver is silent for"
            f" heartbeat_timeout_s={self._settings.heartbeat_timeout_s}"
        )


def slot_error(failed: Failed) -> OnceflowError:
    """Return the error that a slot reported, as its own class if that class exists."""
    text = f"slot {failed.slot}: {failed.message}"
    known = getattr(onceflow.core.errors, failed.error_class, None)
    if isinstance(known, type) and issubclass(known, OnceflowError):
        return known(text, fingerprint=failed.fingerprint)
    text = f"slot {failed.slot}: {failed.error_class}: {failed.message}\n{failed.trace}"
    return SlotFailed(text, fingerprint=failed.fingerprint)
