"""Readers and writers of state outside of a job: snapshots as columns."""
