"""The decision log in files, and the small files beside it."""
