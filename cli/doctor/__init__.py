"""The command `onceflow doctor`, which checks what a job needs and suggests remedies."""
