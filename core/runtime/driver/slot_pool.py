"""The control streams to the slots of one attempt."""

from __future__ import annotations

from collections.abc import Iterator

from onceflow.core.protocol.messages import DriverMessage
from onceflow.core.runtime.transport.control_plane import SlotLink


class SlotPool:
    """Used by the attempt's thread alone; who takes part is for the attempt's loop to decide."""

    def __init__(self) -> None:
        self._links: dict[int, SlotLink] = {}

    def __iter__(self) -> Iterator[tuple[int, SlotLink]]:
        return iter(self._links.items())

    def __getitem__(self, slot: int) -> SlotLink:
        return self._links[slot]

    def admit(self, link: SlotLink) -> None:
        """Send this slot, from now on, what every slot is sent."""
        self._links[link.hello.slot] = link

    def remove(self, slot: int) -> None:
        """Forget a slot that has left."""
        self._links.pop(slot, None)

    def send_all(self, message: DriverMessage) -> None:
        """Send `message` to every connected slot, without waiting."""
        for link in self._links.values():
            link.send(message)

    def waiting_s(self, now: float) -> dict[int, float]:
        """Return, by slot, how long the oldest message has waited to be taken; 0: none waits."""
        return {slot: link.waiting_s(now) for slot, link in self._links.items()}
