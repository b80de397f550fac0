"""The common parts of sinks of lake tables: data files first, then a table version that names them.

The docstring of `table` lists what another format needs, in its folder and outside of it.
"""
