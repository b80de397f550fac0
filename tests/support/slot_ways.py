"""The ways between the slots of a job, each through a proxy: a test can have one stand still."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from onceflow.core.protocol.messages import Deploy
from onceflow.core.runtime.driver import attempt
from onceflow.integration.faults.network import TcpProxy


class SlotWays:
    """The proxies between slots, new in each attempt."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._proxies: tuple[tuple[str, TcpProxy], ...] = ()

    def pause(self, slot: int) -> None:
        """Have what other slots send `slot` arrive no more, nor what it answers, until `heal`."""
        self._proxies[slot][1].pause()

    def heal(self) -> None:
        """Have everything arrive again."""
        for _, proxy in self._proxies:
            proxy.heal()

    def through_proxies(self, addresses: tuple[str, ...], *rest: Any) -> Deploy:
        """Build the message that tells a slot where the others are: behind their proxies."""
        if tuple(address for address, _ in self._proxies) != addresses:
            self._proxies = tuple((address, self._proxy_of(address)) for address in addresses)
        ways = (f"{address.rpartition(':')[0]}:{proxy.port}" for address, proxy in self._proxies)
        return Deploy(tuple(ways), *rest)

    def _proxy_of(self, address: str) -> TcpProxy:
        return self._stack.enter_context(TcpProxy("127.0.0.1", int(address.rpartition(":")[2])))


@contextmanager
def slot_ways(monkeypatch: pytest.MonkeyPatch) -> Generator[SlotWays, None, None]:
    """Have jobs of this process that start from now on go through proxies."""
    with ExitStack() as stack:
        ways = SlotWays(stack)
        monkeypatch.setattr(attempt, "Deploy", ways.through_proxies)
        yield ways
