"""`onceflow list`, `status`, `checkpoint`, `savepoint`, `stop`, `cancel`: running jobs."""
