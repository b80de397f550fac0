# What onceflow uses of fsspec, which ships no types. File systems are Any: each has its own calls.
from fsspec import core as core
