"""The decisions of the engine as plain state machines, without I/O, clocks or threads.

Each takes facts and returns decisions.
"""
