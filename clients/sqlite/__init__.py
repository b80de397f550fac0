"""The connection to SQLite, its catalog and its column types."""
