"""MySQL and MariaDB: tables are looked up by key."""

from onceflow.sources.mysql.lookup import MySQLTable

__all__ = ["MySQLTable"]
