"""The rules of the decision log: who may append which record, and which facts it remembers."""
