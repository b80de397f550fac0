"""State as functions use it, and what a state backend fulfils."""
