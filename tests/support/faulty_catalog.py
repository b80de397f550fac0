"""Catalogs whose commits go wrong once: by an answer, or by the end of the process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.update import TableRequirement, TableUpdate
from typing_extensions import override

NAME = f"{__name__}.FaultyCatalog"


class FaultyCatalog(SqlCatalog):
    """A SQL catalog; what `between` has runs right before the next commit reaches the database."""

    between: ClassVar[list[Callable[[], None]]] = []
    fault: ClassVar[str] = ""
    """Of the next commit: `refused`, `unanswered`, `made, not answered`, `made, called failed`."""

    @override
    def commit_table(
        self,
        table: Table,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> CommitTableResponse:
        fault, FaultyCatalog.fault = FaultyCatalog.fault, ""
        if FaultyCatalog.between:
            FaultyCatalog.between.pop()()
        if fault == "refused":
            raise CommitFailedException("by a test")
        if fault == "unanswered":
            raise CommitStateUnknownException("by a test, before it was made")
        response = super().commit_table(table, requirements, updates)
        if fault == "made, not answered":
            raise CommitStateUnknownException("by a test, after it was made")
        if fault == "made, called failed":
            raise CommitFailedException("by a test, after it was made")
        return response


class SteppingCatalog(SqlCatalog):
    """A SQL catalog whose process dies or stands still around a commit, once for each order.

    An order is an empty file in the directory that the property `orders` names: `kill-before`,
    `kill-after`, `stop-before` or `stop-after` the database has the commit.
    """

    @override
    def commit_table(
        self,
        table: Table,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> CommitTableResponse:
        self._obey("before")
        response = super().commit_table(table, requirements, updates)
        self._obey("after")
        return response

    def _obey(self, when: str) -> None:
        for word, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
            try:
                Path(self.properties["orders"], f"{word}-{when}").unlink()
            except FileNotFoundError:
                continue
            os.kill(os.getpid(), number)
