"""The check of the columns of rows that all sinks of tables and files share."""

from __future__ import annotations

import pyarrow as pa

from onceflow.core.errors import ConfigError


def require_any_column(rows: pa.Schema) -> None:
    """Raise ConfigError if `rows` has no columns: no table and no file holds such rows.

    Raises:
        ConfigError: There is no column.
    """
    if not rows.names:
        raise ConfigError("the rows have no columns, so there is nothing to write")
