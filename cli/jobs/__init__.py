"""The commands for running jobs: `onceflow list`, `status`, `checkpoint`, `stop` and others."""
