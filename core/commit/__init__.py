"""The code that commits or aborts pre-committed transactions, in one way for every caller.

`planner` decides, from the listed transactions, those in doubt and the remembered decisions.
`queue` and `steps` choose the next step and the time of the next try. `loop` carries steps out.
"""
