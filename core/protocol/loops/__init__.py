"""The event loops of a job's driver and of its slots, which turn each fact into decisions."""
