"""Commits to lake tables that go wrong once: by an answer, or by the end of the process.

A commit is one request: to an Iceberg catalog, or of a version to the log of a Delta table.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.update import TableRequirement, TableUpdate
from typing_extensions import override

R = TypeVar("R")

FAULTY_CATALOG = f"{__name__}.FaultyCatalog"
STEPPING_CATALOG = f"{__name__}.SteppingCatalog"


class CommitFaults:
    """The faults of this process's next commit."""

    between: ClassVar[list[Callable[[], None]]] = []
    """What runs right before it."""
    fault: ClassVar[str] = ""
    """`refused`, `unanswered`, `made, not answered`, `made, called failed`; empty: nothing."""

    @classmethod
    def commit(
        cls, commit: Callable[[], R], refused: type[Exception], unanswered: type[Exception]
    ) -> R:
        """Commit, or raise what the library raises then."""
        fault, cls.fault = cls.fault, ""
        if cls.between:
            cls.between.pop()()
        if fault == "refused":
            raise refused("by a test")
        if fault == "unanswered":
            raise unanswered("by a test, before it was made")
        answer = commit()
        if fault == "made, not answered":
            raise unanswered("by a test, after it was made")
        if fault == "made, called failed":
            raise refused("by a test, after it was made")
        return answer


class FaultyCatalog(SqlCatalog):
    """A SQL catalog with these faults."""

    @override
    def commit_table(
        self,
        table: Table,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> CommitTableResponse:
        commit = super().commit_table
        return CommitFaults.commit(
            lambda: commit(table, requirements, updates),
            refused=CommitFailedException,
            unanswered=CommitStateUnknownException,
        )


class FaultyDeltaTable(DeltaTable):
    """A Delta table with these faults, in place of `deltalake.DeltaTable`."""

    @override
    def create_write_transaction(self, *args: Any, **options: Any) -> None:
        commit = super().create_write_transaction
        CommitFaults.commit(
            lambda: commit(*args, **options), refused=CommitFailedError, unanswered=OSError
        )

    @override
    def merge(self, *args: Any, **options: Any) -> Any:
        merger: Any = super().merge(*args, **options)
        execute = merger.execute
        merger.execute = lambda: CommitFaults.commit(
            execute, refused=CommitFailedError, unanswered=OSError
        )
        return merger


class SteppingCatalog(SqlCatalog):
    """A SQL catalog that obeys orders; its property `orders` names their directory."""

    @override
    def commit_table(
        self,
        table: Table,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> CommitTableResponse:
        obey(self.properties["orders"], "before")
        response = super().commit_table(table, requirements, updates)
        obey(self.properties["orders"], "after")
        return response


class SteppingDeltaTable(DeltaTable):
    """A Delta table that obeys orders, in place of `deltalake.DeltaTable`."""

    orders: ClassVar[str] = ""
    """The directory of orders."""

    @override
    def create_write_transaction(self, *args: Any, **options: Any) -> None:
        obey(self.orders, "before")
        super().create_write_transaction(*args, **options)
        obey(self.orders, "after")

    @override
    def merge(self, *args: Any, **options: Any) -> Any:
        merger: Any = super().merge(*args, **options)
        execute = merger.execute

        def execute_in_order() -> Any:
            obey(self.orders, "before")
            metrics = execute()
            obey(self.orders, "after")
            return metrics

        merger.execute = execute_in_order
        return merger


def obey(orders: str, when: str) -> None:
    """Let this process die or stand still if that is ordered, once for each order.

    An order is an empty file in the directory `orders`: `kill-before`, `kill-after`, `stop-before`
    or `stop-after` the commit is made.
    """
    for word, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
        try:
            Path(orders, f"{word}-{when}").unlink()
        except FileNotFoundError:
            continue
        os.kill(os.getpid(), number)
