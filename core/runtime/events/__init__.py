"""The events of a job, the status that is computed from them, and the listeners."""
