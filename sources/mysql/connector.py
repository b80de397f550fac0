"""The connector of tables of MySQL and MariaDB that records are joined with."""

from __future__ import annotations

from onceflow.core.spi.connector import LookupConnector
from onceflow.sources.mysql.lookup import MySQLTable

LOOKUP_CONNECTOR = LookupConnector(lookup=MySQLTable)
"""The connector that the catalog finds."""
