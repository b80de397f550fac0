"""The decision log in files, and the small files in its directory."""
