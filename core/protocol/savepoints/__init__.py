"""What a savepoint is, and how a job begins from one."""
