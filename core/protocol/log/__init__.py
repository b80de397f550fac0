"""The rules of the decision log: who may append what, and what it remembers."""
