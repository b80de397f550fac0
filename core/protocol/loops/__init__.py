"""The event loops of a job's driver and of its slots: what follows from each fact, in order."""
