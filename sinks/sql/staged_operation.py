"""What is to be done with staged rows: written beside them, so that no later setting changes it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from onceflow.core.errors import StateCorrupt
from onceflow.sinks.sql.tables import TableName
from onceflow.sinks.sql.write_mode import WriteMode

_VERSION = 1


@dataclass(frozen=True, slots=True)
class StagedOperation:
    """How one batch of staged rows is applied."""

    table: TableName
    """With its schema, as the server had it."""
    mode: WriteMode
    key: tuple[str, ...]
    deletes: bool
    """Whether the rows are keys to delete; else rows to put."""

    def encoded(self) -> str:
        """Return the label under which the rows are staged."""
        return json.dumps(
            [
                _VERSION,
                "delete" if self.deletes else "put",
                self.table.schema,
                self.table.name,
                self.mode.value,
                *self.key,
            ]
        )

    @classmethod
    def decoded(cls, label: str) -> StagedOperation:
        """Return what `encoded` wrote.

        Raises:
            StateCorrupt: It did not write this.
        """
        try:
            version, verb, schema, name, mode, *key = json.loads(label)
            if version == _VERSION and verb in ("delete", "put"):
                return cls(TableName(schema, name), WriteMode(mode), tuple(key), verb == "delete")
        except (ValueError, TypeError) as error:
            raise StateCorrupt(f"rows are staged with the label {label!r}: {error}") from None
        raise StateCorrupt(
            f"rows are staged with the label {label!r} of another version of onceflow; let that "
            "version commit them"
        )
