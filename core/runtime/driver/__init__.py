"""The driver, which runs in the user's process: attempts, recovery, decisions, HTTP endpoint."""
