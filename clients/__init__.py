"""Clients of the servers that sources and sinks share, one room for each technology."""
