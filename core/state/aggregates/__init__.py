"""Running aggregates of many keys, a whole batch at a time."""
