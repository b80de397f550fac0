"""The slots of an attempt as its driver knows them: who is there, who is silent, why one failed."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator

from onceflow.core import errors
from onceflow.core.errors import ConfigError, OnceflowError, SlotFailed, SlotLost
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.messages import DriverMessage, Failed, Heartbeat, Shutdown
from onceflow.core.runtime.driver.attempt_context import AttemptEvent
from onceflow.core.runtime.slot.context import AttemptPlan, versions
from onceflow.core.runtime.transport.control_plane import SlotGone, SlotLink
from onceflow.core.storage import JobStorage

_CAUSE_S = 0.3
"""How long the loss of one slot is looked for behind the failure of another."""


class SlotPool:
    """Used by the attempt's thread alone; times are of `time.monotonic`."""

    def __init__(self, plan: AttemptPlan, storage: JobStorage, storage_token: str) -> None:
        self._plan = plan
        self._storage = storage
        self._storage_token = storage_token
        self._links: dict[int, SlotLink] = {}
        self._heard_at: dict[int, float] = {}
        self._beat_at = 0.0

    def __len__(self) -> int:
        return len(self._links)

    def __contains__(self, slot: int) -> bool:
        return slot in self._links

    def __iter__(self) -> Iterator[tuple[int, SlotLink]]:
        return iter(self._links.items())

    def __getitem__(self, slot: int) -> SlotLink:
        return self._links[slot]

    def admit(self, link: SlotLink, now: float) -> bool:
        """Return whether the slot takes part; one of an older attempt is told to leave.

        Raises:
            ConfigError: Its versions, or what it sees of checkpoint storage, are not the driver's.
        """
        hello = link.hello
        if hello.attempt != self._plan.attempt:
            link.send(Shutdown(f"attempt {hello.attempt} is over; {self._plan.attempt} runs"))
            return False
        if hello.versions != versions():
            raise ConfigError(
                f"slot {hello.slot} on {hello.host} runs {hello.versions} and the driver runs"
                f" {versions()}; install the same versions on every executor"
            )
        if hello.storage_probe != self._storage_token:
            raise ConfigError(
                f"slot {hello.slot} on {hello.host} does not see the checkpoint storage of the"
                f" driver ({self._storage}): use a directory that every executor shares"
            )
        self._links[hello.slot] = link
        self._heard_at[hello.slot] = now
        return True

    def heard(self, slot: int, now: float) -> None:
        """Record that `slot` lives."""
        self._heard_at[slot] = now

    def remove(self, slot: int) -> None:
        """Forget a slot that has left."""
        self._links.pop(slot, None)
        self._heard_at.pop(slot, None)

    def send_all(self, message: DriverMessage) -> None:
        """Send `message` to every connected slot, without waiting."""
        for link in list(self._links.values()):
            link.send(message)

    def beat(self, now: float) -> None:
        """Once an interval, tell every slot that the driver lives, and ask the same of them.

        Raises:
            SlotLost: One has been silent, or has taken nothing that was sent to it, for too long.
        """
        settings = self._plan.settings
        if now - self._beat_at < settings.heartbeat_interval_s:
            return
        self._beat_at = now
        self.send_all(Heartbeat())
        for slot, heard_at in self._heard_at.items():
            if now - heard_at > settings.heartbeat_timeout_s:
                raise SlotLost(
                    f"slot {slot} (process {self._links[slot].hello.pid}) has been silent for"
                    f" {now - heard_at:.0f} s;"
                    f" heartbeat_timeout_s={settings.heartbeat_timeout_s}"
                )
            waiting_s = self._links[slot].waiting_s(now)
            if waiting_s > settings.heartbeat_timeout_s:
                raise SlotLost(
                    f"slot {slot} (process {self._links[slot].hello.pid}) has taken no message for"
                    f" {waiting_s:.0f} s; heartbeat_timeout_s={settings.heartbeat_timeout_s}"
                )


def slot_error(failed: Failed) -> OnceflowError:
    """Return the error that a slot reported, as its own class where there is one."""
    text = f"slot {failed.slot}: {failed.message}"
    known = getattr(errors, failed.error_class, None)
    if isinstance(known, type) and issubclass(known, OnceflowError):
        return known(text, fingerprint=failed.fingerprint)
    text = f"slot {failed.slot}: {failed.error_class}: {failed.message}\n{failed.trace}"
    return SlotFailed(text, fingerprint=failed.fingerprint)


def cause_of(
    failed: Failed, attempt: AttemptId, events: queue.SimpleQueue[AttemptEvent]
) -> OnceflowError:
    """Return why an attempt fails in which a slot reports `failed`; takes from `events`.

    A slot that loses a channel may say so before the end of the slot at its other side is noticed,
    which is what happened: a short wait for that. All else that comes meanwhile is put back, in its
    order, for the end of the attempt to decide about: what the user asks for stays asked.
    """
    error = slot_error(failed)
    deadline = time.monotonic() + (_CAUSE_S if isinstance(error, SlotLost) else 0.0)
    others: list[AttemptEvent] = []
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            event = events.get(timeout=left_s)
        except queue.Empty:
            break
        others.append(event)
        if isinstance(event, SlotGone) and event.attempt == attempt and event.slot != failed.slot:
            error = SlotLost(f"slot {event.slot} is lost: {event.reason}. Of it, {error}")
            break
    for event in others:
        events.put(event)
    return error
