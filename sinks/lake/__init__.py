"""What sinks of lake tables share: data files come first, and a version that names them last.

The head of `table` lists what another format needs, in its folder and outside of it.
"""
