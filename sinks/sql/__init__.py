"""The common part of sinks into SQL databases.

`sink` has the public options. `dialect` has the interface that each kind of server implements.
"""
