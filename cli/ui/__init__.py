"""The command `onceflow ui`, which serves the page of all jobs in a storage."""
