"""The states and timers that a user's function reads and writes."""
