"""The state objects that functions use, and the interface of a state backend."""
