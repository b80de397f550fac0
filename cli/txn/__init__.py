"""The command `onceflow txn`, which shows, commits and aborts transactions in doubt."""
