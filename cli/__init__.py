"""The `onceflow` command, on top of the public API and the testing kit."""
