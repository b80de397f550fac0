"""The same schedule of crashes against onceflow and other engines, and a table of the results."""
