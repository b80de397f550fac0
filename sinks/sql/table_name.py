"""Tables as users name them and as servers list them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TableName:
    """A table's name, upper and lower case kept; how it is quoted is the dialect's."""

    schema: str | None
    """What MySQL calls a database; None for the one that the server takes by itself."""
    name: str

    @classmethod
    def parse(cls, text: str) -> TableName:
        """Return the name in `table` or `schema.table`.

        Raises:
            ValueError: It is neither.
        """
        parts = text.split(".")
        if len(parts) > 2 or not all(parts):
            raise ValueError(f"table {text!r} is not 'table' or 'schema.table'")
        return cls(parts[0] if len(parts) == 2 else None, parts[-1])

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}" if self.schema else self.name
