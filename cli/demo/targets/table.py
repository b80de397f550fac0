"""A table in a database."""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from onceflow.cli.demo.observers import Observer
from onceflow.cli.demo.targets.target import KillableServer, Target
from onceflow.integration.oracle import Verdict, verify
from onceflow.integration.workload import Payments


class TableTarget(Target):
    """A table that the sink creates."""

    def __init__(
        self,
        server: KillableServer,
        address: str,
        table: str,
        rows: Callable[[str, str], Observer],
    ) -> None:
        """Take a running server; `rows` counts a table, of the address of its database."""
        self._server = server
        self._address = address
        self._table = table
        self._rows = rows

    @property
    @override
    def server(self) -> KillableServer:
        return self._server

    @property
    @override
    def address(self) -> str:
        return self._address

    @property
    @override
    def place(self) -> str:
        return self._table

    @override
    def visible_rows(self) -> Observer:
        return self._rows(self._address, self._table)

    @override
    def judge(self, payments: Payments) -> Verdict:
        return verify(self._address, self._table, payments)
