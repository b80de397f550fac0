"""Running aggregates of many keys, computed for a whole batch at a time."""
