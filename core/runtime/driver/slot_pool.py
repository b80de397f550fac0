"""The control streams to the slots of one attempt."""

from __future__ import annotations

from collections.abc import Iterator

from onceflow.core.protocol.messages import DriverMessage
from onceflow.core.runtime.transport.control_plane import SlotLink


class SlotPool:
    """The connected slots.

    Used by the attempt's thread alone; the attempt's loop admits the slots.
    """

    def __init__(self) -> None:
        self._links: dict[int, SlotLink] = {}

    def __iter__(self) -> Iterator[tuple[int, SlotLink]]:
        return iter(self._links.items())

    def __getitem__(self, slot: int) -> SlotLink:
        return self._links[slot]

    def admit(self, link: SlotLink) -> None:
        """Add the slot, so that `send_all` reaches it."""
        self._links[link.hello.slot] = link

    def remove(self, slot: int) -> None:
        """Remove a slot that has left."""
        self._links.pop(slot, None)

    def send_all(self, message: DriverMessage) -> None:
        """Send `message` to every connected slot, without waiting."""
        for link in self._links.values():
            link.send(message)

    def waiting_s(self, now: float) -> dict[int, float]:
        """Return, by slot, how long its oldest unsent message has waited; 0 if none waits."""
        return {slot: link.waiting_s(now) for slot, link in self._links.items()}
