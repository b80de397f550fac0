"""The connection to Postgres, its catalog and its column types."""
