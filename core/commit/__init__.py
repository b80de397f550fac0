"""Makes what sinks have pre-committed committed or aborted, in one way for every caller.

`planner` decides, from what is listed, what is in doubt and what the decisions remember.
`queue` and `steps` say what is next, `retries` when it is tried again, `loop` carries it out.
"""
