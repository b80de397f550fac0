"""The content of a savepoint, and the rules by which a job starts from it."""
