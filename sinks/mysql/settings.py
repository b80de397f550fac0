"""What a sink's writers and committers need, resolved from what the user wrote."""

from __future__ import annotations

from dataclasses import dataclass

from onceflow.sinks import sql
from onceflow.sinks.mysql.connection import Endpoint
from onceflow.sinks.mysql.ledger import Ledger
from onceflow.sinks.mysql.names import XaNames


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSettings(sql.SinkSettings[Endpoint, Ledger]):
    """One target table and how to work with it."""

    @property
    def names(self) -> XaNames:
        """How this sink's transactions are called in the server."""
        return XaNames(self.ledger.database)
